"""Attention and positions for rows of sources and rows of targets without padding.

The encoder gets the documents of both rows as its mask, the decoder those of its own: transformers passes the mask of
the encoder to the cross-attention too. A bias for distances between tokens, which T5 computes for all pairs of tokens
of a row, is computed once for every distance that occurs within a document. Tables of positions, as BART's, get the
positions within documents.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from ..proof.dropout import dropout_is_off
from . import varlen
from .dispatch import HALF, HAS, UNKNOWN_TO_US
from .document_mask import PAD_BORDERS_TO, borders_in, is_documents, is_given
from .first_blocks import FirstBlocks
from .mask_patterns import AttentionRefused, Pattern, pattern_of
from .per_document import AttentionRequest, each_document
from .switch import AttentionSwitch

NAME = "loopwright_pairs"
NAMED = "position_ids"
CAUSAL, FULL = 1, 2
"""Sizes of the second dimension of a mask: earlier positions of a document, or all of them, maybe of the other row."""


def as_given(borders: Tensor, others: Tensor | None = None) -> Tensor:
    """Documents as the mask passed to a model: of one row, or of the row of keys and that of queries."""
    rows = [borders] if others is None else [_aligned(borders), _aligned(others)]
    return torch.cat(rows).view(1, 1, 1, 1, -1)


def _aligned(borders: Tensor) -> Tensor:
    """The borders with as many empty documents as make their number a multiple of 64."""
    missing = -borders.numel() % PAD_BORDERS_TO
    return torch.cat([borders, borders[-1:].expand(missing)])


def mask_of_pairs(
    *args: Any, mask_function: Any = None, attention_mask: Tensor | None = None, **kwargs: Any
) -> Tensor | None:
    """The documents that an attention needs; None if the model was not given documents."""
    if attention_mask is None or not is_given(attention_mask):
        return None
    pattern = pattern_of(mask_function)
    if pattern not in (Pattern(), Pattern(causal=True)):
        raise AttentionRefused("the model's mask has windows or chunks")
    return attention_mask[0].expand(-1, CAUSAL if pattern.causal else FULL, -1, -1)


def attend(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    position_bias: Tensor | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Attention within documents or between those of two rows, (1, heads, tokens, size) to (1, tokens, heads, size)."""
    if attention_mask is None or not is_documents(attention_mask):
        raise AttentionRefused("the model builds its own attention mask")
    surplus = [name for name in UNKNOWN_TO_US if kwargs.get(name) is not None]
    if surplus or query.shape[0] != 1:
        raise AttentionRefused(f"the model's attention uses {surplus[0] if surplus else 'more than one row'}")
    is_causal, borders = attention_mask.shape[1] == CAUSAL, borders_in(attention_mask)
    keys, queries = (borders, borders) if is_causal else borders.chunk(2)
    if query.shape[2] == key.shape[2]:  # rows of sources and of targets never have the same length
        queries = keys
    elif is_causal:
        raise AttentionRefused("the model's attention spans more than one row")
    bias = _by_distance(position_bias)
    if dropout and dropout_is_off():  # our own kernels draw dropout themselves
        dropout = 0.0
    ask = AttentionRequest(is_causal, None, None, dropout, scaling)
    if query.device.type == "cuda" and value.dtype in HALF:
        return _by_kernel(query, key, value, queries, keys, ask, bias), None
    return each_document(query, key, value, queries, keys, ask, bias=bias), None


def _by_distance(position_bias: Tensor | None) -> Tensor | None:
    """The bias as (heads, distances); None if there is none."""
    if position_bias is None or not position_bias.numel():
        return None
    if position_bias.shape[0] != 1 or position_bias.shape[2] != 1:
        raise AttentionRefused("the model's position bias is not one for every distance")
    return position_bias[0, :, 0]


def _by_kernel(
    query: Tensor, key: Tensor, value: Tensor, queries: Tensor, keys: Tensor, ask: AttentionRequest, bias: Tensor | None
) -> Tensor:
    if not (HAS["kernel"] and varlen.takes(query, value, queries.numel() - 1)):
        raise AttentionRefused("there are no kernels for this attention")
    scale = query.shape[-1] ** -0.5 if ask.scale is None else float(ask.scale)
    q, k, v = (each.transpose(1, 2).squeeze(0).to(value.dtype) for each in (query, key, value))
    output = varlen.attend(
        q, k, v, queries, causal=ask.causal, window=0, scale=scale, drop=ask.dropout,
        key_borders=None if keys is queries else keys, bias=bias,
    )  # fmt: skip
    return output.unsqueeze(0)


class DistanceBias:
    """Makes a model compute its position bias for distances instead of pairs of tokens, within a context."""

    def __init__(self, model: nn.Module) -> None:
        self._modules = [module for module in model.modules() if hasattr(module, "has_relative_attention_bias")]
        self._first_blocks = FirstBlocks(model)
        self.longest: dict[bool, int] = {}
        """The largest distance between tokens of a document, rounded up; for the decoder under True."""

    @property
    def is_used(self) -> bool:
        return bool(self._modules)

    @property
    def reason(self) -> str | None:
        """Why the bias of the model cannot be computed for distances."""
        known = all(hasattr(module, name) for module in self._modules for name in ("compute_bias", "is_decoder"))
        return None if known else "it is not known how the model computes its position bias"

    @contextmanager
    def active(self) -> Iterator[None]:
        changed = [module for module in self._modules if "compute_bias" not in module.__dict__]
        had = [module.has_relative_attention_bias for module in changed]
        computing = {module: self._computing(module, has_bias) for module, has_bias in zip(changed, had, strict=True)}
        for module, compute in computing.items():
            module.compute_bias = compute
            module.has_relative_attention_bias = True  # otherwise it makes zeros for all pairs of tokens
        try:
            with self._first_blocks.given_bias(computing):
                yield
        finally:
            for module, has_bias in zip(changed, had, strict=True):
                del module.compute_bias
                module.has_relative_attention_bias = has_bias

    def _computing(self, module: Any, has_bias: bool) -> Any:
        def compute(*lengths: int, device: Any = None, **kwargs: Any) -> Tensor:
            if not has_bias:
                return torch.empty(0, device=device)
            most = self.longest[bool(module.is_decoder)]
            # One query in the middle of the keys sees every distance.
            bias: Tensor = type(module).compute_bias(module, 1, 2 * most - 1, device=device, past_seen_tokens=most - 1)
            return bias

        return compute


class RowPositions:
    """Makes the tables of positions of a model use the positions within documents, within a context."""

    def __init__(self, model: nn.Module) -> None:
        self._tables = [
            (module, "decoder" in name.split("."))
            for name, module in model.named_modules()
            if name.rpartition(".")[2] == "embed_positions" and isinstance(module, nn.Embedding)
        ]
        self.places: dict[bool, Tensor] = {}
        """The position of every token of a row; for the decoder under True."""

    @property
    def are_used(self) -> bool:
        return bool(self._tables)

    @property
    def reason(self) -> str | None:
        """Why the positions of the model cannot be chosen."""
        accepted = [NAMED in inspect.signature(module.forward).parameters for module, _ in self._tables]
        return None if all(accepted) else "the positions of the model depend on the place in a row"

    @contextmanager
    def active(self) -> Iterator[None]:
        changed = [pair for pair in self._tables if "forward" not in pair[0].__dict__]
        for module, is_decoder in changed:
            module.forward = self._replaced(module, is_decoder)
        try:
            yield
        finally:
            for module, _ in changed:
                del module.forward

    def _replaced(self, module: nn.Module, is_decoder: bool) -> Any:
        def forward(*args: Any, **kwargs: Any) -> Any:
            return type(module).forward(module, *args, **{**kwargs, NAMED: self.places[is_decoder]})

        return forward


def switch_for(model: nn.Module) -> AttentionSwitch | str:
    """The switch that makes a model use this attention, or why it cannot be used."""
    switch = AttentionSwitch(model, {"sdpa": (NAME, attend)}, mask_of_pairs)
    return switch if switch.reason is None else switch.reason
