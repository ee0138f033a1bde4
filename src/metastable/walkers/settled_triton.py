"""Weights, resampling and metrics of Jarzynski's walkers as three Triton kernels.

Only `settled` imports this file, and only where Triton is installed. A population is sorted by counting: each
walker adds up the weights of those before it, all at once, which for thousands of them is sooner done than sorting.
Weights are added as whole numbers, whose sums do not depend on their order, so that every place is given once.
"""

from __future__ import annotations

import triton
import triton.language as tl

ONE = tl.constexpr(4503599627370496.0)
"""What a weight of 1 is as a whole number: 2⁵²."""


@triton.jit
def direction(cov, columns):
    """The direction of largest variance by power iteration; see `population._top_of_covariance`."""
    variance = tl.sum(tl.where(columns[:, None] == columns[None, :], cov, 0.0), 1)
    total = tl.maximum(tl.sum(variance, 0), 1e-30)
    cov, v = cov / total, tl.sqrt(variance / total)
    squared = tl.sum(cov[:, :, None] * cov[None, :, :], 1)
    fourth = tl.sum(squared[:, :, None] * squared[None, :, :], 1)
    for _ in tl.static_range(3):
        v = tl.sum(fourth * v[None, :], 1)
    return v / tl.maximum(tl.sqrt(tl.sum(v * v, 0)), 1e-30)


@triton.jit
def scores_of(x, at, row, p, D: tl.constexpr, COLUMNS: tl.constexpr):
    """Positions along the direction of largest weighted variance, `(P,)`."""
    columns = tl.arange(0, COLUMNS)
    cell = row[:, None] & (columns < D)[None, :]
    here = tl.load(x + at[:, None] * D + columns[None, :], mask=cell, other=0.0)
    centred = tl.where(cell, here - tl.sum(p[:, None] * here, 0)[None, :], 0.0)
    cov = tl.zeros((COLUMNS, COLUMNS), tl.float32)
    for d in tl.static_range(D):
        one = p * tl.sum(tl.where(columns[None, :] == d, centred, 0.0), 1)
        cov += tl.where((columns == d)[:, None], tl.sum(one[:, None] * centred, 0)[None, :], 0.0)
    return tl.sum(centred * direction(cov, columns)[None, :], 1)


@triton.jit(do_not_specialize=["n", "moving", "threshold"])
def weigh_kernel(
    old, new, log_z, resamplings, past_noise, energy, x, sums, scratch, told, totals, living, n, moving, threshold,
    D: tl.constexpr, COLUMNS: tl.constexpr, P: tl.constexpr, PROBE: tl.constexpr, READ: tl.constexpr,
):  # fmt: skip
    """One population: A += U_k − U_{k+1}, its ESS and log Z, and what resampling it needs where it is due.

    `old` is A and U_k, `energy` U_{k+1} there; `new` is where log Z, resamplings and past noise go, `scratch` where
    A, scores and whole weights do. `told` gets log Z, ESS, whether it is due, its noise, v, and means of `sums`.
    No first walker has descendants yet in `living`.
    """
    g, i = tl.program_id(0), tl.arange(0, P)
    row, at = i < n, tl.program_id(0) * n + i
    before = tl.load(old[0] + at, mask=row, other=float("-inf"))
    change = tl.load(old[1] + at, mask=row, other=0.0) - tl.load(energy + at, mask=row, other=0.0)
    change = change.to(tl.float64)
    A = before + change
    tl.store(scratch[0] + at, A, mask=row)
    if READ:
        tl.store(living + at, i * 0, mask=row)
    top = tl.max(A, 0)
    w = tl.exp(A - top)
    total = tl.sum(w, 0)
    ess = total * total / (n * tl.sum(w * w, 0))
    now = tl.load(log_z + g) + tl.log(total) + top - tl.log(n.to(tl.float64))
    due = ess < threshold
    count, past = tl.load(resamplings + g), tl.load(past_noise + g)
    noise = past + (1 / ess - 1) / n
    tl.store(new[0] + g, tl.where(due, now, tl.load(log_z + g)))
    tl.store(new[1] + g, count + due.to(tl.int64))
    tl.store(new[2] + g, tl.where(due, noise, past))
    tl.store(told + g * 7, now)
    tl.store(told + g * 7 + 1, ess)
    tl.store(told + g * 7 + 2, due.to(tl.float64))
    tl.store(told + g * 7 + 3, noise)
    if due:
        p = w / total
        whole = (p * ONE).to(tl.int64)
        tl.store(scratch[2] + at, whole, mask=row)
        tl.store(totals + g, tl.sum(whole, 0))
        tl.store(scratch[1] + at, scores_of(x, at, row, p.to(tl.float32), D, COLUMNS), mask=row)
    if PROBE:
        w = tl.exp(before - tl.max(before, 0))
        p = w / tl.sum(w, 0)
        off = change - tl.sum(p * change, 0)
        moves = i < moving
        accepted = tl.load(sums[0] + i, mask=moves, other=0.0).to(tl.float64)
        moved = tl.load(sums[1] + i, mask=moves, other=0.0).to(tl.float64)
        tl.store(told + g * 7 + 4, tl.sum(p * off * off, 0))
        tl.store(told + g * 7 + 5, tl.sum(accepted, 0) / moving)
        tl.store(told + g * 7 + 6, tl.sum(moved, 0) / moving)


@triton.jit(do_not_specialize=["n", "blocks"])
def draw_kernel(
    walkers, out, living, scratch, told, totals, uniform, n, blocks,
    D: tl.constexpr, COLUMNS: tl.constexpr, BLOCK: tl.constexpr, CHUNK: tl.constexpr, READ: tl.constexpr,
):  # fmt: skip
    """Some walkers of a population into the places that systematic resampling gives them, or their own.

    Walker i takes the places m with C_{i−1} < (m + u)/n ≤ C_i, where C_i is the weight of those up to it.
    """
    g = tl.program_id(0) // blocks
    i = (tl.program_id(0) % blocks) * BLOCK + tl.arange(0, BLOCK)
    row, at, columns = i < n, g * n + i, tl.arange(0, COLUMNS)
    due = tl.load(told + g * 7 + 2) > 0
    first, last = i, i + 1
    A = tl.load(scratch[0] + at, mask=row, other=0.0)
    if due:
        score = tl.load(scratch[1] + at, mask=row, other=0.0)
        own = tl.load(scratch[2] + at, mask=row, other=0)
        below = tl.zeros((BLOCK,), tl.int64)
        for begin in range(0, n, CHUNK):
            j = begin + tl.arange(0, CHUNK)
            inside = j < n
            other = tl.load(scratch[1] + g * n + j, mask=inside, other=float("inf"))[None, :]
            weight = tl.load(scratch[2] + g * n + j, mask=inside, other=0)[None, :]
            same = (other == score[:, None]) & (j[None, :] < i[:, None])
            below += tl.sum(tl.where((other < score[:, None]) | same, weight, 0), 1)
        total, u = tl.load(totals + g).to(tl.float64), 1 - tl.load(uniform + g)
        first = (tl.floor(n * (below.to(tl.float64) / total) - u) + 1).to(tl.int32)
        last = (tl.floor(n * ((below + own).to(tl.float64) / total) - u) + 1).to(tl.int32)
        A = tl.zeros_like(A)
    cell = row[:, None] & (columns < D)[None, :]
    x = tl.load(walkers[0] + at[:, None] * D + columns[None, :], mask=cell, other=0.0)
    energy = tl.load(walkers[1] + at, mask=row, other=0.0)
    ancestor = tl.load(walkers[2] + at, mask=row, other=0)
    copies = tl.max(tl.where(row, last - first, 0), 0)
    for copy in range(0, copies):
        to = first + copy
        fits = row & (to < last)
        to = g * n + to
        tl.store(out[0] + to[:, None] * D + columns[None, :], x, mask=cell & fits[:, None])
        tl.store(out[1] + to, A, mask=fits)
        tl.store(out[2] + to, energy, mask=fits)
        tl.store(out[3] + to, ancestor, mask=fits)
    if READ:
        tl.store(living + ancestor, ancestor * 0 + 1, mask=row & (last > first))


@triton.jit
def next_step(log_step, acceptance, wanted, gain, longest):
    """`adaptation.follow_acceptance`, with the inverse of erf by Winitzki's formula and two steps of Newton's."""
    y = 1 - tl.minimum(tl.maximum(acceptance, 1e-5), 1 - 1e-5)
    half = 4.330746750799873 + 0.5 * tl.log(1 - y * y)
    t = tl.sqrt(tl.sqrt(half * half - tl.log(1 - y * y) / 0.147) - half)
    for _ in tl.static_range(2):
        t -= (tl.erf(t) - y) * 0.886226925452758 * tl.exp(t * t)
    off = tl.log(wanted) - tl.log(2 * 1.4142135623730951 * t)
    off = tl.minimum(tl.maximum(off, -2.0), 2.0)
    return tl.where(acceptance == acceptance, tl.minimum(log_step + gain * off, longest), acceptance)


@triton.jit
def next_factor(log_factor, shift, pace):
    """`jarzynski.paced`."""
    off = tl.minimum(tl.maximum(tl.log(pace / tl.maximum(shift, 1e-30)), -20.0), 20.0)
    slow, fast = 0.05 * (1 - tl.exp(-off)), tl.minimum(0.5 * off, 1.0)
    made = tl.minimum(log_factor + tl.where((off < -2) | (off > 4), fast, slow), 0.0)
    return tl.where(shift == shift, made, shift)  # not a number stays none, which the guard sees


@triton.jit
def tell(
    steering, read, past_noise, resamplings, living, scale, out, n, groups, P: tl.constexpr, G: tl.constexpr
):
    """Metrics of the populations, in the order of `settled.ALWAYS` and `settled.HELD_OUT`."""
    g, i = tl.arange(0, G), tl.arange(0, P)
    some = g < groups
    alive = tl.load(living + g[:, None] * n + i[None, :], mask=some[:, None] & (i < n)[None, :], other=0)
    alive = tl.where(some, tl.sum(alive.to(tl.int32), 1), n).to(tl.float64)
    log_z = tl.load(read + g * 7, mask=some, other=float("-inf"))
    ess = tl.load(read + g * 7 + 1, mask=some, other=1.0)
    due = tl.load(read + g * 7 + 2, mask=some, other=1.0) > 0
    noise = tl.load(past_noise + g, mask=some, other=0.0) + (1 / tl.where(due, 1.0, ess) - 1) / n
    top = tl.max(log_z, 0)
    mean = top + tl.log(tl.sum(tl.exp(log_z - top), 0)) - tl.log(groups.to(tl.float64))
    middle = tl.sum(tl.where(some, log_z, 0.0), 0) / groups
    off = tl.where(some, log_z - middle, 0.0)
    own = tl.load(steering)
    tl.store(out, tl.sqrt(tl.load(steering + 6) * scale))
    tl.store(out + 1, tl.load(steering + 1))
    tl.store(out + 2, tl.load(steering + 2))
    tl.store(out + 3, tl.load(resamplings).to(tl.float64))
    tl.store(out + 4, tl.min(alive, 0) / n)
    tl.store(out + 5, mean)
    tl.store(out + 6, own)
    tl.store(out + 7, tl.sqrt(tl.sum(tl.where(some, noise, 0.0), 0) / groups))
    tl.store(out + 8, tl.load(steering + 5))
    tl.store(out + 9, tl.load(steering + 4))
    tl.store(out + 10, tl.sqrt(tl.sum(off * off, 0) / tl.maximum(groups - 1, 1) / groups))
    tl.store(out + 11, own - mean)
    tl.store(out + 12, tl.sum(tl.where(some, ess, 0.0), 0) / groups)


@triton.jit(do_not_specialize=["n", "groups"])
def tell_kernel(
    steering, read, past_noise, resamplings, living, following, log_step, log_factor, rules, out, n, groups,
    P: tl.constexpr, G: tl.constexpr, TUNED: tl.constexpr, PACED: tl.constexpr,
):  # fmt: skip
    """All metrics of an update, and step and factor of the next: each by a program of its own."""
    part = tl.program_id(0)
    if part == 0:
        tell(steering, read, past_noise, resamplings, living, tl.load(rules), out, n, groups, P, G)
    if TUNED:  # noqa: SIM102
        if part == 1:
            h, acceptance = tl.load(log_step), tl.load(steering + 5)
            tl.store(out + 13, tl.exp(h))
            h = next_step(h, acceptance, tl.load(rules + 1), tl.load(rules + 2), tl.load(rules + 3))
            tl.store(following, h)
    if PACED:  # noqa: SIM102
        if part == 2:
            factor = tl.load(log_factor)
            tl.store(out + 14, tl.exp(factor))
            tl.store(following + 1, next_factor(factor, tl.load(steering + 4), tl.load(rules + 4)))
