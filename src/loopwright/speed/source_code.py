"""The source code of what computes a loss, as a digest that changes with it, for what is kept between runs.

It covers the functions of all classes of a model and of other objects, also those set on instances, and those in the
modules of these classes, where libraries and users replace functions. If one of them is not of an installed package, it
may use any other loaded file that is not; then all of these count.
"""

from __future__ import annotations

import functools
import hashlib
import os
import sys
import sysconfig
import types
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from torch import nn

OWN = str(Path(__file__).resolve().parents[1]) + os.sep
"""This package, whose version is part of every key."""
PYTHON = os.path.realpath(sysconfig.get_path("stdlib")) + os.sep
INSTALLED = tuple(f"{os.sep}{name}{os.sep}" for name in ("site-packages", "dist-packages"))


def source_digest(model: nn.Module, *others: Any) -> str | None:
    """A digest of the code of a model and of other objects; None if some of it has no source file."""
    names: set[str] = set()
    files: set[str] = set()
    for function in _functions([*model.modules(), *(each for each in others if each is not None)]):
        names.add(f"{function.__module__}.{function.__qualname__}")
        file = _file_of(function)
        if file is None:
            return None
        files.add(file)
    if not all(map(_is_installed, files)):
        files |= _loaded_outside()
    digest = hashlib.sha256("\n".join(sorted(names)).encode())
    for file in sorted(files):
        digest.update(file.encode() + Path(file).read_bytes())
    return digest.hexdigest()


def _functions(things: Iterable[Any]) -> Iterator[types.FunctionType]:
    """The functions of these objects, of their classes, and of the modules of their classes, each once."""
    seen: set[int] = set()
    for value in _values(things):
        while value is not None and id(value) not in seen:
            seen.add(id(value))
            if isinstance(value, types.FunctionType):
                yield value
            value = _inside(value)


def _values(things: Iterable[Any]) -> Iterator[Any]:
    classes: dict[type, None] = {}
    for thing in things:
        yield thing
        yield from getattr(thing, "__dict__", {}).values()
        classes.update(dict.fromkeys(type(thing).__mro__))
    for module in {kind.__module__ for kind in classes}:
        yield from list(vars(sys.modules[module]).values()) if module in sys.modules else ()
    for kind in classes:
        yield from vars(kind).values()


def _inside(value: Any) -> Any:
    """What a method, property, partial or decorated function calls; None for anything else."""
    if isinstance(value, functools.partial):
        return value.func
    if isinstance(value, property):
        return value.fget
    if isinstance(value, (types.MethodType, staticmethod, classmethod)):
        return value.__func__
    return getattr(value, "__wrapped__", None) if isinstance(value, types.FunctionType) else None


def _file_of(function: types.FunctionType) -> str | None:
    """The file of a function; for generated code, that of its module."""
    module = sys.modules.get(function.__module__)
    for file in (function.__code__.co_filename, getattr(module, "__file__", None)):
        if file and (found := _existing(file)) is not None:
            return found
    return None


@functools.cache
def _existing(file: str) -> str | None:
    return os.path.realpath(file) if os.path.isfile(file) else None


def _is_installed(file: str) -> bool:
    """Whether a file belongs to Python, to an installed package, or to this one."""
    return file.startswith((OWN, PYTHON)) or any(name in file for name in INSTALLED)


def _loaded_outside() -> set[str]:
    """The source files of loaded modules that are not installed."""
    files = {str(getattr(module, "__file__", None)) for module in list(sys.modules.values())}
    outside = [file for file in files if file.endswith(".py") and not _is_installed(file)]
    found = [_existing(file) for file in outside]
    return {file for file in found if file is not None and not _is_installed(file)}
