"""The names that the code of a user shares: attributes of its classes, and global variables that it names."""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from types import CodeType, FunctionType, ModuleType
from typing import Any

from .refilling import Undo, copied, left_in, refilling

NUMBERS = frozenset({int, float, bool, str, complex, type(None)})
LIBRARIES = ("loopwright", "torch", "transformers", "numpy", "peft", "builtins")
NOT_USERS = frozenset((*sys.stdlib_module_names, *LIBRARIES))
INSTALLED = ("site-packages", "dist-packages")
FEW = 64
"""Entries of the largest container of an installed package that is restored."""


def restoring_class(kind: type) -> list[Undo]:
    """Functions that restore the attributes of a class."""

    def names() -> list[str]:
        return [name for name in vars(kind) if not name.startswith("__")]

    return _restoring(vars(kind), names, partial(setattr, kind), partial(delattr, kind), all_of_it=is_users_code(kind))


def restoring_globals(place: dict[str, Any], names: Iterable[str], *, home: str) -> list[Undo]:
    """Functions that restore the global variables of these names; `home` is the module that they belong to."""
    return _restoring(place, lambda: names, place.__setitem__, place.__delitem__, all_of_it=is_users_module(home))


def may_have_state(home: str | None) -> bool:
    """Whether classes and functions of this module may hold state that a loss changes; generated code has no module."""
    return (home or "").partition(".")[0] not in LIBRARIES


def is_users_code(thing: Any) -> bool:
    """Whether a class or function is the user's, not one of Python or an installed package."""
    return is_users_module(thing.__module__ or "")


def is_users_module(home: str) -> bool:
    """Whether the module of this name is the user's."""
    if home == "__main__":
        return True
    if home.partition(".")[0] in NOT_USERS:
        return False
    file = getattr(sys.modules.get(home), "__file__", None) or ""
    return not any(part in file for part in INSTALLED)


def names_in(function: FunctionType) -> frozenset[str]:
    """The names of global variables and attributes in the code of a function."""
    return frozenset(_names_in(function.__code__))


def _names_in(code: CodeType) -> Iterator[str]:
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _names_in(constant)


def _restoring(
    place: Mapping[str, Any],
    names: Callable[[], Iterable[str]],
    put: Callable[[str, Any], None],
    remove: Callable[[str], None],
    *,
    all_of_it: bool,
) -> list[Undo]:
    """Functions that bind names as they are now; of a package only numbers, and short containers of plain values."""

    def is_kept(value: Any) -> bool:
        # A module that is imported meanwhile would not be bound again by the next import.
        return type(value) in NUMBERS or (all_of_it and not isinstance(value, ModuleType))

    there = {name for name in names() if name in place}
    before = {name: place[name] for name in there if is_kept(place[name])}

    # A count or an iterator of a list continues where it was, if items were taken.
    iterators = {name: (value, copied(value)) for name, value in before.items()}
    drawn = {name: (value, left_in(value), same) for name, (value, same) in iterators.items() if same is not None}

    def put_back() -> None:
        for name in [name for name in names() if name in place and name not in there]:
            if is_kept(place[name]):
                remove(name)
        for name, value in before.items():
            if place.get(name, place) is not value:
                put(name, value)
        for name, (value, left, same) in drawn.items():
            if left_in(value) != left:
                put(name, copied(same))

    kept = [] if all_of_it else [refilling(place[name]) for name in there if _is_plain(place[name])]
    return [put_back, *(each for each in kept if each is not None)]


def _is_plain(value: Any) -> bool:
    if type(value) not in (list, dict, set, deque) or len(value) > FEW:
        return False
    return all(type(each) in NUMBERS for each in (value.values() if isinstance(value, dict) else value))
