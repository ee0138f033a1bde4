"""Recorded functions give what the functions give, whatever changes between two calls."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from metastable.core.capture import CaptureError, Replays
from metastable.core.errors import UnsupportedError
from metastable.core.waiting import unwatched
from metastable.proposals import Diffusion, DiffusionEnergy, InterpolantFlow
from metastable.proposals.replay import replayed

cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


class Counted(Replays):
    recorded = 0

    def record(self, *given):
        self.recorded += 1
        return super().record(*given)


def test_a_recording_is_made_once_for_each_key_and_shape():
    replays, weight = Counted(most=2), torch.tensor(2.0)
    double = lambda x: (weight * x,)  # noqa: E731
    first = replays(double, "a", torch.ones(3))[0]
    weight.fill_(3.0)  # in place, as an optimiser does
    assert replays(double, "a", torch.full((3,), 5.0))[0].tolist() == [15.0] * 3
    assert first.tolist() == [2.0] * 3  # what was handed out is not written over
    assert replays.recorded == 1
    replays(double, "a", torch.ones(4))
    replays(double, "b", torch.ones(4))
    assert (replays.recorded, len(replays.recordings)) == (3, 2)
    replays(double, "a", torch.ones(4))  # used again, so that "b" is the one to go
    replays(double, "c", torch.ones(4))
    replays(double, "a", torch.ones(4))
    assert replays.recorded == 4


def test_what_cannot_be_recorded_says_what_to_do(monkeypatch):
    def broken(*given):
        raise CaptureError("operation not permitted when stream is capturing")

    monkeypatch.setattr(Replays, "record", broken)
    with pytest.raises(UnsupportedError, match=r"not permitted.*; build the flow with replay=False"):
        replayed(nn.Linear(1, 1), lambda x, code, t, first: (x,), "a", torch.ones(1), None, torch.ones(1))


@cuda
@pytest.mark.parametrize("kind", [Diffusion, DiffusionEnergy])
def test_a_replayed_diffusion_is_the_diffusion(kind):
    model = kind(2, 3, width=16, layers=3, steps=8, scored=5).cuda()
    given = torch.randn(7, 3, device="cuda")
    for _ in range(2):
        expected = model.sample_and_log_prob(4, torch.Generator("cuda").manual_seed(0), given)
        with unwatched():
            found = model.sample_and_log_prob(4, torch.Generator("cuda").manual_seed(0), given)
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("kind", [InterpolantFlow, Diffusion, DiffusionEnergy])
def test_named_networks_are_recorded(kind):
    own = {"field" if kind is InterpolantFlow else "network": lambda x, given, t: x}
    assert kind(2, width=8, layers=3).replay
    assert not kind(2, width=8, layers=3, replay=False).replay
    if kind is not DiffusionEnergy:
        assert not kind(2, **own).replay


@cuda
@pytest.mark.parametrize("contexts", [None, 3])
def test_a_replayed_flow_is_the_flow(contexts):
    flow = InterpolantFlow(2, contexts, width=16, steps=8, scored=5, replay=True).cuda()
    given = None if contexts is None else torch.randn(7, contexts, device="cuda")
    times = torch.rand(*([] if given is None else [7]), 3, device="cuda")
    x = torch.randn(7, 2, device="cuda")

    def ask() -> list[torch.Tensor]:
        rng = torch.Generator("cuda").manual_seed(0)
        found = flow.sample_and_log_prob(4, rng, given) + flow.trajectories(4, times, rng, given)
        with torch.no_grad():
            return [*found, flow.log_prob(x, given)]

    for _ in range(3):
        with torch.no_grad():
            for p in flow.parameters():
                p.add_(0.1 * torch.randn_like(p))
        expected = ask()
        with unwatched():
            found = ask()
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)
    copy.deepcopy(flow)
