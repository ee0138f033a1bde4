"""Energies of perceptrons and their gradients inside Triton kernels, a block of chains at a time.

Tiles have one row for each chain. Widths are padded to powers of two with weights of zero, whose units give nothing
to the energy and get nothing back.
"""

from __future__ import annotations

import os

import triton
import triton.language as tl

WIDEN = tl.constexpr(os.environ.get("TRITON_INTERPRET") == "1")
"""Triton's interpreter multiplies the bits of bfloat16 numbers; in float32 their products are the same."""


@triton.constexpr_function
def padded(width):
    """A width that tiles and matrix products have."""
    return max(16, triton.next_power_of_2(width))


@triton.jit
def activated(z, NAME: tl.constexpr):
    """The activation and its derivative at `z`."""
    if NAME == "silu":
        s = tl.sigmoid(z)
        a = z * s
        d = s + a * (1 - s)
    elif NAME == "softplus":
        a = tl.maximum(z, 0.0) + tl.log(1 + tl.exp(-tl.abs(z)))
        d = tl.sigmoid(z)
    elif NAME == "tanh":
        a = 2 * tl.sigmoid(2 * z) - 1
        d = 1 - a * a
    elif NAME == "gelu":
        below = 0.5 * (1 + tl.erf(z * 0.7071067811865476))
        a = z * below
        d = below + z * tl.exp(-0.5 * z * z) * 0.3989422804014327
    else:
        tl.static_assert(NAME == "leaky_relu", "no such activation")
        d = tl.where(z > 0, 1.0, 0.01)
        a = z * d
    return a, d


@triton.jit
def dot(h, w, total, BACK: tl.constexpr, PRECISION: tl.constexpr, FLIP: tl.constexpr):
    """total + h·wᵀ, or h·w for `BACK`; `FLIP` makes the weights the left operand and turns `total` too."""
    if WIDEN:
        h, w = h.to(tl.float32), w.to(tl.float32)
    if FLIP:
        left, right = tl.trans(w) if BACK else w, tl.trans(h)
    else:
        left, right = h, w if BACK else tl.trans(w)
    return tl.dot(left, right, total, input_precision=PRECISION)


@triton.jit
def rounded(x):
    """To the nearest number of TF32: tensor cores cut bits off, which would make every product a little small."""
    return ((x.to(tl.int32, bitcast=True) + 4096) & -8192).to(tl.float32, bitcast=True)


@triton.jit
def cut(x):
    """The nearest bfloat16 number, and what is left: by whole numbers, as few units convert.

    What is not a number leaves something that is not one either, and the last part is converted, which keeps that.
    """
    bits = (x.to(tl.int32, bitcast=True) + 32768) & -65536
    return (bits >> 16).to(tl.int16).to(tl.bfloat16, bitcast=True), x - bits.to(tl.float32, bitcast=True)


@triton.jit
def product(h, w, BACK: tl.constexpr, PRECISION: tl.constexpr, FLIP: tl.constexpr):
    """h·wᵀ of float32 tiles, or h·w for `BACK`.

    `bf16x3` and `bf16x6` write a number as two or three bfloat16 ones, which multiply exactly, and add the products
    down to 2⁻¹⁶ or 2⁻²⁴ of the largest, the small ones first. Weights for `tf32` come rounded already: tensor cores
    read them where they lie, which they do not if anything is made of them here.
    """
    width: tl.constexpr = w.shape[1] if BACK else w.shape[0]
    total = tl.zeros((width, h.shape[0]) if FLIP else (h.shape[0], width), tl.float32)
    if PRECISION == "bf16x3" or PRECISION == "bf16x6":
        h1, h = cut(h)
        w1, w = cut(w)
        if PRECISION == "bf16x6":
            h2, h = cut(h)
            w2, w = cut(w)
            h3, w3 = h.to(tl.bfloat16), w.to(tl.bfloat16)
            total = dot(h3, w1, total, BACK, None, FLIP)
            total = dot(h1, w3, total, BACK, None, FLIP)
            total = dot(h2, w2, total, BACK, None, FLIP)
        else:
            h2, w2 = h.to(tl.bfloat16), w.to(tl.bfloat16)
        total = dot(h2, w1, total, BACK, None, FLIP)
        total = dot(h1, w2, total, BACK, None, FLIP)
        total = dot(h1, w1, total, BACK, None, FLIP)
    elif PRECISION == "tf32":
        total = dot(rounded(h), w, total, BACK, PRECISION, FLIP)
    else:
        total = dot(h, w, total, BACK, PRECISION, FLIP)
    return tl.trans(total) if FLIP else total


@triton.jit
def column(x, i: tl.constexpr):
    """Column `i` of a tile, `(rows,)`."""
    places = tl.arange(0, x.shape[1])[None, :]
    return tl.sum(tl.where(places == i, x, 0.0), 1)


@triton.jit
def matrix(pointer, rows, columns, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """A row-major matrix of `rows` × `columns` with zeros around it."""
    i, j = tl.arange(0, ROWS)[:, None], tl.arange(0, COLUMNS)[None, :]
    return tl.load(pointer + i * columns + j, mask=(i < rows) & (j < columns), other=0.0)


@triton.jit
def vector(pointer, count, COUNT: tl.constexpr):
    """A vector with zeros behind it."""
    i = tl.arange(0, COUNT)
    return tl.load(pointer + i, mask=i < count, other=0.0)


@triton.jit
def into_layer(v, w, late, D: tl.constexpr, WIDTH: tl.constexpr, PRECISION: tl.constexpr, FLIP: tl.constexpr):
    """v·wᵀ from a few columns `v` by a matrix at `w`, `(WIDTH, D)`."""
    P: tl.constexpr = padded(WIDTH)
    if v.shape[1] < 16:
        j = tl.arange(0, P)
        z = tl.zeros((v.shape[0], P), tl.float32)
        for i in tl.static_range(D):
            z += column(v, i)[:, None] * tl.load(w + late + j * D + i, mask=j < WIDTH, other=0.0)[None, :]
    else:
        z = product(v, matrix(w, WIDTH, D, P, v.shape[1]), False, PRECISION, FLIP)
    return z


@triton.jit
def out_of_layer(
    g, w, late, D: tl.constexpr, COLUMNS: tl.constexpr, WIDTH: tl.constexpr,
    PRECISION: tl.constexpr, FLIP: tl.constexpr,
):  # fmt: skip
    """g·w, the way back: the gradient in the columns."""
    P: tl.constexpr = padded(WIDTH)
    if COLUMNS < 16:
        j, places = tl.arange(0, P), tl.arange(0, COLUMNS)[None, :]
        back = tl.zeros((g.shape[0], COLUMNS), tl.float32)
        for i in tl.static_range(D):
            along = tl.sum(g * tl.load(w + late + j * D + i, mask=j < WIDTH, other=0.0)[None, :], 1)
            back += tl.where(places == i, along[:, None], 0.0)
    else:
        back = product(g, matrix(w, WIDTH, D, P, COLUMNS), True, PRECISION, FLIP)
    return back


@triton.jit
def above(h, weights, biases, head, late, WIDTHS: tl.constexpr, LAYER: tl.constexpr, HOW: tl.constexpr):
    """The energy that the layers from `LAYER` on make of `h`, `(rows,)`, and its gradient in `h`.

    Each layer keeps its activation's derivative until the gradient comes back through the same weights.
    """
    IN: tl.constexpr = WIDTHS[LAYER - 1]
    P_IN: tl.constexpr = padded(IN)
    TOP: tl.constexpr = len(WIDTHS)
    if LAYER == TOP:
        w = vector(head + late, IN, P_IN)[None, :]
        energy, back = tl.sum(h * w, 1), w + tl.zeros_like(h)
    else:
        OUT: tl.constexpr = WIDTHS[LAYER]
        NAME: tl.constexpr = HOW[0]
        PRECISION: tl.constexpr = HOW[1]
        FLIP: tl.constexpr = HOW[3]
        P_OUT: tl.constexpr = padded(OUT)
        w = matrix(weights[LAYER], OUT, IN, P_OUT, P_IN)
        z = product(h, w, False, PRECISION, FLIP) + vector(biases[LAYER] + late, OUT, P_OUT)[None, :]
        a, d = activated(z, NAME)
        energy, g = above(a, weights, biases, head, late, WIDTHS, LAYER + 1, HOW)
        back = product(g * d, w, True, PRECISION, FLIP)
    return energy, back


@triton.jit
def narrow(v, f, D: tl.constexpr, TRANSPOSED: tl.constexpr):
    """v·fᵀ, or v·f, with a small square matrix at `f`: always to float32 accuracy."""
    P: tl.constexpr = v.shape[1]
    if P < 16:
        j = tl.arange(0, P)
        z = tl.zeros_like(v)
        for i in tl.static_range(D):
            place = j * D + i if TRANSPOSED else i * D + j
            z += column(v, i)[:, None] * tl.load(f + place, mask=j < D, other=0.0)[None, :]
    else:
        w = matrix(f, D, D, P, P)
        z = tl.dot(v, tl.trans(w) if TRANSPOSED else w, input_precision="tf32x3")
    return z


@triton.jit
def reference(x, parts, D: tl.constexpr, K: tl.constexpr, S: tl.constexpr):
    """−log q of a mixture of Gaussians and its gradient: sums over components, kept from overflow as they grow."""
    log_peak, means, factors, precisions, share_at = parts
    P: tl.constexpr = x.shape[1]
    top = tl.full((x.shape[0],), float("-inf"), tl.float32)
    total = tl.zeros((x.shape[0],), tl.float32)
    pull = tl.zeros_like(x)
    for k in range(K):
        f = factors + k * D * D
        z = narrow(x - vector(means + k * D, D, P)[None, :], f, D, True)
        square = tl.sum(z * z, 1)
        inward = narrow(z, f, D, False)
        for s in tl.static_range(S):
            precise = tl.load(precisions + s)
            here = tl.load(log_peak + k * S + s) - 0.5 * precise * square
            new = tl.maximum(top, here)
            old_share, share = tl.exp(top - new), tl.exp(here - new)
            total = total * old_share + share
            pull = pull * old_share[:, None] + inward * (precise * share)[:, None]
            top = new
    part = tl.load(share_at)
    return -part * (top + tl.log(total)), pull * (part / total)[:, None]


@triton.jit
def value_and_grad(x, net, late, SIZES: tl.constexpr, HOW: tl.constexpr):
    """E and ∇E at a block of positions.

    `net` is the centre, weights, biases, head, offset and Gaussians of the energy; `SIZES` the numbers of an event,
    the widths of layers, and how many components and widths these have; `HOW` the activation, the precision of
    products inside and at the edge, and whether they are flipped.

    `late` is added to where vectors are read. It is 0, which in large blocks the compiler does not see: it reads
    them in every step, from the cache, and does not keep them in registers that it does not have.
    """
    centre, weights, biases, head, offset, parts = net
    D: tl.constexpr = SIZES[0]
    WIDTHS: tl.constexpr = SIZES[1]
    WIDTH: tl.constexpr = WIDTHS[0]
    K: tl.constexpr = SIZES[2]
    S: tl.constexpr = SIZES[3]
    NAME: tl.constexpr = HOW[0]
    EDGE: tl.constexpr = HOW[2]
    FLIP: tl.constexpr = HOW[3]
    v = x - vector(centre + late, D, x.shape[1])[None, :]
    z = into_layer(v, weights[0], late, D, WIDTH, EDGE, FLIP)
    z += vector(biases[0] + late, WIDTH, padded(WIDTH))[None, :]
    a, d = activated(z, NAME)
    energy, g = above(a, weights, biases, head, late, WIDTHS, 1, HOW)
    grad = out_of_layer(g * d, weights[0], late, D, x.shape[1], WIDTH, EDGE, FLIP)
    energy += tl.load(offset)
    if K > 0:
        rest, pull = reference(x, parts, D, K, S)
        energy, grad = energy + rest, grad + pull
    return energy, grad
