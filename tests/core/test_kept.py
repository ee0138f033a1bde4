"""What is kept is what would be made anew, and both sums of weights are those that stand alone."""

from __future__ import annotations

import copy

import pytest
import torch

from metastable.core.capture import record
from metastable.core.kept import Kept
from metastable.core.weights import ess_fraction, log_mean_exp, log_mean_exp_and_ess
from metastable.proposals import Gaussian


def written(q: Gaussian) -> None:
    q.scale.mul_(2)


def moved(q: Gaussian) -> None:
    q.double()


def loaded(q: Gaussian) -> None:
    q.load_state_dict(Gaussian(torch.ones(2), 3.0).state_dict())


@pytest.mark.parametrize("change", [written, moved, loaded, copy.deepcopy])
def test_a_gaussian_follows_its_buffers(change):
    q, x = Gaussian(torch.zeros(2), 1.5), torch.ones(4, 2)
    before = q.log_prob(x), q.gaussians()
    assert q.gaussians() is before[1]
    q = change(q) or q
    fresh = Gaussian(q.mean, q.scale)
    assert torch.equal(q.log_prob(x), fresh.log_prob(x))
    assert all(torch.equal(a, b) for a, b in zip(q.gaussians(), fresh.gaussians(), strict=True))


def test_nothing_made_in_a_recording_is_kept_and_a_recording_forgets_nothing():
    kept, x, count = Kept(), torch.ones(3), []
    made = lambda: kept(lambda: count.append(1) or x.sum(), x)  # noqa: E731
    record(lambda: (made(),), x.device, changes=[x])
    assert kept.value is None
    made()
    record(lambda: (made(),), x.device, changes=[x])  # which puts x back as it was
    made()
    assert len(count) == 2
    record(lambda: (x.add_(1), made())[1:], x.device, changes=[x])
    assert made().item() == 3.0


@pytest.mark.parametrize("shape", [(1, 2048), (16, 128), (3, 7)])
def test_log_mean_and_ess_of_the_same_exponentials_bit_for_bit(shape):
    A = 3 * torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    A[0, 0] = -torch.inf
    log_mean, ess = log_mean_exp_and_ess(A)
    assert torch.equal(log_mean, log_mean_exp(A))
    assert torch.equal(ess, ess_fraction(A))
