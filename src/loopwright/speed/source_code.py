"""The source code of what computes a loss, as a digest that changes with it, for what is kept between runs.

It covers the functions of all classes of a model and of other objects, also those set on instances, and those in the
modules of these classes, where libraries and users replace functions. If one of them is not of an installed package, it
may use any other loaded file that is not; then all of these count, and with them the values that the user's functions
read from elsewhere: global and bound variables, defaults, and the environment.
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

from torch import Tensor, nn

from .model_stamp import PLAIN, described

OWN = str(Path(__file__).resolve().parents[1]) + os.sep
"""This package, whose version is part of every key."""
PYTHON = os.path.realpath(sysconfig.get_path("stdlib")) + os.sep
INSTALLED = tuple(f"{os.sep}{name}{os.sep}" for name in ("site-packages", "dist-packages"))
COMPILED = (
    "__compiled_fn_", "__resume_at_", "__import_", "__gen_rand_values_", "__warnings_warn_wrapper_", "__comprehension_",
)  # fmt: skip
"""What torch's compiler adds to the modules of the functions it compiles."""
WATCHER = "torch._dynamo.mutation_guard"
"""Where it has the functions that it puts around methods of `nn.Module`, to count modules."""
REPLACEABLE = ("torch", "transformers", "numpy", "peft")
"""Libraries in whose modules the user may have replaced functions."""


def source_digest(model: nn.Module, *others: Any, with_values: bool = True) -> str | None:
    """A digest of the code of a model and of other objects, and of the values it reads; None without a source file."""
    names: set[str] = set()
    files: set[str] = set()
    things = [*model.modules(), *(each for each in others if each is not None)]
    for function in _functions(things):
        names.add(f"{function.__module__}.{function.__qualname__}")
        file = _file_of(function)
        if file is None:
            return None
        files.add(file)
    if not all(map(_is_installed, files)):
        files |= _loaded_outside()
    replaced = _replaced()
    names |= {f"{where} is {function.__module__}.{function.__qualname__}" for where, function in replaced.items()}
    files |= {file for file in map(_file_of, replaced.values()) if file is not None}
    read = _Read()
    read.add([*things, *replaced.values()] if with_values else [])
    digest = hashlib.sha256("\n".join([*sorted(names), *sorted(read.found)]).encode())
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
        yield from list(getattr(thing, "__dict__", {}).values())  # lists: other threads may add to these
        classes.update(dict.fromkeys(type(thing).__mro__))
    for module in {kind.__module__ for kind in classes}:
        yield from _held(sys.modules[module]).values() if module in sys.modules else ()
    for kind in classes:
        yield from _members(kind).values()


def _held(module: types.ModuleType) -> dict[str, Any]:
    return {name: value for name, value in list(vars(module).items()) if not name.startswith(COMPILED)}


def _members(kind: type) -> dict[str, Any]:
    return {name: _unwatched(value) for name, value in list(vars(kind).items())}


def _unwatched(value: Any) -> Any:
    if isinstance(value, types.FunctionType) and value.__module__ == WATCHER:
        return next(iter(_bound(value).values()), value)
    return value


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


def _replaced() -> dict[str, types.FunctionType]:
    """Functions of the user in the modules of libraries, by their place."""
    found: dict[str, types.FunctionType] = {}
    for name, module in list(sys.modules.items()):
        if name.partition(".")[0] not in REPLACEABLE or not isinstance(module, types.ModuleType):
            continue
        for key, value in _held(module).items():
            if type(value) is types.FunctionType and _is_users(value.__code__.co_filename):
                found[f"{name}.{key}"] = value
    return found


@functools.cache
def _is_users(file: str) -> bool:
    found = _existing(file)
    return found is not None and not _is_installed(found)


# ---- what functions read --------------------------------------------------------------------------------------------


class _Read:
    """The values that functions of the user read from elsewhere, and functions that these call, each once."""

    def __init__(self) -> None:
        self.found: set[str] = set()
        self._seen: set[int] = set()
        self._kept: list[Any] = []
        """What was seen: its number must not become that of another."""

    def add(self, things: Iterable[Any]) -> None:
        """Everything that these objects, functions and classes read."""
        left = list(things)
        while left:
            thing = left.pop()
            if id(thing) not in self._seen:
                self._seen.add(id(thing))
                self._kept.append(thing)
                left += self._next(thing)

    def _next(self, thing: Any) -> list[Any]:
        """Record the values that a function or class has, and return what it uses."""
        if isinstance(thing, (*PLAIN, Tensor, types.ModuleType)):
            return []
        if isinstance(thing, functools.partial):
            self._note("partial", [thing.args, thing.keywords])
            return [thing.func, *thing.args, *thing.keywords.values()]
        inside = _inside(thing)
        if isinstance(thing, types.FunctionType):
            return [inside, *(self._of_function(thing) if _is_users(thing.__code__.co_filename) else ())]
        if isinstance(thing, type):
            return self._of_class(thing)
        if inside is not None:
            return [inside]
        own = list(getattr(thing, "__dict__", {}).values()) if isinstance(thing, nn.Module) or _is_object(thing) else []
        return [*type(thing).__mro__, *(each for each in own if callable(each) or _is_object(each))]

    def _of_class(self, kind: type) -> list[Any]:
        values = _members(kind)
        for name, value in values.items() if _is_users(_file_of_module(kind.__module__)) else ():
            if not name.startswith("__") and not callable(value):
                self._note(f"{kind.__qualname__}.{name}", value)
        return [each for each in values.values() if callable(each) or _inside(each) is not None]

    def _of_function(self, function: types.FunctionType) -> list[Any]:
        name, codes = f"{function.__module__}.{function.__qualname__}", list(_codes(function.__code__))
        used = {each for code in codes for each in code.co_names}
        texts = [each for code in codes for each in code.co_consts if isinstance(each, str)]
        values = {each: function.__globals__[each] for each in used if each in function.__globals__}
        for key, module in list(values.items()):
            if isinstance(module, types.ModuleType) and _is_users(getattr(module, "__file__", None) or ""):
                values.update((f"{key}.{each}", vars(module)[each]) for each in used if each in vars(module))
        values.update((f"bound {key}", each) for key, each in _bound(function).items())
        values.update((f"default {key}", each) for key, each in enumerate(function.__defaults__ or ()))
        values.update((f"default {key}", each) for key, each in (function.__kwdefaults__ or {}).items())
        texts += [each for each in values.values() if isinstance(each, str)]
        values.update((f"variable {each}", os.environ[each]) for each in texts if each in os.environ)
        for key, value in values.items():
            self._note(f"{name} {key}", value)
        return list(values.values())

    def _note(self, name: str, value: Any) -> None:
        self.found.add(f"{name}={described(value)}")


def _is_object(value: Any) -> bool:
    """Whether a value is an object of a class of the user."""
    return any(_is_users(_file_of_module(kind.__module__)) for kind in type(value).__mro__)


def _file_of_module(name: str) -> str:
    return getattr(sys.modules.get(name), "__file__", None) or ""


def _codes(code: types.CodeType) -> Iterator[types.CodeType]:
    yield code
    for each in code.co_consts:
        if isinstance(each, types.CodeType):
            yield from _codes(each)


def _bound(function: types.FunctionType) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=False):
        try:
            found[name] = cell.cell_contents
        except ValueError:  # a variable that is not bound yet
            continue
    return found
