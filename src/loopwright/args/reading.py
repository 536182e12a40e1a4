"""Parsing a value as its field's declared type: numbers and names given as text, JSON, paths."""

from __future__ import annotations

import functools
import json
import numbers
import os
import types
from collections.abc import Callable
from enum import Enum
from typing import Any, Union, get_args, get_origin

from .field import Spec, one_of
from .names import Name
from .problems import short

Reader = Callable[[Any], Any]
"""Converts a given value to the declared type; raises ValueError with the problem."""

_WORDS = {"true": True, "yes": True, "1": True, "false": False, "no": False, "0": False}


def read(spec: Spec, value: Any) -> Any:
    """The value as the field's type; raises ValueError with what it must be."""
    reader = None if spec.as_given else reader_for(spec.hint)
    allows_none = spec.default is None or type(None) in get_args(spec.hint)
    if reader is None or (value is None and allows_none):
        return value
    return reader(value)


def check(spec: Spec, value: Any) -> str | None:
    """The problem of a parsed value, or None."""
    if value is None and spec.default is None:
        return None
    complaint = one_of(*spec.choices)(value) if spec.choices else None
    return complaint or (spec.check(value) if spec.check else None)


@functools.cache
def reader_for(hint: Any) -> Reader | None:
    """The reader of this type; None if values are used unchanged."""
    is_union = get_origin(hint) in (Union, types.UnionType)
    members = [member for member in (get_args(hint) if is_union else (hint,)) if member is not type(None)]
    for member in members:
        if isinstance(member, type) and issubclass(member, Name):
            return member
    if any(get_origin(member) is dict for member in members):
        return read_dict
    return _READERS.get(members[0]) if len(members) == 1 else None


def read_bool(value: Any) -> bool:
    """True or False, also as text or as 0 and 1."""
    word = str(value).strip().lower()
    if word not in _WORDS:
        raise ValueError(f"{short(value)} is not True or False")
    return _WORDS[word]


def read_int(value: Any) -> int:
    """An integer, also as text or as a float without a fraction."""
    number = read_float(value)
    if number != int(number):
        raise ValueError(f"{short(value)} is not an integer")
    if abs(int(number)) >= 2**63:
        raise ValueError(f"{short(value)} is not an integer of 64 bits")
    return int(number)


def read_float(value: Any) -> float:
    """A finite number, also as text (YAML reads 5e-5 as text); integers keep their type."""
    try:
        number = value if isinstance(value, bool) else float(value)
    except (TypeError, ValueError, OverflowError, RuntimeError):  # the last: a tensor of several numbers
        number = None
    if isinstance(value, numbers.Integral) and number is not None and not isinstance(value, bool):
        return int(value)
    if number is None or isinstance(number, bool) or number - number != 0:  # the last: infinities and NaN
        raise ValueError(f"{short(value)} is not a finite number")
    return number


def read_str(value: Any) -> str:
    """Text, or a path as text."""
    if isinstance(value, Enum):
        value = value.value
    text = os.fspath(value) if isinstance(value, os.PathLike) else value
    if not isinstance(text, str):
        raise ValueError(f"{short(value)} is not text")
    if "\0" in text:
        raise ValueError(f"{short(value)} contains a NUL character")
    return str(text)


def read_dict(value: Any) -> Any:
    """A dict, also as JSON text or the path of a JSON file; other objects are unchanged."""
    if not isinstance(value, str | os.PathLike):
        return value
    text = str(os.fspath(value))
    if not text.lstrip().startswith("{"):
        text = _text_of(text)
    try:
        return {key: _plain(item) for key, item in json.loads(text).items()}
    except (json.JSONDecodeError, AttributeError) as error:
        raise ValueError(f"{short(value)} does not hold a JSON object: {error}") from None


def _text_of(path: str) -> str:
    try:
        with open(os.path.expanduser(path), encoding="utf-8") as file:
            return file.read()
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or type(error).__name__
        raise ValueError(
            f"{short(path)} is neither JSON text starting with '{{' nor a readable JSON file: {reason}"
        ) from None


def _plain(item: Any) -> Any:
    """Convert text to numbers and booleans at any depth: a shell passes everything as text."""
    if isinstance(item, dict):
        return {key: _plain(value) for key, value in item.items()}
    if not isinstance(item, str):
        return item
    if item.lower() in ("true", "false"):
        return item.lower() == "true"
    for kind in (int, float):
        try:
            return kind(item)
        except ValueError:
            continue
    return item


_READERS: dict[Any, Reader] = {
    bool: read_bool,
    int: read_int,
    float: read_float,
    str: read_str,
}
