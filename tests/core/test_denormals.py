"""Training takes numbers below full precision for zero, and leaves the thread as it found it."""

from __future__ import annotations

import pytest
import torch

import metastable as ms
from metastable.core.denormals import are_flushed, flushed

pytestmark = pytest.mark.skipif(not torch.set_flush_denormal(False), reason="this CPU cannot flush denormals")


def test_the_thread_is_left_as_it_was():
    with flushed():
        assert are_flushed()
    assert not are_flushed()
    with pytest.raises(ZeroDivisionError), flushed():
        1 / 0  # noqa: B018
    assert not are_flushed()
    torch.set_flush_denormal(True)
    try:
        torch.set_default_dtype(torch.float64)
        with flushed():
            pass
        assert are_flushed()
    finally:
        torch.set_default_dtype(torch.float32)
        torch.set_flush_denormal(False)


def test_training_flushes_and_nothing_else_does():
    seen = []
    x = torch.randn(64, 2, generator=torch.Generator().manual_seed(0))
    ms.fit(None, x, ms.methods.ShortRun(), 2, evaluate=False, progress=lambda *_: seen.append(are_flushed()))
    assert seen
    assert all(seen)
    assert not are_flushed()
