"""BaseTrainer: what every trainer is, whatever its framework."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, ClassVar

from .outputs import TrainOutput

if TYPE_CHECKING:
    from .internals import Internals


class derived:
    """A property that a user may assign: what was assigned then counts."""

    def __init__(self, compute: Callable[[Any], Any]) -> None:
        self._compute, self.__doc__ = compute, compute.__doc__

    def __get__(self, trainer: Any, owner: type | None = None) -> Any:
        return self if trainer is None else self._compute(trainer)


class BaseTrainer:
    """A list of what users call and override; everything else is behind one private name."""

    _loopwright: Internals
    """What is ours: a subclass may use every other name that is not an override point."""
    train_instead: ClassVar[Callable[[Any], TrainOutput] | None] = None
    """Set by commands that run a user's script to get at its trainer, such as `loopwright replay`."""
