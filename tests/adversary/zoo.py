"""All cases together: importing this fills the list."""

from __future__ import annotations

from . import besides, between_samples, changed, everyday_losses, later, means, outside, training_mode
from .cases import CASES, Case

__all__ = [
    "CASES", "Case", "besides", "between_samples", "changed", "everyday_losses", "later", "means", "outside",
    "training_mode",
]  # fmt: skip
