"""The fused chain as one Triton kernel: a program moves a block of chains through all their steps.

Only `fused` imports this file, and only where Triton is installed. Tiles have one row for each chain. Widths are
padded to powers of two with weights of zero, whose units give nothing to the energy and get nothing back.
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


@triton.jit
def normals(seed, chain, step, COLUMNS: tl.constexpr):
    """Standard normals by Box and Muller, one Philox counter for each chain, coordinate and step.

    cos(2πt) of t in [−½, ½) is 1 − 2 sin²(πt), with the sine's series to πt¹¹: off by 6·10⁻⁸ and without the branch
    for large angles that a library's cosine keeps registers for.
    """
    at = chain[:, None] * COLUMNS + tl.arange(0, COLUMNS)[None, :]
    first, second, _, _ = tl.philox(seed, at, at * 0 + step, at * 0, at * 0)
    radius = tl.sqrt(-2 * tl.log((first.to(tl.float32) + 0.5) * 2.3283064365386963e-10))
    y = second.to(tl.int32, bitcast=True).to(tl.float32) * 7.314590396335798e-10
    q = y * y
    sine = -2.505210838544172e-08
    sine = sine * q + 2.755731922398589e-06
    sine = sine * q - 1.984126984126984e-04
    sine = sine * q + 8.333333333333333e-03
    sine = sine * q - 1.666666666666667e-01
    sine = y + y * q * sine
    return radius * (1 - 2 * sine * sine)


@triton.jit
def uniforms(seed, chain, step):
    """Uniforms on [0, 1), one for each chain and step, from counters that no normal has."""
    zero = chain * 0
    return tl.uint_to_uniform_float(tl.philox(seed, chain, zero + step, zero + 1, zero)[0])


@triton.jit
def noise(
    seed, given, chain, at, step, moves, n, row, cell, D: tl.constexpr, COLUMNS: tl.constexpr,
    ADJUSTED: tl.constexpr, GIVEN: tl.constexpr,
):  # fmt: skip
    """Normals of a step, and uniforms where one is asked for: made here, or given."""
    if GIVEN:
        xi = tl.load(given[0] + step * n * D + at, mask=cell & moves, other=0.0)
        u = tl.load(given[1] + step * n + chain, mask=row & moves, other=0.0) if ADJUSTED else xi
    else:
        xi = tl.where(cell, normals(seed, chain, step, COLUMNS), 0.0)
        u = uniforms(seed, chain, step) if ADJUSTED else xi
    return xi, u


@triton.jit
def adjusted(x, energy, grad, xi, u, h, sigma, moves, net, late, SIZES: tl.constexpr, HOW: tl.constexpr):
    """A step of MALA: new position, energy and gradient, and the probability of the move.

    Where the chain does not move yet, it looks at where it stands.
    """
    y = tl.where(moves, x - h[:, None] * grad + sigma[:, None] * xi, x)
    new_energy, new_grad = value_and_grad(y, net, late, SIZES, HOW)
    half, quarter = 0.5 * (y - x), 0.25 * h[:, None]
    there = tl.sum((half + quarter * grad) * grad, 1)
    back = tl.sum((quarter * new_grad - half) * new_grad, 1)
    ratio = (energy - new_energy) + (there - back)
    finite = tl.abs(ratio) < float("inf")  # a NaN is not below anything
    probability = tl.where(finite, tl.exp(tl.minimum(ratio, 0.0)), 0.0)
    taken = tl.where(moves, u < probability, True)
    wide = taken[:, None]
    y, grad = tl.where(wide, y, x), tl.where(wide, new_grad, grad)
    return y, tl.where(taken, new_energy, energy), grad, tl.where(moves, probability, 0.0)


@triton.jit
def followed(
    x, energy, grad, q, p, g, start, xi, u, h, at, net, late, SIZES: tl.constexpr, HOW: tl.constexpr,
    LEAP: tl.constexpr,
):  # fmt: skip
    """A leapfrog step of HMC with unit mass, the `at`-th of `LEAP`: after the last the chain moves, or stays.

    `q`, `p` and `g` are the trajectory's position, momentum and gradient, `start` twice the kinetic energy that it
    began with. A chain that does not move yet (`at` < 0) looks at where it stands.
    """
    begins, moves, last = at == 0, at >= 0, at == LEAP - 1
    q, p, g = tl.where(begins, x, q), tl.where(begins, xi, p), tl.where(begins, grad, g)
    start = tl.where(begins, tl.sum(xi * xi, 1), start)
    half = 0.5 * h[:, None]
    p = p - half * g
    q = tl.where(moves, q + h[:, None] * p, x)
    new_energy, g = value_and_grad(q, net, late, SIZES, HOW)
    p = p - half * g
    ratio = (energy - new_energy) + 0.5 * (start - tl.sum(p * p, 1))
    finite = tl.abs(ratio) < float("inf")  # a NaN is not below anything
    probability = tl.where(finite, tl.exp(tl.minimum(ratio, 0.0)), 0.0)
    taken = tl.where(moves, last & (u < probability), True)
    wide = taken[:, None]
    y, grad = tl.where(wide, q, x), tl.where(wide, g, grad)
    energy, probability = tl.where(taken, new_energy, energy), tl.where(last & moves, probability, 0.0)
    return y, energy, grad, probability, q, p, g, start


@triton.jit(do_not_specialize=["n", "steps", "h_stride"])
def chain_kernel(
    x_in, out, sums, rows, n, steps, seed_at, step_sizes, h_stride, sigma_given, clip, given, net,
    SIZES: tl.constexpr, HOW: tl.constexpr, BLOCK: tl.constexpr, COLUMNS: tl.constexpr,
    ADJUSTED: tl.constexpr, SIGMA: tl.constexpr, CLIP: tl.constexpr, GIVEN: tl.constexpr,
    ENERGIES: tl.constexpr, SLOPES: tl.constexpr, SOME: tl.constexpr, LEAP: tl.constexpr,
):  # fmt: skip
    """All steps of a block of chains: HMC with `LEAP` leapfrog steps, MALA where it is 0 and `ADJUSTED`, else ULA.

    For `SOME`, chain i begins in row `rows[i]` and ends there; otherwise in row i, where it costs no registers.
    """
    D: tl.constexpr = SIZES[0]
    chain = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    at = chain[:, None] * D + tl.arange(0, COLUMNS)[None, :]
    row, cell = chain < n, (chain < n)[:, None] & (tl.arange(0, COLUMNS) < D)[None, :]
    place = tl.load(rows + chain, mask=row, other=0).to(tl.int32) if SOME else chain
    there = place[:, None] * D + tl.arange(0, COLUMNS)[None, :] if SOME else at
    x = tl.load(x_in + there, mask=cell, other=0.0)
    h = tl.load(step_sizes + chain * h_stride, mask=row, other=0.0)
    sigma = tl.zeros_like(h) + sigma_given if SIGMA else tl.sqrt(2 * h)
    seed = tl.load(seed_at)
    accepted, moved, slope, energy = tl.zeros_like(h), tl.zeros_like(h), tl.zeros_like(h), tl.zeros_like(h)
    grad, first = tl.zeros_like(x), tl.zeros_like(h)
    EACH: tl.constexpr = LEAP if LEAP > 0 else 1  # gradients of a step
    q, p, g, start = x, grad, grad, first
    # an adjusted chain begins with a look at where it stands; an unadjusted one ends with it, if energies are asked
    for i in range(-1 if ADJUSTED else 0, steps * EACH + 1 if ENERGIES and not ADJUSTED else steps * EACH):
        step = tl.where(i < 0, -1, i // EACH) if LEAP > 0 else i
        moves = (step >= 0) & (step < steps)
        late = tl.where(step < -1, 16, 0) if BLOCK >= 64 else 0
        xi, u = noise(seed, given, chain, at, step, moves, n, row, cell, D, COLUMNS, ADJUSTED, GIVEN)
        if LEAP > 0:
            part = tl.where(i < 0, -1, i % EACH)
            if SLOPES:
                slope += tl.where(part == 0, tl.sqrt(tl.sum(grad * grad, 1)), 0.0)
            y, energy, grad, probability, q, p, g, start = followed(
                x, energy, grad, q, p, g, start, xi, u, h, part, net, late, SIZES, HOW, LEAP
            )
            accepted += probability
            first = tl.where(step < 0, energy, first)
        elif ADJUSTED:
            if SLOPES:
                slope += tl.sqrt(tl.sum(grad * grad, 1))
            y, energy, grad, probability = adjusted(
                x, energy, grad, xi, u, h, sigma, moves, net, late, SIZES, HOW
            )
            accepted += probability
            # kept, not stored: beside a store in the loop the weights would be read anew in every step
            first = tl.where(step < 0, energy, first)
        else:
            energy, grad = value_and_grad(x, net, late, SIZES, HOW)
            drift = h[:, None] * grad
            if CLIP:
                drift = tl.minimum(tl.maximum(drift, -clip), clip)
            y = tl.where(moves, x - drift + sigma[:, None] * xi, x)
            if SLOPES:
                slope += tl.where(moves, tl.sqrt(tl.sum(grad * grad, 1)), 0.0)
        moved, x = moved + tl.sum((y - x) * (y - x), 1), y
    count = tl.maximum(steps, 1)
    tl.store(out[0] + there, x, mask=cell)
    tl.store(sums + n + chain, moved / count, mask=row)
    if ADJUSTED:
        tl.store(sums + chain, accepted / count, mask=row)
        tl.store(out[3] + chain, first, mask=row)
    tl.store(sums + 2 * n + chain, slope / count, mask=row)
    if ENERGIES:
        tl.store(out[1] + place, energy, mask=row)
        tl.store(out[2] + there, grad, mask=cell)
