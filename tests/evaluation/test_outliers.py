"""AUROC against every pair, and the three scores against closed forms."""

from __future__ import annotations

import pytest
import torch
from conftest import assert_within, z_limit
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from metastable.core.errors import InputError
from metastable.core.parts import energies_of, in_parts
from metastable.energies import GaussianMixture
from metastable.evaluation.outliers import SCORES, auroc, midranks, ood_aurocs, ood_scores


def rng(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def every_pair(inside: Tensor, outside: Tensor) -> Tensor:
    """1 for a pair in order, ½ for a tie, 0 otherwise, `(n, m)`."""
    difference = inside[:, None] - outside[None]
    return (difference > 0).double() + 0.5 * (difference == 0).double()


few = st.lists(st.integers(0, 5), min_size=2, max_size=12)


@given(few, few)
@settings(max_examples=60, deadline=None)
def test_auroc_and_its_error_count_every_pair(a, b):
    inside, outside = torch.tensor(a).double(), torch.tensor(b).double()
    pairs = every_pair(inside, outside)
    found = auroc(inside, outside)
    assert found.value == pytest.approx(float(pairs.mean()), abs=1e-12)
    # DeLong's variance from the placements themselves
    variance = pairs.mean(1).var() / len(inside) + pairs.mean(0).var() / len(outside)
    assert found.std_error == pytest.approx(float(variance.sqrt()), abs=1e-12)


@given(few, few)
@settings(max_examples=20, deadline=None)
def test_auroc_turns_over_with_the_samples_and_sees_order_only(a, b):
    inside, outside = torch.tensor(a).double(), torch.tensor(b).double()
    assert auroc(outside, inside).value == pytest.approx(1 - auroc(inside, outside).value, abs=1e-12)
    assert auroc(inside.exp(), outside.exp()) == pytest.approx(auroc(inside, outside), abs=1e-12)


def test_auroc_agrees_with_scikit_learn():
    metrics = pytest.importorskip("sklearn.metrics")
    inside = torch.randn(300, generator=rng(0)).round(decimals=1)
    outside = torch.randn(200, generator=rng(1)).sub(0.7).round(decimals=1)
    truth = [1] * 300 + [0] * 200
    theirs = metrics.roc_auc_score(truth, torch.cat([inside, outside]).numpy())
    assert auroc(inside, outside).value == pytest.approx(theirs, abs=1e-12)


def test_auroc_of_two_normals_is_the_closed_form_and_its_error_the_spread():
    truth = float(torch.special.ndtr(torch.tensor(1.2 / 2**0.5, dtype=torch.float64)))
    found = [
        auroc(torch.randn(150, generator=rng(2 * s)) + 1.2, torch.randn(100, generator=rng(2 * s + 1)))
        for s in range(300)
    ]
    values, errors = (torch.tensor(list(column), dtype=torch.float64) for column in zip(*found, strict=True))
    assert_within(values.mean(), truth, values.std() / 300**0.5)
    # the spread over 300 repeats is itself known to 1/√600
    assert abs(float(errors.mean() / values.std()) - 1) < z_limit() / 600**0.5
    assert float(values.mean()) > 0.5 + z_limit() * float(values.std())  # a score with its sign turned fails


def test_samples_apart_have_auroc_1_and_infinite_scores_are_ranked():
    assert auroc(torch.tensor([2.0, 3.0]), torch.tensor([0.0, 1.0])) == (1.0, 0.0)
    assert auroc(torch.tensor([0.0, 1.0]), torch.tensor([-torch.inf, -torch.inf])).value == 1
    assert midranks(torch.tensor([5, 5, 1])).tolist() == [2.5, 2.5, 1.0]


@pytest.mark.parametrize(
    ("inside", "outside", "words"),
    [
        (torch.tensor([0.0, torch.nan]), torch.zeros(2), "inside: 1 of 2 scores are NaN"),
        (torch.zeros(2), torch.zeros(1), r"outside: must be at least two scores \(n,\), got shape \(1,\)"),
        (torch.zeros(2, 2), torch.zeros(2), r"inside: .*got shape \(2, 2\)"),
    ],
)
def test_bad_scores_are_named(inside, outside, words):
    with pytest.raises(InputError, match=words):
        auroc(inside, outside)


# ------------------------------------------------------------------------------------------------- scores


class Joint(nn.Module):
    """Classes are unit Gaussians of equal weight, so that p(x), p(y | x) and ∇log p(x) are known."""

    def __init__(self, scale: float = 1.0):
        super().__init__()
        self.register_buffer(
            "means", torch.tensor([[-2.0, 0.0], [2.0, 1.0], [0.0, 3.0]], dtype=torch.float64)
        )
        self.scale = scale
        self.rows = 0

    def logits(self, x: Tensor) -> Tensor:
        self.rows = max(self.rows, len(x))
        return -0.5 * (x[:, None] - self.means).square().sum(2)

    def forward(self, x: Tensor) -> Tensor:
        return -self.scale * torch.logsumexp(self.logits(x), 1)


def test_scores_have_their_closed_forms():
    energy, x = Joint(scale=5.0), 3 * torch.randn(50, 2, generator=rng(3), dtype=torch.float64)
    found = ood_scores(energy, x)
    assert tuple(found) == SCORES
    p = torch.softmax(energy.logits(x), 1)
    torch.testing.assert_close(found["log_density"], 5 * torch.logsumexp(energy.logits(x), 1))
    torch.testing.assert_close(found["confidence"], p.amax(1))
    slope = 5 * (p @ energy.means - x)  # ∇ₓ log p(x) of the mixture
    torch.testing.assert_close(found["gradient"], -slope.norm(dim=1))
    assert all(values.shape == (50,) and values.dtype == torch.float64 for values in found.values())


def test_the_gradient_is_over_whole_events_and_rows_do_not_mix():
    weight = torch.randn(3, 4, 4, generator=rng(4))

    def energy(x: Tensor) -> Tensor:
        return (x * weight).flatten(1).sum(1).square()

    x = torch.randn(6, 3, 4, 4, generator=rng(5))
    found = ood_scores(energy, x)
    assert tuple(found) == ("log_density", "gradient")
    inner = (x * weight).flatten(1).sum(1)
    torch.testing.assert_close(found["gradient"].float(), -2 * inner.abs() * weight.norm())
    alone = torch.cat([ood_scores(energy, row[None])["gradient"] for row in x])
    torch.testing.assert_close(found["gradient"], alone)


def test_scores_leave_no_graph_and_no_gradient_behind():
    network = nn.Linear(2, 1)
    found = ood_scores(lambda x: network(x)[:, 0], torch.ones(3, 2))
    assert not any(values.requires_grad for values in found.values())
    assert network.weight.grad is None


def test_rows_go_through_in_parts(monkeypatch):
    import metastable.evaluation.outliers as module

    energy, x = Joint(), torch.randn(100, 2, generator=rng(6), dtype=torch.float64)
    whole = ood_scores(energy, x)
    assert energy.rows == 100
    energy.rows = 0
    monkeypatch.setattr(module, "NUMBERS", 8 * 20)
    monkeypatch.setattr(module, "in_parts", lambda f, rows, numbers=20: in_parts(f, rows, numbers))
    parts = ood_scores(energy, x)
    assert energy.rows == 10
    for name in SCORES:
        torch.testing.assert_close(parts[name], whole[name])
    assert energies_of(lambda rows: rows.sum(1), x.float()).dtype == torch.float64
    assert in_parts(lambda rows: rows, x, numbers=1).shape == (100, 2)  # a row at least


def test_events_far_away_are_told_apart_by_density_and_not_by_confidence():
    energy = Joint()
    inside = GaussianMixture(energy.means).sample(300, rng(7))
    outside = inside + torch.tensor([0.0, -9.0], dtype=torch.float64)
    found = ood_aurocs(ood_scores(energy, inside), ood_scores(energy, outside))
    assert found["log_density"].value > 0.99
    assert found["gradient"].value > 0.99
    assert found["confidence"].value < 0.9


def test_no_events_are_refused():
    with pytest.raises(InputError, match=r"x: there are no events to score \(N = 0\)"):
        ood_scores(Joint(), torch.zeros(0, 2, dtype=torch.float64))
