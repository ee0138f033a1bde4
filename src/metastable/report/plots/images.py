"""Events that are images, in a grid."""

from __future__ import annotations

import io
import math

import numpy as np

_MOST_TILES = 64


def image_side(shape: tuple[int, ...] | None) -> tuple[int, int] | None:
    """Height and width where `shape` is that of a picture: (1 or 3, H, W), or (H, W) of at least 4 by 4."""
    if shape is None:
        return None
    if len(shape) == 3 and shape[0] in (1, 3):
        return shape[1], shape[2]
    return (shape[0], shape[1]) if len(shape) == 2 and min(shape) >= 4 else None


def value_range(x: np.ndarray) -> tuple[float, float]:
    """The lowest and the highest finite value; 0 and 1 where there is none."""
    finite = x[np.isfinite(x)]
    return (float(finite.min()), float(finite.max())) if finite.size else (0.0, 1.0)


def image_grid(
    images: np.ndarray, low: float, high: float, columns: int = 8, most: int = _MOST_TILES
) -> bytes:
    """Up to `most` pictures `(n, *event)` as one PNG, `columns` in a row; `low` is black and `high` white."""
    from matplotlib.image import imsave

    images = images[:most]
    if images.ndim == 3:
        images = images[:, None]
    scaled = np.nan_to_num(np.clip((images - low) / max(high - low, 1e-12), 0, 1))
    tiles = np.round(255 * np.moveaxis(scaled, 1, -1)).astype(np.uint8)
    tiles = np.repeat(tiles, 3, axis=-1) if tiles.shape[-1] == 1 else tiles
    sheet = _tiled(tiles, min(len(tiles), columns))
    times = max(round(640 / sheet.shape[1]), 1)  # whole multiples only, so that every pixel keeps its value
    buffer = io.BytesIO()
    imsave(buffer, sheet.repeat(times, axis=0).repeat(times, axis=1), format="png")
    return buffer.getvalue()


def _tiled(tiles: np.ndarray, columns: int) -> np.ndarray:
    n, height, width, _ = tiles.shape
    rows = math.ceil(n / columns)
    # gaps are transparent
    sheet = np.zeros((rows * (height + 1) + 1, columns * (width + 1) + 1, 4), np.uint8)
    for i, tile in enumerate(tiles):
        top, left = 1 + (i // columns) * (height + 1), 1 + (i % columns) * (width + 1)
        sheet[top : top + height, left : left + width] = np.dstack(
            [tile, np.full((height, width), 255, np.uint8)]
        )
    return sheet
