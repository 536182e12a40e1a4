"""Which loss a run has: what was found out about it holds for the same one only."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from types import CodeType
from typing import Any

from .columns import innermost


def stamp_of(trainer: Any) -> str:
    """A digest of the model's class and configuration, the loss functions and the names of labels."""
    model = innermost(trainer.model)
    parts = [
        f"{type(model).__module__}.{type(model).__qualname__}",
        _configuration(getattr(model, "config", None)),
        described(type(model).forward),
        described(getattr(model, "_loss_function", None)),
        described(getattr(type(trainer), "compute_loss", None)),
        described(vars(trainer).get("compute_loss")),
        described(trainer.compute_loss_func),
        *sorted(trainer.label_names),
        str(trainer.args.label_smoothing_factor),
    ]
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()[:32]


def described(function: Callable[..., Any] | None) -> str:
    """A function by its name and its code; an object that is called, by its class."""
    if function is None:
        return ""
    inner = getattr(function, "__wrapped__", function)
    code = getattr(inner, "__code__", None)
    name = f"{getattr(inner, '__module__', '')}.{getattr(inner, '__qualname__', type(inner).__qualname__)}"
    if code is None and not isinstance(inner, type):
        code = getattr(type(inner).__call__, "__code__", None)
    return name if code is None else f"{name} {_of_code(code)}"


def _of_code(code: CodeType) -> str:
    constants = [_of_code(each) if isinstance(each, CodeType) else repr(each) for each in code.co_consts]
    return hashlib.sha256(code.co_code + repr((code.co_names, sorted(constants))).encode()).hexdigest()[:16]


def _configuration(config: Any) -> str:
    """The plain values of a configuration; where it was read from says nothing about the loss."""
    if config is None or not hasattr(config, "to_dict"):
        return ""
    values = {key: value for key, value in config.to_dict().items() if not key.startswith("_")}
    values.pop("transformers_version", None)
    return json.dumps(values, sort_keys=True, default=lambda value: type(value).__name__)
