"""Attention by one torch call per document: for CPUs, single precision and double backward."""

from __future__ import annotations

from contextlib import nullcontext
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from .document_mask import borders_in


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
    """Call scaled_dot_product_attention for each document."""
    borders = borders_in(documents).tolist()
    lengths = [end - begin for begin, end in zip(borders, borders[1:], strict=False) if end > begin]
    groups = query.shape[1] // key.shape[1]
    outputs = []
    # `split` instead of slices: the gradient of a slice has the length of the whole row.
    for q, k, v in zip(*(each.split(lengths, dim=2) for each in (query, key, value)), strict=True):
        k, v = k.to(v.dtype), v
        if ask.softcap:
            outputs.append(_capped(q.to(v.dtype), k, v, groups, ask))
            continue
        mask = _window_mask(q.shape[2], ask.causal, ask.window, q.device)
        with sdpa_kernel(SDPBackend.MATH) if ask.twice else nullcontext():
            outputs.append(
                F.scaled_dot_product_attention(
                    q.to(v.dtype), k, v, attn_mask=mask, dropout_p=ask.dropout, scale=ask.scale,
                    is_causal=ask.causal and mask is None, enable_gqa=groups > 1,
                )
            )  # fmt: skip
    return torch.cat(outputs, dim=2).transpose(1, 2)


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
