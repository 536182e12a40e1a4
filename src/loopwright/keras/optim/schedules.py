"""Learning rate schedules: the shared ones, reduction on plateau, or a Keras schedule."""

from __future__ import annotations

import inspect
from typing import Any

from ...args.reading import read_dict
from ...core.evaluation.metrics import better
from ...core.schedules import build_schedule
from ...errors import ArgumentsError
from ..arguments import KerasTrainingArguments
from ..strategy import KerasStrategy


class ScheduledRate:
    """Sets the learning rate of each update: the base rate times a function of the update number."""

    def __init__(self, strategy: KerasStrategy, base: float, schedule: Any) -> None:
        self._strategy, self.base, self.schedule, self.last_epoch = strategy, base, schedule, 0
        strategy.learning_rate = base * schedule(0)

    def step(self) -> None:
        self.last_epoch += 1
        self._strategy.learning_rate = self.base * self.schedule(self.last_epoch)

    def set_rate(self, rate: float) -> None:
        """Continue from another learning rate; what follows is scaled with it."""
        current = self._strategy.learning_rate
        self.base = self.base * rate / current if current else rate
        self._strategy.learning_rate = rate

    def get_last_lr(self) -> list[float]:
        return [float(self._strategy.learning_rate or 0.0)]

    def state_dict(self) -> dict[str, Any]:
        return {"last_epoch": self.last_epoch, "base": self.base, "rate": self._strategy.learning_rate}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.last_epoch, self.base = state["last_epoch"], state["base"]
        self._strategy.learning_rate = state["rate"]


class PlateauRate(ScheduledRate):
    """Lowers the learning rate when a metric stops improving; the options are those of torch."""

    def __init__(
        self,
        strategy: KerasStrategy,
        base: float,
        *,
        mode: str = "min",
        factor: float = 0.1,
        patience: int = 10,
        threshold: float = 1e-4,
        threshold_mode: str = "rel",
        cooldown: int = 0,
        min_lr: float = 0.0,
        eps: float = 1e-8,
    ) -> None:
        super().__init__(strategy, base, lambda update: 1.0)
        self.mode, self.factor, self.patience, self.threshold = mode, factor, patience, threshold
        self.relative, self.cooldown, self.min_lr, self.eps = threshold_mode == "rel", cooldown, min_lr, eps
        self.best: float | None = None
        self.bad = self.cooling = 0

    def step(self, metric: float) -> None:  # type: ignore[override]
        self.last_epoch += 1
        if self._improves(metric):
            self.best, self.bad = metric, 0
        else:
            self.bad += 1
        if self.cooling > 0:
            self.cooling, self.bad = self.cooling - 1, 0
        if self.bad > self.patience:
            rate = float(self._strategy.learning_rate or 0.0)
            lower = max(rate * self.factor, self.min_lr)
            if rate - lower > self.eps:
                self._strategy.learning_rate = lower
            self.cooling, self.bad = self.cooldown, 0

    def _improves(self, metric: float) -> bool:
        if self.best is None:
            return True
        margin = abs(self.best) * self.threshold if self.relative else self.threshold
        up = self.mode == "max"
        return better(metric, self.best + margin if up else self.best - margin, greater_is_better=up)

    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "best": self.best, "bad": self.bad, "cooling": self.cooling}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        super().load_state_dict(state)
        self.best, self.bad, self.cooling = state["best"], state["bad"], state["cooling"]


class KerasRate:
    """A Keras schedule that the optimizer applies itself, by its own update count."""

    def __init__(self, strategy: KerasStrategy, schedule: Any, done: int) -> None:
        self.schedule, self.last_epoch = schedule, done
        strategy.learning_rate = None

    def __call__(self, step: Any) -> Any:
        return self.schedule(step)

    def step(self) -> None:
        self.last_epoch += 1

    def get_last_lr(self) -> list[float]:
        return [float(self.schedule(self.last_epoch))]

    def state_dict(self) -> dict[str, Any]:
        return {"last_epoch": self.last_epoch}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.last_epoch = state["last_epoch"]


def build_rate(args: KerasTrainingArguments, strategy: KerasStrategy, base: float, total_updates: int) -> ScheduledRate:
    """The schedule named by `lr_scheduler_type`."""
    name = str(getattr(args.lr_scheduler_type, "value", args.lr_scheduler_type))
    options = read_dict(args.lr_scheduler_kwargs) or {}
    if name == "reduce_lr_on_plateau":
        known = [each for each in inspect.signature(PlateauRate).parameters if each not in ("strategy", "base")]
        unknown = [key for key in options if key not in known]
        if unknown:
            raise ArgumentsError(f"The schedule '{name}' has no option '{unknown[0]}'. Options: {', '.join(known)}.")
        mode = {"mode": "max"} if args.greater_is_better else {}
        return PlateauRate(strategy, base, **{**mode, **options})
    if args.poly_power != 1.0:
        name, options = "polynomial", {"lr_end": 0.0, "power": args.poly_power, **options}
    schedule = build_schedule(name, args.get_warmup_steps(total_updates), total_updates, base_lr=base, options=options)
    return ScheduledRate(strategy, base, schedule)


def is_keras_schedule(rate: Any) -> bool:
    """Whether a learning rate is a Keras schedule."""
    return callable(rate) and hasattr(rate, "get_config")
