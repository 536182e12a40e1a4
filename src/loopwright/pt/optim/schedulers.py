"""Schedulers: objects that set an optimizer's learning rates from a schedule or a metric.

`ScheduledLR` follows a function of `core/schedules.py`; `GreedyLR` and torch's `ReduceLROnPlateau` react to a metric
after an evaluation (`steps_on_metric` distinguishes them). The `get_*` functions have the names and parameters of
transformers.
"""

from __future__ import annotations

import inspect
import weakref
from collections.abc import Mapping, Sequence
from typing import Any

from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from ...args.groups.saving import SavingArgs
from ...args.problems import short_value
from ...core.schedules import SCHEDULES, Schedule, build_schedule
from ...errors import ArgumentsError
from .greedy_lr import GreedyLR
from .learning_rates import current_lrs, initial_lr, one_for_each_group, restore_lrs, set_lr

# ------------------------------------------------------------------------------------------------ following a schedule


class _BaseLRs(list[float]):
    """The learning rates before the schedule; one that is assigned becomes the one of its group."""

    def __init__(self, groups: list[dict[str, Any]]) -> None:
        super().__init__(map(initial_lr, groups))
        self._groups = groups

    def __setitem__(self, index: Any, value: Any) -> None:
        super().__setitem__(index, value)
        for group, base in list(zip(self._groups, self, strict=True)):
            group["initial_lr"] = float(base)


class ScheduledLR(LRScheduler):
    """Sets the learning rate of every parameter group to its initial one times the schedule's multiplier.

    Groups added to the optimizer later follow the schedule from their own initial learning rate, starting with their
    first update.
    """

    # torch's __init__ is omitted on purpose: it replaces optimizer.step by a wrapper that is only used for a warning.
    def __init__(self, optimizer: Optimizer, schedule: Schedule, last_epoch: int = -1) -> None:
        self.optimizer, self.schedule, self.last_epoch = optimizer, schedule, last_epoch
        if last_epoch != -1:
            _check_initial_lrs(optimizer, last_epoch)
        self._last_lr: list[float] = []
        self.step()
        _watch_for_new_groups(self)

    def step(self, epoch: int | None = None) -> None:
        """Advance to the next update (or the given one) and set the learning rates."""
        self.last_epoch = update = self.last_epoch + 1 if epoch is None else epoch
        multiplier = self.schedule(update)
        self._last_lr = lrs = []
        for group in self.optimizer.param_groups:
            if type(group["lr"]) is float and "initial_lr" in group:  # the usual case, without a call
                group["lr"] = lr = group["initial_lr"] * multiplier
            else:
                lr = set_lr(group, initial_lr(group) * multiplier)
            lrs += [lr]

    @property
    def base_lrs(self) -> list[float]:
        """Each group's learning rate before the schedule; may be assigned, as in torch's schedulers."""
        return _BaseLRs(self.optimizer.param_groups)

    @base_lrs.setter
    def base_lrs(self, values: Sequence[float]) -> None:
        self.base_lrs[:] = values

    @property
    def lr_lambdas(self) -> list[Schedule]:
        """The schedule once per group, like torch's LambdaLR."""
        return [self.schedule] * len(self.optimizer.param_groups)

    def get_lr(self) -> list[float]:
        """The schedule's learning rates for the current update."""
        multiplier = self.schedule(self.last_epoch)
        return [base * multiplier for base in self.base_lrs]

    def get_last_lr(self) -> list[float]:
        """The learning rates last set, one per group."""
        return list(self._last_lr)

    def state_dict(self) -> dict[str, Any]:
        """The state for resuming, as plain numbers."""
        return {"last_epoch": self.last_epoch, "base_lrs": list(self.base_lrs), "_last_lr": current_lrs(self.optimizer)}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Restore a saved state; also accepts the state of torch's LambdaLR."""
        self.last_epoch = int(state_dict["last_epoch"])
        self.base_lrs = one_for_each_group(self.optimizer, "base_lrs", state_dict["base_lrs"])
        # The rates are stored in addition to the bases: a callback may have changed them since the last step.
        self._last_lr = restore_lrs(self.optimizer, state_dict.get("_last_lr") or self.get_lr())


def _check_initial_lrs(optimizer: Optimizer, last_epoch: int) -> None:
    for index, group in enumerate(optimizer.param_groups):
        if "initial_lr" not in group:
            raise ArgumentsError(
                f"last_epoch={last_epoch} continues a schedule, but parameter group {index} has no 'initial_lr'. Load "
                "the optimizer's saved state first, or leave last_epoch at -1."
            )


def _watch_for_new_groups(scheduler: ScheduledLR) -> None:
    """Before each optimizer step, set the learning rate of groups added since the last one."""
    watched = weakref.ref(scheduler)  # a replaced scheduler must not change the optimizer

    def schedule_new_groups(optimizer: Optimizer, *_: Any) -> None:
        live = watched()
        if live is None:
            return
        for group in optimizer.param_groups[len(live._last_lr) :]:
            live._last_lr.append(set_lr(group, initial_lr(group) * live.schedule(live.last_epoch)))

    if hasattr(scheduler.optimizer, "_optimizer_step_pre_hooks"):  # a wrapper may have the method without them
        scheduler.optimizer.register_step_pre_hook(schedule_new_groups)


# ------------------------------------------------------------------------------------------------ reacting to a metric


def steps_on_metric(scheduler: Any) -> bool:
    """Whether the scheduler steps after an evaluation, with a metric, instead of after each update."""
    metrics = inspect.signature(scheduler.step).parameters.get("metrics")
    return metrics is not None and metrics.default is metrics.empty


METRIC_SCHEDULERS: dict[str, type[LRScheduler]] = {"reduce_lr_on_plateau": ReduceLROnPlateau, "greedy": GreedyLR}


# ------------------------------------------------------------------------------------------------ by name


def build_scheduler(
    name: str,
    optimizer: Optimizer,
    num_warmup_steps: int | None = None,
    num_training_steps: int | None = None,
    kwargs: Mapping[str, Any] | None = None,
    args: SavingArgs | None = None,
) -> LRScheduler:
    """The scheduler of a name; `args.greater_is_better` sets the mode of plateau and greedy unless kwargs do."""
    name, options = str(getattr(name, "value", name)), dict(kwargs or {})
    if name in METRIC_SCHEDULERS:
        return _build_metric_scheduler(name, optimizer, options, args)
    if name not in SCHEDULES:
        known = ", ".join(sorted([*SCHEDULES, *METRIC_SCHEDULERS]))
        raise ArgumentsError(f"No learning-rate schedule is called '{name}'. Known: {known}.")
    last_epoch = options.pop("last_epoch", -1)
    schedule = build_schedule(name, num_warmup_steps, num_training_steps, base_lr=_base_lr(optimizer), options=options)
    return ScheduledLR(optimizer, schedule, last_epoch)


def _build_metric_scheduler(
    name: str, optimizer: Optimizer, options: dict[str, Any], args: SavingArgs | None
) -> LRScheduler:
    cls = METRIC_SCHEDULERS[name]
    accepted = [option for option in inspect.signature(cls).parameters if option != "optimizer"]
    listing = ", ".join(accepted)
    problems = [
        f"The schedule '{name}' has no option '{key}' (given {short_value(key, value)}). It accepts {listing}."
        for key, value in options.items()
        if key not in accepted
    ]
    if problems:
        raise ArgumentsError(problems)
    if getattr(args, "greater_is_better", None):
        options.setdefault("mode", "max")
    return cls(optimizer, **options)


def _base_lr(optimizer: Optimizer) -> float | None:
    """The learning rate that absolute rates such as lr_end are relative to."""
    lr = optimizer.defaults.get("lr")
    if lr is None and optimizer.param_groups:
        lr = optimizer.param_groups[0].get("initial_lr", optimizer.param_groups[0].get("lr"))
    return None if lr is None else float(lr)


def get_scheduler(
    name: str,
    optimizer: Optimizer,
    num_warmup_steps: int | None = None,
    num_training_steps: int | None = None,
    scheduler_specific_kwargs: dict[str, Any] | None = None,
) -> LRScheduler:
    """A scheduler by name."""
    return build_scheduler(name, optimizer, num_warmup_steps, num_training_steps, scheduler_specific_kwargs)


def get_constant_schedule(optimizer: Optimizer, last_epoch: int = -1) -> LRScheduler:
    """A constant learning rate."""
    return build_scheduler("constant", optimizer, kwargs={"last_epoch": last_epoch})


def get_constant_schedule_with_warmup(optimizer: Optimizer, num_warmup_steps: int, last_epoch: int = -1) -> LRScheduler:
    """A constant learning rate after a warm-up."""
    return build_scheduler("constant_with_warmup", optimizer, num_warmup_steps, kwargs={"last_epoch": last_epoch})


def get_linear_schedule_with_warmup(
    optimizer: Optimizer, num_warmup_steps: int, num_training_steps: int, last_epoch: int = -1
) -> LRScheduler:
    """Linear decay to 0 after a warm-up."""
    kwargs = {"last_epoch": last_epoch}
    return build_scheduler("linear", optimizer, num_warmup_steps, num_training_steps, kwargs)


def get_cosine_schedule_with_warmup(
    optimizer: Optimizer, num_warmup_steps: int, num_training_steps: int, num_cycles: float = 0.5, last_epoch: int = -1
) -> LRScheduler:
    """Cosine decay to 0 after a warm-up."""
    kwargs = {"num_cycles": num_cycles, "last_epoch": last_epoch}
    return build_scheduler("cosine", optimizer, num_warmup_steps, num_training_steps, kwargs)


def get_cosine_with_hard_restarts_schedule_with_warmup(
    optimizer: Optimizer, num_warmup_steps: int, num_training_steps: int, num_cycles: int = 1, last_epoch: int = -1
) -> LRScheduler:
    """Repeated cosine decays to 0 after a warm-up."""
    kwargs = {"num_cycles": num_cycles, "last_epoch": last_epoch}
    return build_scheduler("cosine_with_restarts", optimizer, num_warmup_steps, num_training_steps, kwargs)


def get_polynomial_decay_schedule_with_warmup(
    optimizer: Optimizer,
    num_warmup_steps: int,
    num_training_steps: int,
    lr_end: float = 1e-7,
    power: float = 1.0,
    last_epoch: int = -1,
) -> LRScheduler:
    """Polynomial decay to `lr_end` after a warm-up."""
    kwargs = {"lr_end": lr_end, "power": power, "last_epoch": last_epoch}
    return build_scheduler("polynomial", optimizer, num_warmup_steps, num_training_steps, kwargs)


def get_inverse_sqrt_schedule(
    optimizer: Optimizer, num_warmup_steps: int, timescale: int | None = None, last_epoch: int = -1
) -> LRScheduler:
    """One over the square root of the update number, after a warm-up."""
    kwargs = {"timescale": timescale, "last_epoch": last_epoch}
    return build_scheduler("inverse_sqrt", optimizer, num_warmup_steps, kwargs=kwargs)


def get_cosine_with_min_lr_schedule_with_warmup(
    optimizer: Optimizer,
    num_warmup_steps: int,
    num_training_steps: int,
    num_cycles: float = 0.5,
    last_epoch: int = -1,
    min_lr: float | None = None,
    min_lr_rate: float | None = None,
) -> LRScheduler:
    """Cosine decay to a minimum learning rate after a warm-up."""
    kwargs = {"num_cycles": num_cycles, "last_epoch": last_epoch, "min_lr": min_lr, "min_lr_rate": min_lr_rate}
    return build_scheduler("cosine_with_min_lr", optimizer, num_warmup_steps, num_training_steps, kwargs)


def get_cosine_with_min_lr_schedule_with_warmup_lr_rate(
    optimizer: Optimizer,
    num_warmup_steps: int,
    num_training_steps: int,
    num_cycles: float = 0.5,
    last_epoch: int = -1,
    min_lr: float | None = None,
    min_lr_rate: float | None = None,
    warmup_lr_rate: float | None = None,
) -> LRScheduler:
    """Cosine decay to a minimum learning rate after a warm-up that starts above 0."""
    kwargs = {"num_cycles": num_cycles, "last_epoch": last_epoch, "min_lr": min_lr, "min_lr_rate": min_lr_rate}
    kwargs["warmup_lr_rate"] = warmup_lr_rate
    return build_scheduler("cosine_warmup_with_min_lr", optimizer, num_warmup_steps, num_training_steps, kwargs)


def get_wsd_schedule(
    optimizer: Optimizer,
    num_warmup_steps: int,
    num_decay_steps: int,
    num_training_steps: int | None = None,
    num_stable_steps: int | None = None,
    warmup_type: str = "linear",
    decay_type: str = "cosine",
    min_lr_ratio: float = 0,
    num_cycles: float = 0.5,
    last_epoch: int = -1,
) -> LRScheduler:
    """Warm-up, plateau and decay."""
    kwargs: dict[str, Any] = {
        "num_decay_steps": num_decay_steps,
        "num_stable_steps": num_stable_steps,
        "warmup_type": warmup_type,
    }
    kwargs |= {"decay_type": decay_type, "min_lr_ratio": min_lr_ratio, "num_cycles": num_cycles}
    kwargs["last_epoch"] = last_epoch
    return build_scheduler("warmup_stable_decay", optimizer, num_warmup_steps, num_training_steps, kwargs)


def get_reduce_on_plateau_schedule(optimizer: Optimizer, **kwargs: Any) -> LRScheduler:
    """torch's ReduceLROnPlateau: lowers the learning rate when a metric stops improving."""
    return build_scheduler("reduce_lr_on_plateau", optimizer, kwargs=kwargs)


def get_greedy_schedule(optimizer: Optimizer, **kwargs: Any) -> LRScheduler:
    """GreedyLR: raises and lowers the learning rate according to a metric."""
    return build_scheduler("greedy", optimizer, kwargs=kwargs)
