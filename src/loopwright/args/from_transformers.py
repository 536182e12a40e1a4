"""Converting an object of transformers' TrainingArguments, without importing transformers."""

from __future__ import annotations

import dataclasses
from typing import Any, TypeVar

from ..errors import ArgumentsError
from .base import BaseArguments
from .field import default_of

Arguments = TypeVar("Arguments", bound=BaseArguments)


def is_from_transformers(args: object) -> bool:
    """Whether this is an object of transformers' TrainingArguments, or of a class derived from it."""
    return any(
        each.__module__ == "transformers.training_args" and each.__name__ == "TrainingArguments"
        for each in type(args).__mro__
    )


def converted(args: Any, kind: type[Arguments]) -> Arguments:
    """The same arguments as an object of `kind`; fields that a derived class has added are kept as attributes."""
    known = {each.name for each in dataclasses.fields(kind) if each.init}
    given: dict[str, Any] = {}
    added: dict[str, Any] = {}
    for each in dataclasses.fields(args):
        value = getattr(args, each.name, None)
        if each.name not in known:
            added[each.name] = value
        elif each.init and value != default_of(each):
            given[each.name] = value
    given.update(_as_passed(args))
    try:
        made = kind(**given)
    except ArgumentsError as error:
        raise ArgumentsError(
            [f"a {type(args).__module__}.{type(args).__qualname__} cannot be used as it is: {error}"]
        ) from error
    for name, value in added.items():
        setattr(made, name, value)
    return made


def _as_passed(args: Any) -> dict[str, Any]:
    """Fields that transformers replaces by objects of its own, as they can be passed."""
    values: dict[str, Any] = {"output_dir": args.output_dir}
    config = getattr(args, "accelerator_config", None)
    if config is not None and hasattr(config, "to_dict"):
        values["accelerator_config"] = {k: v for k, v in config.to_dict().items() if v is not None}
    for name in ("lr_scheduler_type", "optim", "eval_strategy", "save_strategy", "logging_strategy", "hub_strategy"):
        value = getattr(args, name, None)
        if value is not None:
            values[name] = getattr(value, "value", value)
    return values
