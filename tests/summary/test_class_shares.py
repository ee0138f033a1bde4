"""Mode weights of a model that learned each class up to a constant."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from metastable.core.batch import Batch
from metastable.core.types import Walkers
from metastable.energies.by_class import ClassEnergy
from metastable.methods import Jarzynski, PersistentCD
from metastable.runs.run import Run
from metastable.summary.modes import Modes
from metastable.summary.section import Judged

SHARES = torch.tensor([0.75, 0.25])
CENTRES = torch.tensor([-3.0, 3.0])


class Off(nn.Module):
    """Unit normals at ±3, the second with e^−`off` of the mass that it should have."""

    def __init__(self, off: float):
        super().__init__()
        self.off = nn.Parameter(torch.tensor([0.0, off]))

    def forward(self, x: Tensor) -> Tensor:
        return 0.5 * (x - CENTRES).square() + self.off


def judged(method, labels: Tensor | None = None) -> Judged:
    """A run whose samples are exact ones of E(x), with far too few of the second class, and rows of the data."""
    rng = torch.Generator().manual_seed(0)
    energy = ClassEnergy(Off(2.0), 2, shares=SHARES, event_shape=(1,))
    mass = torch.softmax(SHARES.log() - torch.tensor([0.0, 2.0]), 0)
    which = {
        name: (torch.rand(4000, generator=rng) < float(p)).long()
        for name, p in (("model", mass[1]), ("data", SHARES[1]))
    }
    x = {name: (CENTRES[y] + torch.randn(4000, generator=rng))[:, None] for name, y in which.items()}
    run = Run(energy, method.name, [], Walkers.equal(x["model"], labels=labels), None, trained_with=method)
    return Judged(run, Batch(x["data"]), 0, Batch(x["data"]))


@pytest.mark.parametrize("labelled", [True, False])
def test_classes_that_a_method_cannot_weigh_have_their_shares_of_the_data(labelled):
    """Persistent chains with fixed labels learn p(x | y) alone; Jarzynski's weights see how much mass each has."""
    method = PersistentCD(labels=True) if labelled else Jarzynski()
    facts = Modes().measure(judged(method)).facts
    expected = 0.25 if labelled else float(torch.softmax(SHARES.log() - torch.tensor([0.0, 2.0]), 0)[1])
    off = abs(facts["sample_mode_weights"][1] - expected)
    assert off < 4 * facts["mode_weight_se"][1]
    assert facts["mode_weight_se"][1] < 0.04


def test_chains_that_carry_their_labels_are_taken_as_they_are():
    found = judged(PersistentCD(labels=True), torch.zeros(4000).long())
    weights = Modes().measure(found).facts["sample_mode_weights"]
    assert weights[1] < 0.1
