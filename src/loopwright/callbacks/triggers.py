"""Conditions to save or stop other than a number of updates: minutes, samples, a file, a time limit."""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from ..errors import ArgumentsError
from ..notices import logger

if TYPE_CHECKING:
    from ..args.base import BaseArguments

Clock = Callable[[], float]

SAVE_MARGIN = 1.5
"""Factor on the time of the last checkpoint, to estimate the next one."""
STEP_MEMORY = 0.9
"""Decay per update of the longest update time, so that a slow first update soon has no influence."""


class Trigger:
    """A condition checked after every update; it may set `should_save` or `should_training_stop`."""

    def step_ended(self, state: Any, control: Any) -> None:
        raise NotImplementedError

    def evaluated(self) -> None:
        """Called after an evaluation."""

    def saved(self, state: Any) -> None:
        """Called after a checkpoint was written."""


class EveryMinutes(Trigger):
    """Save when the last checkpoint is `minutes` old."""

    def __init__(self, minutes: float, clock: Clock) -> None:
        self.seconds, self.clock = minutes * 60, clock
        self.last = clock()

    def step_ended(self, state: Any, control: Any) -> None:
        if self.clock() - self.last >= self.seconds:
            control.should_save = True

    def saved(self, state: Any) -> None:
        self.last = self.clock()


class EverySamples(Trigger):
    """Save when another `count` samples have been seen."""

    def __init__(self, count: int, samples_seen: int) -> None:
        self.count, self.full = count, samples_seen // count

    def step_ended(self, state: Any, control: Any) -> None:
        full = getattr(state, "samples_seen", 0) // self.count
        if full > self.full:
            self.full = full
            control.should_save = True


class TriggerFile(Trigger):
    """Save when a file appears, and delete the file."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = os.fspath(path)
        self.ignored = False

    def step_ended(self, state: Any, control: Any) -> None:
        if self.ignored or not os.path.exists(self.path):
            return
        control.should_save = True
        try:
            os.unlink(self.path)
        except OSError as error:
            # A file that is not deleted would cause a checkpoint at every update.
            self.ignored = True
            logger.warning(
                f"save_trigger_file: {self.path} cannot be deleted ({error}). A checkpoint is saved now; the file is "
                "ignored for the rest of this run."
            )


class RuntimeLimit(Trigger):
    """Save and stop while there is enough time for one more update, an evaluation and the checkpoint."""

    def __init__(self, seconds: float, clock: Clock) -> None:
        self.limit, self.clock = seconds, clock
        self.started = self.last = clock()
        self.longest_step = self.longest_evaluation = 0.0

    def step_ended(self, state: Any, control: Any) -> None:
        now = self.clock()
        self.longest_step = max(now - self.last, STEP_MEMORY * self.longest_step)
        self.last = now
        if now - self.started + self._needed(state) < self.limit or control.should_training_stop:
            return
        control.should_save = control.should_training_stop = True
        logger.warning(
            f"max_runtime: stopping at step {state.global_step} after {now - self.started:.0f} of {self.limit:.0f} "
            'seconds, with a checkpoint: resume_from_checkpoint="auto" resumes from it.'
        )

    def evaluated(self) -> None:
        now = self.clock()
        self.longest_evaluation = max(self.longest_evaluation, now - self.last)
        self.last = now

    def saved(self, state: Any) -> None:
        self.last = self.clock()

    def _needed(self, state: Any) -> float:
        save_seconds = getattr(state, "last_save_seconds", 0) or 0
        return self.longest_step + self.longest_evaluation + SAVE_MARGIN * float(save_seconds)


BUILDERS: dict[str, Callable[[Any, Any, Clock], Trigger]] = {
    "save_minutes": lambda value, state, clock: EveryMinutes(value, clock),
    "save_samples": lambda value, state, clock: EverySamples(value, getattr(state, "samples_seen", 0)),
    "save_trigger_file": lambda value, state, clock: TriggerFile(value),
    "max_runtime": lambda value, state, clock: RuntimeLimit(seconds_in(value), clock),
}
"""Arguments with a trigger, and the function that creates it. The time limit is last: it reads what the others set."""


def watches_for(args: BaseArguments, state: Any, clock: Clock) -> tuple[Trigger, ...]:
    """The triggers of these arguments; their clocks start now."""
    asked = ((build, getattr(args, name, None)) for name, build in BUILDERS.items())
    return tuple(build(value, state, clock) for build, value in asked if value is not None)


_CLOCK_TIME = re.compile(r"(?:(?P<days>\d+)-)?(?P<hours>\d+):(?P<minutes>\d{1,2}):(?P<seconds>\d{1,2}(?:\.\d+)?)")
_UNITS = {"days": 86400, "hours": 3600, "minutes": 60, "seconds": 1}


def seconds_in(duration: float | str) -> float:
    """A duration given in seconds, as "HH:MM:SS" or as "D-HH:MM:SS"."""
    if not isinstance(duration, str):
        return float(duration)
    match = _CLOCK_TIME.fullmatch(duration.strip())
    if match:
        return sum(float(match[unit] or 0) * seconds for unit, seconds in _UNITS.items())
    try:
        return float(duration)
    except ValueError:
        raise ArgumentsError(
            f"max_runtime={duration!r} is not a duration. Use seconds (3600), HH:MM:SS or D-HH:MM:SS."
        ) from None
