"""Learning-rate schedules as pure functions: the number of finished updates -> a multiplier of the base learning rate.

`SCHEDULES` maps the name of each schedule with a closed form to its builder. A builder takes the number of warm-up
updates, the number of updates of the run, and its own options by keyword; it returns the function. A builder that needs
the base learning rate (to convert an absolute rate into a multiplier) declares `base_lr`. Parameters without a default
are required. To add a schedule: one function and one row, or `register_schedule` from outside.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from ..args.field import unknown_name
from ..args.problems import short_value
from ..errors import ArgumentsError

Schedule = Callable[[int], float]
ScheduleBuilder = Callable[..., Schedule]

COMMON_PARAMETERS = ("num_warmup_steps", "num_training_steps", "base_lr")
DEFAULT_TIMESCALE = 10_000


def build_schedule(
    name: str,
    num_warmup_steps: int | None = None,
    num_training_steps: int | None = None,
    *,
    base_lr: float | None = None,
    options: Mapping[str, Any] | None = None,
) -> Schedule:
    """The function of the named schedule; raises an ArgumentsError that lists all missing and unknown options."""
    name = str(getattr(name, "value", name))
    if name not in SCHEDULES:
        raise ArgumentsError(unknown_name("schedule", name, SCHEDULES))
    builder = SCHEDULES[name]
    common = dict(zip(COMMON_PARAMETERS, (num_warmup_steps, num_training_steps, base_lr), strict=True))
    parameters = inspect.signature(builder).parameters
    given = {key: value for key, value in common.items() if value is not None and key in parameters}
    problems = _unknown_options(name, options or {}) + _missing(name, given, options or {})
    if problems:
        raise ArgumentsError(problems)
    return builder(**given, **(options or {}))


def register_schedule(name: str, builder: ScheduleBuilder) -> None:
    """Register a user-defined schedule by name: builder(num_warmup_steps, num_training_steps, **options)."""
    SCHEDULES[name] = builder


def schedule_options(name: str) -> list[str]:
    """The options (`lr_scheduler_kwargs`) a schedule accepts."""
    parameters = inspect.signature(SCHEDULES[name]).parameters.values()
    named = [p.name for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]
    return [option for option in named if option not in COMMON_PARAMETERS]


def _unknown_options(name: str, options: Mapping[str, Any]) -> list[str]:
    if any(p.kind is p.VAR_KEYWORD for p in inspect.signature(SCHEDULES[name]).parameters.values()):
        return []
    accepted = schedule_options(name)
    listing = ", ".join(accepted) if accepted else "no options"
    return [
        f"The schedule '{name}' has no option '{key}' (given {short_value(key, value)}). It accepts {listing}."
        for key, value in options.items()
        if key not in accepted
    ]


def _missing(name: str, given: Mapping[str, Any], options: Mapping[str, Any]) -> list[str]:
    return [
        f"The schedule '{name}' needs {p.name}, which was not given."
        for p in inspect.signature(SCHEDULES[name]).parameters.values()
        if p.default is p.empty and p.name not in given and p.name not in options
        if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)
    ]


# ------------------------------------------------------------------------------------------------ the schedules


def _with_options(schedule: Schedule, **options: Any) -> Schedule:
    """The schedule as a `partial` whose `keywords` are its options, under the names that transformers gives them."""
    return partial(lambda update, **_: schedule(update), **options)


def _after_warmup(num_warmup_steps: int, rest: Schedule) -> Schedule:
    """Linear warm-up from 0 to 1, then `rest`."""
    rise = max(1, num_warmup_steps)

    def multiplier(update: int) -> float:
        return update / rise if update < num_warmup_steps else rest(update)

    return multiplier


def constant(num_warmup_steps: int | None = None, num_training_steps: int | None = None) -> Schedule:
    """The base learning rate throughout, without warm-up."""
    return lambda update: 1.0


def constant_with_warmup(num_warmup_steps: int, num_training_steps: int | None = None) -> Schedule:
    """The base learning rate after a linear warm-up."""
    schedule = _after_warmup(num_warmup_steps, lambda update: 1.0)
    return _with_options(schedule, num_warmup_steps=num_warmup_steps)


def linear(num_warmup_steps: int, num_training_steps: int) -> Schedule:
    """Linear decay to 0 at the last update."""
    span = max(1, num_training_steps - num_warmup_steps)

    def fall(update: int) -> float:
        return (num_training_steps - update) / span if update < num_training_steps else 0.0

    schedule = _after_warmup(num_warmup_steps, fall) if num_warmup_steps else fall
    return _with_options(schedule, num_warmup_steps=num_warmup_steps, num_training_steps=num_training_steps)


def cosine(num_warmup_steps: int, num_training_steps: int, *, num_cycles: float = 0.5) -> Schedule:
    """`num_cycles` cosine cycles between 1 and 0; half a cycle is one smooth descent."""
    options: dict[str, Any] = {"num_warmup_steps": num_warmup_steps, "num_training_steps": num_training_steps}
    options["num_cycles"] = num_cycles
    return _with_options(_cosine_to_floor(**options, floor=0.0), **options)


def cosine_with_restarts(num_warmup_steps: int, num_training_steps: int, *, num_cycles: int = 1) -> Schedule:
    """`num_cycles` descents from 1 to 0, each starting at 1 again."""
    span = max(1, num_training_steps - num_warmup_steps)

    def descents(update: int) -> float:
        progress = (update - num_warmup_steps) / span
        if progress >= 1.0:
            return 0.0
        return max(0.0, _half_wave(float(num_cycles) * progress % 1.0))

    options: dict[str, Any] = {"num_warmup_steps": num_warmup_steps, "num_training_steps": num_training_steps}
    options["num_cycles"] = num_cycles
    return _with_options(_after_warmup(num_warmup_steps, descents), **options)


def polynomial(
    num_warmup_steps: int, num_training_steps: int, *, base_lr: float, lr_end: float = 1e-7, power: float = 1.0
) -> Schedule:
    """Polynomial decay of the given power, from the base learning rate to `lr_end`."""
    if not base_lr > lr_end:
        raise ArgumentsError(
            f"The schedule 'polynomial' ends at lr_end={lr_end}, which must be smaller than the learning rate "
            f"{base_lr}. Lower lr_end in lr_scheduler_kwargs or raise learning_rate."
        )
    end, span = lr_end / base_lr, max(1, num_training_steps - num_warmup_steps)

    def descent(update: int) -> float:
        if update > num_training_steps:
            return end
        remaining = 1 - (update - num_warmup_steps) / span
        return float((1 - end) * remaining**power + end)

    options: dict[str, Any] = {"num_warmup_steps": num_warmup_steps, "num_training_steps": num_training_steps}
    schedule = _after_warmup(num_warmup_steps, descent)
    return _with_options(schedule, **options, lr_end=lr_end, power=power, lr_init=base_lr)


def inverse_sqrt(
    num_warmup_steps: int, num_training_steps: int | None = None, *, timescale: int | None = None
) -> Schedule:
    """One over the square root of the updates since the warm-up, counted in units of `timescale`."""
    scale = (num_warmup_steps or DEFAULT_TIMESCALE) if timescale is None else timescale
    if scale <= 0:
        raise ArgumentsError(f"The schedule 'inverse_sqrt' needs a timescale above 0, got {timescale}.")
    shift = scale - num_warmup_steps
    schedule = _after_warmup(num_warmup_steps, lambda update: 1.0 / math.sqrt((update + shift) / scale))
    return _with_options(schedule, num_warmup_steps=num_warmup_steps, timescale=scale)


def cosine_with_min_lr(
    num_warmup_steps: int,
    num_training_steps: int,
    *,
    base_lr: float | None = None,
    num_cycles: float = 0.5,
    min_lr: float | None = None,
    min_lr_rate: float | None = None,
) -> Schedule:
    """Like cosine, but ending at `min_lr`, or at `min_lr_rate` times the base learning rate."""
    floor = _floor("cosine_with_min_lr", base_lr, min_lr, min_lr_rate)
    options: dict[str, Any] = {"num_warmup_steps": num_warmup_steps, "num_training_steps": num_training_steps}
    options["num_cycles"] = num_cycles
    return _with_options(_cosine_to_floor(**options, floor=floor), **options, min_lr_rate=floor)


def cosine_warmup_with_min_lr(
    num_warmup_steps: int,
    num_training_steps: int,
    *,
    base_lr: float | None = None,
    num_cycles: float = 0.5,
    min_lr: float | None = None,
    min_lr_rate: float | None = None,
    warmup_lr_rate: float | None = None,
) -> Schedule:
    """Like cosine_with_min_lr, with a warm-up that starts above 0 and both phases one update ahead."""
    floor = _floor("cosine_warmup_with_min_lr", base_lr, min_lr, min_lr_rate)
    span = max(1, num_training_steps - num_warmup_steps)

    def rise(update: int) -> float:
        if warmup_lr_rate is None:
            return (update + 1) / max(1, num_warmup_steps)
        return warmup_lr_rate + (1.0 - warmup_lr_rate) * update / max(1, num_warmup_steps - 1)

    def multiplier(update: int) -> float:
        if update < num_warmup_steps:
            return rise(update)
        progress = (update - num_warmup_steps + 1) / span
        return max(0.0, _lift(_half_wave(2.0 * num_cycles * progress), floor))

    options: dict[str, Any] = {"num_warmup_steps": num_warmup_steps, "num_training_steps": num_training_steps}
    options["num_cycles"] = num_cycles
    return _with_options(multiplier, **options, min_lr_rate=floor, warmup_lr_rate=warmup_lr_rate)


def warmup_stable_decay(
    num_warmup_steps: int,
    num_training_steps: int | None = None,
    *,
    num_decay_steps: int,
    num_stable_steps: int | None = None,
    warmup_type: str = "linear",
    decay_type: str = "cosine",
    min_lr_ratio: float = 0.0,
    num_cycles: float = 0.5,
) -> Schedule:
    """Warm-up, plateau and decay; without `num_stable_steps`, the plateau is the rest of `num_training_steps`."""
    _check_shapes(warmup_type, decay_type)
    if num_stable_steps is None:
        if num_training_steps is None:
            raise ArgumentsError("The schedule 'warmup_stable_decay' needs num_training_steps or num_stable_steps.")
        num_stable_steps = num_training_steps - num_warmup_steps - num_decay_steps
    rise, fall = RISES[warmup_type], FALLS[decay_type]
    fall_from = num_warmup_steps + num_stable_steps
    rise_span, fall_span = max(1, num_warmup_steps), max(1, num_decay_steps)

    def multiplier(update: int) -> float:
        if update < num_warmup_steps:
            return max(0.0, _lift(rise(update / rise_span), min_lr_ratio))
        if update < fall_from:
            return 1.0
        if update < fall_from + num_decay_steps:
            return max(0.0, _lift(fall((update - fall_from) / fall_span, num_cycles), min_lr_ratio))
        return float(min_lr_ratio)

    steps: dict[str, Any] = {
        "num_warmup_steps": num_warmup_steps,
        "num_stable_steps": num_stable_steps,
        "num_decay_steps": num_decay_steps,
    }
    shape = {"warmup_type": warmup_type, "decay_type": decay_type}
    return _with_options(multiplier, **steps, **shape, min_lr_ratio=min_lr_ratio, num_cycles=num_cycles)


# ------------------------------------------------------------------------------------------------ their shapes


def _half_wave(progress: float) -> float:
    """Half a cosine wave: 1 at progress 0, 0 at progress 1."""
    return 0.5 * (1.0 + math.cos(math.pi * progress))


def _lift(value: float, floor: float) -> float:
    """Map a value from 0..1 to floor..1."""
    return value * (1.0 - floor) + floor


def _cosine_to_floor(num_warmup_steps: int, num_training_steps: int, *, num_cycles: float, floor: float) -> Schedule:
    span = max(1, num_training_steps - num_warmup_steps)

    def wave(update: int) -> float:
        progress = (update - num_warmup_steps) / span
        return max(0.0, _lift(_half_wave(2.0 * num_cycles * progress), floor))

    return _after_warmup(num_warmup_steps, wave)


def _floor(name: str, base_lr: float | None, min_lr: float | None, min_lr_rate: float | None) -> float:
    """The lowest multiplier, from an absolute rate or a fraction of the base rate."""
    if (min_lr is None) == (min_lr_rate is None):
        raise ArgumentsError(
            f"The schedule '{name}' needs exactly one of min_lr and min_lr_rate in lr_scheduler_kwargs, "
            f"got min_lr={min_lr} and min_lr_rate={min_lr_rate}."
        )
    if min_lr_rate is not None:
        return float(min_lr_rate)
    if not base_lr:
        raise ArgumentsError(f"The schedule '{name}' needs a learning rate above 0 to reach min_lr, got {base_lr}.")
    assert min_lr is not None
    return min_lr / base_lr


RISES: dict[str, Callable[[float], float]] = {
    "linear": lambda progress: progress,
    "cosine": lambda progress: 1.0 - _half_wave(progress),
    "1-sqrt": lambda progress: 1.0 - math.sqrt(1.0 - progress),
}
FALLS: dict[str, Callable[[float, float], float]] = {
    "linear": lambda progress, cycles: 1.0 - progress,
    "cosine": lambda progress, cycles: _half_wave(2.0 * cycles * progress),
    "1-sqrt": lambda progress, cycles: 1.0 - math.sqrt(progress),
}


def _check_shapes(warmup_type: str, decay_type: str) -> None:
    problems = [
        f"The schedule 'warmup_stable_decay' has no {option}={given!r}. Choose {', '.join(table)}."
        for option, given, table in (("warmup_type", warmup_type, RISES), ("decay_type", decay_type, FALLS))
        if given not in table
    ]
    if problems:
        raise ArgumentsError(problems)


SCHEDULES: dict[str, ScheduleBuilder] = {
    "linear": linear,
    "cosine": cosine,
    "cosine_with_restarts": cosine_with_restarts,
    "polynomial": polynomial,
    "constant": constant,
    "constant_with_warmup": constant_with_warmup,
    "inverse_sqrt": inverse_sqrt,
    "cosine_with_min_lr": cosine_with_min_lr,
    "cosine_warmup_with_min_lr": cosine_warmup_with_min_lr,
    "warmup_stable_decay": warmup_stable_decay,
}
