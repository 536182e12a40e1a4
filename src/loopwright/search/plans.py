"""Plans of searches without a package: which trial begins or continues next. Pure functions of the journal."""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from .coordinator import better
from .journal import COMPLETE, FAILED, PAUSED, RUNNING, Entry, Task
from .space import Choice, Interval, Space

Entries = Mapping[int, Entry]


class Plan(Protocol):
    """Chooses the next task; None if there is none, or none until a running trial ends."""

    def next(self, entries: Entries, busy: set[int]) -> Task | None: ...


def interrupted(entries: Entries, busy: set[int]) -> Task | None:
    """A trial that was running when the search was killed."""
    return next((each.task for each in entries.values() if each.state == RUNNING and each.number not in busy), None)


def ranked(entries: list[Entry], stage: int, direction: str) -> list[Entry]:
    """Trials by their objective at the end of a stage, the best first."""
    sign = 1 if direction == "minimize" else -1
    there = [each for each in entries if stage in each.stages]
    return sorted(there, key=lambda each: (each.stages[stage] != each.stages[stage], sign * each.stages[stage]))


def best_of(entries: Entries, direction: str) -> Entry | None:
    """The best of the complete trials; the one with the lower number of two that are equal."""
    best: Entry | None = None
    for each in sorted(entries.values(), key=lambda each: each.number):
        if each.state == COMPLETE and (best is None or better(each.objective, best.objective, direction)):
            best = each
    return best


@dataclass(frozen=True)
class Independent:
    """Trials that do not depend on each other: random values, or the points of a grid."""

    n_trials: int
    points: tuple[dict[str, Any], ...] | None = None

    def next(self, entries: Entries, busy: set[int]) -> Task | None:
        """Interrupted trials first, then new ones."""
        found = interrupted(entries, busy)
        if found is not None or len(entries) >= self.n_trials:
            return found
        number = len(entries)
        return Task(number, {} if self.points is None else self.points[number])


@dataclass(frozen=True)
class Halving:
    """Asynchronous successive halving (ASHA): the best trials of a rung continue where they paused.

    The first rung ends at `min_steps`, or at the first evaluation; each further one is `factor` times as long.
    """

    n_trials: int
    direction: str
    min_steps: int | None = None
    factor: int = 3

    def next(self, entries: Entries, busy: set[int]) -> Task | None:
        """A promotion if there is one, the highest rung first; else a new trial; at the end, the best one of all."""
        found = interrupted(entries, busy)
        if found is not None:
            return found
        rungs = sorted({rung for each in entries.values() for rung in each.stages}, reverse=True)
        for rung in rungs:
            order = ranked(list(entries.values()), rung, self.direction)
            for each in order[: len(order) // self.factor]:
                if self._may_continue(each, rung, busy):
                    return self._promotion(each)
        if len(entries) < self.n_trials:
            return Task(len(entries), until=self.min_steps or 1)
        if busy or any(each.state == COMPLETE for each in entries.values()):
            return None
        for rung in rungs:
            for each in ranked(list(entries.values()), rung, self.direction):
                if self._may_continue(each, rung, busy):
                    return self._promotion(each)
        return None

    def _may_continue(self, entry: Entry, rung: int, busy: set[int]) -> bool:
        return entry.state == PAUSED and entry.task.stage == rung and entry.number not in busy

    def _promotion(self, entry: Entry) -> Task:
        first, rung = self.min_steps or entry.steps[0], entry.task.stage + 1
        return Task(entry.number, entry.params, until=first * self.factor**rung, stage=rung)


@dataclass(frozen=True)
class Population:
    """Population-based training: after each generation, the worst continue from the checkpoints of the best.

    A generation ends every `interval` updates, or at each evaluation. A trial that continues from another one gets its
    values, changed a little.
    """

    n_trials: int
    direction: str
    space: Any
    seed: int
    interval: int | None = None
    quantile: float = 0.25

    def next(self, entries: Entries, busy: set[int]) -> Task | None:
        """The next member of the current generation, those that continue from another one first."""
        found = interrupted(entries, busy)
        if found is not None:
            return found
        if len(entries) < self.n_trials:
            return Task(len(entries), until=self.interval or 1)
        alive = [each for each in entries.values() if each.state != FAILED]
        waiting = [each for each in alive if each.state == PAUSED]
        stage = min((each.task.stage for each in waiting), default=0)
        # A generation is compared when all of its members have ended it.
        if not waiting or any(each.state == RUNNING and each.task.stage <= stage for each in alive):
            return None
        return self._member(alive, [each for each in waiting if each.task.stage == stage], stage)

    def _member(self, alive: list[Entry], waiting: list[Entry], stage: int) -> Task:
        order = ranked(alive, stage, self.direction)
        count = min(max(1, int(len(order) * self.quantile)), len(order) // 2)
        best, worst = order[:count], order[len(order) - count :]
        until = self._until(waiting, stage)
        for each in waiting:
            if each in worst:
                draw = random.Random(f"{self.seed}/{each.number}/{stage}")
                source = draw.choice(best)
                params = changed(source.params, self.space, draw)
                return Task(each.number, params, until, stage + 1, source.number)
        each = waiting[0]
        return Task(each.number, each.params, until, stage + 1)

    def _until(self, waiting: list[Entry], stage: int) -> int:
        if self.interval is not None:
            return self.interval * (stage + 2)
        return max(each.step for each in waiting) + 1


def changed(params: dict[str, Any], space: Any, draw: random.Random) -> dict[str, Any]:
    """The values of a trial, each number multiplied by 0.8 or 1.25 within its bounds; a choice moves to a neighbour."""
    found = {}
    for name, value in params.items():
        part = space.parts.get(name) if isinstance(space, Space) else None
        factor = draw.choice((0.8, 1.25))
        if isinstance(part, Choice):
            place = part.values.index(value) + draw.choice((-1, 0, 1))
            found[name] = part.values[min(max(place, 0), len(part.values) - 1)]
        elif isinstance(part, Interval):
            number = min(max(value * factor, part.low), part.high)
            found[name] = round(number) if part.integer else number
        else:  # of a function: its bounds are not known, and integers are often sizes or seeds
            found[name] = value * factor if isinstance(value, float) else value
    return found
