"""Search spaces: which values an argument may have, written as a dict or as a `search:` block of a file.

learning_rate: {log_uniform: [1e-6, 1e-3]}
weight_decay: {uniform: [0, 0.1]}
warmup_steps: {int_uniform: [0, 500]}
per_device_train_batch_size: [8, 16, 32]          the same as {choice: [8, 16, 32]} and {grid: [8, 16, 32]}
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any, Protocol

from ..args.field import nearest
from ..args.problems import short
from ..errors import ArgumentsError


class Suggests(Protocol):
    """A trial, of Optuna or loopwright, as far as a space needs it."""

    def suggest_float(self, name: str, low: float, high: float, *, log: bool = False) -> float: ...
    def suggest_int(self, name: str, low: int, high: int, *, log: bool = False) -> int: ...
    def suggest_categorical(self, name: str, choices: Sequence[Any]) -> Any: ...


@dataclass(frozen=True)
class Choice:
    """One of several values."""

    values: tuple[Any, ...]

    def suggest(self, trial: Suggests, name: str) -> Any:
        """The value of a trial."""
        return trial.suggest_categorical(name, self.values)

    def __str__(self) -> str:
        return f"one of {', '.join(map(str, self.values))}"


@dataclass(frozen=True)
class Interval:
    """A number between two bounds, both included."""

    low: float
    high: float
    log: bool = False
    integer: bool = False

    def suggest(self, trial: Suggests, name: str) -> Any:
        """The value of a trial."""
        if self.integer:
            return trial.suggest_int(name, int(self.low), int(self.high), log=self.log)
        return trial.suggest_float(name, self.low, self.high, log=self.log)

    def __str__(self) -> str:
        return f"{self.low:g} to {self.high:g}{', log scale' if self.log else ''}"


INTERVALS = {
    "uniform": {},
    "log_uniform": {"log": True},
    "int_uniform": {"integer": True},
    "log_int_uniform": {"log": True, "integer": True},
}
"""Kinds of intervals, and how they differ."""
CHOICES = ("choice", "grid")
KINDS = (*CHOICES, *INTERVALS)


@dataclass(frozen=True)
class Space:
    """The values of all arguments that a search varies."""

    parts: dict[str, Choice | Interval]

    def __call__(self, trial: Suggests) -> dict[str, Any]:
        """The values of a trial, as `hp_space` returns them."""
        return {name: part.suggest(trial, name) for name, part in self.parts.items()}

    @property
    def size(self) -> int | None:
        """The number of combinations; None if a value is a number of an interval."""
        if any(isinstance(part, Interval) for part in self.parts.values()):
            return None
        return math.prod(len(part.values) for part in self.parts.values() if isinstance(part, Choice))

    def grid(self) -> list[dict[str, Any]]:
        """Every combination; the last argument changes fastest."""
        intervals = [name for name, part in self.parts.items() if isinstance(part, Interval)]
        if intervals:
            raise ArgumentsError(
                f"a grid needs a list of values for {', '.join(intervals)}; list them, or use another backend"
            )
        values = [part.values for part in self.parts.values() if isinstance(part, Choice)]
        return [dict(zip(self.parts, each, strict=True)) for each in product(*values)]

    def __str__(self) -> str:
        return "\n".join(f"  {name}: {part}" for name, part in self.parts.items())


def read_space(block: Any) -> Space:
    """The space that a dict describes; raises one error with every problem."""
    if not isinstance(block, Mapping) or not block:
        raise ArgumentsError(f"a search space is a dict of arguments and their values, not {short(block)}")
    parts: dict[str, Choice | Interval] = {}
    problems = []
    for name, given in block.items():
        try:
            parts[str(name)] = read_part(given)
        except ValueError as error:
            problems.append(f"{name}: {error}")
    if problems:
        raise ArgumentsError(problems)
    return Space(parts)


def read_part(given: Any) -> Choice | Interval:
    """The values of one argument."""
    if isinstance(given, (list, tuple)):
        return _choice(given)
    if not isinstance(given, Mapping) or len(given) != 1:
        raise ValueError(f"{short(given)} is neither a list of values nor one of {', '.join(KINDS)}")
    ((kind, values),) = given.items()
    if kind in CHOICES:
        return _choice(values)
    if kind in INTERVALS:
        return _interval(kind, values)
    raise ValueError(f"{kind!r} is not a kind of values{nearest(str(kind), KINDS)}; use {', '.join(KINDS)}")


def _choice(values: Any) -> Choice:
    if not isinstance(values, (list, tuple)) or not values:
        raise ValueError(f"{short(values)} is not a list of at least one value")
    if any(isinstance(each, (list, dict)) for each in values):
        raise ValueError(f"{short(values)} has a list or a dict among its values; use numbers, texts or booleans")
    if len({(type(each), each) for each in values}) < len(values):
        raise ValueError(f"{short(values)} has a value twice")
    return Choice(tuple(values))


def _interval(kind: str, values: Any) -> Interval:
    if not isinstance(values, (list, tuple)) or len(values) != 2:
        raise ValueError(f"{kind} needs two bounds, [lowest, highest], not {short(values)}")
    low, high = (_number(each) for each in values)
    form = INTERVALS[kind]
    if low >= high:
        raise ValueError(f"{kind}: the lowest value {low:g} must be below the highest, {high:g}")
    if form.get("log") and low <= 0:
        raise ValueError(f"{kind}: the lowest value is {low:g}, but a log scale begins above 0")
    if form.get("integer") and (low != int(low) or high != int(high)):
        raise ValueError(f"{kind} needs integers as bounds, not {short(values)}")
    return Interval(low, high, **form)


def _number(value: Any) -> float:
    """A bound; also as text, because YAML reads 1e-5 as text."""
    try:
        number = math.nan if isinstance(value, bool) else float(value)
    except (TypeError, ValueError):
        number = math.nan
    if not math.isfinite(number):
        raise ValueError(f"the bound {short(value)} is not a finite number")
    return number


DEFAULT = Space(
    {
        "learning_rate": Interval(1e-6, 1e-4, log=True),
        "num_train_epochs": Interval(1, 5, integer=True),
        "seed": Interval(1, 40, integer=True),
        "per_device_train_batch_size": Choice((4, 8, 16, 32, 64)),
    }
)
"""The space without `hp_space`, as transformers has it."""
