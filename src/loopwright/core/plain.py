"""Plain values: what logs, metrics and callback states are made of, so that every file can be written."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from ..errors import MetricError

WANTED = "numbers, strings, None, and lists and dicts of them"


def plain(value: Any, name: str) -> Any:
    """The value with numbers of numpy and torch as Python numbers; raises `MetricError` for other objects."""
    if value is None or isinstance(value, (bool, str)):
        return value
    if isinstance(value, int):
        return int(value)
    if isinstance(value, float):
        return float(value)
    if isinstance(value, Mapping):
        return {str(key): plain(each, f"{name}[{key!r}]") for key, each in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(each, f"{name}[{index}]") for index, each in enumerate(value)]
    number = _number(value)
    if number is None:
        raise MetricError(f"{name} is a {type(value).__name__}, which cannot be logged or saved; use {WANTED}")
    return number


def storable(value: Any, name: str, tell: Callable[[str], None]) -> Any:
    """Like `plain`, for a file that must be written: other objects are left out, with a message to `tell`."""
    if isinstance(value, Mapping):
        found = {str(key): storable(each, f"{name}[{key!r}]", tell) for key, each in value.items()}
        return {key: each for key, each in found.items() if each is not LEFT_OUT}
    if isinstance(value, (list, tuple)):
        return [each for i, item in enumerate(value) if (each := storable(item, f"{name}[{i}]", tell)) is not LEFT_OUT]
    try:
        return plain(value, name)
    except MetricError as error:
        tell(f"{error}. It is left out of the checkpoint")
        return LEFT_OUT


LEFT_OUT = object()


def _number(value: Any) -> bool | int | float | None:
    """A scalar of another library as a Python number; None if it is something else."""
    item = getattr(value, "item", None)
    try:
        found = item() if callable(item) else None  # arrays and tensors of one element; others raise an error
    except (TypeError, ValueError, RuntimeError):
        return None
    return found if isinstance(found, (bool, int, float)) else None
