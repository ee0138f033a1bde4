"""Pictures changed a little, at random: mirrored, shifted, zoomed, with paler colours, blurred.

Every change works on whole batches, `(B, C, H, W)`, where they are, with random numbers of each picture's own, and
keeps the shape and the range of its values. Nothing waits for a device.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torch.nn import functional as F

from .errors import UnsupportedError, require, require_choice
from .random import Seed, generator, uniform_rows
from .types import per_row

Change = Callable[[Tensor, torch.Generator], Tensor]


def flip(x: Tensor, rng: torch.Generator) -> Tensor:
    """Left and right change places in half of the pictures."""
    return torch.where(per_row(uniform_rows(x, rng) < 0.5, x), x.flip(-1), x)


def crop(x: Tensor, rng: torch.Generator) -> Tensor:
    """Shifted by up to an eighth of the side each way, or by a pixel; what comes in is what the edge mirrors.

    The same as a margin of mirrored pixels, four of them at 32 × 32, and a random cut of the old size.
    """

    def mirrored(place: Tensor, last: int) -> Tensor:
        return last - (last - place.abs()).abs()

    return _moved(x, rng, 8, mirrored)


def shift(x: Tensor, rng: torch.Generator) -> Tensor:
    """Shifted by up to a sixteenth of the side each way, or by a pixel; edges are repeated.

    What policies that see pictures are trained with: I. Kostrikov, D. Yarats, R. Fergus, *Image augmentation is
    all you need*, ICLR 2021.
    """
    return _moved(x, rng, 16, lambda place, last: place.clamp(0, last))


def _moved(x: Tensor, rng: torch.Generator, share: int, inside: Callable[[Tensor, int], Tensor]) -> Tensor:
    """Every picture shifted by up to 1/`share` of either side, its pixels from places that `inside` brings back."""
    for dim in (2, 3):
        side = x.shape[dim]
        most = min(max(side // share, 1), side - 1)
        by = (uniform_rows(x, rng) * (2 * most + 1)).long() - most
        place = inside(torch.arange(side, device=x.device) + by[:, None], side - 1)
        x = x.gather(dim, place.view(-1, 1, *((side, 1) if dim == 2 else (1, side))).expand(x.shape))
    return x


def rescale(x: Tensor, rng: torch.Generator) -> Tensor:
    """Zoomed around the middle by a factor between 0.8 and 1.25, by bilinear interpolation; edges are repeated."""
    factor = 0.8 * (1.25 / 0.8) ** uniform_rows(x, rng)
    zero = torch.zeros_like(factor)
    matrix = torch.stack([factor, zero, zero, zero, factor, zero], 1).view(-1, 2, 3)
    grid = F.affine_grid(matrix, list(x.shape), align_corners=False)
    return F.grid_sample(x, grid, padding_mode="border", align_corners=False)


def colour(x: Tensor, rng: torch.Generator) -> Tensor:
    """Up to half of the way to a grey picture, and up to half of the way to one even colour."""
    for pale in (x.mean(1, keepdim=True), x.mean((2, 3), keepdim=True)):
        x = torch.lerp(x, pale.expand(x.shape), per_row(0.5 * uniform_rows(x, rng), x))
    return x


def blur(x: Tensor, rng: torch.Generator) -> Tensor:
    """Every pixel mixed with its neighbours, (w, 1 − 2w, w) along both sides, w up to a quarter."""
    w = per_row(0.25 * uniform_rows(x, rng), x)
    for dim in (2, 3):
        side = torch.arange(x.shape[dim], device=x.device)
        before, after = (x.index_select(dim, (side + k).clamp(0, x.shape[dim] - 1)) for k in (-1, 1))
        x = (1 - 2 * w) * x + w * (before + after)
    return x


CHANGES: dict[str, Change] = {
    **{"flip": flip, "crop": crop, "shift": shift},
    **{"rescale": rescale, "colour": colour, "blur": blur},
}


def require_changes(field: str, names: Sequence[str]) -> tuple[str, ...]:
    """Names of changes, as a word with commas too, or an error that names the one which is none."""
    require(isinstance(names, Sequence), field, f"names among {', '.join(CHANGES)}, or ()", names)
    names = tuple(names.split(",")) if isinstance(names, str) else tuple(names)
    for i, name in enumerate(names):
        require_choice(f"{field}.{i}", name, CHANGES)
    return names


def require_images(field: str, shape: Sequence[int], what: str = "events") -> None:
    """Refuse what is no picture."""
    if len(shape) != 3:
        raise UnsupportedError(
            f"{field}: is for pictures (channels, height, width), and {what} have shape {tuple(shape)}"
        )


def augmented(x: Tensor, names: Sequence[str], rng: torch.Generator) -> Tensor:
    """The pictures, changed in every way that is named, in that order.

    >>> x = torch.arange(8.0).view(1, 1, 2, 4)
    >>> y = augmented(x, ("flip",), torch.Generator().manual_seed(0))
    >>> bool((y == x).all() | (y == x.flip(-1)).all())
    True
    """
    for name in names:
        x = CHANGES[name](x, rng)
    return x


def augmented_contexts(given: Tensor, at: Sequence[int], names: Sequence[str], seed: Seed) -> Tensor:
    """Contexts `(B, *context)` with their pictures changed, those of one context all alike.

    Args:
        given: the contexts.
        at: where pictures lie in a flattened context: start, count, channels, height and width.
        names: of the changes.
        seed: of the random numbers.
    """
    start, count, *shape = at
    flat = given.flatten(1).clone()
    pictures = flat[:, start : start + count * math.prod(shape)].view(-1, count, *shape)
    for k in range(count):
        pictures[:, k] = augmented(pictures[:, k].contiguous(), names, generator(seed, given.device))
    return flat.view(given.shape)
