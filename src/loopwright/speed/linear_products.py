"""Linear layers on a CPU, with oneDNN's matrix products where MKL's are slow.

torch calls MKL for products in single precision. MKL has AVX-512 code for Intel's processors only; oneDNN, which torch
contains too, has it for all: on AMD's Zen 5 a product takes half of the time. Only the rounding differs, which the
proof of the layout covers.
"""

from __future__ import annotations

import platform
from functools import lru_cache
from pathlib import Path
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from .fused_modules import FusedModules
from .output_layer import is_looked_through

ONEDNN = "oneDNN's matrix products"
LEAST = 1 << 21
"""Multiplications of a product below which the call takes longer than what is saved."""


class LinearProducts(FusedModules):
    """Replaces the forward of a model's linear layers within a context."""

    def __init__(self, model: nn.Module) -> None:
        found = [module for module in model.modules() if type(module) is nn.Linear] if onednn_is_faster() else []
        self._found = [(module, MethodType(forward, module)) for module in found if _is_single_on_cpu(module.weight)]

    @property
    def are_used(self) -> bool:
        """Whether there are such layers."""
        return bool(self._found)


def onednn_is_faster() -> bool:
    """Whether this processor has AVX-512, but is not one for which MKL uses it. Not measured: two runs must agree."""
    if not (torch.backends.mkl.is_available() and torch.backends.mkldnn.is_available()):
        return False
    if not hasattr(torch.ops.mkldnn, "_linear_pointwise"):  # not part of torch's interface
        return False
    has_avx512 = torch.backends.cpu.get_cpu_capability() == "AVX512"
    return has_avx512 and bool(torch.backends.mkldnn.enabled) and "AuthenticAMD" in _processor()


@lru_cache(maxsize=1)
def _processor() -> str:
    """A text that contains the maker of the processor."""
    try:
        return Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return platform.processor()


def forward(module: nn.Linear, input: Tensor) -> Tensor:
    """The forward of a layer while it is replaced."""
    weight, bias = module.weight, module.bias
    if not _is_supported(input, weight, bias):
        return F.linear(input, weight, bias)
    product: Tensor = _Product.apply(input.reshape(-1, input.shape[-1]), weight, bias)
    return product.view(*input.shape[:-1], weight.shape[0])


def _is_supported(input: Tensor, weight: Tensor, bias: Tensor | None) -> bool:
    """Whether a product is a large one of plain matrices in single precision."""
    if input.numel() * weight.shape[0] < LEAST or torch.is_autocast_enabled("cpu") or is_looked_through():
        return False
    given = (input, weight) if bias is None else (input, weight, bias)
    return all(type(each) in (Tensor, nn.Parameter) and _is_single_on_cpu(each) for each in given)


def _is_single_on_cpu(tensor: Tensor) -> bool:
    return tensor.dtype is torch.float32 and tensor.device.type == "cpu"


class _Product(torch.autograd.Function):
    """`left @ right.T + bias`. Its gradients are products of the same kind, so that they have gradients too."""

    @staticmethod
    def forward(ctx: Any, left: Tensor, right: Tensor, bias: Tensor | None) -> Tensor:
        of_left, of_right, _ = ctx.needs_input_grad
        ctx.save_for_backward(left if of_right else None, right if of_left else None)
        product: Tensor = torch.ops.mkldnn._linear_pointwise(left, right, bias, "none", [], "")
        return product

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        left, right = ctx.saved_tensors
        of_left, of_right, of_bias = ctx.needs_input_grad
        return (
            _Product.apply(gradient, right.t(), None) if of_left else None,
            _Product.apply(gradient.t(), left.t(), None) if of_right else None,
            gradient.sum(0) if of_bias else None,
        )
