"""Part: one subject behind a trainer, as the core knows it.

The parts of a trainer are made by its internals, once. Each has its own names; what it needs of another part it reaches
by that part's name: `self.internals.data.epoch_batches(...)`.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from itertools import islice
from typing import TYPE_CHECKING, Any

from ..args.base import BaseArguments
from ..notices import Notices
from .events import CallbackHandler
from .hooks import Hooks
from .plan import Plan
from .run import Run
from .state import TrainerControl, TrainerState
from .strategy import Strategy
from .update import MicroBatch, Place, Update

if TYPE_CHECKING:
    from .internals import Internals


class Part:
    """What every part has: the user's trainer as hooks, the strategy, and the run."""

    internals: Internals
    trainer: Hooks
    strategy: Strategy
    notices: Notices

    def __init__(self, internals: Any) -> None:
        self.internals = internals
        self.trainer, self.strategy, self.notices = internals.trainer, internals.strategy, internals.notices

    @property
    def run(self) -> Run:
        return self.internals.run

    @property
    def is_alone(self) -> bool:
        """Whether this process holds all the data of an update."""
        return self.internals.is_alone

    # ---- what the user may replace ----------------------------------------------------------------------------------

    @property
    def args(self) -> BaseArguments:
        return self.trainer.args

    @property
    def state(self) -> TrainerState:
        return self.trainer.state

    @property
    def control(self) -> TrainerControl:
        return self.trainer.control

    @property
    def callback_handler(self) -> CallbackHandler:
        return self.trainer.callback_handler

    @property
    def model(self) -> Any:
        return self.trainer.model

    # ---- checkpoints ------------------------------------------------------------------------------------------------

    def part_states(self) -> dict[str, Any]:
        """What the part wants back when a run resumes, as JSON values."""
        return {}

    def load_part_states(self, states: dict[str, Any]) -> None:
        """The counterpart of `part_states`; gets the states of all parts."""


class DataPart(Part):
    """The training data of a run, in its order."""

    def epoch_batches(self, epoch: int) -> Iterator[Any]:
        """The micro-batches of an epoch from where progress stands."""
        raise NotImplementedError

    def next_batches(self, batches: Iterator[Any]) -> list[Any]:
        """The micro-batches of the next update: fewer at the end of the data, none when it is over."""
        return list(islice(batches, self.run.plan.accumulation))

    def plan_again(self) -> Plan:
        """The plan of the arguments as they are now, from the beginning of the run."""
        raise NotImplementedError

    def samples_at(self, place: Place) -> tuple[list[int], list[Any]] | None:
        """An update's samples by index, and its micro-batches loaded again; None if the data owns its order."""
        raise NotImplementedError

    def release(self) -> None:
        """Let go of whatever loads the training data."""


class LossPart(Part):
    """One update: its micro-batches, and what the loss of each counts for."""

    def make_update(self, batches: list[Any]) -> Update:
        """The update made of these micro-batches, its targets counted."""
        raise NotImplementedError

    def sync_update(self, batches: list[Any]) -> Update | None:
        """This process's part of an update, or None when no process has any data left."""
        raise NotImplementedError

    def begin_update(self, update: Update) -> None:
        """Before the micro-batches of an update."""

    def around_update(self) -> AbstractContextManager[Any]:
        """The context of all micro-batches of an update."""
        return nullcontext()

    def micro_batch(self, update: Update, index: int) -> MicroBatch:
        """One micro-batch of an update: its inputs, the number of items its loss is given, and its weight."""
        raise NotImplementedError

    def end_update(self, update: Update, loss: Any) -> Any:
        """After the micro-batches of an update: its loss, from the sum of their losses."""
        return loss

    def recover(self, error: Exception, update: Update) -> bool:
        """After an error: whether the update may be tried again, in smaller micro-batches."""
        return False

    def write_incident(self, step: int) -> str:
        """Run a step whose numbers were not finite once more and write down what it shows; returns the folder."""
        raise NotImplementedError
