"""Pictures changed at random: shapes and ranges stay, and each change is the one it says."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import metastable as ms
from metastable.core.augment import CHANGES, augmented, augmented_contexts
from metastable.core.batch import Batch
from metastable.core.errors import ConfigError, UnsupportedError
from metastable.core.pixels import Frames, table_of
from metastable.core.random import derive, generator
from metastable.training.batches import Batches

SHAPE = (64, 3, 16, 24)


def pictures() -> Tensor:
    return 2 * torch.rand(SHAPE, generator=generator(0)) - 1


@pytest.mark.parametrize("name", CHANGES)
def test_shape_and_range_stay_and_a_seed_says_it_all(name: str) -> None:
    x = pictures()
    kept = x.clone()
    y = augmented(x, (name,), generator(1))
    assert y.shape == x.shape
    assert torch.equal(x, kept), "the pictures themselves are left as they are"
    tolerance = 1e-6
    low, high = x.flatten(1).amin(1) - tolerance, x.flatten(1).amax(1) + tolerance
    assert bool((y.flatten(1).amin(1) >= low).all() & (y.flatten(1).amax(1) <= high).all())
    assert torch.equal(y, augmented(x, (name,), generator(1)))
    changed = (y != x).flatten(1).any(1).double().mean()
    assert 0.3 < float(changed) <= 1


def test_a_flip_mirrors_half_of_the_pictures() -> None:
    """Each is itself or its mirror image, a permutation of pixels; about half are mirrored."""
    x = pictures()
    y = augmented(x, ("flip",), generator(2))
    mirrored = (y == x.flip(-1)).flatten(1).all(1)
    same = (y == x).flatten(1).all(1)
    assert bool((mirrored ^ same).all())
    assert 16 <= int(mirrored.sum()) <= 48  # four standard deviations around 32


@pytest.mark.parametrize("side", [1, 2, 5, 7])
def test_small_pictures_are_shifted_by_a_pixel(side: int) -> None:
    x = torch.arange(float(side * side)).view(1, 1, side, side).repeat(200, 1, 1, 1)
    y = augmented(x, ("crop",), generator(4))
    moved = {tuple(row.flatten().tolist()) for row in y}
    assert len(moved) == (1 if side == 1 else 4 if side == 2 else 9)  # a mirror of two is the same both ways


def test_a_crop_is_a_cut_from_a_mirrored_margin() -> None:
    """Every picture is one of the 5 × 7 cuts of torch's own reflecting pad, and all of them come up."""
    x = torch.rand((400, 1, 16, 24), generator=generator(3))
    y = augmented(x, ("crop",), generator(4))
    wide = torch.nn.functional.pad(x, (3, 3, 2, 2), mode="reflect")
    cuts = torch.stack([wide[:, :, i : i + 16, j : j + 24] for i in range(5) for j in range(7)], 1)
    found = (cuts == y[:, None]).flatten(2).all(2)
    assert bool((found.sum(1) == 1).all())
    assert int(found.any(0).sum()) == 35


def test_blur_and_colour_keep_what_they_must() -> None:
    """An even picture stays even under every change; blur keeps no contrast that it had."""
    even = torch.full((8, 3, 8, 8), 0.25)
    for name in CHANGES:
        torch.testing.assert_close(augmented(even, (name,), generator(5)), even)
    x = pictures()
    assert float(augmented(x, ("blur",), generator(6)).var()) < float(x.var())


def test_batches_are_augmented_by_seed_and_step() -> None:
    """The same update sees the same pictures whenever it is made; noise comes on top and is what it was."""
    x = torch.rand((12, 1, 8, 8), generator=generator(7))
    plain, batches = Batches(x, 4, 0), Batches(x, 4, 0, augment=("flip", "crop"))
    expected = augmented(plain.at(5).x, ("flip", "crop"), generator(derive(0, "augment", 5)))
    assert torch.equal(batches.at(5).x, expected)
    added = plain.at(5, 0.1).x - plain.at(5).x
    torch.testing.assert_close(batches.at(5, 0.1).x - expected, added, rtol=0, atol=1e-6)


def test_training_takes_it_and_refuses_what_is_no_picture() -> None:
    x = torch.rand((40, 1, 8, 8), generator=generator(8))
    pcd = ms.methods.PersistentCD(walkers=8, augment=("flip", "colour"))
    run = ms.fit("conv", x, pcd, 3, augment="flip,crop", data_noise=0.1, evaluate=False)
    assert run.config["trainer"]["augment"] == ["flip", "crop"]
    assert run.config["method"]["augment"] == ["flip", "colour"]
    with pytest.raises(ConfigError, match=r"trainer.augment.0: unknown value .turn. .known: blur"):
        ms.fit("conv", x, "pcd", 3, augment=("turn",))
    with pytest.raises(ConfigError, match=r"trainer.augment: must be names among flip, .*, got None"):
        ms.fit("conv", x, "pcd", 3, augment=None)
    with pytest.raises(ConfigError, match=r"pcd.augment: must be names among flip, .*, got 3"):
        ms.methods.PersistentCD(augment=3)
    with pytest.raises(UnsupportedError, match=r"trainer.augment: is for pictures .*\(2,\)"):
        ms.fit("mlp", torch.randn(20, 2), "pcd", 3, augment=("flip",))
    with pytest.raises(UnsupportedError, match=r"trainer.augment: .*units='none'"):
        ms.fit("conv", x, "pcd", 3, augment=("flip",), units="scale")
    with pytest.raises(UnsupportedError, match=r"pcd.augment: is for pictures"):
        ms.fit("mlp", torch.randn(20, 2), ms.methods.PersistentCD(augment="flip"), 3)


def test_chains_are_augmented_before_they_move() -> None:
    """With a step of nothing the chains of an update are mirror images of the buffer's or themselves."""
    x = torch.rand((64, 1, 8, 8), generator=generator(9))
    method = ms.methods.PersistentCD(walkers=64, augment=("flip",), step_size=1e-30)
    run = ms.fit("conv", x, method, 1, evaluate=False)
    assert run.walkers is not None
    moved = run.walkers.x
    mirrored = torch.isclose(moved, x.flip(-1), atol=1e-6).flatten(1).all(1)
    same = torch.isclose(moved, x, atol=1e-6).flatten(1).all(1)
    assert bool((mirrored ^ same).all())
    assert 0 < int(mirrored.sum()) < 64


def test_rows_gathered_together_are_augmented_as_one_by_one():
    x = torch.rand((12, 1, 8, 8), generator=torch.Generator().manual_seed(0))
    batches = Batches(x, 4, 0, augment=("flip", "colour"))
    together = batches.several(1, [0.0, 0.0])
    for step, batch in enumerate(together, 1):
        assert torch.equal(batch.x, batches.at(step).x)
        assert not torch.equal(batch.x, batches._rows(step).x)


@pytest.mark.parametrize("frames", [1, 2])
def test_pictures_of_one_context_are_shifted_alike(frames: int) -> None:
    """Each row by whole pixels of its own, with repeated edges; what is no picture stays, as do other rows."""
    side, most, numbers = 16, 1, 3
    x = torch.rand((400, numbers + frames * 2 * side * side), generator=generator(11))
    at = (numbers, frames, 2, side, side)
    y = augmented_contexts(x, at, ("shift",), 12)
    assert torch.equal(y[:, :numbers], x[:, :numbers])
    before, after = (z[:, numbers:].view(-1, frames * 2, side, side) for z in (x, y))
    wide = torch.nn.functional.pad(before, (most,) * 4, mode="replicate")
    cuts = torch.stack([wide[:, :, i : i + side, j : j + side] for i in range(3) for j in range(3)], 1)
    found = (cuts == after[:, None]).flatten(2).all(2)  # one place for all frames and channels of a row
    assert bool((found.sum(1) == 1).all())
    shares = found.float().mean(0)
    assert float((shares - 1 / 9).abs().max()) < 4.5 * (8 / 81 / 400) ** 0.5
    assert torch.equal(y, augmented_contexts(x, at, ("shift",), 12))
    assert not torch.equal(y, augmented_contexts(x, at, ("shift",), 13))


def test_contexts_are_augmented_by_seed_and_step_and_events_are_not() -> None:
    x, given = torch.randn(12, 2), torch.rand((12, 5 + 2 * 64), generator=generator(7))
    at, rows = (5, 2, 1, 8, 8), Batch(x, given)
    plain, changed = Batches(rows, 4, 0), Batches(rows, 4, 0, given_augment=("shift",), pictures=at)
    seed = derive(0, "given-augment", 5)
    expected = augmented_contexts(plain.at(5).conditions, at, ("shift",), seed)
    assert torch.equal(changed.at(5).conditions, expected)
    assert torch.equal(changed.several(5, [0.0])[0].conditions, expected)
    assert torch.equal(changed.at(5).x, plain.at(5).x)
    assert not torch.equal(expected, plain.at(5).conditions)
    assert torch.equal(rows.given, given)  # what is read is not written to


def test_noise_on_numbers_of_a_context_leaves_its_pictures() -> None:
    """It is drawn for the numbers alone, of the size that was asked for, and for all of contexts of numbers."""
    codes, shown = torch.full((2, 1, 1, 37), 9, dtype=torch.uint8), torch.zeros(4000, 1, dtype=torch.int64)
    given = Frames(torch.zeros(4000, 3), codes, shown, table_of(-1.0, 1.0))
    x, share = torch.zeros(4000, 2), (1.0, 0.0, 2.0) + (0.0,) * 37
    added = Batches(Batch(x, given), None, 0, given_noise=share).at(3, 0.5).conditions - given.plain()
    assert not added[:, [1, *range(3, 40)]].any()
    spread = added[:, [0, 2]].std(0) / torch.tensor([0.5, 1.0])
    assert float((spread - 1).abs().max()) < 4.5 / (2 * 4000) ** 0.5
    plain = Batches(Batch(x, given.plain()), None, 0, given_noise=share).at(3, 0.5).conditions - given.plain()
    rng = generator(derive(0, "data-noise", 3))
    torch.randn(4000, 2, generator=rng)
    expected = 0.5 * torch.tensor(share) * torch.randn(4000, 40, generator=rng)
    torch.testing.assert_close(plain, expected, rtol=0, atol=1e-6)


def test_training_takes_augmented_contexts_and_refuses_others() -> None:
    x, given = torch.randn(40, 2), torch.rand((40, 1, 16, 16), generator=generator(8))
    net = {
        "name": "transformer",
        "pictures": [0, 1, 1, 16, 16],
        "width": 8,
        "layers": 1,
        "heads": 2,
        "step": 1,
    }
    flow = {"name": "interpolant", "field": net, "steps": 2}
    asked: dict[str, Any] = {"method": "density", "steps": 2, "batch_size": 8, "evaluate": False}
    run = ms.fit(flow, x, given=given, given_augment="shift", **asked)
    assert run.config["trainer"]["given_augment"] == ["shift"]
    assert run.config["trainer"]["given_pictures"] == [0, 1, 1, 16, 16]
    with pytest.raises(
        UnsupportedError, match=r"trainer.given_augment: is for pictures .*contexts have shape"
    ):
        ms.fit(flow, x, given=given.flatten(1), given_augment="shift", **asked)
    with pytest.raises(ConfigError, match=r"trainer.given_pictures: must be within the 256 numbers"):
        ms.fit(flow, x, given=given, given_augment="shift", given_pictures=(1, 1, 1, 16, 16), **asked)
    with pytest.raises(ConfigError, match=r"trainer.given_pictures: must be start, count, .*got \(1, 2\)"):
        ms.fit(flow, x, given=given, given_augment="shift", given_pictures=(1, 2), **asked)
    with pytest.raises(UnsupportedError, match=r"trainer.given_augment: is for events with contexts"):
        ms.fit("interpolant", x, given_augment="shift", **asked)
    with pytest.raises(UnsupportedError, match=r"units: must be 'none' for things .*`pictures`"):
        ms.fit(flow, x, given=given, units="scale", **asked)
    dense, at = {"name": "interpolant", "steps": 2}, (0, 1, 1, 16, 16)
    ms.fit(dense, x, given=given, given_augment="shift", **asked)  # no vectors, and left as they are
    with pytest.raises(ConfigError, match=r"trainer.given_pictures: must be within the 256 numbers"):
        ms.fit(flow, x, given=given, given_pictures=(9, 9, 9, 99, 99), **asked)
    with pytest.raises(UnsupportedError, match=r"trainer.given_augment: .*units='none', got 'scale'"):
        ms.fit(
            dense, x, given=given.flatten(1), given_augment="shift", given_pictures=at, units="scale", **asked
        )
