"""Running a user's training script in this process, unchanged, with its trainers adjusted."""

from __future__ import annotations

import os
import runpy
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..errors import ArgumentsError

if TYPE_CHECKING:
    from ..args.base import BaseArguments

Adjust = Callable[[Any, "BaseArguments", list[Any]], list[Any]]
"""Receives a trainer, its arguments and its callbacks before the trainer is set up; returns the callbacks to use."""

FLAGS = frozenset({"-u", "-B", "-E", "-I", "-O", "-OO", "-s", "-S", "-P", "-v", "-q"})
WITH_VALUE = frozenset({"-X", "-W"})


@dataclass(frozen=True)
class Script:
    """A script or module with its command line arguments."""

    target: str
    words: tuple[str, ...] = ()
    is_module: bool = False
    python: str | None = None
    """The interpreter named in the command."""

    def run(self) -> None:
        """Run it as Python does: as __main__, with its own sys.argv and import path."""
        sys.argv = [self.target, *self.words]
        if self.is_module:
            sys.path.insert(0, os.getcwd())
            runpy.run_module(self.target, run_name="__main__", alter_sys=True)
        else:
            sys.path.insert(0, str(Path(self.target).resolve().parent))
            runpy.run_path(self.target, run_name="__main__")

    def as_words(self) -> list[str]:
        """The command, without the interpreter, from which `script_in` returns this script."""
        return [*(["-m"] if self.is_module else []), self.target, *self.words]


def script_in(command: Sequence[str]) -> Script:
    """The script in a command such as `python train.py --lr 1`, `python -m package.train` or `train.py`."""
    words = list(command)
    python = words.pop(0) if words and Path(words[0]).name.lower().startswith("python") else None
    while words and words[0] in FLAGS | WITH_VALUE:
        del words[: 2 if words[0] in WITH_VALUE else 1]
    if words and words[0] == "-m" and len(words) > 1:
        return Script(words[1], tuple(words[2:]), is_module=True, python=python)
    if not words or not (python or words[0].endswith(".py")):
        raise ArgumentsError(
            f"{' '.join(command) or 'an empty command'!r} does not run a Python script; use the form `python train.py "
            "...` or `python -m package.train ...`"
        )  # fmt: skip
    if not Path(words[0]).is_file():
        raise ArgumentsError(f"there is no script {words[0]!r} in {os.getcwd()}")
    return Script(words[0], tuple(words[1:]), python=python)


def script_of_record(argv: Sequence[str]) -> Script:
    """The script of a process with this sys.argv; a file inside a package is run as a module."""
    path, words = Path(argv[0]).absolute(), tuple(argv[1:])
    if not path.is_file():
        raise ArgumentsError(f"the run was started as {argv[0]!r}, which is not a file; give the command after --")
    package: list[str] = []
    while (path.parent / "__init__.py").is_file():
        package.insert(0, path.stem)
        path = path.parent
    if not package:
        return Script(argv[0], words)
    sys.path.insert(0, str(path.parent))
    return Script(".".join([path.name, *package]).removesuffix(".__main__"), words, is_module=True)


def split_at_dashes(words: list[str]) -> tuple[list[str], list[str]]:
    """The arguments before `--` and the user's command after it."""
    if "--" not in words:
        return words, []
    place = words.index("--")
    return words[:place], words[place + 1 :]


@contextmanager
def adjusted_trainers(adjust: Adjust) -> Iterator[None]:
    """Context manager: `adjust` is called for every trainer that is created."""
    from ..core.internals import Internals

    original = Internals.set_up

    def set_up(self: Any, args: BaseArguments, callbacks: list[Any], **context: Any) -> None:
        original(self, args, adjust(self.trainer, args, callbacks), **context)

    Internals.set_up = set_up  # type: ignore[method-assign]
    try:
        yield
    finally:
        Internals.set_up = original  # type: ignore[method-assign]


def without_reporters(callbacks: list[Any]) -> list[Any]:
    """The callbacks without reporters and reports: drills and replays are not sent to trackers."""
    from ..report.callback import ReportCallback
    from ..reporters.callback import ReporterCallback

    return [each for each in callbacks if not isinstance(each, (ReporterCallback, ReportCallback))]
