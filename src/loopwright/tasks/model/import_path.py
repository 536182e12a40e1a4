"""Import paths in a configuration: `file.py:name` beside the configuration, or `package.module:name`, installed.

Code is never imported from a checkpoint or a downloaded model: a path that leads there is refused.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
import re
import sys
import sysconfig
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.machinery import PathFinder
from importlib.metadata import packages_distributions
from pathlib import Path
from typing import Any

from ...args.field import nearest
from ...errors import ArgumentsError, LoopwrightError, ModelError

PATTERN = re.compile(r"([A-Za-z_][\w.\-]*(?:/[\w.\-]+)*):([A-Za-z_]\w*)")
MODEL_FILES = (
    "config.json",
    "adapter_config.json",
    "model.safetensors",
    "model.safetensors.index.json",
    "pytorch_model.bin",
    "tokenizer.json",
    "trainer_state.json",
    "manifest.json",
)
"""Files by which a folder is recognized as a model or a checkpoint."""


def is_import_path(text: str) -> bool:
    """Whether a text has the form of an import path."""
    return PATTERN.fullmatch(text) is not None


def imported(text: str, folder: Path, place: str) -> Any:
    """The object of an import path; `folder` is that of the configuration."""
    match = PATTERN.fullmatch(text)
    if match is None:
        raise ArgumentsError(f"{place}={text!r} is not an import path of the form file.py:name or package.module:name")
    home, name = match.groups()
    module = _from_file(home, folder, place) if home.endswith(".py") else _from_package(home, place)
    found = getattr(module, name, None)
    if found is None:
        raise ArgumentsError(f"{place}: {home} has no {name!r}{nearest(name, vars(module))}")
    if not callable(found):
        raise ArgumentsError(f"{place}: {text} is {type(found).__name__}, not a function or a class")
    owner = str(getattr(found, "__module__", module.__name__)).partition(".")[0]
    if owner != module.__name__.partition(".")[0] and not home.endswith(".py"):
        raise ArgumentsError(f"{place}: {text} is imported from {owner!r}; name it where it is defined")
    return found


def _from_file(home: str, folder: Path, place: str) -> Any:
    path = (folder / home).resolve()
    if path.parent != folder.resolve():
        raise ArgumentsError(f"{place}: {home} is not in the folder of the configuration; move it there")
    if not path.is_file():
        names = [each.name for each in folder.glob("*.py")]
        raise ArgumentsError(f"{place}: there is no file {home!r} beside the configuration{nearest(home, names)}")
    model = next((name for name in MODEL_FILES if (path.parent / name).exists()), None)
    if model is not None:
        raise ArgumentsError(
            f"{place}: {path.parent} holds a model or a checkpoint ({model}), whose code is not run; move the "
            "configuration and its code to a folder of their own"
        )
    name = f"loopwright_config_{path.stem}"
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    with user_code(f"{place}: {home}", "cannot be imported:"):
        spec.loader.exec_module(module)
    return module


@contextmanager
def user_code(what: str, happened: str) -> Iterator[None]:
    """Errors of a user's code in one line with its place; the whole traceback is that of the error's cause."""
    try:
        yield
    except LoopwrightError:
        raise
    except Exception as error:  # anything may be raised there
        at = traceback.extract_tb(error.__traceback__)[-1]
        where = (error.filename, error.lineno) if isinstance(error, SyntaxError) else (at.filename, at.lineno)
        reason = error.msg if isinstance(error, SyntaxError) else str(error)
        raise ModelError(f"{what} {happened} {type(error).__name__}: {reason} ({where[0]}:{where[1]})") from error


def _from_package(home: str, place: str) -> Any:
    top = home.partition(".")[0]
    if top in sys.stdlib_module_names or not _is_installed(top):
        raise ArgumentsError(
            f"{place}: {top!r} is not an installed package; install it, or write file.py:name for a file beside the "
            "configuration"
        )
    try:
        return importlib.import_module(home)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{home}.".startswith(f"{error.name}."):
            raise  # the module exists, but one of its imports is missing
        raise ArgumentsError(f"{place}: the package {top!r} has no module {home!r}") from None


def _is_installed(top: str) -> bool:
    """Whether a package was installed, and is not a folder or a file where the command was started."""
    folders = [each for each in sys.path if each and Path(each).resolve() != Path.cwd()]
    found = PathFinder.find_spec(top, folders)
    if found is None or found.origin is None:
        return False
    sites = {Path(sysconfig.get_path(name)).resolve() for name in ("purelib", "platlib")}
    inside = any(site in Path(found.origin).resolve().parents for site in sites)
    return inside or top in packages_distributions() or any(_is_site(path) for path in Path(found.origin).parents)


def _is_site(path: Path) -> bool:
    return path.name in ("site-packages", "dist-packages") and str(path) in map(os.path.abspath, sys.path)
