"""The arithmetic of a run: numbers of updates, epochs and samples."""

from __future__ import annotations

import math
import sys
from dataclasses import dataclass


@dataclass(frozen=True)
class Plan:
    """Sizes of a run; immutable."""

    batch_size: int
    """Samples of one micro-batch on one rank."""
    accumulation: int
    world_size: int
    batches_per_epoch: int | None
    """Micro-batches of all ranks in an epoch; None if the data has no length."""
    examples: int | None
    updates_per_epoch: int
    max_steps: int
    epochs: int

    @property
    def total_batch_size(self) -> int:
        """Effective batch size: samples of one update over all ranks."""
        return self.batch_size * self.accumulation * self.world_size

    @property
    def train_samples(self) -> int:
        """Samples seen by the whole run."""
        if self.examples is None or self.batches_per_epoch is None:
            return self.max_steps * self.total_batch_size
        whole_epochs, rest = divmod(self.max_steps, self.updates_per_epoch)
        return whole_epochs * self.examples + min(rest * self.total_batch_size, self.examples)

    def batches_in(self, epoch: int) -> int | None:
        """Micro-batches of one epoch; None if the data has no length."""
        return self.batches_per_epoch

    def updates_before(self, epoch: int) -> int:
        """Updates of all epochs before this one."""
        return epoch * self.updates_per_epoch

    def epochs_to(self, max_steps: int, *, done: int, epoch: int, left: int) -> int:
        """Total epochs of a run of `max_steps` updates: `done` are done, `left` remain in the current epoch."""
        after = max_steps - done - left
        return epoch + 1 + max(math.ceil(after / self.updates_per_epoch), 0)

    def epoch_after(self, epoch: int, batches: int) -> float:
        """The fractional epoch once `batches` micro-batches of epoch `epoch` are done."""
        return epoch + batches / (self.batches_per_epoch or self.max_steps * self.accumulation * self.world_size)


def make_plan(
    *,
    batch_size: int,
    accumulation: int,
    batches_per_epoch: int | None,
    examples: int | None,
    max_steps: int,
    num_train_epochs: float,
    world_size: int = 1,
) -> Plan:
    """The plan for data of this size; a positive `max_steps` overrides the number of epochs."""
    if batches_per_epoch is None:
        updates, epochs = max_steps, sys.maxsize
    else:
        # The last accumulation window of an epoch may be short and still makes an update.
        updates = max(math.ceil(batches_per_epoch / (accumulation * world_size)), 1)
        max_steps = max_steps if max_steps > 0 else math.ceil(num_train_epochs * updates)
        epochs = math.ceil(max_steps / updates)
    return Plan(
        batch_size=batch_size,
        accumulation=accumulation,
        world_size=world_size,
        batches_per_epoch=batches_per_epoch,
        examples=examples,
        updates_per_epoch=updates,
        max_steps=max_steps,
        epochs=epochs,
    )
