"""Part: one concern of a trainer, such as data, loss or saving.

The internals of a trainer create its parts once. Parts do not share a namespace; one uses another by name:
`self.internals.data.epoch_batches(...)`.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from itertools import islice
from operator import attrgetter
from typing import TYPE_CHECKING, Any

from ..notices import Notices
from .hooks import HookUser
from .plan import Plan
from .run import Run
from .strategy import Strategy
from .update import MicroBatch, Place, Update

if TYPE_CHECKING:
    from .internals import Internals


class Part(HookUser):
    """Base of all parts: holds the user's trainer, the strategy and the run."""

    internals: Internals
    strategy: Strategy
    notices: Notices
    run: Run = property(attrgetter("internals.run"))  # type: ignore[assignment]
    is_alone: bool = property(attrgetter("internals.is_alone"))  # type: ignore[assignment]
    """Whether this process holds all the data of an update."""

    def __init__(self, internals: Any) -> None:
        self.internals = internals
        self.trainer, self.strategy, self.notices = internals.trainer, internals.strategy, internals.notices

    # ---- checkpoints ------------------------------------------------------------------------------------------------

    def part_states(self) -> dict[str, Any]:
        """State of the part for a checkpoint, as JSON values."""
        return {}

    def load_part_states(self, states: dict[str, Any]) -> None:
        """The counterpart of `part_states`; receives the states of all parts."""


class DataPart(Part):
    """The training data of a run, in its order."""

    def epoch_batches(self, epoch: int) -> Iterator[Any]:
        """The micro-batches of an epoch, starting at the run's current position."""
        raise NotImplementedError

    def restart_epoch(self) -> None:
        """With ignore_data_skip, return to the beginning of an epoch that is not complete."""
        progress = self.run.progress
        if self.args.ignore_data_skip and progress.batches_in_epoch != self.run.plan.batches_in(progress.epoch):
            progress.batches_in_epoch = progress.samples_in_epoch = 0

    def next_batches(self, batches: Iterator[Any]) -> list[Any]:
        """The micro-batches of the next update: fewer at the end of the data, an empty list after it."""
        return list(islice(batches, self.run.plan.accumulation))

    def plan_again(self) -> Plan:
        """The plan for the current arguments, from the beginning of the run."""
        raise NotImplementedError

    def samples_at(self, place: Place) -> tuple[list[int], list[Any]] | None:
        """An update's sample indices, and its micro-batches loaded again; None if the data has its own order."""
        raise NotImplementedError

    def release(self) -> None:
        """Release the loaders of the training data."""

    def ended_with_errors(self) -> AbstractContextManager[None]:
        """A context that an error leaves without processes that load data."""
        return nullcontext()


class PushPart(Part):
    """Pushes checkpoints and models to the Hub; this one, for trainers without it, pushes nothing."""

    def create_repository(self) -> None:
        """Create the repository that a run pushes to; called by the constructor of a trainer."""

    def begin(self) -> None:
        """Called when a run begins, by every rank."""

    def local_checkpoint(self, request: str) -> str:
        """The folder of a requested checkpoint, downloaded if it is one on the Hub; called by rank 0."""
        return request

    def before_save(self) -> None:
        """Called before a checkpoint is saved, by every rank."""

    def after_save(self) -> None:
        """Called after a checkpoint was saved or left to the background, by every rank."""

    def finish(self) -> None:
        """Wait for all pushes at the end of training, and raise the error of one that failed; a collective."""

    def close(self) -> None:
        """Abandon what is not pushed yet; called when a run ends, also after an error."""

    def wait(self) -> None:
        """Wait for the pushes in progress."""


class LossPart(Part):
    """One update: its micro-batches, and the weight of the loss of each."""

    def make_update(self, batches: list[Any]) -> Update:
        """The update made of these micro-batches, with its targets counted."""
        raise NotImplementedError

    def sync_update(self, batches: list[Any]) -> Update | None:
        """This rank's part of an update, or None when no rank has data left."""
        raise NotImplementedError

    def begin_update(self, update: Update) -> None:
        """Called before the micro-batches of an update."""

    def around_update(self) -> AbstractContextManager[Any]:
        """A context around all micro-batches of an update."""
        return nullcontext()

    def micro_batch(self, update: Update, index: int) -> MicroBatch:
        """One micro-batch of an update: its inputs, the item count passed to its loss, and its weight."""
        raise NotImplementedError

    def end_update(self, update: Update, loss: Any) -> Any:
        """The loss of an update from the sum of its micro-batches' losses; called after the last micro-batch."""
        return loss

    def recover(self, error: Exception, update: Update) -> bool:
        """Whether the update may be retried after this error, in smaller micro-batches."""
        return False

    def explain(self, error: BaseException, batch: Any, what: str = "training") -> str:
        """One sentence about the cause of an error of a forward pass or a loss; empty if it is not known."""
        return ""

    def write_incident(self, step: int) -> str:
        """Run a non-finite step again and write a report on it; returns the folder."""
        raise NotImplementedError
