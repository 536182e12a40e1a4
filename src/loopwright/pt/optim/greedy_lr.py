"""GreedyLR: a scheduler that raises and lowers the learning rate according to a metric."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from ...errors import ArgumentsError
from ...notices import logger
from .learning_rates import current_lrs, initial_lr, one_for_each_group, restore_lrs, set_lr

GREEDY_FLOOR = 0.01  # the default lower bound, as a fraction of each group's learning rate
TRANSFORMERS_NAMES = {
    "good": "num_good_epochs",
    "bad": "num_bad_epochs",
    "rest": "cooldown_counter",
    "attempts_left": "reset_start",
    "base_lrs": "_init_lrs",
}
"""Names in the state of transformers' class, where they differ."""
COUNTERS = ("last_epoch", "best", "good", "bad", "rest", "attempts_left")


class GreedyLR(LRScheduler):
    """Raises the learning rate while a metric keeps improving and lowers it while it does not.

    After more than `patience` consecutive improvements the rate is divided by `factor`, and the next `warmup` values
    are not evaluated; after more than `patience` values without one it is multiplied by `factor`, and the next
    `cooldown` are not. Rates stay between `min_lr` (by default 1 % of each group's rate) and `max_lr`. After
    `reset_start` attempts to lower rates that are already minimal, it restarts from the initial rates. With `smooth`,
    the mean of the last `window_size` values is evaluated instead of each value.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        mode: str = "min",
        factor: float = 0.95,
        patience: int = 10,
        threshold: float = 1e-6,
        threshold_mode: str = "abs",
        cooldown: int = 0,
        warmup: int = 0,
        min_lr: float | Sequence[float] | None = None,
        max_lr: float | Sequence[float] = 1.0,
        eps: float = 1e-8,
        verbose: bool = False,
        smooth: bool = False,
        window_size: int = 50,
        reset_start: int = 500,
    ) -> None:
        self.optimizer, self.factor, self.patience = optimizer, factor, patience
        self.mode, self.threshold, self.threshold_mode = mode, threshold, threshold_mode
        self.cooldown, self.warmup, self.eps, self.verbose = cooldown, warmup, eps, verbose
        self.smooth, self.window_size, self.reset_patience = smooth, window_size, reset_start
        self.min_lr, self.max_lr = min_lr, max_lr
        self.base_lrs: list[float] = []
        self.min_lrs: list[float] = []
        self.max_lrs: list[float] = []
        self._adopt_groups()
        self._check()
        self.last_epoch, self.good, self.bad, self.rest, self.attempts_left = 0, 0, 0, 0, reset_start
        self.best: float | None = None
        self.window: deque[float] = deque(maxlen=window_size)

    def step(self, metrics: float, epoch: int | None = None) -> None:
        """Evaluate the new value of the metric and adjust the learning rates."""
        self._adopt_groups()
        self.last_epoch = self.last_epoch + 1 if epoch is None else epoch
        value = self._smoothed(float(metrics))
        if self.rest > 0:
            self.rest -= 1
            return
        if self._is_better(value):
            self.best, self.good, self.bad = value, self.good + 1, 0
        else:
            self.good, self.bad = 0, self.bad + 1
        if self.good > self.patience:
            self._raise()
        elif self.bad > self.patience:
            self._lower()

    def get_last_lr(self) -> list[float]:
        """The current learning rates, one per group."""
        return current_lrs(self.optimizer)

    @property
    def _last_lr(self) -> list[float]:  # type: ignore[override]
        """What code written for torch's schedulers reads."""
        return current_lrs(self.optimizer)

    def state_dict(self) -> dict[str, Any]:
        """The state for resuming, as plain numbers."""
        return {name: getattr(self, name) for name in COUNTERS} | {
            "window": list(self.window),
            "base_lrs": list(self.base_lrs),
            "_last_lr": current_lrs(self.optimizer),
        }

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Restore a saved state, also one of transformers' class."""
        if "num_good_epochs" in state_dict:
            state_dict = from_transformers(state_dict)
        self.base_lrs = list(one_for_each_group(self.optimizer, "base_lrs", state_dict["base_lrs"]))
        restore_lrs(self.optimizer, state_dict["_last_lr"])
        self.window = deque(state_dict["window"], maxlen=self.window_size)
        for name in COUNTERS:
            setattr(self, name, state_dict[name])

    def _smoothed(self, value: float) -> float:
        if not self.smooth:
            return value
        self.window.append(value)
        return math.fsum(self.window) / len(self.window)

    def _is_better(self, value: float) -> bool:
        if self.best is None:
            return math.isfinite(value)
        margin = self.threshold * (self.best if self.threshold_mode == "rel" else 1.0)
        return value < self.best - margin if self.mode == "min" else value > self.best + margin

    def _raise(self) -> None:
        self._scale(lambda index, lr: max(lr, min(lr / self.factor, self.max_lrs[index])))
        self.good, self.rest, self.attempts_left = 0, self.warmup, self.reset_patience

    def _lower(self) -> None:
        moved = self._scale(lambda index, lr: min(lr, max(lr * self.factor, self.min_lrs[index])))
        self.bad = 0
        is_above = any(lr > low for lr, low in zip(current_lrs(self.optimizer), self.min_lrs, strict=True))
        # A step too small to apply counts as minimal too; otherwise the reset would never happen.
        if not (moved and is_above):
            self.attempts_left -= 1
        if self.attempts_left <= 0:
            restore_lrs(self.optimizer, self.base_lrs)
            self._start_over()
        self.rest = self.cooldown

    def _scale(self, scaled: Callable[[int, float], float]) -> bool:
        """Set each group's scaled learning rate if it changes by more than `eps`; returns whether any did."""
        moved = False
        for index, group in enumerate(self.optimizer.param_groups):
            before = float(group["lr"])
            after = scaled(index, before)
            if abs(after - before) > self.eps:
                set_lr(group, after)
                moved = True
                if self.verbose:
                    logger.info("Learning rate of group %d: %.4e -> %.4e", index, before, after)
        return moved

    def _start_over(self) -> None:
        self.best, self.good, self.bad, self.rest = None, 0, 0, 0
        self.attempts_left = self.reset_patience
        self.window.clear()

    def _adopt_groups(self) -> None:
        """Record the initial rate and the bounds of new groups."""
        for index, group in enumerate(self.optimizer.param_groups):
            if index < len(self.base_lrs):
                continue
            base = initial_lr(group)
            self.base_lrs.append(base)
            self.min_lrs.append(self._bound("min_lr", self.min_lr, index, default=base * GREEDY_FLOOR))
            self.max_lrs.append(self._bound("max_lr", self.max_lr, index, default=base))

    def _bound(self, name: str, given: float | Sequence[float] | None, index: int, *, default: float) -> float:
        """The bound of one group: the common one, its entry of a list, or the default."""
        if given is None:
            return default
        if not isinstance(given, Sequence):
            return float(given)
        if index >= len(given):
            raise ArgumentsError(f"GreedyLR: {name} has {len(given)} values for at least {index + 1} parameter groups.")
        return float(given[index])

    def _check(self) -> None:
        modes, threshold_modes = ("min", "max"), ("rel", "abs")
        problems = [f"GreedyLR: factor must be between 0 and 1, got {self.factor}."] * (not 0.0 < self.factor < 1.0)
        problems += [
            f"GreedyLR: {name} must be one of {', '.join(choices)}, got {given!r}."
            for name, given, choices in (
                ("mode", self.mode, modes),
                ("threshold_mode", self.threshold_mode, threshold_modes),
            )
            if given not in choices
        ]
        problems += [
            f"GreedyLR: min_lr={low} is above the learning rate {base}, so it could never decrease. Lower min_lr in "
            "lr_scheduler_kwargs, or remove it to use 1 % of the learning rate."
            for low, base in zip(self.min_lrs, self.base_lrs, strict=True)
            if low > base
        ]
        if problems:
            raise ArgumentsError(problems)


def to_transformers(state: dict[str, Any]) -> dict[str, Any]:
    """A state as transformers' class reads it: without a best value, it keeps its initial one."""
    found = {TRANSFORMERS_NAMES.get(name, name): value for name, value in state.items() if name != "window"}
    if found["best"] is None:
        del found["best"]
    if state["window"]:
        found["_streaming_avg"] = {"values": list(state["window"]), "sum": math.fsum(state["window"])}
    return {**found, "warmup_counter": 0}


def from_transformers(state: Mapping[str, Any]) -> dict[str, Any]:
    """A state that transformers' class reads or has written."""
    best = state.get("best")
    names = [name for name in (*COUNTERS, "base_lrs", "_last_lr") if name != "best"]
    found = {name: state[TRANSFORMERS_NAMES.get(name, name)] for name in names}
    found["rest"] += state["warmup_counter"]
    window = state.get("_streaming_avg", {}).get("values", ())
    return {**found, "best": None if best is None or math.isinf(best) else best, "window": window}
