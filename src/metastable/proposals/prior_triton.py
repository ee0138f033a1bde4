"""The convolutional prior (B.2) and its gradient in the tokens, beside the layers; see `body_triton`."""

from __future__ import annotations

import triton
import triton.language as tl

from .tiles_triton import GROUPS, OF_PRIOR, ahead, back, own, part, pointer, prior_at, row_of, silu, tile


@triton.jit
def in_groups(sums, W: tl.constexpr, C: tl.constexpr):
    """Sums over the columns of each group, in the place of each column."""
    SIZE: tl.constexpr = W // GROUPS
    total = tl.sum(tl.reshape(sums, [C // SIZE, SIZE]), 1)
    return tl.reshape(tl.broadcast_to(total[:, None], [C // SIZE, SIZE]), [C])


@triton.jit
def conv_kernel(
    table, scratch, turn: tl.constexpr, EPS: tl.constexpr, FIRST: tl.constexpr, L: tl.constexpr,
    LAYERS: tl.constexpr, R: tl.constexpr, W: tl.constexpr, C: tl.constexpr, HOW: tl.constexpr,
):  # fmt: skip
    """A convolution over three tokens with its group norm, activated: C columns, which are whole groups."""
    base, c, row = own(scratch, LAYERS, R, W, C), tl.program_id(1) * C, tl.arange(0, R)[:, None]
    mine, its, col = table + 11 + 6 * turn, prior_at(LAYERS), tl.arange(0, W)[None, :]
    source = base + (0 if turn == 0 else (its + 3) * (R * W))
    made = tl.zeros([R, C], tl.float32) + row_of(pointer(mine, 1) + c, C)
    for j in tl.static_range(3):
        there = row + j - 1
        h = tl.load(source + there * W + col, mask=(there >= FIRST) & (there < L), other=0.0)
        made += ahead(h, pointer(mine, 0), c, j * W, 3 * W, C, W, HOW)
    path = (row >= FIRST) & (row < L) & (tl.arange(0, C) >= 0)[None, :]
    n: tl.constexpr = (L - FIRST) * (W // GROUPS)
    mean = in_groups(tl.sum(tl.where(path, made, 0.0), 0), W, C) / n
    centred = tl.where(path, made - mean[None, :], 0.0)
    scale = 1 / tl.sqrt(in_groups(tl.sum(centred * centred, 0), W, C) / n + EPS)
    white = centred * scale[None, :]
    a, slope = silu(white * row_of(pointer(mine, 2) + c, C) + row_of(pointer(mine, 3) + c, C))
    at = its + (0 if turn == 0 else 5)
    tl.store(part(base, at, c, W, R, W, C), white)
    tl.store(part(base, at + 1, c, W, R, W, C), a)
    tl.store(part(base, at + 2, c, W, R, W, C), slope)
    tl.store(base + (its + 8) * (R * W) + turn * W + c + tl.arange(0, C), scale)


@triton.jit
def conv_back_kernel(
    table, value, scratch, turn: tl.constexpr, FIRST: tl.constexpr, L: tl.constexpr,
    LAYERS: tl.constexpr, R: tl.constexpr, W: tl.constexpr, C: tl.constexpr, HOW: tl.constexpr,
):  # fmt: skip
    """The way back through it, of C columns: what each of the three neighbours gets; at its end also the value."""
    base, c, row = own(scratch, LAYERS, R, W, C), tl.program_id(1) * C, tl.arange(0, R)
    mine, its = table + 11 + 6 * turn, prior_at(LAYERS)
    on, at = (row >= FIRST) & (row < L), its + (0 if turn == 0 else 5)
    if turn == 0:
        d = tl.load(part(base, its + 9, c, W, R, W, C))
    else:
        a = tl.load(tile(base, at + 1, R, W))
        v, slope = silu(tl.sum(a * row_of(pointer(table, 21), W), 1) + tl.load(pointer(table, 22)))
        d = tl.where(on, slope, 0.0)[:, None] * row_of(pointer(table, 21) + c, C)
        d *= tl.load(part(base, at + 2, c, W, R, W, C))
        if c == 0:
            tl.store(value + tl.program_id(0), tl.sum(tl.where(on, v, 0.0), 0))
    path, white = on[:, None] & (tl.arange(0, C) >= 0)[None, :], tl.load(part(base, at, c, W, R, W, C))
    d = tl.where(path, d * row_of(pointer(mine, 2) + c, C), 0.0)
    n: tl.constexpr = (L - FIRST) * (W // GROUPS)
    mean, along = in_groups(tl.sum(d, 0), W, C) / n, in_groups(tl.sum(d * white, 0), W, C) / n
    scale = tl.load(base + (its + 8) * (R * W) + turn * W + c + tl.arange(0, C))
    d = tl.where(path, scale[None, :] * (d - mean[None, :] - white * along[None, :]), 0.0)
    for j in tl.static_range(3):
        made = back(d, pointer(mine, 0), c, j * W, 3 * W, C, W, HOW)
        tl.store(tile(base, its + OF_PRIOR + 3 * tl.program_id(1) + j, R, W), made)


@triton.jit
def joined(
    base, FIRST: tl.constexpr, L: tl.constexpr, LAYERS: tl.constexpr, R: tl.constexpr, W: tl.constexpr,
    C: tl.constexpr,
):  # fmt: skip
    """What tokens get from the convolutions that they are in: as the one before, the middle and the one after."""
    row, col, its = tl.arange(0, R)[:, None], tl.arange(0, W)[None, :], prior_at(LAYERS) + OF_PRIOR
    total = tl.zeros([R, W], tl.float32)
    for c in tl.static_range(W // C):
        for j in tl.static_range(3):
            there = row + 1 - j
            ok = (row >= FIRST) & (row < L) & (there >= FIRST) & (there < L)
            total += tl.load(base + (its + 3 * c + j) * (R * W) + there * W + col, mask=ok, other=0.0)
    return total


@triton.jit
def between_kernel(
    table, scratch, LAYERS: tl.constexpr, R: tl.constexpr, W: tl.constexpr, C: tl.constexpr, HOW: tl.constexpr
):  # fmt: skip
    """The prior's dense layer between its convolutions, activated: C columns."""
    base, c, its = own(scratch, LAYERS, R, W, C), tl.program_id(1) * C, prior_at(LAYERS)
    h = ahead(tl.load(tile(base, its + 1, R, W)), pointer(table, 15), c, 0, W, C, W, HOW)
    a, slope = silu(h + row_of(pointer(table, 16) + c, C))
    tl.store(part(base, its + 3, c, W, R, W, C), a)
    tl.store(part(base, its + 4, c, W, R, W, C), slope)


@triton.jit
def between_back_kernel(
    table, scratch, FIRST: tl.constexpr, L: tl.constexpr, LAYERS: tl.constexpr, R: tl.constexpr,
    W: tl.constexpr, C: tl.constexpr, HOW: tl.constexpr,
):  # fmt: skip
    """The way back through it and the activation before it: C columns."""
    base, c, its = own(scratch, LAYERS, R, W, C), tl.program_id(1) * C, prior_at(LAYERS)
    d = joined(base, FIRST, L, LAYERS, R, W, C) * tl.load(tile(base, its + 4, R, W))
    made = back(d, pointer(table, 15), 0, c, W, W, C, HOW) * tl.load(part(base, its + 2, c, W, R, W, C))
    tl.store(part(base, its + 9, c, W, R, W, C), made)
