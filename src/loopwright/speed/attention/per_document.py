"""Attention by one torch call per document: for CPUs, single precision and double backward."""

from __future__ import annotations

from contextlib import nullcontext
from functools import lru_cache
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from .document_mask import borders_in

CHUNK = 64
"""Queries of a causal document that are computed together on a CPU, with the keys up to the last of them."""
FEWEST, MOST = 2 * CHUNK, 1024
"""Lengths of documents for which that is faster: torch's kernel leaves out blocks of 512 keys that no query sees, but
computes all scores of other blocks, which is twice what a document of up to 512 tokens needs."""


class AttentionRequest(NamedTuple):
    """Options of one attention call."""

    causal: bool
    window: int | None
    softcap: float | None
    dropout: float
    scale: float | None
    twice: bool = False
    """Whether gradients must be differentiable again, as those of eager attention are."""


@torch._disable_dynamo  # every number of documents would be compiled again
def one_by_one(query: Tensor, key: Tensor, value: Tensor, documents: Tensor, ask: AttentionRequest) -> Tensor:
    """Attention within each document of a row, by one call of scaled_dot_product_attention per document."""
    borders = borders_in(documents)
    return each_document(query, key, value, borders, borders, ask)


@torch._disable_dynamo
def each_document(
    query: Tensor, key: Tensor, value: Tensor, borders: Tensor, key_borders: Tensor, ask: AttentionRequest, *,
    bias: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """The attention of each document of a row to the document at the same place of the row of keys.

    `bias`, (heads, distances), is added to the scores by the distance between query and key.
    """
    pairs = zip(_lengths(borders), _lengths(key_borders), strict=True)
    lengths = [pair for pair in pairs if any(pair)]
    dtype, device = value.dtype, value.device.type
    # torch's kernel for CPUs takes up to seven times longer in half precision, which autocast would choose again.
    is_slow = device == "cpu" and dtype.itemsize < 4
    query, key, value = (each.to(torch.float32 if is_slow else dtype) for each in (query, key, value))
    # `split` instead of slices: the gradient of a slice has the length of the whole row.
    queries = query.split([length for length, _ in lengths], dim=2)
    keys, values = (each.split([length for _, length in lengths], dim=2) for each in (key, value))
    outputs: list[Tensor] = []
    with torch.autocast(device, enabled=False) if is_slow else nullcontext():
        for q, k, v in zip(queries, keys, values, strict=True):
            outputs += _of_document(q, k, v, ask, bias)
    # The kernels write tokens before heads: joined in this order, neither this nor the reshape after it moves heads.
    return torch.cat([each.transpose(1, 2) for each in outputs], dim=1).to(dtype)


def _of_document(q: Tensor, k: Tensor, v: Tensor, ask: AttentionRequest, bias: Tensor | None) -> list[Tensor]:
    """The attention of one document, in one part or several."""
    groups = q.shape[1] // k.shape[1]
    if ask.softcap:
        return [_capped(q, k, v, groups, ask)]
    if bias is None and _is_cut(q, ask):
        return _in_chunks(q, k, v, ask.scale)
    mask = _window_mask(q.shape[2], ask.causal, ask.window, q.device)
    if bias is not None:
        mask = _biased_mask(bias.to(v.dtype), q.shape[2], causal=ask.causal)
    with sdpa_kernel(SDPBackend.MATH) if ask.twice else nullcontext():
        return [
            F.scaled_dot_product_attention(
                q, k, v, attn_mask=mask, dropout_p=ask.dropout, scale=ask.scale,
                is_causal=ask.causal and mask is None, enable_gqa=groups > 1,
            )
        ]  # fmt: skip


def _lengths(borders: Tensor) -> list[int]:
    places = borders.tolist()
    return [end - begin for begin, end in zip(places, places[1:], strict=False)]


def _biased_mask(bias: Tensor, tokens: int, *, causal: bool) -> Tensor:
    """What is added to the scores of a document, (1, heads, tokens, tokens)."""
    middle = bias.shape[1] // 2
    near = bias[:, middle - tokens + 1 : middle + tokens]
    added = near.unfold(1, tokens, 1).flip(1)  # the window of the first query begins at distance 0
    if causal:
        later = torch.ones(tokens, tokens, dtype=torch.bool, device=bias.device).triu(1)
        added = added.masked_fill(later, float("-inf"))
    return added.unsqueeze(0)


def _is_cut(query: Tensor, ask: AttentionRequest) -> bool:
    """Whether a document is computed in chunks of queries."""
    tokens = query.shape[2]
    is_plain = ask.causal and not ask.dropout and not ask.twice and (ask.window is None or ask.window >= tokens)
    return is_plain and FEWEST <= tokens <= MOST and query.device.type == "cpu"


def _in_chunks(q: Tensor, k: Tensor, v: Tensor, scale: float | None) -> list[Tensor]:
    """The attention of a causal document, chunk by chunk."""
    outputs: list[Tensor] = []
    begin = 0
    for chunk in q.split(CHUNK, dim=2):
        end = begin + chunk.shape[2]
        keys, values = (each if end == q.shape[2] else each[:, :, :end] for each in (k, v))
        outputs.append(
            F.scaled_dot_product_attention(
                chunk, keys, values, attn_mask=_later_keys(v.dtype)[: end - begin, MOST - begin : MOST - begin + end],
                scale=scale, enable_gqa=q.shape[1] != k.shape[1],
            )
        )  # fmt: skip
        begin = end
    return outputs


@lru_cache(maxsize=4)
def _later_keys(dtype: torch.dtype) -> Tensor:
    """What is added to the scores of a chunk of queries that follows `MOST` keys; other chunks use a part of it."""
    with torch.inference_mode(False):
        return torch.full((CHUNK, MOST + CHUNK), float("-inf"), dtype=dtype, device="cpu").triu(MOST + 1)


def _window_mask(tokens: int, causal: bool, window: int | None, device: torch.device) -> Tensor | None:
    if window is None or window >= tokens:
        return None
    distance = torch.arange(tokens, device=device)
    distance = distance[:, None] - distance[None, :]
    seen = (distance < window) & (distance > -window)
    return seen & (distance >= 0) if causal else seen


def _capped(q: Tensor, k: Tensor, v: Tensor, groups: int, ask: AttentionRequest) -> Tensor:
    """Attention with soft-capped scores."""
    assert ask.softcap is not None
    k, v = k.repeat_interleave(groups, dim=1), v.repeat_interleave(groups, dim=1)
    tokens = q.shape[2]
    scores = q @ k.transpose(2, 3) * (q.shape[-1] ** -0.5 if ask.scale is None else ask.scale)
    scores = ask.softcap * torch.tanh(scores / ask.softcap)
    seen = _window_mask(tokens, ask.causal, ask.window, q.device)
    if seen is None and ask.causal:
        seen = torch.ones(tokens, tokens, dtype=torch.bool, device=q.device).tril()
    if seen is not None:
        scores = scores.masked_fill(~seen, float("-inf"))
    return F.dropout(torch.softmax(scores, dim=-1, dtype=torch.float32).to(v.dtype), ask.dropout) @ v
