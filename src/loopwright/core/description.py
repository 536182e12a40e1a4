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

from ..args.base import BaseArguments, plain, without_secrets
from ..args.field import specs
from ..args.reading import read_dict

DEEPEST = 6
"""Levels of nested values that are described."""


def described(value: Any, depth: int = 0) -> str:
    """A text for a value: numbers and collections as they are, functions by name and code, other objects by class."""
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
    if isinstance(value, type) or not callable(value):
        return name_of(value if isinstance(value, type) else type(value))
    return _described_function(value, depth)


def name_of(kind: Any) -> str:
    """The full name of a class or a function."""
    return f"{getattr(kind, '__module__', '?')}.{getattr(kind, '__qualname__', type(kind).__qualname__)}"


def _described_function(function: Any, depth: int) -> str:
    if isinstance(function, functools.partial):
        given = described([function.func, function.args, function.keywords], depth + 1)
        return f"partial({given})"
    function = getattr(function, "__func__", function)
    code = getattr(function, "__code__", None)
    if not isinstance(code, CodeType):
        named = hasattr(function, "__qualname__")
        return name_of(function if named else type(function))
    return f"{name_of(function)} (code {digest(code_of(function, depth))[:8]})"


def code_of(function: Any, depth: int = 0) -> str:
    """The instructions of a function, its constants, defaults and the values it encloses."""
    cells = []
    for cell in function.__closure__ or ():
        try:
            cells.append(described(cell.cell_contents, depth + 1))
        except ValueError:  # the variable has no value yet
            cells.append("unset")
    given = described([function.__defaults__, function.__kwdefaults__], depth + 1)
    return f"{_instructions(function.__code__)} {given} {cells}"


def _instructions(code: CodeType) -> str:
    constants = [_instructions(each) if isinstance(each, CodeType) else described(each) for each in code.co_consts]
    return f"{code.co_code.hex()} {code.co_names} {constants}"


def described_class(kind: type) -> dict[str, str]:
    """The name of a class, and the methods that are defined outside of loopwright, by name."""
    found = {"trainer class": name_of(kind)}
    for each in kind.__mro__:
        if each is object or each.__module__.split(".")[0] == "loopwright":
            continue
        for name, member in vars(each).items():
            function = getattr(member, "__func__", member)
            if isinstance(getattr(function, "__code__", None), CodeType):
                found.setdefault(f"{kind.__name__}.{name}", described(function))
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
