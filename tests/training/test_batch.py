"""Rows with labels or contexts beside them: batches, noise on the data, and what `fit` hands to a method."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import pytest
import torch
from conftest import mean_and_error, z_limit
from torch import nn

import metastable as ms
from metastable.core.batch import Batch
from metastable.core.errors import ConfigError, EnergyError, InputError
from metastable.core.types import bind
from metastable.data import Dataset
from metastable.energies import check_conditional
from metastable.methods.base import Method, Nothing
from metastable.training import Schedule, TrainerConfig
from metastable.training.batches import Batches

X = torch.arange(24.0).view(12, 2)
LABELS = torch.arange(12)


def test_rows_and_what_they_are_given_are_shuffled_together():
    batches = Batches(Batch(X, LABELS), 4, seed=0)
    seen = [batches.at(step) for step in range(3)]
    assert all(torch.equal(b.x[:, 0], 2.0 * b.given) for b in seen)
    assert torch.cat([b.given for b in seen]).sort().values.tolist() == LABELS.tolist()


def test_pairs_of_different_lengths_are_refused():
    with pytest.raises(InputError, match="one for each of the 12 events, got 3"):
        Batch(X, LABELS[:3])


def test_data_noise_is_fresh_at_every_step_and_has_its_standard_deviation():
    batches = Batches(torch.zeros(400, 25), None, seed=0)
    first, second = batches.at(0, 0.3), batches.at(1, 0.3)
    assert torch.equal(first.x, batches.at(0, 0.3).x)
    assert not torch.equal(first.x, second.x)
    mean, error = mean_and_error(first.x.flatten().square())
    assert abs(float(mean) - 0.09) < z_limit() * float(error)


def test_noise_leaves_labels_alone():
    noisy = Batches(Batch(X, LABELS), None, seed=0).at(0, 1.0)
    assert torch.equal(noisy.given, LABELS)
    assert not torch.equal(noisy.x, X)


def test_data_noise_moves_in_a_straight_line():
    config = TrainerConfig(steps=10, data_noise=0.4, data_noise_final=0.2)
    assert [round(config.noise_at(step), 3) for step in (0, 5, 10)] == [0.4, 0.3, 0.2]
    early = TrainerConfig(steps=10, data_noise=0.4, data_noise_final=0.2, data_noise_over=0.5)
    assert [round(early.noise_at(step), 3) for step in (0, 2, 5, 10)] == [0.4, 0.32, 0.2, 0.2]
    with pytest.raises(ConfigError, match=r"trainer\.data_noise_over: must be above 0 and at most 1"):
        TrainerConfig(data_noise_over=0.0)
    with pytest.raises(ConfigError, match=r"trainer\.data_noise: must be at least 0"):
        TrainerConfig(data_noise=-1.0)


def test_a_rate_that_falls_in_steps():
    schedule = Schedule("step", warmup=2, drops=(4, 6), drop=0.5)
    assert [schedule.factor(step, 8) for step in (0, 1, 3, 4, 6, 7)] == [0.5, 1.0, 1.0, 0.5, 0.25, 0.25]
    for wrong in (dict(shape="step"), dict(shape="cosine", drops=(3,))):
        with pytest.raises(ConfigError, match=r"schedule\.drops"):
            Schedule(**wrong)


class Around(nn.Module):
    """A normal density around a·given; counts how often contexts are encoded."""

    def __init__(self):
        super().__init__()
        self.a, self.encoded = nn.Parameter(torch.tensor(0.5)), 0

    def encode(self, given):
        self.encoded += len(given)
        return self.a * given

    def score(self, x, code, t=None):
        return 0.5 * (x - code[:, None]).square().sum(-1)

    def forward(self, x, given, t=None):
        flat = x.dim() == given.dim()
        E = self.score(x[:, None] if flat else x, self.encode(given), t)
        return E[:, 0] if flat else E


def test_a_bound_energy_encodes_its_contexts_once():
    energy, given = Around(), torch.tensor([[0.0], [10.0]])
    bound = bind(energy, given)
    w = ms.sample(bound, 200, init=torch.zeros(200, 1), kernel=ms.kernels.MALA(1.0), steps=60)
    assert energy.encoded == 2
    means = w.x.view(2, 100).mean(1)
    assert abs(float(means[0])) < 0.6
    assert abs(float(means[1]) - 5) < 0.6
    with pytest.raises(InputError, match="multiple of the 2 contexts"):
        bound(torch.zeros(3, 1))


def test_a_conditional_energy_of_the_wrong_shape_is_named():
    check_conditional(Around(), Batch(torch.zeros(3, 1), torch.zeros(3, 1)))
    with pytest.raises(EnergyError, match=r"must be one for each event, shape \(2, 3\)"):
        check_conditional(lambda x, given: x.sum((1, 2)), Batch(torch.zeros(3, 1), torch.zeros(3, 1)))


@pytest.mark.parametrize(("energy", "named"), [("mlp", "'mlp'"), (nn.Linear(1, 1), "Linear")])
@pytest.mark.parametrize("method", ["density", "ranking-nce"])
def test_an_energy_of_events_alone_is_refused_for_contexts_by_its_name(energy, named, method):
    x = torch.randn(20, 1, generator=torch.Generator().manual_seed(0))
    with pytest.raises(
        EnergyError, match=rf"\(x, given\), which {named} does not; .* 'conditional', or 'flow'"
    ):
        ms.fit(energy, x, method, given=x, steps=1)


@dataclass(frozen=True)
class Watcher(Method[Nothing]):
    """Regresses on what it is given, and keeps what it saw."""

    name: ClassVar[str] = "watcher"
    needs: ClassVar[str] = "given"
    seen: ClassVar[list] = []

    def companions(self, energy, data, noise, seed):
        self.seen.append(data)
        return {}

    def start(self, context):
        self.seen.append(context.given)
        return Nothing()

    def loss(self, context, state, player, batch, negatives):
        self.seen.append(batch)
        return context.energy(batch.x, batch.given).mean(), {}

    def load(self, tree):
        return Nothing()


def test_fit_hands_contexts_to_a_method_that_needs_them():
    given = torch.linspace(-1, 1, 60)[:, None]
    x = 2 * given + 0.1 * torch.randn(60, 1, generator=torch.Generator().manual_seed(0))
    run = ms.fit(
        Around(), x, Watcher(), steps=300, given=given, learning_rate=0.05, batch_size=30, evaluate=False
    )
    companions, start, *batches = Watcher.seen
    assert isinstance(companions, Batch)
    assert torch.equal(start, given)
    assert all(isinstance(b, Batch) and len(b) == 30 for b in batches)
    assert abs(run.energy.a.item() - 2) < 0.1
    assert run.config["context_shape"] == [1]


def test_contexts_that_are_missing_or_do_not_fit_are_named():
    with pytest.raises(
        InputError, match="given: 'watcher' needs the context of each row, and array has none"
    ):
        ms.fit(Around(), torch.zeros(5, 1), Watcher(), steps=1)
    with pytest.raises(InputError, match="given: must be one for each of 5 rows, got 4"):
        ms.fit(Around(), torch.zeros(5, 1), Watcher(), steps=1, given=torch.zeros(4, 1))


def test_a_split_keeps_contexts_with_their_rows_and_the_digest_sees_them():
    data = Dataset.of(X, "mine", given=LABELS[:, None].float())
    train, held = data.split(0.25, seed=1)
    assert len(held) == 3
    assert torch.equal(train.x[:, :1], 2 * train.given)
    assert data.digest != Dataset.of(X, "mine").digest
