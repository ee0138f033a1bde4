"""A recorded function is the function, on memory that stays where it is."""

from __future__ import annotations

import pytest
import torch

from metastable.core.capture import CaptureError, Replays, is_recording, record

HOST = torch.device("cpu")
cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
DEVICES = [HOST, pytest.param(torch.device("cuda"), marks=cuda)]


@pytest.mark.parametrize("device", DEVICES)
def test_recording_changes_nothing_and_replays_draw_what_the_function_would_have(device):
    def walk(x: torch.Tensor, rng: torch.Generator) -> tuple[torch.Tensor]:
        x.add_(torch.randn(x.shape, generator=rng, device=x.device))
        return (x.square(),)

    ours, theirs = (torch.Generator(device).manual_seed(3) for _ in range(2))
    x, y = torch.zeros(4, device=device), torch.zeros(4, device=device)
    recording = record(lambda: walk(x, ours), device, changes=[x], generators=[ours])
    assert not x.any()
    for _ in range(3):
        expected, found = walk(y, theirs)[0], recording.replay()[0]
        assert torch.equal(x, y)
        assert torch.equal(found, expected)
    assert torch.equal(ours.get_state(), theirs.get_state())
    ours.set_state(theirs.manual_seed(5).get_state())  # as resuming does
    recording.replay(), walk(y, theirs)
    assert torch.equal(x, y)


def test_what_python_decided_stays_decided_and_what_lies_elsewhere_is_not_seen():
    told, x = [], torch.ones(1)

    def inside() -> tuple[torch.Tensor]:
        told.append(is_recording())
        return (x * 2,)

    recording = record(inside, HOST)
    first = recording.replay()[0]
    x.fill_(5.0)
    assert recording.replay()[0] is first
    assert first.item() == 10.0
    assert all(told)
    assert not is_recording()


def test_an_error_of_the_function_leaves_everything_as_it_was():
    x, rng = torch.zeros(2), torch.Generator().manual_seed(0)
    before = rng.get_state()

    def broken() -> tuple[torch.Tensor]:
        x.add_(torch.rand(2, generator=rng))
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        record(broken, HOST, changes=[x], generators=[rng])
    assert not x.any()
    assert torch.equal(rng.get_state(), before)
    assert not is_recording()


def test_replays_of_two_generators_are_two_recordings():
    replays, draw = Replays(), torch.Generator().manual_seed(0)
    other = torch.Generator().manual_seed(0)

    def shifted(rng: torch.Generator) -> torch.Tensor:
        return replays(lambda x: (x + torch.rand(2, generator=rng),), "a", torch.zeros(2), generators=[rng])[
            0
        ]

    assert torch.equal(shifted(draw), shifted(other))
    assert len(replays.recordings) == 2
    assert not torch.equal(shifted(draw), shifted(other).roll(1))


@cuda
@pytest.mark.parametrize("how", ["item", "generator"])
def test_a_function_that_cannot_be_recorded_is_named_by_its_line_and_nothing_is_broken(how):
    device = torch.device("cuda")
    x, rng = torch.ones(3, device=device), torch.Generator(device).manual_seed(1)
    expected = torch.rand(3, generator=torch.Generator(device).manual_seed(1), device=device)

    def looks() -> tuple[torch.Tensor]:
        drawn = torch.rand(3, generator=rng, device=device)
        if how == "item":
            return (x * drawn.sum().item(),)
        return (x * torch.rand(3, generator=torch.Generator(device), device=device),)

    with pytest.raises(CaptureError, match=r"test_capture.py:\d+, `return \(x"):
        record(looks, device, generators=[rng])
    assert torch.equal(torch.rand(3, generator=rng, device=device), expected)
    torch.rand(3, device=device)
    record(lambda: (x * 2,), device).replay()
