"""Descriptions of arguments, code and versions as short texts, equal on two ranks that have the same ones."""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import platform
from collections.abc import Iterable, Mapping
from enum import Enum
from importlib import metadata
from types import CodeType
from typing import Any

from ...args.base import BaseArguments, plain, without_secrets
from ...args.field import specs
from ...args.reading import read_dict

DEEPEST = 6
"""Levels of nested values that are described."""


def described(value: Any, depth: int = 0) -> str:
    """A text for a value: numbers and collections as they are, functions by name, code and values, others by class."""
    if depth > DEEPEST:
        return "..."
    if isinstance(value, Enum):
        return described(value.value, depth)
    if value is None or isinstance(value, (bool, int, float, complex, str, bytes)):
        return repr(value)
    if isinstance(value, Mapping):
        pairs = sorted((described(key, depth + 1), described(each, depth + 1)) for key, each in value.items())
        return "{" + ", ".join(f"{key}: {each}" for key, each in pairs) + "}"
    if isinstance(value, (set, frozenset)):
        return "{" + ", ".join(sorted(described(each, depth + 1) for each in value)) + "}"
    if isinstance(value, (list, tuple)):
        return "[" + ", ".join(described(each, depth + 1) for each in value) + "]"
    if getattr(value, "ndim", None) == 0 and callable(getattr(value, "item", None)):
        return repr(value.item())
    return _described_object(value, depth)


def _described_object(value: Any, depth: int) -> str:
    if isinstance(value, type):
        return name_of(value)
    if dataclasses.is_dataclass(value):
        values = {each.name: getattr(value, each.name, None) for each in dataclasses.fields(value)}
        return f"{name_of(type(value))}({described(values, depth + 1)})"
    if isinstance(value, functools.partial):
        return f"partial({described([value.func, value.args, value.keywords], depth + 1)})"
    function = getattr(value, "__func__", value)
    if not isinstance(getattr(function, "__code__", None), CodeType):
        return described_code(value)
    return f"{described_code(function)} with {_enclosed(function, depth)}"


def described_code(value: Any) -> str:
    """The name and the code of a function, without the values it uses; for other objects, their class."""
    if isinstance(value, functools.partial):
        return f"partial({described_code(value.func)})"
    function = getattr(value, "__func__", value)
    code = getattr(function, "__code__", None)
    if isinstance(code, CodeType):
        return f"{name_of(function)} (code {digest(_instructions(code))[:8]})"
    return "None" if value is None else name_of(value if hasattr(value, "__qualname__") else type(value))


def name_of(kind: Any) -> str:
    """The full name of a class or a function."""
    return f"{getattr(kind, '__module__', '?')}.{getattr(kind, '__qualname__', type(kind).__qualname__)}"


def _enclosed(function: Any, depth: int) -> str:
    """The defaults of a function and the values it encloses."""
    cells = []
    for cell in function.__closure__ or ():
        try:
            cells.append(cell.cell_contents)
        except ValueError:  # the variable has no value yet
            cells.append("unset")
    return described([function.__defaults__, function.__kwdefaults__, cells], depth + 1)


def _instructions(code: CodeType) -> str:
    constants = [_instructions(each) if isinstance(each, CodeType) else described(each) for each in code.co_consts]
    return f"{code.co_code.hex()} {code.co_names} {constants}"


def methods_of(kind: type) -> dict[str, Any]:
    """The methods of a class that are defined outside of loopwright, by name."""
    found: dict[str, Any] = {}
    for each in kind.__mro__:
        if each is object or each.__module__.split(".")[0] == "loopwright":
            continue
        for name, member in vars(each).items():
            function = getattr(member, "__func__", member)
            if isinstance(getattr(function, "__code__", None), CodeType):
                found.setdefault(f"{kind.__name__}.{name}", function)
    return found


def described_arguments(args: BaseArguments) -> tuple[dict[str, str], dict[str, str]]:
    """The arguments that ranks must have in common, and those they usually have; secrets are masked.

    Fields that a user has added are among the second: whether they depend on the rank is unknown.
    """
    same: dict[str, str] = {}
    usual: dict[str, str] = {}
    known = specs(type(args))
    for field in dataclasses.fields(args):
        spec = known.get(field.name)
        if spec is not None and (spec.ranks == "any" or spec.row is not None):
            continue
        text = described(without_secrets(plain(_content(spec, getattr(args, field.name, None)))))
        (same if spec is not None and spec.ranks == "same" else usual)[field.name] = text
    return same, usual


def _content(spec: Any, value: Any) -> Any:
    """The value of an argument; for the path of a JSON file, what the file holds."""
    if spec is not None and "dict" in str(spec.hint) and isinstance(value, str):
        try:
            return read_dict(value)
        except ValueError:  # it is reported where the argument is used
            return value
    return value


def versions(packages: Iterable[str]) -> dict[str, str]:
    """The versions of Python, as major.minor, and of packages."""
    found = {"python version": ".".join(platform.python_version_tuple()[:2])}
    for name in packages:
        try:
            found[f"{name} version"] = metadata.version(name)
        except metadata.PackageNotFoundError:
            found[f"{name} version"] = "not installed"
    return found


def digest(text: str) -> str:
    return hashlib.sha256(text.encode(errors="surrogatepass")).hexdigest()
