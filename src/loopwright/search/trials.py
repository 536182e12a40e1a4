"""Trials as `hp_space` and `model_init` see them: one that draws values, and one whose values are known."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence
from typing import Any

from ..errors import ArgumentsError

SUGGESTIONS = ("suggest_float", "suggest_int", "suggest_categorical")


class Suggesting:
    """The interface of Optuna's trials for choosing values; a name gets one value per trial."""

    def __init__(self, number: int, params: dict[str, Any] | None = None) -> None:
        self.number, self.params = number, dict(params or {})

    def suggest_float(
        self, name: str, low: float, high: float, *, step: float | None = None, log: bool = False
    ) -> float:
        """A number between two bounds."""
        return float(self._value("suggest_float", name, low, high, step=step, log=log))

    def suggest_int(self, name: str, low: int, high: int, *, step: int = 1, log: bool = False) -> int:
        """An integer between two bounds, both included."""
        return int(self._value("suggest_int", name, low, high, step=step, log=log))

    def suggest_categorical(self, name: str, choices: Sequence[Any]) -> Any:
        """One of several values."""
        return self._value("suggest_categorical", name, choices)

    def _value(self, method: str, name: str, *given: Any, **options: Any) -> Any:
        if name not in self.params:
            self.params[name] = self.choose(method, name, *given, **options)
        return self.params[name]

    def choose(self, method: str, name: str, *given: Any, **options: Any) -> Any:
        """The value of a name that this trial does not have yet."""
        raise NotImplementedError


class KnownTrial(Suggesting):
    """A trial in its own process: its values are known, and others are requested from the search."""

    def __init__(self, number: int, params: dict[str, Any], request: Callable[..., Any] | None = None) -> None:
        super().__init__(number, params)
        self._request = request

    def choose(self, method: str, name: str, *given: Any, **options: Any) -> Any:
        if self._request is None:
            raise ArgumentsError(
                f"model_init suggests {name!r}, which hp_space does not: with several ranks, let hp_space suggest it "
                "and read trial.params"
            )
        return self._request(method, name, *given, **options)


class RandomTrial(Suggesting):
    """Values drawn from seed, trial and name, so that a trial has the same values when it is resumed."""

    def __init__(self, number: int, seed: int, params: dict[str, Any] | None = None) -> None:
        super().__init__(number, params)
        self._seed = seed

    def choose(self, method: str, name: str, *given: Any, **options: Any) -> Any:
        draw = random.Random(f"{self._seed}/{self.number}/{name}")
        if method == "suggest_categorical":
            return draw.choice(list(given[0]))
        low, high = given
        step = options.get("step")
        if method == "suggest_int" and not options.get("log"):
            return draw.randrange(int(low), int(high) + 1, step or 1)
        if options.get("log"):
            value = math.exp(draw.uniform(math.log(low), math.log(high)))
        else:
            value = draw.uniform(low, high)
            value = value if step is None else low + step * round((value - low) / step)
        value = min(max(value, low), high)
        return round(value) if method == "suggest_int" else value
