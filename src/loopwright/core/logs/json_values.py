"""Values of logs, metrics and callback states as JSON values, so that every file can be written."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, MutableMapping
from numbers import Number, Real
from typing import Any

import numpy as np

from ...errors import LogError

LEFT_OUT = object()
"""A value that cannot be saved."""

DEEPEST = 100
"""Levels of lists and dicts in each other; a value that contains itself has more than any number."""
SAVED_BITS = 13_000
"""Size of the largest integer that is saved: Python reads no more than 4,300 digits from a text."""
LOGGED_BITS = 1_023
"""Size of the largest integer that is logged: it is displayed and sent to trackers as a float."""


def json_value(value: Any, name: str, *, bits: int = SAVED_BITS) -> Any:
    """The value with numbers of numpy, torch and TensorFlow as Python numbers; raises `LogError` for other objects."""
    try:
        return _converted(value, name, bits, DEEPEST)
    except LogError:
        raise
    except Exception as error:  # methods of the user's object are called here
        raise LogError(
            f"{name} cannot be logged or saved: converting this {type(value).__name__} raised {type(error).__name__}; "
            "use numbers, strings, None, and lists and dicts of them"
        ) from error


def _converted(value: Any, name: str, bits: int, levels: int) -> Any:
    if value is None or isinstance(value, (bool, str)):
        return value
    if isinstance(value, int):
        return _integer(value, name, bits)
    if isinstance(value, float):
        return float(value)
    if levels == 0:
        raise LogError(f"{name[:100]} ... has more than {DEEPEST} levels, or contains itself; log or save a part of it")
    if isinstance(value, Mapping):
        return {str(key): _converted(each, f"{name}[{key!r}]", bits, levels - 1) for key, each in value.items()}
    if isinstance(value, (list, tuple)):
        return [_converted(each, f"{name}[{index}]", bits, levels - 1) for index, each in enumerate(value)]
    number = _number(value)
    if number is None:
        raise LogError(
            f"{name} is a {type(value).__name__}, which cannot be logged or saved; use numbers, strings, None, and "
            "lists and dicts of them"
        )
    return number


def _integer(value: int, name: str, bits: int) -> int:
    if value.bit_length() > bits:
        raise LogError(
            f"{name} is an integer of {value.bit_length():,} bits, and only {bits:,} can be logged or saved here; use "
            "a string"
        )
    return int(value)


def as_logs(logs: Any) -> Any:
    """The logs with JSON values, converted in place; raises `LogError` for a value or a name that cannot be logged."""
    if not isinstance(logs, Mapping):
        raise LogError(f"trainer.log was given a {type(logs).__name__}; use a dict of names and numbers")
    names = [name for name in logs if not isinstance(name, str)]
    if names:
        raise LogError(f"trainer.log was given a name of type {type(names[0]).__name__}; use text as names")
    logs = logs if isinstance(logs, MutableMapping) else dict(logs)
    for name, value in logs.items():
        logs[name] = json_value(value, f"the logged value {name!r}", bits=LOGGED_BITS)
    return logs


def json_or_left_out(value: Any, name: str, tell: Callable[[str], None]) -> Any:
    """Like `json_value`, for a file that must be written: LEFT_OUT for other objects, with a message to `tell`."""
    try:
        return json_value(value, name)
    except LogError as error:
        tell(f"{error}. It is left out of the checkpoint")
        return LEFT_OUT


def _number(value: Any) -> bool | int | float | None:
    """A scalar of another library as a Python number; None if it is something else."""
    if isinstance(value, np.ma.MaskedArray) and np.ma.is_masked(value):
        return math.nan if value.size == 1 else None  # item() would return what is under the mask
    if isinstance(value, Number) and not hasattr(value, "item"):  # decimals and fractions, no complex numbers
        return None if isinstance(value, complex) else float(value)  # type: ignore[arg-type]
    try:
        value = value.numpy() if hasattr(value, "numpy") and not hasattr(value, "item") else value  # TensorFlow
        found = value.item()  # arrays and tensors of one element; others raise an error
    except (AttributeError, TypeError, ValueError, RuntimeError):
        return None
    if isinstance(found, Real):
        return found if isinstance(found, (bool, int, float)) else float(found)  # numpy's longdouble
    return None
