"""Optimizers: maps values of `optim` to Keras classes."""

from __future__ import annotations

import ast
import inspect
import re
from collections.abc import Callable
from typing import Any

from ...args.field import nearest
from ...args.groups.optimizer import OptimizerArgs
from ...errors import ArgumentsError
from ..models import variable_name

UNDECAYED = re.compile(r"bias|layer_?norm|rms_?norm|normalization|(?:^|[/_.])norm(?:[/_.]|$)|/(gamma|beta)(:0)?$", re.I)
"""Variables without weight decay: biases and those of normalization layers."""


def _adam(args: OptimizerArgs) -> dict[str, Any]:
    return {"beta_1": args.adam_beta1, "beta_2": args.adam_beta2, "epsilon": args.adam_epsilon}


def _betas(args: OptimizerArgs) -> dict[str, Any]:
    return {"beta_1": args.adam_beta1, "beta_2": args.adam_beta2}


def _nothing(args: OptimizerArgs) -> dict[str, Any]:
    return {}


OPTIMIZERS: dict[str, tuple[str, Callable[[OptimizerArgs], dict[str, Any]]]] = {
    "adamw_torch": ("AdamW", _adam),
    "adamw_torch_fused": ("AdamW", _adam),
    "adamw_torch_xla": ("AdamW", _adam),
    "sgd": ("SGD", _nothing),
    "adagrad": ("Adagrad", _nothing),
    "rmsprop": ("RMSprop", _nothing),
    "adafactor": ("Adafactor", _nothing),
    "lion_32bit": ("Lion", _betas),
}
"""Value of `optim` -> Keras class, and its options besides learning rate and weight decay."""


def build_optimizer(args: OptimizerArgs, variables: list[Any], family: Any) -> Any:
    """The Keras optimizer named by `optim`; `family` is the Keras package of the model."""
    name, options = optimizer_name_and_options(args, family)
    optimizer = getattr(family.optimizers, name)(learning_rate=args.learning_rate, **options)
    if args.weight_decay and hasattr(optimizer, "exclude_from_weight_decay"):
        spared = [variable for variable in variables if not is_decayed(variable)]
        optimizer.exclude_from_weight_decay(var_list=spared)
    return optimizer


def optimizer_name_and_options(args: OptimizerArgs, family: Any) -> tuple[str, dict[str, Any]]:
    """The class's name and keyword arguments; raises on unknown options."""
    asked = str(getattr(args.optim, "value", args.optim))
    if asked not in OPTIMIZERS:
        known = ", ".join(OPTIMIZERS)
        raise ArgumentsError(f"optim={asked!r} has no Keras counterpart{nearest(asked, OPTIMIZERS)} (known: {known})")
    name, own = OPTIMIZERS[asked]
    cls = getattr(family.optimizers, name, None)
    if cls is None:
        raise ArgumentsError(f"optim={asked!r} needs {family.__name__}.optimizers.{name}, which does not exist")
    decay = {"weight_decay": args.weight_decay or None} if "weight_decay" in inspect.signature(cls).parameters else {}
    if args.weight_decay and not decay:
        raise ArgumentsError(f"weight_decay={args.weight_decay}: {family.__name__}'s {name} does not support it")
    if name == "AdamW":
        decay = {"weight_decay": args.weight_decay}
    return name, {**own(args), **decay, **_extra_options(args.optim_args, cls)}


def _extra_options(text: str | None, cls: Any) -> dict[str, Any]:
    """`optim_args` as keyword arguments of the class."""
    options = dict(part.split("=", 1) for part in text.replace(" ", "").split(",")) if text else {}
    known = inspect.signature(cls).parameters
    unknown = [name for name in options if name not in known]
    if unknown:
        raise ArgumentsError(f"optim_args: {cls.__name__} has no option {unknown[0]!r}{nearest(unknown[0], known)}")
    return {name: _literal(value) for name, value in options.items()}


def _literal(text: str) -> Any:
    try:
        return ast.literal_eval(text.capitalize() if text.lower() in ("true", "false", "none") else text)
    except (ValueError, SyntaxError):
        return text


def is_decayed(variable: Any) -> bool:
    """Whether weight decay applies to a variable."""
    return UNDECAYED.search(variable_name(variable)) is None


def scales_loss(optimizer: Any) -> bool:
    """Whether this is a LossScaleOptimizer of Keras or of tf_keras, also before it is built."""
    return any("LossScaleOptimizer" in each.__name__ for each in type(optimizer).__mro__)


def number(value: Any) -> float:
    """A learning rate as a number; a variable of several replicas has no `float()`."""
    from keras import ops

    return float(ops.convert_to_numpy(ops.convert_to_tensor(value)))
