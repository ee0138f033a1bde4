"""Pictures changed at random: shapes and ranges stay, and each change is the one it says."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import metastable as ms
from metastable.core.augment import CHANGES, augmented
from metastable.core.errors import ConfigError, UnsupportedError
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
