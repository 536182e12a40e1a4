"""TorchRun: what exists only while a PyTorch model is trained."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ..core.run import Run
from ..speed.engine import SpeedEngine
from ..speed.measure.step_timing import TimeSplit
from ..speed.model_stamp import ModelStamp
from .data.loaders import OrderedSampler
from .loss.accounting import LossAccounting
from .model.known import Known
from .token_counter import TorchWorkCounter


@dataclass(kw_only=True)
class TorchRun(Run):
    """One call of `train()` of a PyTorch trainer."""

    # loss
    accounting: LossAccounting = field(init=False)
    """The denominator of the loss: what is known about it, and the weight of each micro-batch."""
    micro_batches: int | None = None
    """Micro-batches of the current update; None before the first."""
    micro_split: int = 1
    """Parts that each micro-batch is split into since memory ran out."""
    before_update: Any = None
    """The state before the update, where it may have to be tried again after running out of memory."""

    # speed
    speed: SpeedEngine | None = None
    """None when micro-batches stay as the collator made them."""
    speed_plan: dict[str, Any] | None = None
    """What was switched on and why: `choices`, rows of (name, on, reason), and `probe`, numbers by name."""
    has_planned: bool = False
    """Whether all ranks have made their speed plan."""
    stamp: ModelStamp | None = None
    """The model at the last update, where the loss weights or the speed plan depend on it."""
    time_split: TimeSplit | None = None
    work: TorchWorkCounter = field(init=False)

    # data
    loader: Any = None
    order_sampler: OrderedSampler | None = None
    """The sampler of the training data, if its order is ours."""
    batches_overridden: bool = False
    """Whether `get_batch_samples` is overridden."""
    counted_loader: tuple[Any, int] | None = None
    """The training loader and how many batches the loaders of all ranks give."""
    stream: Any = None
    """The state of a stream, from the checkpoint the run resumes from."""
    stream_before: Any = None
    """The state of a stream before the batches of the current update were read."""
    epoch_rng: dict[str, Any] | None = None
    """RNG states at the beginning of the epoch, where the data owns its order."""

    # resuming and changes
    resume_from: Path | None = None
    kept_accumulation: int | None = None
    """The accumulation that keeps the size of updates when a run resumes on another number of ranks."""
    scheduled_then: int | None = None
    """The updates the schedule was made for, where a resumed run has changed their size since."""
    scheduled_updates: int = 0
    """How many updates the schedule of the learning rate was made for."""
    known: Known | None = None
    """What training goes by; None while nothing is trained."""

    def close(self) -> None:
        super().close()
        self.known = self.micro_batches = self.stamp = self.before_update = None
