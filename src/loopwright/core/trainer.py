"""BaseTrainer: the base of all trainers, independent of the framework."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, ClassVar

from ..args.field import Counterpart
from .outputs import TrainOutput

if TYPE_CHECKING:
    from .internals import Internals


class derived:
    """A property that a user may override by assignment."""

    def __init__(self, compute: Callable[[Any], Any]) -> None:
        self._compute, self.__doc__ = compute, compute.__doc__

    def __get__(self, trainer: Any, owner: type | None = None) -> Any:
        return self if trainer is None else self._compute(trainer)


class BaseTrainer(metaclass=Counterpart):
    """The methods that users call and override; everything else is behind one private name."""

    _loopwright: Internals
    """The library's part. Subclasses may use any other name that is not an override point."""
    train_instead: ClassVar[Callable[[Any], TrainOutput] | None] = None
    """Replaces `train`: set by commands that run a user's script to get its trainer, such as `loopwright replay`."""
