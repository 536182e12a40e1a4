"""Errors of a model that its data or the memory cause, in one line: a configuration has no code to debug."""

from __future__ import annotations

import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from ..core.user_code.error_notes import BEGINNING
from ..errors import DataError, LoopwrightError, ModelError

if TYPE_CHECKING:
    from ..config import Config
    from .command import Words

STEPS = ("the training step", "the evaluation step")
"""The parts whose errors are those of the model."""


@contextmanager
def model_errors(config: Config, words: Words, step: Callable[[], int]) -> Iterator[None]:
    """Replace an error of the model by one line; `step` returns the number of updates that were done.

    An error without a known cause after the first update is not replaced: its traceback is needed.
    """
    from ..speed.memory.out_of_memory import is_out_of_memory

    try:
        yield
    except LoopwrightError:
        raise
    except Exception as error:  # a model may raise anything
        cause, where = _noted(error)
        if not where or not (cause or step() == 0):
            raise
        if is_out_of_memory(error):
            words.is_input = False
            raise ModelError(cause) from error
        advice = "" if cause else ". Change the model, or the columns of the data"
        reason = _reason(error, cause, where, config)
        raise DataError(f"{_model(config)} cannot compute these data: {reason}{advice}") from error


def _noted(error: Exception) -> tuple[str, str]:
    """The notes of an error: its cause, if that is known, and the part that raised it, if it is a step."""
    notes = [str(note) for note in getattr(error, "__notes__", ())]
    where = next((note for note in notes if note.startswith(BEGINNING) and any(part in note for part in STEPS)), "")
    return (notes[0] if where and notes[0] != where else ""), where


def _model(config: Config) -> str:
    return f"{config.place('model.name')}={config.model.name!r}"


def _reason(error: Exception, cause: str, where: str, config: Config) -> str:
    lines = str(error).strip().splitlines()
    reason = cause or f"{type(error).__name__}: {lines[0] if lines else ''}"
    return f"{reason}{_place(error, config)}; {where}"


def _place(error: Exception, config: Config) -> str:
    """The line of a file beside the configuration that failed, if the model is made there."""
    folder = str(config.folder.resolve())
    own = [each for each in traceback.extract_tb(error.__traceback__) if each.filename.startswith(folder)]
    return f" ({own[-1].filename}:{own[-1].lineno})" if own else ""
