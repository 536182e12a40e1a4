"""Plain values that the code of a model shares: on its class, and in the global variables that it names."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from types import CodeType, FunctionType
from typing import Any

from torch import nn

from .refilling import refilling

NUMBERS = frozenset({int, float, bool, str, complex, type(None)})
LIBRARIES = ("loopwright", "torch", "transformers", "numpy", "peft", "builtins")
FEW = 64
"""Entries of the largest container that is restored."""


def shared_by(modules: Iterable[nn.Module]) -> list[Callable[[], None]]:
    """Functions that restore what the classes of a user's modules count or collect."""
    found: list[Callable[[], None]] = []
    for kind in {base for module in modules for base in type(module).__mro__}:
        if kind.__module__.partition(".")[0] in LIBRARIES:
            continue
        own = {name: value for name, value in vars(kind).items() if not name.startswith("__")}
        found += _restoring(own, partial(setattr, kind))
        for function in own.values():
            found += globals_of(function)
    return found


def globals_of(function: Any) -> list[Callable[[], None]]:
    """Functions that restore the global variables that a function of the user names, as far as they are plain."""
    function = getattr(function, "__func__", function)
    if not isinstance(function, FunctionType) or (function.__module__ or "").partition(".")[0] in LIBRARIES:
        return []
    place = function.__globals__
    named = {name: place[name] for name in _names_in(function.__code__) if name in place}
    return _restoring(named, place.__setitem__)


def _names_in(code: CodeType) -> Iterator[str]:
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _names_in(constant)


def _restoring(values: dict[str, Any], put: Callable[[str, Any], None]) -> list[Callable[[], None]]:
    """Functions that restore numbers by `put`, and short containers of plain values in place."""
    numbers = {name: value for name, value in values.items() if type(value) in NUMBERS}

    def put_back() -> None:
        for name, value in numbers.items():
            put(name, value)

    kept = [refilling(value) for value in values.values() if _is_plain(value)]
    undo = [each for each in kept if each is not None]
    return [put_back, *undo] if numbers else undo


def _is_plain(value: Any) -> bool:
    if type(value) not in (list, dict, set, deque) or len(value) > FEW:
        return False
    return all(type(each) in NUMBERS for each in (value.values() if isinstance(value, dict) else value))
