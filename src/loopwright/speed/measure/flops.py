"""The number of operations a model needs, counted once in a small forward pass.

The forward pass is counted without gradients. The backward is derived: every matrix product of the forward has two of
the same size in the backward, one for the gradient of its input and one for that of its weight, which gives three times
the forward in total. Products for the gradients of frozen weights are omitted in proportion. Attention's products have
no weights and always count three times; for causal models half of them, since the other half need not be computed.
Recomputation (activation checkpointing) and padding are not counted: this is the work needed, not the work done.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from ...snapshot import restored

LONGEST = 256
"""Most tokens per row of the batch that is counted."""
SHORTEST = 16
"""Below this length, attention's share cannot be separated from the rest by two lengths."""
ROWS = 2


@dataclass(frozen=True)
class Operations:
    """Operations of forward and backward: per token, and per squared length of a sample."""

    per_token: float
    per_square: float = 0.0

    def of(self, tokens: float, squared_lengths: float = 0.0) -> float:
        """The operations of samples with this total of tokens and this sum of squared lengths."""
        return self.per_token * tokens + (self.per_square * squared_lengths if self.per_square else 0.0)


def count_operations(
    forward: Callable[[dict[str, Any]], Any],
    model: nn.Module,
    batch: Mapping[str, Any],
    main: str,
    *,
    causal: bool,
) -> Operations | None:
    """The operations of the model per token of the input `main`; None if a small batch cannot be taken from this one.

    RNG states and buffers are restored; gradients and modes are unchanged.
    """
    rows, length = _shape(batch, main)
    if not length:
        return None
    longest = min(length, LONGEST)
    separable = longest >= SHORTEST and _one_length(batch, length)
    lengths = (longest, longest // 2) if separable else (longest if _one_length(batch, length) else length,)
    with restored(model):
        counts = [_watched(forward, cut(batch, rows=ROWS, old=length, new=each)) for each in lengths]
    per_length = [count / (min(rows, ROWS) * each) for count, each in zip(counts, lengths, strict=True)]
    linear, square = _separate(per_length, lengths)
    if linear + square <= 0:
        return None
    return Operations((2 + trainable_share(model)) * linear, 3 * square * (0.5 if causal else 1.0))


def cut(batch: Mapping[str, Any], *, rows: int, old: int, new: int) -> dict[str, Any]:
    """The first rows of a batch; dimensions of size `old` are truncated to `new`."""

    def smaller(value: Any) -> Any:
        if not isinstance(value, Tensor) or not value.ndim:
            return value
        value = value[:rows]
        for axis in range(1, value.ndim):
            if value.shape[axis] == old:
                value = value.narrow(axis, 0, new)
        return value

    return {name: smaller(value) for name, value in batch.items()}


def trainable_share(model: nn.Module) -> float:
    """The fraction of a model's matrix elements that are trained."""
    matrices = [each for each in model.parameters() if each.ndim > 1]
    everything = sum(each.numel() for each in matrices)
    return sum(each.numel() for each in matrices if each.requires_grad) / everything if everything else 1.0


def _watched(forward: Callable[[dict[str, Any]], Any], batch: dict[str, Any]) -> int:
    counter = FlopCounterMode(display=False)
    with ExitStack() as stack:
        stack.enter_context(torch.no_grad())
        # The counter supports matrix products, but not all kernels of compiled code and fused attention.
        stack.enter_context(torch.compiler.set_stance("force_eager"))
        stack.enter_context(sdpa_kernel(SDPBackend.MATH))
        stack.enter_context(counter)
        forward(batch)
    return int(counter.get_total_flops())


def _separate(per_length: list[float], lengths: tuple[int, ...]) -> tuple[float, float]:
    """Operations per token as a linear function of the length: intercept and slope."""
    if len(lengths) == 1:
        return per_length[0], 0.0
    slope = (per_length[0] - per_length[1]) / (lengths[0] - lengths[1])
    if slope <= 0 or math.isclose(per_length[0], per_length[1], rel_tol=1e-9):
        return per_length[0], 0.0
    return per_length[0] - slope * lengths[0], slope


def _shape(batch: Mapping[str, Any], main: str) -> tuple[int, int]:
    """Rows and length of the main input; zeros if it does not hold token sequences."""
    found = batch.get(main)
    if not isinstance(found, Tensor) or found.ndim < 2 or found.is_floating_point():
        return 0, 0
    return found.shape[0], found.shape[1]


def _one_length(batch: Mapping[str, Any], length: int) -> bool:
    """Whether all sequences in a batch have this length, so that truncating them gives a valid batch."""
    tensors = [value for value in batch.values() if isinstance(value, Tensor) and value.ndim > 1]
    return all(value.shape[1] == length for value in tensors)
