"""Run: the state that exists only while a trainer trains."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from .checkpoint.manager import CheckpointManager
from .checkpoint.ownership.run_id import RUNNING, CurrentRun
from .logs.deferred_logs import LogPoint
from .measure.ledger import Ledger
from .measure.ledger_file import LedgerFile
from .measure.meter import Meter
from .measure.spikes import SpikeWatch
from .measure.throughput import ThroughputMeter
from .plan import Plan
from .shutdown.signals import SignalWatch
from .state import Progress
from .update import MicroBatch, Place, whole_batch


@dataclass(kw_only=True)
class Run:
    """One call of `train()`: created when it begins, closed when it ends.

    State that outlives a run is on the trainer: model, optimizer, scheduler, state. A closed run is kept until the next
    one begins, for reports and for a save after training; it keeps its numbers and its loader, but no device memory.
    """

    checkpoints: CheckpointManager
    signals: SignalWatch
    plan: Plan = field(init=False)
    progress: Progress = field(default_factory=Progress)
    meter: Meter = field(init=False)
    pace: ThroughputMeter = field(default_factory=ThroughputMeter)
    spikes: SpikeWatch = field(default_factory=SpikeWatch)
    ledger: Ledger = field(default_factory=Ledger)
    """What the wall time was spent on."""
    ledger_file: LedgerFile = field(init=False)
    learning_rate: float = 0.0
    """Learning rate of the latest update."""
    ignore_keys_for_eval: list[str] | None = None
    trial: Any = None
    """The trial of a hyper-parameter search that this run is."""

    status: str = RUNNING
    """How the run ends, as it is recorded in the output folder."""
    before: CurrentRun | None = None
    """The run that the output folder belonged to; it belongs to it again if this one ends before its first update."""
    resumes_by_command: bool = False
    """Whether the same command resumes this run, should it be interrupted."""
    has_begun: bool = False
    """Whether everything is ready for the first update."""
    has_agreed: bool = False
    """Whether the ranks have been compared before the first update."""
    has_diverged: bool = False
    """Whether the weights of the ranks have been found to differ."""
    may_leave: bool = True
    """Whether a signal may interrupt an evaluation: one of getting ready, or one of the loop that will be repeated as a
    whole. Those of callbacks would be lost, and those whose numbers were logged would be reported twice."""

    # the current update
    step: Callable[..., Any] = field(init=False)
    """Forward and backward of one micro-batch: the trainer's `training_step`, or a replay of it as a graph."""
    micro_batch: MicroBatch = field(default_factory=whole_batch)
    """The micro-batch that `step` computes; its weight is applied before the backward."""
    named: dict[str, tuple[Any, Any]] | None = None
    """Numerator and denominator of the named values of the update's loss, if it has any."""
    snapshot: Any = None
    """The state before the update, restored if a signal interrupts it."""
    undone: bool = False
    """Whether a signal has undone an update whose batches were already read."""

    # values that callbacks may change
    optimizer: Any = None
    """The optimizer in use; `trainer.optimizer` may have been assigned since."""
    schedule: Any = None
    schedule_follows_metric: bool = False
    """Whether the schedule advances after evaluations instead of updates."""
    asked_accumulation: int = 1
    """The gradient_accumulation_steps that the plan is based on; callbacks may set another value."""
    first_accumulation: int = 1
    """The gradient_accumulation_steps at the start of the run."""
    is_resized: bool = False
    """Whether earlier updates of this run had a different size, because gradient_accumulation_steps was changed."""

    # the start of the run
    started: float = 0.0
    first_step: int = 0
    first_sample: int = 0
    first_token: int = 0
    resumed_from: str | None = None
    """The checkpoint that the run resumes from."""
    resume_rng: Any = None
    """RNG states of the checkpoint the run resumes from, until they are restored."""

    # logs and incidents
    late_logs: list[LogPoint] = field(default_factory=list)
    """Log points whose numbers are still being computed."""
    places: dict[int, Place] = field(default_factory=dict)
    """The samples of the latest updates by step, until their numbers are known to be finite."""
    step_timer: Any = None
    """Breaks the time of the current update into parts, if this update is sampled."""
    step_timer_at: int = -1
    """The step after which `toggle_step_timing` starts or stops that timer."""

    def __post_init__(self) -> None:
        self.ledger_file = LedgerFile(self.ledger)

    @property
    def planned_updates(self) -> int | None:
        """Number of updates of the run; None before it is planned."""
        return self.plan.max_steps if "plan" in vars(self) else None

    @property
    def given_to_model_init(self) -> tuple[Any, ...]:
        """The trial, if this run is one."""
        return () if self.trial is None else (self.trial,)

    def close(self) -> None:
        """Release everything except the numbers of the run."""
        self.snapshot = self.step_timer = self.resume_rng = self.trial = None
        self.micro_batch = whole_batch()
        self.optimizer = self.schedule = None
        self.late_logs.clear()
        self.places.clear()
