"""Values of logs, metrics and callback states as JSON values, so that every file can be written."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from numbers import Number
from typing import Any

from ..errors import LogError

LEFT_OUT = object()
"""A value that cannot be saved."""


def json_value(value: Any, name: str) -> Any:
    """The value with numbers of numpy, torch and TensorFlow as Python numbers; raises `LogError` for other objects."""
    if value is None or isinstance(value, (bool, str)):
        return value
    if isinstance(value, int):
        return int(value)
    if isinstance(value, float):
        return float(value)
    if isinstance(value, Mapping):
        return {str(key): json_value(each, f"{name}[{key!r}]") for key, each in value.items()}
    if isinstance(value, (list, tuple)):
        return [json_value(each, f"{name}[{index}]") for index, each in enumerate(value)]
    number = _number(value)
    if number is None:
        raise LogError(
            f"{name} is a {type(value).__name__}, which cannot be logged or saved; use numbers, strings, None, and "
            "lists and dicts of them"
        )
    return number


def json_or_left_out(value: Any, name: str, tell: Callable[[str], None]) -> Any:
    """Like `json_value`, for a file that must be written: LEFT_OUT for other objects, with a message to `tell`."""
    try:
        return json_value(value, name)
    except LogError as error:
        tell(f"{error}. It is left out of the checkpoint")
        return LEFT_OUT


def _number(value: Any) -> bool | int | float | None:
    """A scalar of another library as a Python number; None if it is something else."""
    if isinstance(value, Number) and not hasattr(value, "item"):  # decimals and fractions, no complex numbers
        return None if isinstance(value, complex) else float(value)  # type: ignore[arg-type]
    try:
        value = value.numpy() if hasattr(value, "numpy") and not hasattr(value, "item") else value  # TensorFlow
        found = value.item()  # arrays and tensors of one element; others raise an error
    except (AttributeError, TypeError, ValueError, RuntimeError):
        return None
    return found if isinstance(found, (bool, int, float)) else None
