"""`TokenBody` with one output and its gradient in the events, as a few Triton kernels for each layer.

Only `fused_body` imports this file, and only where Triton is installed. Program (i, j) takes the j-th share of a
layer's work for event i: a head, some hidden units, or some columns. Shares are summed by those who read them next,
so that no program waits for another. Tiles have a row for each token: those of context and time, then the event's,
then rows of nothing. An event has its own tiles in `scratch`, which `tiles_triton` numbers.

Where events are FEW, kernels first read their weights and make what the kernel before them has no part in; EARLY
while that one is at work, and then wait.
"""

# pyright: reportPossiblyUnboundVariable=false
# FEW is known when a kernel is compiled: what one of its branches makes, the other never asks for.

from __future__ import annotations

import triton
import triton.language as tl

from .prior_triton import joined
from .tiles_triton import (
    GLOBALS,
    KEPT,
    OF_LAYER,
    ahead,
    back,
    both_turned,
    grads_at,
    heads_at,
    hidden_at,
    in_turn,
    normed,
    normed_back,
    own,
    part,
    pointer,
    read,
    row_of,
    silu,
    some_of,
    summed,
    tile,
    turned,
    whitened,
)


@triton.jit
def shares(q, k, L: tl.constexpr, R: tl.constexpr, HEAD: tl.constexpr, HOW: tl.constexpr):
    """What each token takes from each, `(R, R)`: nothing from rows of nothing."""
    s = tl.dot(q, tl.trans(k), input_precision=HOW) / tl.sqrt(HEAD * 1.0)
    s = tl.where((tl.arange(0, R) < L)[None, :], s, float("-inf"))
    p = tl.exp(s - tl.max(s, 1)[:, None])
    return p / tl.sum(p, 1)[:, None]


@triton.jit
def after_dense(
    base, layer, bias, PARTS: tl.constexpr, L: tl.constexpr, LAYERS: tl.constexpr, R: tl.constexpr,
    W: tl.constexpr,
):  # fmt: skip
    """h behind a layer: what it had between its parts, and what its hidden units add."""
    h = read(base, 1 + KEPT * layer + 4, L, R, W) + bias
    return h + summed(base, hidden_at(LAYERS), PARTS, L, R, W)


# ---- tokens of the event, and the way back to its numbers


@triton.jit
def lifted(x, table, S: tl.constexpr, L: tl.constexpr, STEP: tl.constexpr, R: tl.constexpr, W: tl.constexpr):
    """The first dense layer of an event's tokens, activated, and its slopes."""
    row = tl.arange(0, R)
    at = x + tl.program_id(0).to(tl.int64) * ((L - S) * STEP) + (row - S) * STEP
    e, mine = tl.zeros([R, W], tl.float32) + row_of(pointer(table, 1), W), (row >= S) & (row < L)
    for j in tl.static_range(STEP):
        w = tl.load(pointer(table, 0) + tl.arange(0, W) * STEP + j)
        e += tl.load(at + j, mask=mine, other=0.0)[:, None] * w[None, :]
    return silu(e)


@triton.jit
def embed_kernel(
    x, beside, each, table, scratch, S: tl.constexpr, L: tl.constexpr, STEP: tl.constexpr,
    LAYERS: tl.constexpr, R: tl.constexpr, W: tl.constexpr, C: tl.constexpr, HOW: tl.constexpr,
):  # fmt: skip
    """All tokens, C columns of them."""
    base, c, row = own(scratch, LAYERS, R, W, C), tl.program_id(1) * C, tl.arange(0, R)[:, None]
    col = c + tl.arange(0, C)[None, :]
    a, _ = lifted(x, table, S, L, STEP, R, W)
    h = ahead(a, pointer(table, 2), c, 0, W, C, W, HOW) + row_of(pointer(table, 3) + c, C)
    h += tl.load(pointer(table, 4) + (row - S) * W + col, mask=(row >= S) & (row < L), other=0.0)
    tokens = beside + (tl.program_id(0) // each).to(tl.int64) * (S * W)
    other = tl.load(tokens + row * W + col, mask=row < S, other=0.0)
    tl.store(part(base, 0, c, W, R, W, C), tl.where((row >= S) & (row < L), h, other))


@triton.jit
def embed_back_kernel(
    x, table, grad, scratch, PRIOR: tl.constexpr, EPS: tl.constexpr, HEADS: tl.constexpr,
    FIRST: tl.constexpr, S: tl.constexpr, L: tl.constexpr, STEP: tl.constexpr, WIDE: tl.constexpr,
    LAYERS: tl.constexpr, R: tl.constexpr, W: tl.constexpr, C: tl.constexpr, HOW: tl.constexpr, D: tl.constexpr,
):  # fmt: skip
    """The gradient in the event, from those in its tokens, D columns at a time."""
    base, row, col = own(scratch, LAYERS, R, W, C), tl.arange(0, R), tl.arange(0, D)
    white, scale = whitened(read(base, 1, L, R, W), EPS, W)
    d_white = summed(base, heads_at(LAYERS), HEADS, L, R, W)
    g = read(base, grads_at(LAYERS) + 2, L, R, W)
    g += normed_back(d_white, white, scale, row_of(pointer(table, GLOBALS), W), W)
    if PRIOR:
        g += joined(base, FIRST, L, LAYERS, R, W, C)
    i, mine = tl.program_id(0).to(tl.int64), (row >= S) & (row < L)
    at = i * ((L - S) * STEP) + (row - S) * STEP
    numbers, first, k = x + at, pointer(table, 0), tl.arange(0, WIDE)
    made = tl.zeros([R, WIDE], tl.float32)
    for c in range(0, W, D):
        e = tl.zeros([R, D], tl.float32) + row_of(pointer(table, 1) + c, D)
        for j in tl.static_range(STEP):
            w = tl.load(first + (c + col) * STEP + j)
            e += tl.load(numbers + j, mask=mine, other=0.0)[:, None] * w[None, :]
        _, slope = silu(e)
        d = back(g, pointer(table, 2), 0, c, W, W, D, HOW) * slope
        w = tl.load(first + (c + col)[:, None] * STEP + k[None, :], mask=(k < STEP)[None, :], other=0.0)
        made += tl.sum(d[:, :, None] * w[None, :, :], 1)
    there = mine[:, None] & (k < STEP)[None, :]
    tl.store(grad + at[:, None] + k[None, :], made, mask=there)


# ---- a layer


@triton.jit(do_not_specialize=["layer"])
def attend_kernel(
    table, scratch, layer, EPS: tl.constexpr, PARTS: tl.constexpr, HEAD: tl.constexpr, L: tl.constexpr,
    LAYERS: tl.constexpr, R: tl.constexpr, W: tl.constexpr, C: tl.constexpr, HOW: tl.constexpr, FEW: tl.constexpr,
    EARLY: tl.constexpr,
):  # fmt: skip
    """What one head adds."""
    base, head = own(scratch, LAYERS, R, W, C), tl.program_id(1)
    layers, kept, c = table + GLOBALS, 1 + KEPT * layer, head * HEAD
    mine = layers + layer * OF_LAYER
    offer, offer_b = pointer(mine, 4), pointer(mine, 5)
    before = row_of(pointer(layers + tl.maximum(layer - 1, 0) * OF_LAYER, 13), W)
    norm_w, norm_b = row_of(pointer(mine, 0), W), row_of(pointer(mine, 1), W)
    b_q, b_k = row_of(pointer(mine, 3) + c, HEAD), row_of(offer_b + c, HEAD)
    b_v = row_of(offer_b + W + c, HEAD)
    if FEW:
        w_q, w_o = turned(pointer(mine, 2), c, 0, W, HEAD, W), turned(pointer(mine, 6), 0, c, W, W, HEAD)
        w_kv = both_turned(offer, c, W, HEAD, W)
        in_turn(EARLY)
    if layer == 0:
        h = read(base, 0, L, R, W)
    else:
        h = after_dense(base, layer - 1, before, PARTS, L, LAYERS, R, W)
    if head == 0:
        tl.store(tile(base, kept, R, W), h)
    white = normed(h, norm_w, norm_b, EPS, W)
    if FEW:
        q, kv = tl.dot(white, w_q, input_precision=HOW), tl.dot(white, w_kv, input_precision=HOW)
        k, v = tl.split(tl.permute(tl.reshape(kv, [R, 2, HEAD]), (0, 2, 1)))
    else:
        q = ahead(white, pointer(mine, 2), c, 0, W, HEAD, W, HOW)
        k = ahead(white, offer, c, 0, W, HEAD, W, HOW)
        v = ahead(white, offer, W + c, 0, W, HEAD, W, HOW)
    q, k, v = q + b_q, k + b_k, v + b_v
    tl.store(part(base, kept + 1, c, W, R, W, HEAD), q)
    tl.store(part(base, kept + 2, c, W, R, W, HEAD), k)
    tl.store(part(base, kept + 3, c, W, R, W, HEAD), v)
    o = tl.dot(shares(q, k, L, R, HEAD, HOW), v, input_precision=HOW)
    if FEW:
        added = tl.dot(o, w_o, input_precision=HOW)
    else:
        added = ahead(o, pointer(mine, 6), 0, c, W, W, HEAD, HOW)
    tl.store(tile(base, heads_at(LAYERS) + head, R, W), added)


@triton.jit(do_not_specialize=["layer"])
def dense_kernel(
    table, scratch, layer, EPS: tl.constexpr, PARTS: tl.constexpr, HEADS: tl.constexpr, L: tl.constexpr,
    LAYERS: tl.constexpr, R: tl.constexpr, W: tl.constexpr, C: tl.constexpr, HOW: tl.constexpr, H: tl.constexpr,
    FEW: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """What some of the hidden units add."""
    base, j, kept = own(scratch, LAYERS, R, W, C), tl.program_id(1), 1 + KEPT * layer
    mine, first = table + GLOBALS + layer * OF_LAYER, j * (4 * W // PARTS)
    wide, wide_b, narrow = pointer(mine, 10), pointer(mine, 11), pointer(mine, 12)
    bias, norm_w, norm_b = (
        row_of(pointer(mine, 7), W),
        row_of(pointer(mine, 8), W),
        row_of(pointer(mine, 9), W),
    )
    if FEW:
        b_1 = row_of(wide_b + first, H)
        w_1, w_2 = turned(wide, first, 0, W, H, W), turned(narrow, 0, first, 4 * W, W, H)
        in_turn(EARLY)
    h = read(base, kept, L, R, W) + bias
    h += summed(base, heads_at(LAYERS), HEADS, L, R, W)
    if j == 0:
        tl.store(tile(base, kept + 4, R, W), h)
    white = normed(h, norm_w, norm_b, EPS, W)
    if FEW:
        z = tl.dot(white, w_1, input_precision=HOW) + b_1
        tl.store(part(base, kept + 5, first, 4 * W, R, W, H), z)
        a, _ = silu(z)
        total = tl.dot(a, w_2, input_precision=HOW)
    else:
        total = tl.zeros([R, W], tl.float32)
        for s in range(0, 4 * W // PARTS, C):
            c = first + s
            z = ahead(white, wide, c, 0, W, C, W, HOW) + row_of(wide_b + c, C)
            tl.store(part(base, kept + 5, c, 4 * W, R, W, C), z)
            a, _ = silu(z)
            total += ahead(a, narrow, 0, c, 4 * W, W, C, HOW)
    tl.store(tile(base, hidden_at(LAYERS) + j, R, W), total)


@triton.jit(do_not_specialize=["layer"])
def dense_back_kernel(
    table, scratch, layer, EPS: tl.constexpr, PARTS: tl.constexpr, HEADS: tl.constexpr, FIRST: tl.constexpr,
    L: tl.constexpr, LAYERS: tl.constexpr, R: tl.constexpr, W: tl.constexpr, C: tl.constexpr, HOW: tl.constexpr,
    H: tl.constexpr, FEW: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """The way back through some of the hidden units."""
    base, j, kept = own(scratch, LAYERS, R, W, C), tl.program_id(1), 1 + KEPT * layer
    mine, grads, first = table + GLOBALS + layer * OF_LAYER, grads_at(LAYERS), j * (4 * W // PARTS)
    wide, narrow, last = pointer(mine, 10), pointer(mine, 12), layer == LAYERS - 1
    h = read(base, tl.where(last, grads + 3, kept + KEPT), L, R, W, tl.where(last, FIRST, 0))
    white, scale = whitened(h, EPS, W)
    norm_w = row_of(pointer(table, tl.where(last, 5, GLOBALS + (layer + 1) * OF_LAYER)), W)
    if FEW:
        w_1, w_2 = some_of(wide, first, 0, W, H, W), some_of(narrow, 0, first, 4 * W, W, H)
        _, slope = silu(tl.load(part(base, kept + 5, first, 4 * W, R, W, H)))
        in_turn(EARLY)
    if last:
        g = normed_back(read(base, grads, L, R, W), white, scale, norm_w, W)
    else:
        d_white = summed(base, heads_at(LAYERS), HEADS, L, R, W)
        g = read(base, grads + 2, L, R, W) + normed_back(d_white, white, scale, norm_w, W)
    if j == 0:
        tl.store(tile(base, grads + 1, R, W), g)
    if FEW:
        total = tl.dot(tl.dot(g, w_2, input_precision=HOW) * slope, w_1, input_precision=HOW)
    else:
        total = tl.zeros([R, W], tl.float32)
        for s in range(0, 4 * W // PARTS, C):
            c = first + s
            _, slope = silu(tl.load(part(base, kept + 5, c, 4 * W, R, W, C)))
            total += back(back(g, narrow, 0, c, 4 * W, W, C, HOW) * slope, wide, c, 0, W, C, W, HOW)
    tl.store(tile(base, hidden_at(LAYERS) + j, R, W), total)


@triton.jit(do_not_specialize=["layer"])
def attend_back_kernel(
    table, scratch, layer, EPS: tl.constexpr, PARTS: tl.constexpr, HEAD: tl.constexpr, L: tl.constexpr,
    LAYERS: tl.constexpr, R: tl.constexpr, W: tl.constexpr, C: tl.constexpr, HOW: tl.constexpr, FEW: tl.constexpr,
    EARLY: tl.constexpr,
):  # fmt: skip
    """The way back through one head."""
    base, head, kept = own(scratch, LAYERS, R, W, C), tl.program_id(1), 1 + KEPT * layer
    mine, c, grads = table + GLOBALS + layer * OF_LAYER, head * HEAD, grads_at(LAYERS)
    offer, norm_w = pointer(mine, 4), row_of(pointer(mine, 8), W)
    white, scale = whitened(read(base, kept + 4, L, R, W), EPS, W)
    q, k = tl.load(part(base, kept + 1, c, W, R, W, HEAD)), tl.load(part(base, kept + 2, c, W, R, W, HEAD))
    v, p = tl.load(part(base, kept + 3, c, W, R, W, HEAD)), shares(q, k, L, R, HEAD, HOW)
    if FEW:
        w_o, w_q = some_of(pointer(mine, 6), 0, c, W, W, HEAD), some_of(pointer(mine, 2), c, 0, W, HEAD, W)
        w_k, w_v = some_of(offer, c, 0, W, HEAD, W), some_of(offer, W + c, 0, W, HEAD, W)
        in_turn(EARLY)
    d_white = summed(base, hidden_at(LAYERS), PARTS, L, R, W)
    g = read(base, grads + 1, L, R, W) + normed_back(d_white, white, scale, norm_w, W)
    if head == 0:
        tl.store(tile(base, grads + 2, R, W), g)
    if FEW:
        d_o = tl.dot(g, w_o, input_precision=HOW)
    else:
        d_o = back(g, pointer(mine, 6), 0, c, W, W, HEAD, HOW)
    d_v = tl.dot(tl.trans(p), d_o, input_precision=HOW)
    d_p = tl.dot(d_o, tl.trans(v), input_precision=HOW)
    d_s = p * (d_p - tl.sum(d_p * p, 1)[:, None]) / tl.sqrt(HEAD * 1.0)
    d_q, d_k = tl.dot(d_s, k, input_precision=HOW), tl.dot(tl.trans(d_s), q, input_precision=HOW)
    if FEW:
        total = tl.dot(d_q, w_q, input_precision=HOW)
        total += tl.dot(d_k, w_k, input_precision=HOW)
        total += tl.dot(d_v, w_v, input_precision=HOW)
    else:
        total = back(d_q, pointer(mine, 2), c, 0, W, HEAD, W, HOW)
        total += back(d_k, offer, c, 0, W, HEAD, W, HOW)
        total += back(d_v, offer, W + c, 0, W, HEAD, W, HOW)
    tl.store(tile(base, heads_at(LAYERS) + head, R, W), total)


# ---- the end: dense layers over all tokens of the path at once


@triton.jit
def end_kernel(
    table, scratch, EPS: tl.constexpr, PARTS: tl.constexpr, FIRST: tl.constexpr, L: tl.constexpr,
    LAYERS: tl.constexpr, R: tl.constexpr, W: tl.constexpr, C: tl.constexpr, FEW: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """What one token of the path gives to the dense layer."""
    base, p, grads = own(scratch, LAYERS, R, W, C), tl.program_id(1), grads_at(LAYERS)
    col, norm_w, norm_b = tl.arange(0, W), row_of(pointer(table, 5), W), row_of(pointer(table, 6), W)
    at, bias = base + (FIRST + p) * W + col, pointer(table + GLOBALS + (LAYERS - 1) * OF_LAYER, 13)
    bias = tl.load(bias + col)
    if FEW:
        w = some_of(pointer(table, 7), 0, p * W, (L - FIRST) * W, W, W)
        in_turn(EARLY)
    h = tl.load(at + (1 + KEPT * (LAYERS - 1) + 4) * (R * W)) + bias
    for j in tl.static_range(PARTS):  # one row of what `after_dense` says
        h += tl.load(at + (hidden_at(LAYERS) + j) * (R * W))
    tl.store(at + (grads + 3) * (R * W), h)
    y = normed(h[None, :], norm_w, norm_b, EPS, W)
    if not FEW:
        w = some_of(pointer(table, 7), 0, p * W, (L - FIRST) * W, W, W)
    # in the place of head 0's share, which the layers do not need any more
    tl.store(base + heads_at(LAYERS) * (R * W) + p * W + col, tl.sum(w * y, 1))


@triton.jit
def end_back_kernel(
    table, energy, scratch, FIRST: tl.constexpr, L: tl.constexpr, LAYERS: tl.constexpr, R: tl.constexpr,
    W: tl.constexpr, C: tl.constexpr, FEW: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """The value of the end, and its gradient in one token, or zero for rows that are not on the path."""
    base, p, col = own(scratch, LAYERS, R, W, C), tl.program_id(1), tl.arange(0, W)
    row, grads = tl.arange(0, R)[:, None], grads_at(LAYERS)
    some, on = (row < L - FIRST) & (col >= 0)[None, :], p < L - FIRST
    at = pointer(table, 7) + p * W + col[:, None] * ((L - FIRST) * W) + col[None, :]
    its = on & (col >= 0)[:, None] & (col >= 0)[None, :]
    bias, head, level = tl.load(pointer(table, 8) + col), tl.load(pointer(table, 9) + col), pointer(table, 10)
    if FEW:
        w = tl.load(at, mask=its, other=0.0)
        in_turn(EARLY)
    all_of = tl.load(tile(base, heads_at(LAYERS), R, W), mask=some, other=0.0)
    a, slope = silu(tl.sum(all_of, 0) + bias)
    if not FEW:
        w = tl.load(at, mask=its, other=0.0)
    to = tl.where(on, FIRST + p, tl.where(p < L, p - (L - FIRST), p))
    tl.store(base + grads * (R * W) + to * W + col, tl.sum(w * (head * slope)[:, None], 0))
    if p == 0:
        tl.store(energy + tl.program_id(0), tl.sum(a * head, 0) + tl.load(level))
