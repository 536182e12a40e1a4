"""What a JSON document of a checkpoint contains, declared next to the code that writes it and checked when it is read.

A shape is a function that returns the problem of a value, or None: `record({"step": count(), "rows": list_of(text)})`.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from ...errors import CheckpointError, LoopwrightError

Shape = Callable[[Any, str], str | None]
"""Returns the problem of a value with this name, or None."""

LARGEST_COUNT = 1 << 62
LARGEST = 1e30
"""No number of a schedule, an optimizer or a position is larger."""
NOT_IN_NAMES = re.compile(r"[/\\\x00]|^\.*$")
"""What leads from a name to another folder."""
DEEPEST = 100
"""Levels of nested values in a document."""


def anything(value: Any, name: str) -> str | None:
    return None


def _a(expected: str, fits: Callable[[Any], bool]) -> Shape:
    return lambda value, name: None if fits(value) else f"{name} is {shown(value)}, expected {expected}"


def count(least: int = 0, most: int = LARGEST_COUNT) -> Shape:
    expected = f"an integer from {least}" + (f" to {most}" if most < LARGEST_COUNT else "")
    return _a(expected, lambda value: type(value) is int and least <= value <= most)


def number(least: float = -LARGEST, most: float = LARGEST) -> Shape:
    """A finite number."""
    expected = "a finite number" if least == -LARGEST else f"a finite number from {least:g}"
    return _a(expected, lambda value: type(value) in (int, float) and least <= value <= most)


any_number = _a("a number", lambda value: type(value) is float or (type(value) is int and abs(value) < 1 << 1000))
flag = _a("true or false", lambda value: type(value) is bool)
text = _a("a string", lambda value: type(value) is str)
file_part = _a(
    "a name without folders", lambda value: type(value) is str and len(value) < 200 and not NOT_IN_NAMES.search(value)
)
"""Part of the name of a file or folder."""


def one_of(*values: Any) -> Shape:
    return _a(f"one of {', '.join(map(repr, values))}", lambda value: any(value is v or value == v for v in values))


def maybe(shape: Shape) -> Shape:
    """Null, or a value of this shape."""
    return lambda value, name: None if value is None else shape(value, name)


def either(*shapes: Shape) -> Shape:
    """A value of one of these shapes; the problem is that of the last."""

    def check(value: Any, name: str) -> str | None:
        problems = [shape(value, name) for shape in shapes]
        return None if None in problems else problems[-1]

    return check


def list_of(shape: Shape = anything, *, length: int | None = None) -> Shape:
    """A list with values of this shape."""

    def check(value: Any, name: str) -> str | None:
        if type(value) not in (list, tuple):
            return f"{name} is {shown(value)}, expected a list"
        if length is not None and len(value) != length:
            return f"{name} has {len(value)} entries, expected {length}"
        return next((p for i, one in enumerate(value) if (p := shape(one, f"{name}[{i}]")) is not None), None)

    return check


def named(shape: Shape = anything) -> Shape:
    """An object with values of this shape under any names."""

    def check(value: Any, name: str) -> str | None:
        if not isinstance(value, dict):
            return f"{name} is {shown(value)}, expected an object"
        return next((p for key, one in value.items() if (p := shape(one, _inside(name, key))) is not None), None)

    return check


def record(
    required: Mapping[str, Shape], optional: Mapping[str, Shape] | None = None, *, others: bool = True
) -> Shape:
    """An object with these names; `others`: and possibly more."""
    shapes = {**(optional or {}), **required}

    def check(value: Any, name: str) -> str | None:
        if not isinstance(value, dict):
            return f"{name} is {shown(value)}, expected an object"
        for key in required:
            if key not in value:
                return f"{_inside(name, key)} is missing"
        more = [] if others else sorted(map(str, value.keys() - shapes.keys()))
        if more:
            return f"{_inside(name, more[0])} is unknown; there are {', '.join(shapes)}"
        known = ((key, shape) for key, shape in shapes.items() if key in value)
        return next((p for key, shape in known if (p := shape(value[key], _inside(name, key))) is not None), None)

    return check


def like(template: Any, *, complete: bool = True) -> Shape:
    """A value of the same kind as another; `complete`: with all its names. For a state that another object defines."""
    if isinstance(template, Mapping):
        shapes = {str(key): like(one, complete=complete) for key, one in template.items()}
        return record(shapes if complete else {}, shapes)
    if isinstance(template, (list, tuple)):
        same = {type(one) for one in template}
        inner = like(template[0], complete=complete) if same and same <= {int, float} else anything
        return list_of(inner)
    if isinstance(template, bool):
        return flag
    if isinstance(template, str):
        return text
    if isinstance(template, (int, float)):
        return _like_number(template)
    return anything


def _like_number(template: float) -> Shape:
    if not math.isfinite(template):  # such as the best metric before there is one
        return any_number
    most = max(LARGEST, abs(template))
    return number(0 if template >= 0 else -most, most)


def _inside(name: str, key: Any) -> str:
    return str(key) if name == "the document" else f"{name}.{key}"


def shown(value: Any) -> str:
    """A short form of a value for a message."""
    if isinstance(value, (dict, list)):
        return "an object" if isinstance(value, dict) else "a list"
    if value is None:
        return "null"
    try:
        whole = repr(value)
    except ValueError:  # an integer of thousands of digits
        return "a very large integer"
    return whole if len(whole) <= 40 else f"{whole[:30]}... ({len(whole)} characters)"


def check(value: Any, shape: Shape, path: Path) -> Any:
    """The value; raises `CheckpointError` if it has another shape, or too many levels."""
    try:
        return check_part(value, shape)
    except ValueError as error:
        raise CheckpointError(
            f"{label(path)}: {error}. The file was damaged or changed; resume from another checkpoint"
        ) from None


def check_part(value: Any, shape: Shape) -> Any:
    """Like `check`, for a part of a document: raises a ValueError, to which `restoring` adds the file."""
    problem = f"it has more than {DEEPEST} levels" if _is_too_deep(value) else shape(value, "the document")
    if problem is not None:
        raise ValueError(problem)
    return value


def _is_too_deep(value: Any) -> bool:
    level = [value]
    for _ in range(DEEPEST):
        level = [
            child
            for one in level
            if isinstance(one, (dict, list))
            for child in (one.values() if isinstance(one, dict) else one)
            if isinstance(child, (dict, list))
        ]
        if not level:
            return False
    return True


def label(path: Path) -> str:
    """The name of a file with that of its checkpoint."""
    parts = path.parts[-3:] if path.parent.name == "ranks" else path.parts[-2:]
    return "/".join(parts)


@contextmanager
def restoring(path: Path, what: str) -> Iterator[None]:
    """Convert any error of restoring a document, in other libraries or the user's code, to one that names it."""
    try:
        yield
    except (LoopwrightError, MemoryError):
        raise
    except Exception as error:  # a state of other values fails in many ways
        raise CheckpointError(
            f"{label(path)}: {what} cannot be restored ({type(error).__name__}: {error}). The file was changed, or "
            "this run is not the one that saved it"
        ) from error
