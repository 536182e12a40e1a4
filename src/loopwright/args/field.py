"""How an argument is declared: default, help and check in one place, used by parser, docs and validation."""

from __future__ import annotations

import dataclasses
import functools
import inspect
import math
import numbers
import os
from abc import ABCMeta
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from typing import Any, ClassVar, Literal, get_type_hints

Check = Callable[[Any], "str | None"]
"""Checks a value; returns the problem, or None."""


class Unset:
    """The type of UNSET, the value of an argument that was not given; a singleton."""

    _only: ClassVar[Unset | None] = None

    def __new__(cls) -> Unset:
        if cls._only is None:
            cls._only = super().__new__(cls)
        return cls._only

    def __repr__(self) -> str:
        return "UNSET"

    def __bool__(self) -> bool:
        return False

    def __reduce__(self) -> tuple[type[Unset], tuple[()]]:
        return Unset, ()


UNSET: Any = Unset()

LONGEST_NAME = 100
"""Characters of a name that is compared with others: the time of a comparison grows with the square of the length."""


LONGEST_PATH = 4096


class Help(str):
    """The help text of a field, with loopwright's own metadata attached.

    Parsers based on argparse pass every key of a field's metadata to `add_argument`, so the check cannot be a
    separate key.
    """

    check: Check | None = None
    as_given: bool = False
    ranks: str = "same"
    row: Any = None


def arg(
    default: Any,
    help: str,
    *,
    check: Check | None = None,
    choices: Sequence[str] | None = None,
    as_given: bool = False,
    nargs: str | None = None,
    const: Any = None,
    repr: bool = True,
    ranks: Literal["same", "usual", "any"] = "same",
    row: Any = None,
) -> Any:
    """A dataclass field. `as_given`: the value is not parsed. `row`: its row in the legacy table.

    `ranks`: whether the ranks of a run must have the `same` value, `usual`ly have it (a warning if not), or `any`.
    """
    text = Help(help.replace("%", "%%"))
    text.check, text.as_given, text.ranks, text.row = check, as_given, ranks, row
    metadata: dict[str, Any] = {"help": text}
    for key, value in (("choices", choices), ("nargs", nargs), ("const", const)):
        if value is not None:
            metadata[key] = value
    if isinstance(default, list | dict):
        return dataclasses.field(default_factory=default.copy, metadata=metadata, repr=repr)
    return dataclasses.field(default=default, metadata=metadata, repr=repr)


class Counterpart(ABCMeta):
    """The metaclass of classes that other packages have too, whose objects `register` makes instances of this one."""


class Group(metaclass=Counterpart):
    """Base class of the argument groups."""

    title: ClassVar[str] = ""


@dataclass(frozen=True)
class Spec:
    """The declaration of one field."""

    name: str
    title: str
    hint: Any
    default: Any
    help: str
    check: Check | None
    choices: Sequence[str] | None
    as_given: bool
    ranks: str
    row: Any


def specs(cls: Any) -> dict[str, Spec]:
    """Every argument declared by the groups of a class, by name; subclasses may have changed defaults."""
    return _specs(cls)


@functools.cache
def _specs(cls: type) -> dict[str, Spec]:
    found: dict[str, Spec] = {}
    for group in reversed(cls.__mro__):
        if issubclass(group, Group) and Group in group.__bases__:
            hints = get_type_hints(group)
            found.update((name, _spec(field, group.title, hints)) for name, field in _fields_of(group).items())
    return found


@functools.cache
def is_redeclared(cls: type, name: str) -> bool:
    """Whether a class of a third party declares this old name as a field of its own."""
    first = next(each for each in cls.__mro__ if name in vars(each).get("__annotations__", ()))
    return not first.__module__.startswith("loopwright.")


def _fields_of(group: Any) -> dict[str, dataclasses.Field[Any]]:
    return {field.name: field for field in dataclasses.fields(group)}


def _spec(field: dataclasses.Field[Any], title: str, hints: dict[str, Any]) -> Spec:
    text = field.metadata["help"]
    return Spec(
        name=field.name,
        title=title,
        hint=hints[field.name],
        default=default_of(field),
        help=text.replace("%%", "%"),
        check=text.check,
        choices=field.metadata.get("choices"),
        as_given=text.as_given,
        ranks=text.ranks,
        row=text.row,
    )


def default_of(field: dataclasses.Field[Any]) -> Any:
    """A field's default value; lists and dicts are created for each call."""
    return field.default if field.default_factory is dataclasses.MISSING else field.default_factory()


def nearest(name: str, names: Iterable[str]) -> str:
    """'; did you mean ...?' if one of the names is similar, else an empty string."""
    if not isinstance(name, str) or len(name) > LONGEST_NAME:
        return ""
    close = get_close_matches(name, list(names), n=1, cutoff=0.6)
    return f"; did you mean {close[0]!r}?" if close else ""


def unknown_name(kind: str, name: str, names: Iterable[str]) -> str:
    """A message for a name that is not in a table, with the similar one if there is one."""
    known = sorted(names)
    near = get_close_matches(name, known, n=1)
    hint = f" Did you mean '{near[0]}'?" if near else ""
    return f"No {kind} is called '{name}'.{hint} Known: {', '.join(known)}."


def advised(problem: str, name: str, names: Iterable[str], more: str) -> str:
    """A problem, the similar name if there is one, and what else helps, as one text."""
    near = nearest(name, names)
    return f"{problem}{near} {more[0].upper()}{more[1:]}" if near else f"{problem}; {more}"


# Checks. Each returns the end of the sentence "<name>=<value>: ...".


def is_number(value: Any) -> bool:
    """A finite real number of the range of floats, and not True or False."""
    if not isinstance(value, numbers.Real) or isinstance(value, bool):
        return False
    try:
        return math.isfinite(value)
    except OverflowError:
        return False


def positive(value: Any) -> str | None:
    """Above zero."""
    return None if is_number(value) and value > 0 else "must be a number above 0"


def non_negative(value: Any) -> str | None:
    """Zero or more."""
    return None if is_number(value) and value >= 0 else "must be a number greater than or equal to 0"


def between(low: float, high: float, *, below: bool = False) -> Check:
    """From low to high; `below` excludes high itself."""

    def check(value: Any) -> str | None:
        if is_number(value) and low <= value and (value < high if below else value <= high):
            return None
        return f"must be a number from {low:g} to {'just below ' if below else ''}{high:g}"

    return check


def steps_or_share(value: Any) -> str | None:
    """An integer number of steps, or a fraction of all steps below 1."""
    if is_number(value) and value >= 0 and (value < 1 or value == int(value)):
        return None
    return "must be an integer number of steps, or a fraction of all steps between 0 and 1"


def one_of(*allowed: str) -> Check:
    """One of the allowed names."""

    def check(value: Any) -> str | None:
        return None if value in allowed else f"must be one of {', '.join(allowed)}{nearest(value, allowed)}"

    return check


def whole_lengths(value: Any) -> str | None:
    """A list of integers above zero."""
    numbers_only = isinstance(value, list | tuple) and all(isinstance(each, int) and each > 0 for each in value)
    return None if numbers_only and value else "must be a list of integers above 0"


def list_of_names(value: Any) -> str | None:
    """A list of strings."""
    is_list = isinstance(value, list | tuple) and all(isinstance(name, str) for name in value)
    return None if is_list else "must be a list of names; put yes, no and numbers in quotes"


def path_or_flag(value: Any) -> str | None:
    """A path, True or False."""
    text = os.fspath(value) if isinstance(value, os.PathLike) else value
    if isinstance(text, bool) or (isinstance(text, str) and "\0" not in text and len(text) <= LONGEST_PATH):
        return None
    return f"must be a path of at most {LONGEST_PATH:,} characters, True or False"


def text_or_false(value: Any) -> str | None:
    """Text, or False."""
    return None if isinstance(value, str) or value is False else "must be text, or False"


def names_or_pattern(value: Any) -> str | None:
    """Text, or a list of texts."""
    return None if isinstance(value, str) or list_of_names(value) is None else "must be text, or a list of names"


def names_or_flag(value: Any) -> str | None:
    """Text, a list of texts, True or False."""
    fits = isinstance(value, bool | str) or list_of_names(value) is None
    return None if fits else "must be text, a list of names, True or False"


def configuration(value: Any) -> str | None:
    """A dict with texts as keys, text, a path, or an object with options as attributes."""
    if isinstance(value, Mapping):
        return options(value)
    plain = isinstance(value, bool | numbers.Number | bytes | list | tuple | set | type) or inspect.isroutine(value)
    return "must be a dict of options, an object with them, text or a path" if plain else None


def options(value: Any) -> str | None:
    """A dict whose keys are text."""
    is_dict = isinstance(value, Mapping) and all(isinstance(name, str) for name in value)
    return None if is_dict else "must be a dict of options, or JSON text of one"


def names_in(*allowed: str) -> Check:
    """A list made of the allowed names."""

    def check(value: Any) -> str | None:
        unknown = [name for name in value if name not in allowed] if isinstance(value, list | tuple) else [value]
        if not unknown:
            return None
        return f"must be a list of names from {', '.join(allowed)}{nearest(unknown[0], allowed)}"

    return check
