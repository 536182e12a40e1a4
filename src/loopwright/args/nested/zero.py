"""DeepSpeed's configuration: fills in `auto` values from the arguments and checks the others against them."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ..base import BaseArguments

AUTO = "auto"

Value = Callable[["BaseArguments", int], Any]
"""A value derived from the arguments and the world size."""

FILLED: dict[str, tuple[str, Value]] = {
    "train_micro_batch_size_per_gpu": ("per_device_train_batch_size", lambda a, w: a.per_device_train_batch_size),
    "gradient_accumulation_steps": ("gradient_accumulation_steps", lambda a, w: a.gradient_accumulation_steps),
    "train_batch_size": (
        "processes x per_device_train_batch_size x gradient_accumulation_steps",
        lambda a, w: w * a.per_device_train_batch_size * a.gradient_accumulation_steps,
    ),
    "gradient_clipping": ("max_grad_norm", lambda a, w: a.max_grad_norm or 0.0),
    "optimizer.params.lr": ("learning_rate", lambda a, w: a.learning_rate),
    "optimizer.params.betas": ("adam_beta1, adam_beta2", lambda a, w: [a.adam_beta1, a.adam_beta2]),
    "optimizer.params.eps": ("adam_epsilon", lambda a, w: a.adam_epsilon),
    "optimizer.params.weight_decay": ("weight_decay", lambda a, w: a.weight_decay),
    "scheduler.params.warmup_max_lr": ("learning_rate", lambda a, w: a.learning_rate),
    "fp16.enabled": ("fp16", lambda a, w: bool(a.fp16)),
    "bf16.enabled": ("bf16", lambda a, w: bool(a.bf16)),
    "checkpoint.use_node_local_storage": ("save_on_each_node", lambda a, w: bool(a.save_on_each_node)),
}
"""Keys that duplicate an argument: its name and its value."""

FREE: dict[str, Value] = {"scheduler.params.warmup_min_lr": lambda a, w: 0.0}
"""Keys without an argument, and the value of `auto`."""

OF_MODEL: dict[str, Callable[[int], int]] = {
    "zero_optimization.reduce_bucket_size": lambda hidden: hidden * hidden,
    "zero_optimization.stage3_prefetch_bucket_size": lambda hidden: int(0.9 * hidden * hidden),
    "zero_optimization.stage3_param_persistence_threshold": lambda hidden: 10 * hidden,
}
"""Keys whose `auto` depends on the hidden size of the model."""

OPTIMIZERS = {"adam": "adamw_torch", "adamw": "adamw_torch"}
SECTIONS_OF_OURS = ("optimizer", "scheduler")
"""Sections that duplicate optim and lr_scheduler_type: checked, then removed; the trainer creates both."""


def get(config: Mapping[str, Any], path: str) -> Any:
    """The value at a dotted path, or None."""
    value: Any = config
    for key in path.split("."):
        if not isinstance(value, Mapping) or key not in value:
            return None
        value = value[key]
    return value


def put(config: dict[str, Any], path: str, value: Any) -> None:
    """Set the value at a dotted path that exists."""
    *parents, last = path.split(".")
    for key in parents:
        config = config[key]
    config[last] = value


def filled_config(given: Mapping[str, Any], args: BaseArguments, world: int, hidden_size: int | None) -> dict[str, Any]:
    """The configuration with every `auto` filled in; raises ValueError with all contradictions."""
    problems = contradictions(given, args, world)
    config = copy.deepcopy(dict(given))
    for path, (_, value) in FILLED.items():
        if get(config, path) == AUTO:
            put(config, path, value(args, world))
    for path, free in FREE.items():
        if get(config, path) == AUTO:
            put(config, path, free(args, world))
    for path, of_width in OF_MODEL.items():
        if get(config, path) == AUTO and hidden_size is not None:
            put(config, path, of_width(hidden_size))
    for section in SECTIONS_OF_OURS:
        config.pop(section, None)
    problems += [f"{path}: 'auto' cannot be filled in from the arguments; set a value" for path in autos(config)]
    if problems:
        raise ValueError("; ".join(problems))
    config.setdefault("train_micro_batch_size_per_gpu", args.per_device_train_batch_size)
    config.setdefault("gradient_accumulation_steps", args.gradient_accumulation_steps)
    config.setdefault("gradient_clipping", args.max_grad_norm or 0.0)
    return {**config, "zero_allow_untested_optimizer": True, "zero_force_ds_cpu_optimizer": False}


def contradictions(given: Mapping[str, Any], args: BaseArguments, world: int) -> list[str]:
    """Every value of a configuration that contradicts the arguments."""
    problems = []
    for path, (argument, value) in FILLED.items():
        found, expected = get(given, path), value(args, world)
        if found in (None, AUTO) or found == expected or _alike(found, expected):
            continue
        problems.append(f"{path} is {found!r}, but {argument} is {expected!r}; make them equal, or use 'auto'")
    name = get(given, "optimizer.type")
    if name is not None and OPTIMIZERS.get(str(name).lower()) is None:
        problems.append(f"optimizer.type {name!r} is not supported through DeepSpeed; remove it and set optim")
    elif name is not None and not args.optim.startswith("adamw_torch"):
        problems.append(
            f"optimizer.type is {name!r}, but optim is {args.optim!r}; make them equal, or remove optimizer.type"
        )
    if get(given, "fp16.enabled") is True and get(given, "bf16.enabled") is True:
        problems.append("fp16.enabled and bf16.enabled are both true; set only one of them")
    return problems


def _alike(found: Any, expected: Any) -> bool:
    if isinstance(expected, list):
        return isinstance(found, (list, tuple)) and list(found) == expected
    numbers = isinstance(found, (int, float)) and isinstance(expected, (int, float))
    return numbers and abs(found - expected) <= 1e-12 * max(abs(found), abs(expected))


def autos(config: Any, path: str = "") -> list[str]:
    """Paths whose value is still `auto`."""
    if isinstance(config, Mapping):
        return [found for key, value in config.items() for found in autos(value, f"{path}.{key}".lstrip("."))]
    return [path] if config == AUTO else []


def stage_of(config: Mapping[str, Any]) -> int:
    """The ZeRO stage of a configuration."""
    return int(get(config, "zero_optimization.stage") or 0)
