"""What a speed plan depends on, as values and functions: this room knows no trainer."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from .probe import LossOf


@dataclass
class Situation:
    """A model, its loss, its device, and what the user asked for."""

    model: nn.Module
    """The user's own module, without wrappers."""
    device: torch.device
    level: str
    """off, auto or max."""
    loss_of: LossOf
    put: Callable[[Any], Any]
    """A batch to the device."""
    untouched: Callable[[], AbstractContextManager[Any]]
    """Random states and buffers put back afterwards."""
    as_trained: Callable[[], AbstractContextManager[Any]]
    """Around a forward as training runs it: autocast."""
    computes_half: bool
    """Whether matrix products are computed in half precision."""
    learn: Callable[[Any], bool]
    """Find out how the loss counts its targets, from one batch; returns whether that is known now."""
    shifts: Callable[[], bool]
    """Whether the loss leaves out the first target of each row."""
    updates_left: Callable[[], int]
    compile: Callable[[], None]
    """Compile the model's blocks for changing lengths."""
    why_not_compile: str | None
    operations_per_token: float
    token_budget: int | None = None
    """Tokens per micro-batch, if the user said so."""
    only_grouped: str | None = None
    """Why nothing but grouping by length is allowed, if so."""
    is_pair: bool = False
    """Whether samples are pairs of source and target."""
    device_memory: Callable[[], int | None] = lambda: None
    """Bytes the device has in all; None where nothing is planned with them."""
    model_bytes: Callable[[], int] = lambda: 0
    """Bytes of weights, gradients and optimizer states."""
    recompute: Callable[[str], Callable[[], None]] = lambda policy: lambda: None
    """Have the model recompute activations by a policy; returns what undoes it."""
    policies: tuple[str, ...] = ("none",)
    """What the model can do about its activations, from nothing recomputed to all."""
    recomputes: bool = False
    """Whether the user has activations recomputed already."""

    @property
    def insists(self) -> bool:
        """Whether the user wants what is possible, whether or not it pays."""
        return self.level == "max" or self.token_budget is not None

    @property
    def on_gpu(self) -> bool:
        return self.device.type != "cpu"

    def described(self) -> str:
        """Where a plan is proved; elsewhere it is proved again."""
        name = torch.cuda.get_device_name(self.device) if self.device.type == "cuda" else self.device.type
        return f"{name}, torch {torch.__version__}"
