"""Modules that transformers computes in many small kernels and torch in one: the tanh form of GELU, T5's RMS norm.

Where blocks are not compiled, these are half of the time that a T5 spends outside of matrix products and attention. The
proof of the layout that uses them covers them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

GELU = "NewGELUActivation"
NORMS = ("T5LayerNorm", "MT5LayerNorm", "UMT5LayerNorm", "LongT5LayerNorm")


class FusedModules:
    """Replaces the forward of such modules within a context.

    What reads the module is a method of it, so that a copy of the model that is made meanwhile uses its own weights.
    """

    def __init__(self, model: nn.Module) -> None:
        self._found = [(module, forward) for module in model.modules() if (forward := _fused(module)) is not None]

    @contextmanager
    def active(self) -> Iterator[None]:
        # A forward that someone else has replaced is left as it is.
        changed = [(module, forward) for module, forward in self._found if "forward" not in module.__dict__]
        for module, forward in changed:
            module.forward = forward
        try:
            yield
        finally:
            for module, _ in changed:
                del module.forward


def _fused(module: nn.Module) -> Callable[..., Any] | None:
    kind = type(module)
    if not kind.__module__.startswith("transformers."):
        return None
    if kind.__name__ == GELU:
        return _gelu
    return MethodType(forward, module) if kind.__name__ in NORMS else None


def _gelu(given: Tensor) -> Tensor:
    return F.gelu(given, approximate="tanh")


def forward(module: Any, hidden_states: Tensor) -> Tensor:
    """The forward of T5's RMS norm while it is replaced."""
    weight = module.weight
    # The kernel needs one dtype; in double precision the module squares in single precision.
    if hidden_states.dtype != weight.dtype or weight.dtype is torch.float64:
        written: Tensor = type(module).forward(module, hidden_states)
        return written
    return F.rms_norm(hidden_states, (hidden_states.shape[-1],), weight, module.variance_epsilon)
