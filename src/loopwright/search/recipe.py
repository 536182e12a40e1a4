"""Recipe: what a trainer is created from, so that each trial has a trainer of its own, also in another process."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import Any

from ..args.base import BaseArguments
from ..callbacks.defaults import default_callbacks
from ..core.trainer import BaseTrainer
from ..errors import first_line
from .transfer import packed

OF_THE_RUN = frozenset(
    (
        "_loopwright", "args", "state", "control", "callback_handler", "accelerator", "model", "model_wrapped",
        "optimizer", "lr_scheduler", "label_smoother", "deepspeed", "hp_space", "hp_name", "compute_objective",
        "objective", "hp_search_backend", "is_in_train", "train_loss", "eval_loss",
    )
)  # fmt: skip
"""Attributes of a trainer that its constructor or a run sets; the others are the user's."""


@dataclass(frozen=True)
class Recipe:
    """The class of a trainer, the user's attributes, and what its constructor was given."""

    kind: type[BaseTrainer]
    internals: type[Any]
    """The class of the library's part of the trainer."""
    attributes: dict[str, Any]
    given: dict[str, Any]
    args: BaseArguments
    callbacks: list[Any]
    without: list[type]
    """Default callbacks that the user has removed."""
    backend: str

    @classmethod
    def of(cls, trainer: Any, backend: str) -> Recipe:
        """The recipe of a trainer as it is now."""
        held, usual = trainer.callback_handler.callbacks, [type(each) for each in default_callbacks(trainer.args)]
        given = trainer._loopwright.given_to_constructor()
        return cls(
            kind=type(trainer),
            internals=type(trainer._loopwright),
            attributes={
                name: value for name, value in vars(trainer).items() if name not in OF_THE_RUN and name not in given
            },
            given=given,
            args=trainer.args,
            callbacks=[each for each in held if type(each) not in usual],
            without=[kind for kind in usual if not any(type(each) is kind for each in held)],
            backend=backend,
        )

    def build(self, args: BaseArguments) -> Any:
        """A new trainer with these arguments. The constructor of a subclass is not called; its attributes are set."""
        trainer: Any = object.__new__(self.kind)
        vars(trainer).update(self.attributes)
        trainer._loopwright = self.internals(trainer)
        trainer._loopwright.construct(args=args, callbacks=_copied(self.callbacks), **self.given)
        for each in self.without:
            trainer.callback_handler.remove_callback(each)
        trainer.hp_search_backend, trainer.objective = self.backend, None
        return trainer


def _copied(callbacks: list[Any]) -> list[Any]:
    """The callbacks without the state that an earlier trial gave them; those that cannot be copied are shared."""
    try:
        return copy.deepcopy(callbacks)
    except Exception:  # a callback may hold anything, such as an open file
        return list(callbacks)


def part_not_pickled(recipe: Recipe) -> str | None:
    """The name of the part of a recipe that cannot be sent to another process, or None."""
    parts = {**recipe.given, **{f"trainer.{name}": value for name, value in recipe.attributes.items()}}
    parts.update({"the class of the trainer": recipe.kind, "args": recipe.args})
    parts.update({f"the callback {type(each).__name__}": each for each in recipe.callbacks})
    for name, value in parts.items():
        try:
            packed(value)
        except Exception as error:  # any class may define how it is pickled
            return f"{name} ({first_line(error)})"
    return None
