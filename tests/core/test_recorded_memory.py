"""Recordings have memory of their own, and are made anew where the process rounds in another way."""

from __future__ import annotations

import torch
from torch import nn

from metastable.core.capture import Replays
from metastable.proposals.replay import _REPLAYS, replayed


def test_a_recording_is_of_one_precision():
    layer, x = nn.Linear(2, 2), torch.ones(1, 2)
    solve = lambda x, code, t, first: (layer(x), t)  # noqa: E731
    for rounded in (False, True, False):
        with torch.no_grad(), torch.autocast("cpu", torch.bfloat16, enabled=rounded):
            found = replayed(layer, solve, "a", x, None, x)[0]
        assert found.dtype == (torch.bfloat16 if rounded else torch.float32)
    assert len(_REPLAYS[layer].recordings) == 2


def test_one_made_in_inference_mode_serves_outside_of_it():
    replays, double = Replays(), lambda x: (2 * x,)
    with torch.inference_mode():
        replays(double, "a", torch.ones(2))
    assert replays(double, "a", torch.full((2,), 3.0))[0].tolist() == [6.0, 6.0]
    assert len(replays.recordings) == 1


def test_its_memory_is_no_part_of_a_graph_of_gradients():
    replays, x = Replays(), torch.ones(2, requires_grad=True)
    for _ in range(2):
        assert not replays(lambda x: (2 * x.detach(),), "a", 3 * x)[0].requires_grad
    ((own,), _), *_ = replays.recordings.values()
    assert not own.requires_grad
