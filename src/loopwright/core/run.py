"""Run: everything that exists only while a trainer trains."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from .checkpoint.manager import CheckpointManager
from .deferred_logs import LogPoint
from .meter import Meter
from .plan import Plan
from .signals import SignalWatch
from .spikes import SpikeWatch
from .state import Progress
from .throughput import ThroughputMeter
from .update import MicroBatch, Place, whole_batch


@dataclass(kw_only=True)
class Run:
    """One call of `train()`: made when it begins, closed when it ends.

    What survives a run is on the trainer: model, optimizer, scheduler, state. A closed run is kept until the next one
    begins, for reports and for a save after training; it holds numbers, no data and no device memory.
    """

    checkpoints: CheckpointManager
    signals: SignalWatch
    plan: Plan = field(init=False)
    progress: Progress = field(default_factory=Progress)
    meter: Meter = field(init=False)
    pace: ThroughputMeter = field(default_factory=ThroughputMeter)
    spikes: SpikeWatch = field(default_factory=SpikeWatch)
    learning_rate: float = 0.0
    """The learning rate of the newest update."""
    ignore_keys_for_eval: list[str] | None = None

    # the update that is being carried out
    step: Callable[..., Any] = field(init=False)
    """Forward and backward of one micro-batch: the trainer's `training_step`, or what replays it as a graph."""
    micro_batch: MicroBatch = field(default_factory=whole_batch)
    """The micro-batch that `step` computes: its weight is applied before the backward."""
    snapshot: Any = None
    """The state before the update, for a signal that cuts it short."""
    undone: bool = False
    """Whether a signal has undone an update whose batches were already read."""

    # what callbacks may change
    optimizer: Any = None
    """The optimizer that training goes by; `trainer.optimizer` may have been assigned since."""
    schedule: Any = None
    schedule_follows_metric: bool = False
    """Whether the learning rate moves after evaluations instead of updates."""
    asked_accumulation: int = 1
    """The accumulation the plan was made for; callbacks may ask for another one."""
    first_accumulation: int = 1
    """The accumulation the run was started with."""
    is_resized: bool = False
    """Whether updates of this run had another size before, because the accumulation was changed in between."""

    # where the run began
    started: float = 0.0
    first_step: int = 0
    first_sample: int = 0
    first_token: int = 0
    resume_rng: Any = None
    """RNG states of the checkpoint the run resumes from, until they are restored."""

    # logs and incidents
    late_logs: list[LogPoint] = field(default_factory=list)
    """Log points whose numbers are still being computed."""
    places: dict[int, Place] = field(default_factory=dict)
    """The samples of the newest updates by step, until their numbers are known to be finite."""
    split: Any = None
    """The timer of the update whose time is being split into parts."""
    split_at: int = -1
    """The update after which `toggle_step_timing` starts or stops that timer."""

    @property
    def planned_updates(self) -> int | None:
        """How many updates the run has; None before it is planned."""
        return self.plan.max_steps if "plan" in vars(self) else None

    def close(self) -> None:
        """Release everything but the numbers of the run."""
        self.snapshot = self.split = self.resume_rng = None
        self.micro_batch = whole_batch()
        self.optimizer = self.schedule = None
        self.late_logs.clear()
        self.places.clear()
