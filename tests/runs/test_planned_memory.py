"""How much room a training takes for each of its pictures."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch

from metastable.core.parts import column_moments
from metastable.core.random import generator, normal_like, with_normal

TRAIN = """
import resource, torch, metastable as ms
x = torch.zeros(5000, 3, 32, 32).uniform_(-1, 1, generator=torch.Generator().manual_seed(0))
method = ms.methods.PersistentCD(walkers=16, batch=8, step_size=1e-4)
options = dict(batch_size=8, data_noise=0.03, evaluate=True)
fit = lambda rows, held_out: ms.fit("conv", rows, method, 1, held_out=held_out, **options)
fit(x[:20], 0.5)
peak = lambda: resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
before = peak()
fit(x, 0.1)
print((peak() - before) * 1024 / len(x))
"""


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="ru_maxrss is in kilobytes on Linux")
def test_training_and_judging_take_few_copies_of_the_pictures() -> None:
    """The split, and rows with noise, 12,288 bytes each beside the pictures themselves: 60,000 stay below 4 GB."""
    made = subprocess.run([sys.executable, "-c", TRAIN], capture_output=True, text=True, check=True)
    assert float(made.stdout) < 3 * 3 * 32 * 32 * 4


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
