"""How much room a training takes for each of its pictures."""

from __future__ import annotations

import pytest
import torch
from torch.profiler import ProfilerActivity, profile

import metastable as ms
from metastable.core.parts import column_moments
from metastable.core.random import generator, normal_like, with_normal


def most_taken(x: torch.Tensor, evaluate: bool) -> float:
    """Bytes that a training has taken at once for its tensors, as a multiple of those of its pictures."""
    method = ms.methods.PersistentCD(walkers=16, batch=8, step_size=1e-4)
    options = {"batch_size": 8, "data_noise": 0.03, "held_out": 0.1, "evaluate": evaluate}
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as seen:
        ms.fit("conv", x, method, 1, **options)
    assert seen.profiler is not None
    events = [e for e in seen.profiler.kineto_results.events() if e.name() == "[memory]"]
    changes = torch.tensor([e.nbytes() for e in sorted(events, key=lambda e: e.start_ns())])
    return float(changes.cumsum(0).max()) / x.nbytes


@pytest.mark.slow
def test_training_and_judging_take_few_copies_of_the_pictures() -> None:
    """The split, rows with noise and the fit of a Gaussian: 47 kB with the pictures themselves, 2.8 GB for 60,000.

    Judging takes a few copies of 2,000 rows, however many there are, and with many no more than training did.
    """
    x = torch.zeros(12_000, 3, 32, 32).uniform_(-1, 1, generator=generator(0))
    trained = most_taken(x, evaluate=False)
    assert 2.7 < trained < 2.9
    assert most_taken(x, evaluate=True) <= trained + 0.001


@pytest.mark.parametrize("shape", [(9000, 2, 3, 4), (4100, 17), (5000, 3)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_noise_in_little_room_is_the_same_noise(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    x = torch.rand(shape, generator=generator(0), dtype=dtype)
    expected = x + 0.3 * normal_like(x, generator(1))
    assert torch.equal(with_normal(x, 0.3, generator(1)), expected)


def test_moments_a_few_columns_at_a_time() -> None:
    x = torch.randn(50, 3, 7, 5, generator=generator(0))
    mean, std = column_moments(x, columns=8)
    flat = x.flatten(1).double()
    torch.testing.assert_close(mean, flat.mean(0))
    torch.testing.assert_close(std, flat.std(0, correction=0))
