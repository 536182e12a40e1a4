"""Plain values that the code of a model shares: on its class, and in the global variables that it names."""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from types import CodeType, FunctionType
from typing import Any

from .refilling import refilling

NUMBERS = frozenset({int, float, bool, str, complex, type(None)})
LIBRARIES = ("loopwright", "torch", "transformers", "numpy", "peft", "builtins")
NOT_USERS = frozenset((*sys.stdlib_module_names, *LIBRARIES))
INSTALLED = ("site-packages", "dist-packages")
FEW = 64
"""Entries of the largest container that is restored."""


def shared_by(objects: Iterable[Any]) -> list[Callable[[], None]]:
    """Functions that restore what the classes of a user's objects count or collect."""
    found: list[Callable[[], None]] = []
    for kind in {base for each in objects for base in type(each).__mro__}:
        if kind.__module__.partition(".")[0] not in LIBRARIES:
            found += shared_by_class(kind)
            for function in vars(kind).values():
                found += globals_of(function)
    return found


def shared_by_class(kind: type) -> list[Callable[[], None]]:
    """Functions that restore what a class counts or collects."""
    own = {name: value for name, value in vars(kind).items() if not name.startswith("__")}

    def remove_new() -> None:  # a number of a base class that was counted on
        for name, value in list(vars(kind).items()):
            if name not in own and type(value) in NUMBERS and not name.startswith("__"):
                delattr(kind, name)

    return [remove_new, *_restoring(own, partial(setattr, kind))]


def globals_of(function: Any) -> list[Callable[[], None]]:
    """Functions that restore the global variables that a function of the user names, as far as they are plain."""
    function = getattr(function, "__func__", function)
    if not isinstance(function, FunctionType) or (function.__module__ or "").partition(".")[0] in LIBRARIES:
        return []
    return _restoring(named_by(function), function.__globals__.__setitem__)


def is_users_code(thing: Any) -> bool:
    """Whether a class or function is the user's, not one of Python or an installed package."""
    home = thing.__module__ or ""
    if home == "__main__":
        return True
    if home.partition(".")[0] in NOT_USERS:
        return False
    file = getattr(sys.modules.get(home), "__file__", None) or ""
    return not any(part in file for part in INSTALLED)


def named_by(function: FunctionType) -> dict[str, Any]:
    """The global variables that the code of a function names."""
    place = function.__globals__
    return {name: place[name] for name in _names_in(function.__code__) if name in place}


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
