"""Attention over rows that hold several documents: every token sees only its own document.

It is registered by name with transformers, so models are not changed. GPUs use our own kernels or torch's flash kernels
for variable lengths; CPUs call scaled_dot_product_attention for each document.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor, nn

from ..compile.preparation import await_imports
from ..proof.dropout import dropout_is_off
from . import varlen as document_attention
from .document_mask import borders_in, is_documents, longest_in, pattern_in
from .mask_patterns import AttentionRefused
from .per_document import AttentionRequest, one_by_one

HALF = (torch.float16, torch.bfloat16)
UNKNOWN_TO_US = ("s_aux", "position_bias", "alibi", "block_mask", "head_mask", "relative_position", "cache")
"""Arguments that change the result and are not supported here; models that use one are refused."""


def attend(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    *,
    twice: bool = False,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Attention within documents, (1, heads, tokens, size) to (1, tokens, heads, size)."""
    if not is_documents(attention_mask):
        raise AttentionRefused("the model builds its own attention mask")
    assert attention_mask is not None
    surplus = [name for name in UNKNOWN_TO_US if kwargs.get(name) is not None]
    if surplus:
        raise AttentionRefused(f"the model's attention uses {surplus[0]}")
    if query.shape[0] != 1 or query.shape[2] != key.shape[2]:
        raise AttentionRefused("the model's attention spans more than one row")
    if dropout and dropout_is_off():  # our own kernels draw dropout themselves
        dropout = 0.0
    causal, window = pattern_in(attention_mask)
    claimed = kwargs.get("is_causal")
    if bool(getattr(module, "is_causal", True) if claimed is None else claimed) != causal:
        raise AttentionRefused("the model's attention and mask disagree on causality")
    ask = AttentionRequest(causal, window, kwargs.get("softcap"), dropout, scaling, twice)
    run = _on_gpu(query, key, value, attention_mask, ask) if query.device.type == "cuda" else one_by_one
    return run(query, key, value, attention_mask, ask), None


def attend_twice(*args: Any, **kwargs: Any) -> tuple[Tensor, None]:
    """Replaces eager attention, whose gradients can be differentiated again."""
    return attend(*args, twice=True, **kwargs)


def attend_as_told(module: nn.Module, query: Tensor, key: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, None]:
    """Replaces flash attention, which takes a window instead of a mask."""
    mask = args[1] if len(args) > 1 else kwargs.get("attention_mask")
    if is_documents(mask) and pattern_in(mask)[1] != kwargs.get("sliding_window"):
        raise AttentionRefused("the model's mask has a window that is not passed to flash attention")
    return attend(module, query, key, *args, **kwargs)


# ---- GPUs -----------------------------------------------------------------------------------------------------------


def _on_gpu(
    query: Tensor, key: Tensor, value: Tensor, documents: Tensor, ask: AttentionRequest
) -> Callable[..., Tensor]:
    if value.dtype not in HALF:
        if HAS["kernel"] and not ask.softcap and not torch.compiler.is_compiling():
            _prepare_kernels(query, key, value, documents, ask)
        apart: Callable[..., Tensor] = one_by_one
        return apart
    if ask.softcap:
        return by_flex
    ours = HAS["kernel"] and document_attention.takes(query, value, documents.shape[-1] - 1)
    return by_kernel if ours else by_flash


def _prepare_kernels(query: Tensor, key: Tensor, value: Tensor, documents: Tensor, ask: AttentionRequest) -> None:
    """Compile our kernels while a proof in single precision runs, which is followed by one in half precision."""
    if document_attention.takes(query, value, documents.shape[-1] - 1):
        q, k, v = (each.transpose(1, 2).squeeze(0) for each in (query, key, value))
        document_attention.prepare(q, k, v, borders_in(documents), causal=ask.causal, window=int(ask.window or 0))


def by_kernel(query: Tensor, key: Tensor, value: Tensor, documents: Tensor, ask: AttentionRequest) -> Tensor:
    """Attention by our own kernels."""
    scale = query.shape[-1] ** -0.5 if ask.scale is None else float(ask.scale)
    q, k, v = (each.transpose(1, 2).squeeze(0).to(value.dtype) for each in (query, key, value))
    output = document_attention.attend(
        q, k, v, borders_in(documents), causal=ask.causal, window=int(ask.window or 0), scale=scale, drop=ask.dropout
    )
    return output.unsqueeze(0)


def by_flash(query: Tensor, key: Tensor, value: Tensor, documents: Tensor, ask: AttentionRequest) -> Tensor:
    """Attention by torch's varlen flash kernels; there may be fewer key heads than query heads."""
    borders, longest = borders_in(documents), longest_in(documents)
    # Rotary embeddings compute in single precision; the kernel requires one dtype.
    q, k, v = (each.transpose(1, 2).squeeze(0).to(value.dtype) for each in (query, key, value))
    left = -1 if ask.window is None else int(ask.window) - 1
    window = (left, 0 if ask.causal else left)
    if ask.dropout or (ask.scale is not None and not VARLEN_TAKES["scale"]):
        output = torch.ops.aten._flash_attention_forward(
            q, k, v, borders, borders, longest, longest, ask.dropout, ask.causal, False,
            scale=ask.scale, window_size_left=window[0], window_size_right=window[1],
        )[0]  # fmt: skip
    else:
        output = _varlen(q, k, v, borders, longest, window, ask)
    return output.unsqueeze(0)


def _varlen(
    q: Tensor, k: Tensor, v: Tensor, borders: Tensor, longest: int, window: tuple[int, int], ask: AttentionRequest
) -> Tensor:
    from torch.nn.attention.varlen import varlen_attn

    options: dict[str, Any] = {"scale": ask.scale} if VARLEN_TAKES["scale"] else {}
    if VARLEN_TAKES["window_size"]:
        options["window_size"] = window
    else:
        options["is_causal"] = ask.causal
        if ask.window is not None:
            raise AttentionRefused("this version of torch has no varlen attention with sliding windows")
    if VARLEN_TAKES["enable_gqa"] and q.shape[1] != k.shape[1]:
        options["enable_gqa"] = True
    return varlen_attn(q, k, v, borders, borders, longest, longest, **options)


def varlen_options() -> dict[str, bool]:
    """Which options torch's varlen_attn supports; its signature differs between versions."""
    try:
        from torch.nn.attention.varlen import varlen_attn
    except ImportError:
        return dict.fromkeys(("scale", "window_size", "enable_gqa"), False)
    names = inspect.signature(varlen_attn).parameters
    return {name: name in names for name in ("scale", "window_size", "enable_gqa")}


VARLEN_TAKES: dict[str, bool] = {}
HAS = {"kernel": False}
"""Both are set when a model's attention is replaced, since compiled blocks cannot determine them."""


def by_flex(query: Tensor, key: Tensor, value: Tensor, documents: Tensor, ask: AttentionRequest) -> Tensor:
    """FlexAttention, for features that the flash kernels do not have."""
    if ask.dropout:
        raise AttentionRefused("FlexAttention does not support dropout")
    softcap = ask.softcap

    def capped(score: Tensor, *place: Tensor) -> Tensor:
        return softcap * torch.tanh(score / softcap) if softcap else score

    output = _flex()(
        query.to(value.dtype), key.to(value.dtype), value,
        score_mod=capped if softcap else None,
        block_mask=_block_mask(documents, query.shape[2], ask.causal, ask.window),
        scale=ask.scale,
        enable_gqa=query.shape[1] != key.shape[1],
    )  # fmt: skip
    return output.transpose(1, 2)


@lru_cache(maxsize=1)
def _flex() -> Callable[..., Any]:
    await_imports()
    from torch.nn.attention.flex_attention import flex_attention

    compiled: Callable[..., Any] = torch.compile(flex_attention, dynamic=True)
    return compiled


_LAST_BLOCKS: list[Any] = []


def _block_mask(documents: Tensor, tokens: int, causal: bool, window: int | None) -> Any:
    """The blocks of the row to compute; all layers of a forward use the same, so the last result is kept."""
    from torch.nn.attention.flex_attention import create_block_mask

    asked = (documents, tokens, causal, window)
    if _LAST_BLOCKS and _LAST_BLOCKS[0][0] is documents and _LAST_BLOCKS[0][1:] == asked[1:]:
        return _LAST_BLOCKS[1]
    places = torch.arange(tokens, device=documents.device)
    document = torch.searchsorted(borders_in(documents).contiguous(), places, right=True)

    def sees(batch: Tensor, head: Tensor, q: Tensor, k: Tensor) -> Tensor:
        seen = document[q] == document[k]
        if causal:
            seen = seen & (q >= k)
        return seen & (q - k < window) & (k - q < window) if window is not None else seen

    blocks = create_block_mask(sees, None, None, tokens, tokens, device=documents.device)
    _LAST_BLOCKS[:] = [asked, blocks]
    return blocks
