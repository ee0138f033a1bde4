"""The fused chain as one Triton kernel: a program moves a block of chains through all their steps.

Only `fused` imports this file, and only where Triton is installed. Tiles have one row for each chain.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .fused_network import value_and_grad


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
def drifted(
    x, xi, h, sigma, clip, moves, net, late, SIZES: tl.constexpr, HOW: tl.constexpr, CLIP: tl.constexpr
):  # fmt: skip
    """A step of ULA: new position, and energy and gradient of the old one."""
    energy, grad = value_and_grad(x, net, late, SIZES, HOW)
    drift = h[:, None] * grad
    if CLIP:
        drift = tl.minimum(tl.maximum(drift, -clip), clip)
    return tl.where(moves, x - drift + sigma[:, None] * xi, x), energy, grad


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


@triton.jit
def kept(
    out, sums, state, means, chain, place, there, row, cell, n, steps, ADJUSTED: tl.constexpr,
    ENERGIES: tl.constexpr,
):  # fmt: skip
    """Writes where chains are and what their steps add up to."""
    x, energy, grad, first = state
    accepted, moved, slope = means
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
        if ADJUSTED:
            part = tl.where(i < 0, -1, i % EACH)
            if SLOPES:
                slope += tl.where(part == 0, tl.sqrt(tl.sum(grad * grad, 1)), 0.0)
            if LEAP > 0:
                y, energy, grad, probability, q, p, g, start = followed(
                    x, energy, grad, q, p, g, start, xi, u, h, part, net, late, SIZES, HOW, LEAP
                )  # fmt: skip
            else:
                y, energy, grad, probability = adjusted(
                    x, energy, grad, xi, u, h, sigma, moves, net, late, SIZES, HOW
                )  # fmt: skip
            accepted += probability
            # kept, not stored: beside a store in the loop the weights would be read anew in every step
            first = tl.where(step < 0, energy, first)
        else:
            y, energy, grad = drifted(x, xi, h, sigma, clip, moves, net, late, SIZES, HOW, CLIP)
            if SLOPES:
                slope += tl.where(moves, tl.sqrt(tl.sum(grad * grad, 1)), 0.0)
        moved, x = moved + tl.sum((y - x) * (y - x), 1), y
    state, means = (x, energy, grad, first), (accepted, moved, slope)
    kept(out, sums, state, means, chain, place, there, row, cell, n, steps, ADJUSTED, ENERGIES)
