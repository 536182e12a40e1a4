"""Quantized models: which can be trained, and layers of bitsandbytes that evaluation on a CPU would change."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn

from ...errors import ModelError
from ..data.columns import innermost

_REPACKS = "support_avx512bf16_for_cpu"


def check_trainable(model: nn.Module) -> None:
    """Refuse to train a quantized model without adapters: only what happens not to be quantized would be trained."""
    own: Any = innermost(model)
    quantizer = getattr(own, "hf_quantizer", None)
    if quantizer is None or hasattr(model, "peft_config") or getattr(own, "_hf_peft_config_loaded", False):
        return
    if getattr(quantizer, "is_qat_trainable", False):
        return
    method = getattr(getattr(quantizer, "quantization_config", None), "quant_method", "quantized")
    name = getattr(method, "value", method)
    raise ModelError(
        f"the weights of {type(own).__name__} are quantized ({name}) and cannot be trained. "
        "Add adapters to train, for example peft.get_peft_model(model, LoraConfig(...))"
    )


def keep_differentiable(model: nn.Module, tell: Callable[[str], None]) -> None:
    """Stop 4-bit layers of bitsandbytes from repacking their weights in an evaluation on a CPU.

    Repacked weights are rounded again, and no gradient flows through them in later updates.
    """
    layers = [each for each in model.modules() if getattr(each, _REPACKS, False)]
    repacked = [each for each in layers if _is_repacked(each)]
    for layer in repacked:
        layer.state_dict()  # packs the weights as they were
    for layer in layers:
        setattr(layer, _REPACKS, False)
    if repacked:
        tell(
            f"bitsandbytes repacked {len(repacked)} layers of the model for inference on a CPU before training; their "
            "scales are rounded now. Load the model again to train the original weights"
        )


def _is_repacked(layer: nn.Module) -> bool:
    state = getattr(getattr(layer, "weight", None), "quant_state", None)
    return bool(getattr(state, "packing_format_for_cpu", False))
