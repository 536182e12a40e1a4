"""Attention with a learned position bias (such as T5's), converted to a form that torch's fast kernels support.

The bias is looked up with the heads as its last dimension. For that memory order torch has no kernel and computes
attention step by step in single precision; for a contiguous copy it has one.
"""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch import Tensor, nn

from ..layouts.positions import has_position_bias
from .switch import AttentionSwitch

NAME = "loopwright_biased"


def attend(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    position_bias: Tensor | None = None,
    **kwargs: Any,
) -> Any:
    """transformers' attention by scaled_dot_product_attention, with a contiguous bias."""
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    if position_bias is not None:
        # Autocast would round it too, but after it was expanded to the whole batch.
        position_bias = position_bias.to(value.dtype, memory_format=torch.contiguous_format)
    return sdpa_attention_forward(module, query, key, value, attention_mask, position_bias=position_bias, **kwargs)


def switch_for(model: nn.Module) -> AttentionSwitch | str:
    """The switch that makes a model use this attention, or why it would not help."""
    if not has_position_bias(model):
        return "the model has no position bias"
    try:
        from transformers.integrations.sdpa_attention import sdpa_attention_forward
        from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
    except ImportError:
        return "transformers has no attention interface"
    if "position_bias" not in inspect.signature(sdpa_attention_forward).parameters:
        return "this version of transformers passes no position bias to the attention"
    switch = AttentionSwitch(model, {"sdpa": (NAME, attend)}, ALL_MASK_ATTENTION_FUNCTIONS["sdpa"])
    return switch if switch.reason is None else switch.reason
