"""How far a replay is from an eager run."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor, nn

from ..proof.distance import in_pieces


def relative_difference(mine: list[Tensor], expected: list[Tensor]) -> float:
    """`|mine - expected| / |expected|` over all tensors as one vector; infinite if it is not finite."""
    if not mine:
        return 0.0
    pairs = ((in_pieces(a), in_pieces(b)) for a, b in zip(mine, expected, strict=True))
    sums = torch.stack([_squares(a.float(), b.float()) for pair in pairs for a, b in zip(*pair, strict=True)]).sum(0)
    off, size = sums.sqrt().tolist()
    found = off / max(size, 1e-12)
    return float(found) if np.isfinite(found) else float("inf")


def _squares(mine: Tensor, expected: Tensor) -> Tensor:
    """Squared norms of the difference and of `expected`; elements that are not finite in both are ignored."""
    off = torch.where(mine.isfinite() | expected.isfinite(), mine - expected, 0.0)
    return torch.stack([off.square().sum(), expected.nan_to_num(0.0, 0.0, 0.0).square().sum()])


def gradient_or_zeros(parameter: nn.Parameter) -> Tensor:
    """The gradient of a parameter itself, not a copy; zeros if it has none."""
    return torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
