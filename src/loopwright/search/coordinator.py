"""The coordinator of a trial: computes the objective of each evaluation and decides whether the trial continues."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from ..core.trial import CONTINUE, Reply
from ..errors import SearchError
from .trials import SUGGESTIONS

Objective = float | list[float]
Decide = Callable[[int, Any], str]
"""Decides after an evaluation: gets the step and the objective."""
Listen = Callable[[int, dict[str, float], Any], None]
"""Receives the step, the metrics and the objective of an evaluation."""


class TrialCoordinator:
    """In the process of the search; the process of the trial calls it through a pipe."""

    def __init__(
        self,
        trial: Any,
        compute_objective: Callable[[dict[str, float]], Any],
        decide: Decide,
        listen: Listen | None = None,
    ) -> None:
        self._trial, self._compute, self._decide, self._listen = trial, compute_objective, decide, listen

    def report(self, step: int, metrics: dict[str, float]) -> Reply:
        """The objective of an evaluation, and whether the trial continues."""
        objective = checked(self._compute(dict(metrics)))
        if self._listen is not None:
            self._listen(step, metrics, objective)
        return Reply(objective, self._decide(step, objective))

    def suggest(self, method: str, *given: Any, **options: Any) -> Any:
        """A value that `model_init` requests."""
        if method not in SUGGESTIONS:
            raise SearchError(f"{method} is not a method of trials; use {', '.join(SUGGESTIONS)}")
        return getattr(self._trial, method)(*given, **options)


def checked(objective: Any) -> Objective:
    """An objective as plain numbers."""
    if isinstance(objective, (list, tuple)):
        return [float(_number(each)) for each in objective]
    return float(_number(objective))


def _number(value: Any) -> float:
    value = value.item() if callable(getattr(value, "item", None)) else value
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise SearchError(f"compute_objective returned {value!r}; return a number, or a list of them")
    return value


def never(step: int, objective: Objective) -> str:
    """Let every trial train to its end."""
    return CONTINUE


def better(one: float, other: float, direction: str) -> bool:
    """Whether an objective is better than another one; one that is not a number is worse than all."""
    if math.isnan(one) or math.isnan(other):
        return math.isnan(other) and not math.isnan(one)
    return one < other if direction == "minimize" else one > other
