"""The base of the parts of a PyTorch trainer."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from ..core.part import Part
from .arguments import TrainingArguments
from .hooks import TorchHooks
from .run import TorchRun
from .strategies.base import ManyProcesses
from .strategies.single import SingleDevice

if TYPE_CHECKING:
    from .internals import TorchInternals


class TorchPart(Part):
    """One concern of a trainer of PyTorch models."""

    internals: TorchInternals  # type: ignore[assignment]
    trainer: TorchHooks
    strategy: SingleDevice  # type: ignore[assignment]
    run: TorchRun
    args: TrainingArguments

    def __init__(self, internals: Any) -> None:
        super().__init__(internals)
        self.device: torch.device = internals.device

    @property
    def processes(self) -> ManyProcesses:
        """The strategy, as one with several ranks."""
        return self.internals.processes
