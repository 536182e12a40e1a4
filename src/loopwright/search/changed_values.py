"""Values that change between two parts of a trial: a resumed optimizer and schedule get them when training begins."""

from __future__ import annotations

from typing import Any

from ..args.base import BaseArguments
from ..core.events import TrainerCallback

RESTORED = ("learning_rate", "weight_decay", "adam_beta1", "adam_beta2", "adam_epsilon")
"""Arguments that a checkpoint restores into the optimizer, so that another value must be set there."""


class ChangedValues(TrainerCallback):
    """Sets changed values in the parameter groups and the schedule, after the checkpoint was loaded."""

    def __init__(self, changed: dict[str, tuple[Any, Any]]) -> None:
        self.changed = {name: pair for name, pair in changed.items() if name in RESTORED}

    def on_train_begin(
        self,
        args: BaseArguments,
        state: Any,
        control: Any,
        optimizer: Any = None,
        lr_scheduler: Any = None,
        **kwargs: Any,
    ) -> None:
        for name, (before, now) in self.changed.items():
            if name == "learning_rate":
                _scale_rates(optimizer, lr_scheduler, now / before)
            for group in optimizer.param_groups:
                _set(group, name, before, now)


def _scale_rates(optimizer: Any, schedule: Any, factor: float) -> None:
    """Scale the rates of all groups, which may differ, and the rates that the schedule starts from."""
    for group in optimizer.param_groups:
        for key in ("lr", "initial_lr"):
            if key in group:
                group[key] = group[key] * factor
    for key in ("base_lrs", "_last_lr"):
        if key in vars(schedule):
            setattr(schedule, key, [rate * factor for rate in getattr(schedule, key)])


def _set(group: dict[str, Any], name: str, before: Any, now: Any) -> None:
    if name == "weight_decay" and group.get("weight_decay") == before:  # groups without decay keep 0
        group["weight_decay"] = now
    elif name == "adam_epsilon" and "eps" in group:
        group["eps"] = now
    elif name == "adam_beta1" and "betas" in group:
        group["betas"] = (now, group["betas"][1])
    elif name == "adam_beta2" and "betas" in group:
        group["betas"] = (group["betas"][0], now)
