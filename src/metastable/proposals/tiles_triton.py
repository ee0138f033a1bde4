"""Tiles of tokens and products of them, of which `body_triton` and `prior_triton` make kernels.

Names: W width, R rows, S tokens beside the event, L all of them, FIRST the first that end and prior see, HEAD
numbers of a head, C columns of a product, PARTS shares of hidden units, HOW the precision.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

GLOBALS, OF_LAYER = tl.constexpr(23), tl.constexpr(14)
"""Entries of the table of pointers that come first, and those of each layer."""
KEPT, OF_PRIOR = tl.constexpr(9), tl.constexpr(10)
"""Tiles that each layer keeps for the way back: h, q, k, v, h between its parts, hidden units (4); the prior's."""
GROUPS = tl.constexpr(8)


@triton.constexpr_function
def heads_at(LAYERS):
    """Where the shares of heads begin, behind the tokens and what layers keep; at most 8."""
    return 1 + 9 * LAYERS


@triton.constexpr_function
def hidden_at(LAYERS):
    """Those of hidden units; at most 8."""
    return heads_at(LAYERS) + 8


@triton.constexpr_function
def grads_at(LAYERS):
    """Gradients: at the end, before and between the parts of a layer; then the last h."""
    return hidden_at(LAYERS) + 8


@triton.constexpr_function
def prior_at(LAYERS):
    """The prior's: white, activated and slopes of each convolution, those of the layer between, deviations, d."""
    return grads_at(LAYERS) + 4


@triton.constexpr_function
def tiles_of(LAYERS, W, C):
    """All tiles of an event; the last are what convolutions give back to three neighbours."""
    return prior_at(LAYERS) + 10 + 3 * (W // C)


@triton.jit
def pointer(table, i):
    """The i-th tensor."""
    return tl.multiple_of(tl.load(table + i).to(tl.pointer_type(tl.float32)), 16)


@triton.jit
def own(scratch, LAYERS: tl.constexpr, R: tl.constexpr, W: tl.constexpr, C: tl.constexpr):
    """Where the tiles of this program's event begin."""
    return scratch + tl.program_id(0).to(tl.int64) * (tiles_of(LAYERS, W, C) * R * W)


@triton.jit
def tile(base, number, R: tl.constexpr, W: tl.constexpr):
    """Where the numbers of a tile lie."""
    return base + number * (R * W) + tl.arange(0, R)[:, None] * W + tl.arange(0, W)[None, :]


@triton.jit
def part(base, number, c, ROW: tl.constexpr, R: tl.constexpr, W: tl.constexpr, C: tl.constexpr):
    """Where those of columns c to c + C lie, in rows of ROW numbers."""
    return base + number * (R * W) + tl.arange(0, R)[:, None] * ROW + c + tl.arange(0, C)[None, :]


@triton.jit
def read(base, number, L: tl.constexpr, R: tl.constexpr, W: tl.constexpr, first=0):
    """A tile's rows of tokens, from one of them on; others are zero, and not read."""
    row = tl.arange(0, R)[:, None]
    return tl.load(tile(base, number, R, W), mask=(row >= first) & (row < L), other=0.0)


@triton.jit
def summed(base, number, count: tl.constexpr, L: tl.constexpr, R: tl.constexpr, W: tl.constexpr):
    """The sum of some tiles."""
    total = read(base, number, L, R, W)
    for j in tl.static_range(1, count):
        total += read(base, number + j, L, R, W)
    return total


@triton.jit
def in_turn(EARLY: tl.constexpr):
    """Wait for the kernel before, of which nothing was read yet, and let the next one begin to do the same.

    What kernels before that one wrote was there from the start: it had waited for them.
    """
    if EARLY:
        gdc_wait()
        gdc_launch_dependents()


@triton.jit
def row_of(w, W: tl.constexpr):
    """W numbers as a row."""
    return tl.load(w + tl.arange(0, W))[None, :]


@triton.jit
def silu(z):
    """The activation and its derivative."""
    s = tl.sigmoid(z)
    a = z * s
    return a, s + a * (1 - s)


@triton.jit
def turned(w, first, at, ROW: tl.constexpr, O: tl.constexpr, K: tl.constexpr):
    """vᵀ for v = w[first : first + O, at : at + K]."""
    o, k = first + tl.arange(0, O), at + tl.arange(0, K)
    return tl.load(w + k[:, None] + o[None, :] * ROW)


@triton.jit
def both_turned(w, first, apart, O: tl.constexpr, K: tl.constexpr):
    """vᵀ for v the O rows of w from `first` on, and as many that lie `apart` from them: one product has both."""
    o, k = tl.arange(0, 2 * O), tl.arange(0, K)
    row = first + o % O + tl.where(o < O, 0, apart)
    return tl.load(w + k[:, None] + row[None, :] * K)


@triton.jit
def some_of(w, first, at, ROW: tl.constexpr, O: tl.constexpr, K: tl.constexpr):
    """v itself."""
    o, k = first + tl.arange(0, O), at + tl.arange(0, K)
    return tl.load(w + o[:, None] * ROW + k[None, :])


@triton.jit
def ahead(h, w, first, at, ROW: tl.constexpr, O: tl.constexpr, K: tl.constexpr, HOW: tl.constexpr):
    """h·vᵀ."""
    return tl.dot(h, turned(w, first, at, ROW, O, K), input_precision=HOW)


@triton.jit
def back(g, w, first, at, ROW: tl.constexpr, O: tl.constexpr, K: tl.constexpr, HOW: tl.constexpr):
    """g·v: the way back."""
    return tl.dot(g, some_of(w, first, at, ROW, O, K), input_precision=HOW)


@triton.jit
def whitened(h, EPS: tl.constexpr, W: tl.constexpr):
    """Rows of mean 0 and variance 1, and one over their deviations."""
    centred = h - (tl.sum(h, 1) / W)[:, None]
    scale = 1 / tl.sqrt(tl.sum(centred * centred, 1) / W + EPS)
    return centred * scale[:, None], scale


@triton.jit
def normed(h, w, b, EPS: tl.constexpr, W: tl.constexpr):
    """A layer norm, of weights that were read."""
    white, _ = whitened(h, EPS, W)
    return white * w + b


@triton.jit
def normed_back(d, white, scale, w, W: tl.constexpr):
    """The way back through `normed` where h was `whitened`."""
    d = d * w
    along = tl.sum(d * white, 1) / W
    return scale[:, None] * (d - (tl.sum(d, 1) / W)[:, None] - white * along[:, None])
