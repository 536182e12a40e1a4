"""Triton kernels for attention within the documents of a row: forward, gradients of queries, of keys and values.

A row of a tile is a token for one head, and the G query heads of a program share one key head. Documents are located
by their borders; a program without a block of any document returns immediately.
"""

from __future__ import annotations

from functools import cache
from typing import Any

# Set when the kernels are built: Triton resolves the names in a kernel from the globals of its module.
tl: Any = None
place_of: Any = None
is_seen: Any = None
is_kept: Any = None


@cache
def kernels() -> dict[str, Any]:
    """The kernels, which are compiled on first use."""
    global tl, place_of, is_seen, is_kept
    import triton
    import triton.language

    tl = triton.language
    place_of, is_seen, is_kept = (triton.jit(function) for function in (_place_of, _is_seen, _is_kept))
    # These values differ between rows.
    build = triton.jit(do_not_specialize=["documents", "tokens"])
    return {"forward": build(_forward_kernel), "queries": build(_queries_kernel), "keys": build(_keys_kernel)}


def _place_of(item, borders, documents, BLOCK: tl.constexpr, ROOM: tl.constexpr):
    """Where the document of a block begins, how long it is (0: no such block), and which of its blocks it is."""
    index = tl.arange(0, ROOM)
    begins = tl.load(borders + index, mask=index < documents, other=0)
    ends = tl.load(borders + index + 1, mask=index < documents, other=0)
    blocks = (ends - begins + BLOCK - 1) // BLOCK
    until = tl.cumsum(blocks, 0)
    mine = (item < until) & (item >= until - blocks)
    begin = tl.sum(tl.where(mine, begins, 0), 0)
    length = tl.sum(tl.where(mine, ends - begins, 0), 0)
    return begin.to(tl.int64), length, tl.sum(tl.where(mine, item - (until - blocks), 0), 0)


def _is_seen(q, k, length, CAUSAL: tl.constexpr, WINDOW: tl.constexpr):
    """Which keys a query attends to."""
    seen = (k < length) & (q < length)
    if CAUSAL:
        seen = seen & (k <= q)
    if WINDOW > 0:
        seen = seen & (q - k < WINDOW) & (k - q < WINDOW)
    return seen


def _is_kept(seed, row, k, drop):
    """Which weights dropout leaves: a hash of the seed, the row and the key against the share to drop."""
    x = (row * 0x9E3779B1 + seed).to(tl.uint32)
    x = (x ^ (x >> 16)) * 0x7FEB352D
    x = (x ^ (x >> 15)) + k.to(tl.uint32) * 0x85EBCA6B
    x = (x ^ (x >> 16)) * 0x7FEB352D
    x = (x ^ (x >> 15)) * 0x846CA68B
    x = x ^ (x >> 16)
    return (x >> 8).to(tl.float32) * (1.0 / 16777216.0) >= drop


def _forward_kernel(
    Q, K, V, OUT, LSE, borders, seed, documents, tokens, scale, drop,
    q_step, q_head, k_step, k_head, v_step, v_head, o_step, o_head,
    G: tl.constexpr, SHARING: tl.constexpr, D: tl.constexpr, T: tl.constexpr, N: tl.constexpr, CAUSAL: tl.constexpr,
    WINDOW: tl.constexpr, DROP: tl.constexpr, ROOM: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """A tile of queries against the keys it sees; LSE is the logarithm, base 2, of the sum of the exponentials."""
    begin, length, block = place_of(tl.program_id(0), borders, documents, T, ROOM)
    if length == 0:
        return
    first = tl.program_id(1) * G
    row, d, n = tl.arange(0, T * G), tl.arange(0, D), tl.arange(0, N)
    if WIDE:
        n = n.to(tl.int64)
    at, head = block * T + row // G, first + row % G
    inside, token = at < length, begin + at
    place = head.to(tl.int64) * tokens + token
    q = tl.load(Q + (token * q_step + head * q_head)[:, None] + d[None, :], mask=inside[:, None], other=0.0)
    K += begin * k_step + (first // SHARING) * k_head
    V += begin * v_step + (first // SHARING) * v_head
    low, high, whole = 0, length, length // N * N  # blocks of keys before `whole` need no mask
    if CAUSAL:
        high = tl.minimum(length, (block + 1) * T)
        whole = tl.minimum(whole, (block * T + 1) // N * N)
    if WINDOW > 0:
        low = tl.maximum(block * T - WINDOW + 1, 0) // N * N
        high = tl.minimum(high, (block + 1) * T + WINDOW)
        whole = low
    factor = scale * 1.4426950408889634
    top = tl.full([T * G], float("-inf"), tl.float32)
    total = tl.zeros([T * G], tl.float32)
    sums = tl.zeros([T * G, D], tl.float32)
    for start in tl.range(low, whole, N):
        k = tl.load(K + (start + n)[None, :] * k_step + d[:, None])
        v = tl.load(V + (start + n)[:, None] * v_step + d[None, :])
        s = tl.dot(q, k)
        new = tl.maximum(top, tl.max(s, 1) * factor)
        p = tl.exp2(s * factor - new[:, None])
        faded = tl.exp2(top - new)
        total = total * faded + tl.sum(p, 1)
        if DROP:
            p = tl.where(is_kept(tl.load(seed), place[:, None], (start + n)[None, :], drop), p / (1.0 - drop), 0.0)
        sums = tl.dot(p.to(v.dtype), v, sums * faded[:, None])
        top = new
    for start in tl.range(whole, high, N):
        there = (start + n) < length
        k = tl.load(K + (start + n)[None, :] * k_step + d[:, None], mask=there[None, :], other=0.0)
        v = tl.load(V + (start + n)[:, None] * v_step + d[None, :], mask=there[:, None], other=0.0)
        seen = is_seen(at[:, None], (start + n)[None, :], length, CAUSAL, WINDOW)
        s = tl.where(seen, tl.dot(q, k) * factor, float("-inf"))
        new = tl.maximum(top, tl.max(s, 1))
        base = tl.where(new == float("-inf"), 0.0, new)  # rows without a visible key so far
        p = tl.exp2(s - base[:, None])
        faded = tl.exp2(top - base)
        total = total * faded + tl.sum(p, 1)
        if DROP:
            p = tl.where(is_kept(tl.load(seed), place[:, None], (start + n)[None, :], drop), p / (1.0 - drop), 0.0)
        sums = tl.dot(p.to(v.dtype), v, sums * faded[:, None])
        top = new
    out = (sums / total[:, None]).to(OUT.dtype.element_ty)
    tl.store(OUT + (token * o_step + head * o_head)[:, None] + d[None, :], out, mask=inside[:, None])
    tl.store(LSE + place, top + tl.log2(total), mask=inside)


def _queries_kernel(
    Q, K, V, OUT, DO, DQ, LSE, INNER, borders, seed, documents, tokens, scale, drop,
    q_step, q_head, k_step, k_head, v_step, v_head, o_step, o_head, g_step, g_head, dq_step, dq_head,
    G: tl.constexpr, SHARING: tl.constexpr, D: tl.constexpr, T: tl.constexpr, N: tl.constexpr, CAUSAL: tl.constexpr,
    WINDOW: tl.constexpr, DROP: tl.constexpr, ROOM: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """The gradient of a tile of queries, and INNER, the inner product of each output with its gradient."""
    begin, length, block = place_of(tl.program_id(0), borders, documents, T, ROOM)
    if length == 0:
        return
    first = tl.program_id(1) * G
    row, d, n = tl.arange(0, T * G), tl.arange(0, D), tl.arange(0, N)
    if WIDE:
        n = n.to(tl.int64)
    at, head = block * T + row // G, first + row % G
    inside, token = at < length, begin + at
    place = head.to(tl.int64) * tokens + token
    q = tl.load(Q + (token * q_step + head * q_head)[:, None] + d[None, :], mask=inside[:, None], other=0.0)
    o = tl.load(OUT + (token * o_step + head * o_head)[:, None] + d[None, :], mask=inside[:, None], other=0.0)
    do = tl.load(DO + (token * g_step + head * g_head)[:, None] + d[None, :], mask=inside[:, None], other=0.0)
    inner = tl.sum(o.to(tl.float32) * do.to(tl.float32), 1)
    tl.store(INNER + place, inner, mask=inside)
    lse = tl.load(LSE + place, mask=inside, other=0.0)
    K += begin * k_step + (first // SHARING) * k_head
    V += begin * v_step + (first // SHARING) * v_head
    low, high = 0, length
    if CAUSAL:
        high = tl.minimum(length, (block + 1) * T)
    if WINDOW > 0:
        low = tl.maximum(block * T - WINDOW + 1, 0) // N * N
        high = tl.minimum(high, (block + 1) * T + WINDOW)
    dq = tl.zeros([T * G, D], tl.float32)
    for start in tl.range(low, high, N):
        there = (start + n) < length
        k = tl.load(K + (start + n)[None, :] * k_step + d[:, None], mask=there[None, :], other=0.0)
        v = tl.load(V + (start + n)[None, :] * v_step + d[:, None], mask=there[None, :], other=0.0)
        p = tl.exp2(tl.dot(q, k) * (scale * 1.4426950408889634) - lse[:, None])
        p = tl.where(is_seen(at[:, None], (start + n)[None, :], length, CAUSAL, WINDOW), p, 0.0)
        dp = tl.dot(do, v)
        if DROP:
            dp = tl.where(is_kept(tl.load(seed), place[:, None], (start + n)[None, :], drop), dp / (1.0 - drop), 0.0)
        dq = tl.dot((p * (dp - inner[:, None])).to(k.dtype), tl.trans(k), dq)
    out = (dq * scale).to(DQ.dtype.element_ty)
    tl.store(DQ + (token * dq_step + head * dq_head)[:, None] + d[None, :], out, mask=inside[:, None])


def _keys_kernel(
    Q, K, V, DO, DK, DV, LSE, INNER, borders, seed, documents, tokens, scale, drop,
    q_step, q_head, k_step, k_head, v_step, v_head, g_step, g_head, dk_step, dk_head, dv_step, dv_head,
    G: tl.constexpr, SHARING: tl.constexpr, D: tl.constexpr, T: tl.constexpr, N: tl.constexpr, CAUSAL: tl.constexpr,
    WINDOW: tl.constexpr, DROP: tl.constexpr, ROOM: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """The gradients of a tile of keys and values, over all queries of all heads that share them."""
    begin, length, block = place_of(tl.program_id(0), borders, documents, N, ROOM)
    if length == 0:
        return
    key_head = tl.program_id(1)
    row, d, at = tl.arange(0, T * G), tl.arange(0, D), block * N + tl.arange(0, N)
    inside, token = at < length, begin + at
    k = tl.load(K + (token * k_step + key_head * k_head)[:, None] + d[None, :], mask=inside[:, None], other=0.0)
    v = tl.load(V + (token * v_step + key_head * v_head)[:, None] + d[None, :], mask=inside[:, None], other=0.0)
    low, high = 0, length
    if CAUSAL:
        low = block * N // T * T
    if WINDOW > 0:
        low = tl.maximum(low, tl.maximum(block * N - WINDOW + 1, 0) // T * T)
        high = tl.minimum(length, (block + 1) * N + WINDOW)
    Q += begin * q_step
    DO += begin * g_step
    dk = tl.zeros([N, D], tl.float32)
    dv = tl.zeros([N, D], tl.float32)
    for part in tl.range(0, SHARING // G):
        head = key_head * SHARING + part * G + row % G
        for start in tl.range(low, high, T):
            q_at = start + row // G
            if WIDE:
                q_at = q_at.to(tl.int64)
            there = q_at < length
            place = head.to(tl.int64) * tokens + begin + q_at
            q_place, g_place = q_at * q_step + head * q_head, q_at * g_step + head * g_head
            q = tl.load(Q + q_place[None, :] + d[:, None], mask=there[None, :], other=0.0)
            do = tl.load(DO + g_place[:, None] + d[None, :], mask=there[:, None], other=0.0)
            lse = tl.load(LSE + place, mask=there, other=0.0)
            inner = tl.load(INNER + place, mask=there, other=0.0)
            p = tl.exp2(tl.dot(k, q) * (scale * 1.4426950408889634) - lse[None, :])
            p = tl.where(is_seen(q_at[None, :], at[:, None], length, CAUSAL, WINDOW), p, 0.0)
            dp = tl.dot(v, tl.trans(do))
            kept = p
            if DROP:
                left = is_kept(tl.load(seed), place[None, :], at[:, None], drop)
                kept, dp = tl.where(left, p / (1.0 - drop), 0.0), tl.where(left, dp / (1.0 - drop), 0.0)
            dv = tl.dot(kept.to(do.dtype), do, dv)
            dk = tl.dot((p * (dp - inner[None, :])).to(q.dtype), tl.trans(q), dk)
    step, out = token * dk_step + key_head * dk_head, (dk * scale).to(DK.dtype.element_ty)
    tl.store(DK + step[:, None] + d[None, :], out, mask=inside[:, None])
    step, out = token * dv_step + key_head * dv_head, dv.to(DV.dtype.element_ty)
    tl.store(DV + step[:, None] + d[None, :], out, mask=inside[:, None])
