"""TorchRun: the state that exists only while a PyTorch model is trained."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ..core.run import Run
from ..speed.engine import SpeedEngine
from ..speed.measure.step_timing import TimeSplit
from ..speed.memory.host_heap import HostHeap
from ..speed.model_stamp import ModelStamp
from .data.loaders import OrderedSampler
from .data.streams import StreamPosition
from .loss.accounting import LossAccounting
from .measure.token_counter import TorchWorkCounter
from .model.known import Known


@dataclass(kw_only=True)
class TorchRun(Run):
    """One call of `train()` of a PyTorch trainer."""

    # loss
    accounting: LossAccounting = field(init=False)
    """The denominator of the loss, and the weight of each micro-batch."""
    micro_batches: int | None = None
    """Micro-batches of the current update; None before the first."""
    micro_split: int = 1
    """Number of parts each micro-batch is split into after running out of memory."""
    before_update: Any = None
    """The state before the update, if it may be retried after running out of memory."""

    # speed
    speed: SpeedEngine | None = None
    """None if the collator's micro-batches are kept."""
    speed_plan: dict[str, Any] | None = None
    """The speed plan and its reasons: `choices`, rows of (name, on, reason), and `probe`, numbers by name."""
    has_planned: bool = False
    """Whether all ranks have made their speed plan."""
    stamp: ModelStamp | None = None
    """The model at the last update, if loss weights or the speed plan depend on it."""
    heap: HostHeap | None = None
    """The heap of the process, if it keeps freed memory for the run."""
    time_split: TimeSplit | None = None
    """The time of the sampled updates so far, by part."""
    work: TorchWorkCounter = field(init=False)
    """Counts the tokens and operations of updates."""

    # data
    loader: Any = None
    order_sampler: OrderedSampler | None = None
    """The sampler of the training data, if loopwright determines the order."""
    splits_by_source: bool = False
    """Whether micro-batches are divided by the sources of their samples, to log the loss of each."""
    batches_overridden: bool = False
    """Whether `get_batch_samples` is overridden."""
    counted_loader: tuple[Any, int] | None = None
    """The training loader, and the number of batches over all ranks."""
    stream: StreamPosition | None = None
    """The position in a stream, from the checkpoint the run resumes from."""
    stream_before: StreamPosition | None = None
    """The position in a stream before the batches of the current update were read."""
    stream_end: StreamPosition | None = None
    """The position at the end of a stream, once this epoch has reached it: the stream may start over there."""
    epoch_rng: dict[str, Any] | None = None
    """RNG states at the beginning of the epoch, if the data has its own order."""
    generators: list[Any] = field(default_factory=list)
    """The states of the loader's own random generators at the beginning of the epoch."""
    resume_generators: list[Any] = field(default_factory=list)
    """Their states from the checkpoint the run resumes from, until they are restored."""

    # resuming and changes
    resume_from: Path | None = None
    kept_accumulation: int | None = None
    """The accumulation that preserves the effective batch size when a run resumes with another number of ranks."""
    scheduled_then: int | None = None
    """Number of updates the schedule was made for, if their size has changed since, in a resumed run."""
    scheduled_updates: int = 0
    """Number of updates the learning rate schedule was made for."""
    known: Known | None = None
    """The objects training uses; None when not training."""

    def close(self) -> None:
        super().close()
        self.known = self.micro_batches = self.stamp = self.before_update = None
        if self.heap is not None:
            self.heap.release()
            self.heap = None
