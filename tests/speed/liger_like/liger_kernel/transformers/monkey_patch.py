"""Replaces what Liger replaces in a Llama: attributes of modules, of their classes, and of their Python module."""

from __future__ import annotations

from types import MethodType
from typing import Any

import torch

SCALE = {"norm": 1.0}
"""A factor of the norm's output; another value makes the kernel wrong."""
CALLS = {"norm": 0, "rope": 0}


def norm_forward(self: Any, hidden: torch.Tensor) -> torch.Tensor:
    CALLS["norm"] += 1
    variance = hidden.float().pow(2).mean(-1, keepdim=True)
    return self.weight * (hidden * torch.rsqrt(variance + self.variance_epsilon)) * SCALE["norm"] + self.offset


def apply_liger_kernel_to_llama(rope: bool = True, rms_norm: bool = True, model: Any = None) -> None:
    from transformers.models.llama import modeling_llama

    if rope:
        before = modeling_llama.apply_rotary_pos_emb

        def rotated(*args: Any, **kwargs: Any) -> Any:
            CALLS["rope"] += 1
            return before(*args, **kwargs)

        modeling_llama.apply_rotary_pos_emb = rotated
    if rms_norm:
        modeling_llama.LlamaRMSNorm.is_liger = True
        for layer in model.model.layers:
            layer.input_layernorm.offset = 0.0
            layer.input_layernorm.forward = MethodType(norm_forward, layer.input_layernorm)


MODEL_TYPE_TO_APPLY_LIGER_FN = {"llama": apply_liger_kernel_to_llama}
