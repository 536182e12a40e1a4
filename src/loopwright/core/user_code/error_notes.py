"""Errors raised by a user's code: type and traceback stay, and one note says which part raised it, when and on what."""

from __future__ import annotations

import sysconfig
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import FrameType
from typing import Any

from ...errors import LoopwrightError

BEGINNING = "raised in "
"""How every note begins: an error that passes several parts has the note of the first."""
PACKAGE = str(Path(__file__).resolve().parents[2])
INSTALLED = tuple({path for name, path in sysconfig.get_paths().items() if name.endswith(("lib", "stdlib"))})
"""Folders of the standard library and of installed packages."""
MOST = 8
"""Entries of a container that are described."""


def is_clear(error: BaseException) -> bool:
    """Whether an error needs no note: it is one of loopwright's, or has one already."""
    notes = getattr(error, "__notes__", ())
    return isinstance(error, LoopwrightError) or any(str(note).startswith(BEGINNING) for note in notes)


def add_note(error: BaseException, part: str, *, when: str = "", given: str = "", advice: str = "") -> None:
    """Add one line to an error of the user's code: the part, the moment, what was passed, and what to do."""
    if isinstance(error, Exception) and not is_clear(error):
        passed = f"; given: {given}" if given else ""
        error.add_note(f"{BEGINNING}{part}{f' {when}' if when else ''}{passed}{f'; {advice}' if advice else ''}")


def moment(step: int, epoch: float | None) -> str:
    """The position of a run, for a note."""
    return f"at step {step}" if epoch is None else f"at step {step}, epoch {epoch:.4g}"


def add_note_of_step(error: BaseException, when: str, given: str, what: str = "training", *, cause: str = "") -> None:
    """A note about an error in the forward pass, the loss or the backward pass of a micro-batch, after its cause."""
    name = called(error)
    part = f"the {what} step" if name is None else f"{name}, called by the {what} step,"
    advice = ""
    if not cause and isinstance(error, TypeError) and "argument" in str(error):
        advice = "the names of a batch are the arguments of forward: compare the columns of the dataset with them"
    if cause and not is_clear(error):
        error.add_note(cause)
    add_note(error, part, when=when, given=given, advice=advice)


def add_note_of_call(error: BaseException, what: str, when: str) -> None:
    """A note about an error that no closer part has noted, if the user's own files are in its traceback."""
    name = origin(error)
    if name is not None:
        add_note(error, f"{name}, called by {what},", when=when)


def frames_of(error: BaseException) -> Iterator[FrameType]:
    """The frames of a traceback, from the outermost."""
    trace = error.__traceback__
    while trace is not None:
        yield trace.tb_frame
        trace = trace.tb_next


def is_wrong_call(error: BaseException) -> bool:
    """Whether a function was called with arguments it does not have: the call itself raised, not a line inside."""
    return isinstance(error, TypeError) and list(frames_of(error))[-1].f_code.co_filename.startswith(PACKAGE)


def origin(error: BaseException) -> str | None:
    """The outermost function of the user's own files in a traceback; None if there is none."""
    return next((_name_of(frame) for frame in frames_of(error) if _is_users(frame.f_code.co_filename)), None)


def called(error: BaseException) -> str | None:
    """The function outside of loopwright that was called when the error was raised; None if there was none."""
    own = origin(error)
    outside = (frame for frame in frames_of(error) if not frame.f_code.co_filename.startswith(PACKAGE))
    return own or next((_name_of(frame) for frame in outside if not frame.f_code.co_name.startswith("_")), None)


def _is_users(file: str) -> bool:
    return not file.startswith((PACKAGE, *INSTALLED)) and not file.startswith("<frozen")


def _name_of(frame: FrameType) -> str:
    owner, code = frame.f_locals.get("self"), frame.f_code
    return code.co_qualname if owner is None else f"{type(owner).__name__}.{code.co_name}"


def describe(value: Any, depth: int = 3) -> str:
    """Types, shapes and dtypes of a value in a few words, never its contents."""
    try:
        return _described(value, depth)
    except Exception:  # the value is the user's, and its attributes may raise anything
        return type(value).__name__


def _described(value: Any, depth: int) -> str:
    if value is None or isinstance(value, bool):
        return str(value)
    if isinstance(getattr(value, "shape", None), tuple) and hasattr(value, "dtype"):
        device = str(getattr(value, "device", "cpu"))
        place = f" on {device}" if device != "cpu" and len(device) < 12 else ""
        return f"{str(value.dtype).removeprefix('torch.')} {tuple(value.shape)}{place}"
    if isinstance(value, (str, bytes)):
        return f"{type(value).__name__} of length {len(value)}"
    if isinstance(value, Mapping) and depth:
        found = [f"{key}: {describe(each, depth - 1)}" for key, each in list(value.items())[:MOST]]
        return "{" + ", ".join(found + ["..."] * (len(value) > MOST)) + "}"
    if isinstance(value, (list, tuple)) and depth and len(value):
        found = list(dict.fromkeys(describe(each, depth - 1) for each in value[:MOST]))
        return f"{type(value).__name__} of {len(value)}: {' or '.join(found)}"
    return type(value).__name__


def describe_items(items: list[Any]) -> str:
    """Indices of samples, shortened."""
    shown = ", ".join(map(str, items[:MOST]))
    return f"[{shown}, ...]" if len(items) > MOST else f"[{shown}]"
