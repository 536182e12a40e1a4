"""The learning rates of an optimizer's parameter groups: reading, setting and restoring them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

from ...errors import CheckpointError


def initial_lr(group: dict[str, Any]) -> float:
    """The group's learning rate before the schedule, stored at the first call."""
    initial = group.get("initial_lr")
    if type(initial) is not float:
        initial = group["initial_lr"] = float(group["lr"] if initial is None else initial)
    return initial


def set_lr(group: dict[str, Any], lr: float) -> float:
    """Set a group's learning rate; in place if it is a tensor, because a compiled step holds that tensor."""
    if isinstance(group["lr"], Tensor):
        group["lr"].fill_(lr)
    else:
        group["lr"] = lr
    return lr


def current_lrs(optimizer: Optimizer) -> list[float]:
    """The current learning rate of each group."""
    return [float(group["lr"]) for group in optimizer.param_groups]


def restore_lrs(optimizer: Optimizer, lrs: Sequence[float]) -> list[float]:
    """Set each group's learning rate to a saved one."""
    saved = one_for_each_group(optimizer, "learning rates", lrs)
    return [set_lr(group, float(lr)) for group, lr in zip(optimizer.param_groups, saved, strict=True)]


def one_for_each_group(optimizer: Optimizer, what: str, values: Sequence[float]) -> Sequence[float]:
    """The saved values; raises unless there is one per group of the optimizer."""
    if len(values) != len(optimizer.param_groups):
        raise CheckpointError(
            f"scheduler.json: the saved scheduler has {len(values)} {what}, but the optimizer has "
            f"{len(optimizer.param_groups)} parameter groups. Build the optimizer with the same groups before resuming."
        )
    return values
