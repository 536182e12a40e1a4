"""Triton kernels for attention within documents: forward, gradients of queries, of keys and values, of a bias.

A row of a tile is a token for one head, and the G query heads of a program share one key head. Documents are located
by their borders; a program without a block of any document returns immediately. With CROSS, the keys are those of
another row with the same number of documents. With BIAS, a number for the distance between key and query is added to
each score; B has one for every head and distance, MIDDLE is the place of distance 0.
"""

from __future__ import annotations

from functools import cache
from typing import Any

# Set when the kernels are built: Triton resolves the names in a kernel from the globals of its module.
tl: Any = None
place_of: Any = None
is_seen: Any = None
is_kept: Any = None
bias_of: Any = None


@cache
def kernels() -> dict[str, Any]:
    """The kernels, which are compiled on first use."""
    global tl, place_of, is_seen, is_kept, bias_of
    import triton
    import triton.language

    tl = triton.language
    place_of, is_seen, is_kept, bias_of = map(triton.jit, (_place_of, _is_seen, _is_kept, _bias_of))
    # These values differ between rows.
    build = triton.jit(do_not_specialize=["documents", "tokens", "distances"])
    functions = {"forward": _forward_kernel, "queries": _queries_kernel, "keys": _keys_kernel, "bias": _bias_kernel}
    return {name: build(function) for name, function in functions.items()}


def _place_of(item, borders, others, documents, BLOCK: tl.constexpr, ROOM: tl.constexpr, CROSS: tl.constexpr):
    """Where the document of a block begins, how long it is (0: no such block), and which of its blocks it is.

    The last two: where the document begins in the other row, and how long it is there.
    """
    index = tl.arange(0, ROOM)
    begins = tl.load(borders + index, mask=index < documents, other=0)
    ends = tl.load(borders + index + 1, mask=index < documents, other=0)
    blocks = (ends - begins + BLOCK - 1) // BLOCK
    until = tl.cumsum(blocks, 0)
    mine = (item < until) & (item >= until - blocks)
    begin = tl.sum(tl.where(mine, begins, 0), 0)
    length = tl.sum(tl.where(mine, ends - begins, 0), 0)
    block = tl.sum(tl.where(mine, item - (until - blocks), 0), 0)
    other_begin, other_length = begin, length
    if CROSS:
        begins = tl.load(others + index, mask=index < documents, other=0)
        ends = tl.load(others + index + 1, mask=index < documents, other=0)
        other_begin = tl.sum(tl.where(mine, begins, 0), 0)
        other_length = tl.sum(tl.where(mine, ends - begins, 0), 0)
    return begin.to(tl.int64), length, block, other_begin.to(tl.int64), other_length


def _is_seen(q, k, queries, keys, CAUSAL: tl.constexpr, WINDOW: tl.constexpr):
    """Which keys a query attends to; `queries` and `keys` are the lengths of the document."""
    seen = (k < keys) & (q < queries)
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


def _bias_of(B, head, distance, distances, seen):
    """The bias of scores, times the logarithm of e to base 2; there are `distances`, the middle one is 0."""
    return tl.load(B + head * distances + distance + distances // 2, mask=seen, other=0.0) * 1.4426950408889634


def _forward_kernel(  # noqa: C901  # a kernel is one function; the branches are those of its constants
    Q, K, V, OUT, LSE, B, borders, others, seed, documents, tokens, scale, drop, distances,
    q_step, q_head, k_step, k_head, v_step, v_head, o_step, o_head,
    G: tl.constexpr, SHARING: tl.constexpr, D: tl.constexpr, T: tl.constexpr, N: tl.constexpr, CAUSAL: tl.constexpr,
    WINDOW: tl.constexpr, DROP: tl.constexpr, ROOM: tl.constexpr, WIDE: tl.constexpr, CROSS: tl.constexpr,
    BIAS: tl.constexpr,
):  # fmt: skip
    """A tile of queries against the keys it sees; LSE is the logarithm, base 2, of the sum of the exponentials."""
    begin, length, block, key_begin, keys = place_of(tl.program_id(0), borders, others, documents, T, ROOM, CROSS)
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
    K += key_begin * k_step + (first // SHARING) * k_head
    V += key_begin * v_step + (first // SHARING) * v_head
    low, high, whole = 0, keys, keys // N * N  # blocks of keys before `whole` need no mask
    if CAUSAL:
        high = tl.minimum(keys, (block + 1) * T)
        whole = tl.minimum(whole, (block * T + 1) // N * N)
    if WINDOW > 0:
        low = tl.maximum(block * T - WINDOW + 1, 0) // N * N
        high = tl.minimum(high, (block + 1) * T + WINDOW)
        whole = low
    if BIAS:
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
        there = (start + n) < keys
        k = tl.load(K + (start + n)[None, :] * k_step + d[:, None], mask=there[None, :], other=0.0)
        v = tl.load(V + (start + n)[:, None] * v_step + d[None, :], mask=there[:, None], other=0.0)
        seen = is_seen(at[:, None], (start + n)[None, :], length, keys, CAUSAL, WINDOW)
        s = tl.dot(q, k) * factor
        if BIAS:
            s += bias_of(B, head[:, None], (start + n)[None, :] - at[:, None], distances, seen)
        s = tl.where(seen, s, float("-inf"))
        new = tl.maximum(top, tl.max(s, 1))
        base = tl.where(new == float("-inf"), 0.0, new)  # rows without a visible key so far
        p = tl.exp2(s - base[:, None])
        faded = tl.exp2(top - base)
        total = total * faded + tl.sum(p, 1)
        if DROP:
            p = tl.where(is_kept(tl.load(seed), place[:, None], (start + n)[None, :], drop), p / (1.0 - drop), 0.0)
        sums = tl.dot(p.to(v.dtype), v, sums * faded[:, None])
        top = new
    if CROSS:
        total = tl.where(total == 0.0, 1.0, total)  # a document without keys
    out = (sums / total[:, None]).to(OUT.dtype.element_ty)
    tl.store(OUT + (token * o_step + head * o_head)[:, None] + d[None, :], out, mask=inside[:, None])
    tl.store(LSE + place, top + tl.log2(total), mask=inside)


def _queries_kernel(
    Q, K, V, OUT, DO, DQ, LSE, INNER, B, borders, others, seed, documents, tokens, scale, drop, distances,
    q_step, q_head, k_step, k_head, v_step, v_head, o_step, o_head, g_step, g_head, dq_step, dq_head,
    G: tl.constexpr, SHARING: tl.constexpr, D: tl.constexpr, T: tl.constexpr, N: tl.constexpr, CAUSAL: tl.constexpr,
    WINDOW: tl.constexpr, DROP: tl.constexpr, ROOM: tl.constexpr, WIDE: tl.constexpr, CROSS: tl.constexpr,
    BIAS: tl.constexpr,
):  # fmt: skip
    """The gradient of a tile of queries, and INNER, the inner product of each output with its gradient."""
    begin, length, block, key_begin, keys = place_of(tl.program_id(0), borders, others, documents, T, ROOM, CROSS)
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
    K += key_begin * k_step + (first // SHARING) * k_head
    V += key_begin * v_step + (first // SHARING) * v_head
    low, high = 0, keys
    if CAUSAL:
        high = tl.minimum(keys, (block + 1) * T)
    if WINDOW > 0:
        low = tl.maximum(block * T - WINDOW + 1, 0) // N * N
        high = tl.minimum(high, (block + 1) * T + WINDOW)
    dq = tl.zeros([T * G, D], tl.float32)
    for start in tl.range(low, high, N):
        there = (start + n) < keys
        k = tl.load(K + (start + n)[None, :] * k_step + d[:, None], mask=there[None, :], other=0.0)
        v = tl.load(V + (start + n)[None, :] * v_step + d[:, None], mask=there[None, :], other=0.0)
        seen = is_seen(at[:, None], (start + n)[None, :], length, keys, CAUSAL, WINDOW)
        s = tl.dot(q, k) * (scale * 1.4426950408889634)
        if BIAS:
            s += bias_of(B, head[:, None], (start + n)[None, :] - at[:, None], distances, seen)
        p = tl.where(seen, tl.exp2(s - lse[:, None]), 0.0)
        dp = tl.dot(do, v)
        if DROP:
            dp = tl.where(is_kept(tl.load(seed), place[:, None], (start + n)[None, :], drop), dp / (1.0 - drop), 0.0)
        dq = tl.dot((p * (dp - inner[:, None])).to(k.dtype), tl.trans(k), dq)
    out = (dq * scale).to(DQ.dtype.element_ty)
    tl.store(DQ + (token * dq_step + head * dq_head)[:, None] + d[None, :], out, mask=inside[:, None])


def _keys_kernel(
    Q, K, V, DO, DK, DV, LSE, INNER, B, borders, others, seed, documents, tokens, scale, drop, distances,
    q_step, q_head, k_step, k_head, v_step, v_head, g_step, g_head, dk_step, dk_head, dv_step, dv_head,
    G: tl.constexpr, SHARING: tl.constexpr, D: tl.constexpr, T: tl.constexpr, N: tl.constexpr, CAUSAL: tl.constexpr,
    WINDOW: tl.constexpr, DROP: tl.constexpr, ROOM: tl.constexpr, WIDE: tl.constexpr, CROSS: tl.constexpr,
    BIAS: tl.constexpr,
):  # fmt: skip
    """The gradients of a tile of keys and values, over all queries of all heads that share them."""
    begin, length, block, query_begin, queries = place_of(
        tl.program_id(0), borders, others, documents, N, ROOM, CROSS
    )
    if length == 0:
        return
    key_head = tl.program_id(1)
    row, d, at = tl.arange(0, T * G), tl.arange(0, D), block * N + tl.arange(0, N)
    inside, token = at < length, begin + at
    k = tl.load(K + (token * k_step + key_head * k_head)[:, None] + d[None, :], mask=inside[:, None], other=0.0)
    v = tl.load(V + (token * v_step + key_head * v_head)[:, None] + d[None, :], mask=inside[:, None], other=0.0)
    low, high = 0, queries
    if CAUSAL:
        low = block * N // T * T
    if WINDOW > 0:
        low = tl.maximum(low, tl.maximum(block * N - WINDOW + 1, 0) // T * T)
        high = tl.minimum(queries, (block + 1) * N + WINDOW)
    Q += query_begin * q_step
    DO += query_begin * g_step
    dk = tl.zeros([N, D], tl.float32)
    dv = tl.zeros([N, D], tl.float32)
    for part in tl.range(0, SHARING // G):
        head = key_head * SHARING + part * G + row % G
        for start in tl.range(low, high, T):
            q_at = start + row // G
            if WIDE:
                q_at = q_at.to(tl.int64)
            there = q_at < queries
            place = head.to(tl.int64) * tokens + query_begin + q_at
            q_place, g_place = q_at * q_step + head * q_head, q_at * g_step + head * g_head
            q = tl.load(Q + q_place[None, :] + d[:, None], mask=there[None, :], other=0.0)
            do = tl.load(DO + g_place[:, None] + d[None, :], mask=there[:, None], other=0.0)
            lse = tl.load(LSE + place, mask=there, other=0.0)
            inner = tl.load(INNER + place, mask=there, other=0.0)
            seen = is_seen(q_at[None, :], at[:, None], queries, length, CAUSAL, WINDOW)
            s = tl.dot(k, q) * (scale * 1.4426950408889634)
            if BIAS:
                s += bias_of(B, head[None, :], at[:, None] - q_at[None, :], distances, seen)
            p = tl.where(seen, tl.exp2(s - lse[None, :]), 0.0)
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


def _bias_kernel(
    Q, K, V, DO, SUMS, LSE, INNER, B, borders, others, seed, documents, tokens, scale, drop, distances,
    q_step, q_head, k_step, k_head, v_step, v_head, g_step, g_head,
    G: tl.constexpr, SHARING: tl.constexpr, D: tl.constexpr, T: tl.constexpr, N: tl.constexpr, CAUSAL: tl.constexpr,
    WINDOW: tl.constexpr, DROP: tl.constexpr, ROOM: tl.constexpr, WIDE: tl.constexpr, CROSS: tl.constexpr,
    BIAS: tl.constexpr,
):  # fmt: skip
    """The gradients of the scores of one head, summed over all tiles at the same distance from the diagonal.

    Along a diagonal of such a sum, all scores have the same distance. Every program sums a part of the documents, in a
    fixed order: sums by atomic additions would differ from run to run.
    """
    offset = tl.program_id(0) - (distances // 2) // N
    head, part, parts = tl.program_id(1), tl.program_id(2), tl.num_programs(2)
    d, n = tl.arange(0, D), tl.arange(0, N)
    Q += head * q_head
    DO += head * g_head
    K += (head // SHARING) * k_head
    V += (head // SHARING) * v_head
    sums = tl.zeros([N, N], tl.float32)
    for document in tl.range(part, documents, parts):
        begin = tl.load(borders + document).to(tl.int64)
        length = (tl.load(borders + document + 1) - begin).to(tl.int32)
        blocks = (length + N - 1) // N
        for block in tl.range(tl.maximum(0, -offset), tl.minimum(blocks, blocks - offset)):
            at, k_at = block * N + n, (block + offset) * N + n
            there, k_there = at < length, k_at < length
            token, k_token = begin + at, begin + k_at
            q = tl.load(Q + token[:, None] * q_step + d[None, :], mask=there[:, None], other=0.0)
            do = tl.load(DO + token[:, None] * g_step + d[None, :], mask=there[:, None], other=0.0)
            k = tl.load(K + k_token[None, :] * k_step + d[:, None], mask=k_there[None, :], other=0.0)
            v = tl.load(V + k_token[None, :] * v_step + d[:, None], mask=k_there[None, :], other=0.0)
            place = head.to(tl.int64) * tokens + token
            lse = tl.load(LSE + place, mask=there, other=0.0)
            inner = tl.load(INNER + place, mask=there, other=0.0)
            seen = is_seen(at[:, None], k_at[None, :], length, length, CAUSAL, WINDOW)
            s = tl.dot(q, k) * (scale * 1.4426950408889634)
            s += bias_of(B, head, k_at[None, :] - at[:, None], distances, seen)
            p = tl.where(seen, tl.exp2(s - lse[:, None]), 0.0)
            dp = tl.dot(do, v)
            if DROP:
                dp = tl.where(is_kept(tl.load(seed), place[:, None], k_at[None, :], drop), dp / (1.0 - drop), 0.0)
            sums += p * (dp - inner[:, None])
    tile = (part * tl.num_programs(1) + head) * tl.num_programs(0) + tl.program_id(0)
    tl.store(SUMS + tile.to(tl.int64) * N * N + n[:, None] * N + n[None, :], sums)
