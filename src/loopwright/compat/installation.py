"""install() and uninstall(): replacing classes of transformers everywhere they are held, and undoing it."""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from importlib import import_module
from types import ModuleType
from typing import Any

from ..callbacks.flow import DefaultFlowCallback
from ..callbacks.metrics_file import MetricsFileCallback
from ..errors import LoopwrightError, MissingPackage, NotAvailable
from ..pt.arguments import TrainingArguments
from ..report.callback import ReportCallback
from .messages import forward_messages
from .names import BASES, loaded_modules, pairs

REWRITERS = {
    "axolotl": "it rewrites the source text of transformers' Trainer when it is imported",
    "unsloth": "it rewrites the source text of transformers' Trainer and compiles it again",
}
"""Libraries that cannot train here, and why."""

BEHAVIOUR = {"shares_state": True, "logger_name": "transformers", "usual_format": "transformers"}
"""Class attributes of TrainingArguments that differ while installed."""

_undo: list[Callable[[], None]] = []
"""What uninstall() calls, last first; empty if nothing is installed."""


def install() -> None:
    """Replace transformers' Trainer, TrainingArguments, callbacks and outputs by those of loopwright.

    Call it before importing libraries that derive from them. Modules that imported the classes earlier are changed too.
    """
    if _undo:
        return
    _refuse_rewriters()
    try:
        modules = loaded_modules()
    except ModuleNotFoundError as error:
        if error.name != "transformers":
            raise
        raise MissingPackage("transformers", needed_for="loopwright.compat") from None
    found = pairs(modules)
    _refuse_subclasses(found)
    try:
        _replace(found)
        for name, value in BEHAVIOUR.items():
            _undo.append(partial(setattr, TrainingArguments, name, getattr(TrainingArguments, name)))
            setattr(TrainingArguments, name, value)
        _replace_default_callbacks()
        _replace_callbacks_of_trackers(found)
        _undo.append(forward_messages())
        for old, new in found:
            if old.__name__ in BASES:
                _adopt_subclasses(old, new)
                _register(old, new)
    except BaseException:  # also after Ctrl-C: all or nothing
        uninstall()
        raise
    _undo.append(lambda: None)  # installed, even if there was nothing to replace


def uninstall() -> None:
    """Put transformers' own classes back."""
    while _undo:
        _undo.pop()()


def is_installed() -> bool:
    """Whether loopwright's classes are in the place of transformers' own."""
    return bool(_undo)


@contextmanager
def installed() -> Iterator[None]:
    """install() for a block; an installation from before the block stays."""
    before = is_installed()
    install()
    try:
        yield
    finally:
        if not before:
            uninstall()


def _refuse_rewriters() -> None:
    for name, why in REWRITERS.items():
        if name in sys.modules:
            raise NotAvailable(f"{name} cannot be used with loopwright.compat: {why}")


def _refuse_subclasses(found: list[tuple[type, type]]) -> None:
    """Refuse subclasses that were defined before: their methods are those of transformers' classes."""
    old = {each for each, _ in found if each.__name__ in BASES and each.__name__ != "TrainerCallback"}
    late = sorted(
        f"{each.__module__}.{each.__qualname__}({base.__name__})"
        for base in old
        for each in _descendants(base)
        if not each.__module__.startswith("transformers.")
    )
    if late:
        raise LoopwrightError(
            "loopwright.compat.install() comes too late: these classes are already derived from transformers' own: "
            f"{', '.join(late)}. Call it before they are imported, as the first line of the script, or start the "
            "script with `loopwright run`"
        )


def _descendants(cls: type) -> list[type]:
    children: list[type] = cls.__subclasses__()
    return [each for child in children for each in (child, *_descendants(child))]


def _replace(found: list[tuple[type, type]]) -> None:
    """Replace the classes in every module that holds them, also under other names."""
    new_by_id = {id(old): (old, new) for old, new in found}
    for module in _modules():
        for name, value in list(vars(module).items()):
            old, new = new_by_id.get(id(value), (None, None))
            if old is not None:
                setattr(module, name, new)
                _undo.append(partial(setattr, module, name, old))


def _replace_default_callbacks() -> None:
    """Let `DEFAULT_CALLBACKS` be the callbacks that every trainer here starts with, besides the progress display."""
    trainer: Any = import_module("transformers.trainer")
    old = trainer.DEFAULT_CALLBACKS
    trainer.DEFAULT_CALLBACKS = [DefaultFlowCallback, MetricsFileCallback, ReportCallback]
    _undo.append(partial(setattr, trainer, "DEFAULT_CALLBACKS", old))


def _replace_callbacks_of_trackers(found: list[tuple[type, type]]) -> None:
    """Let `report_to` of libraries that build their own list of callbacks name those of loopwright."""
    table = getattr(import_module("transformers.integrations.integration_utils"), "INTEGRATION_TO_CALLBACK", {})
    new_of = {id(old): new for old, new in found}
    for name, old in list(table.items()):
        if id(old) in new_of:
            table[name] = new_of[id(old)]
            _undo.append(partial(table.__setitem__, name, old))


def _modules() -> list[ModuleType]:
    """All modules but loopwright's own; transformers may exist twice, because it replaces its entry in sys.modules."""
    is_frozen = gc.get_freeze_count() > 0
    if is_frozen:  # the collector does not list what gc.freeze() has set apart
        gc.unfreeze()
    modules = [each for each in gc.get_objects() if issubclass(type(each), ModuleType)]
    if is_frozen:
        gc.freeze()
    # A lazy module may raise for any name that is not in its dict.
    return [each for each in modules if str(vars(each).get("__name__", "")).partition(".")[0] != "loopwright"]


def _adopt_subclasses(old: type, new: type) -> None:
    """Give callbacks the new base class: a handler calls only the events that a callback overrides."""
    if old.__name__ != "TrainerCallback":
        return
    children: list[type] = old.__subclasses__()
    for child in children:
        bases = child.__bases__
        child.__bases__ = tuple(new if base is old else base for base in bases)
        _undo.append(partial(setattr, child, "__bases__", bases))


def _register(old: type, new: Any) -> None:
    """Let `isinstance` be true for objects that transformers' class made before; this is not undone."""
    new.register(old)
