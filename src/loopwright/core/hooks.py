"""Hooks: the attributes and methods of a user's trainer that the library uses.

Users may assign attributes and override methods at any time, so the library reads them from the trainer on every use
and never copies them.
"""

from __future__ import annotations

from operator import attrgetter
from typing import TYPE_CHECKING, Any, Protocol

from .events import CallbackHandler
from .state import TrainerControl, TrainerState

if TYPE_CHECKING:
    from ..args.base import BaseArguments


class Hooks(Protocol):
    """The hooks of every trainer."""

    _loopwright: Any
    state: TrainerState
    control: TrainerControl
    callback_handler: CallbackHandler
    model: Any
    model_wrapped: Any
    optimizer: Any
    lr_scheduler: Any
    compute_metrics: Any
    eval_dataset: Any
    data_collator: Any
    processing_class: Any
    is_in_train: bool

    @property
    def args(self) -> BaseArguments: ...
    @args.setter
    def args(self, args: Any) -> None: ...  # each trainer accepts its framework's arguments
    def log(self, *args: Any, **kwargs: Any) -> Any: ...
    def evaluate(self, *args: Any, **kwargs: Any) -> Any: ...
    def _evaluate(self, *args: Any, **kwargs: Any) -> Any: ...
    def _determine_best_metric(self, *args: Any, **kwargs: Any) -> Any: ...
    def _get_learning_rate(self, *args: Any, **kwargs: Any) -> Any: ...
    def _save_checkpoint(self, *args: Any, **kwargs: Any) -> Any: ...
    def _load_from_checkpoint(self, *args: Any, **kwargs: Any) -> Any: ...
    def _load_best_model(self, *args: Any, **kwargs: Any) -> Any: ...
    def is_world_process_zero(self, *args: Any, **kwargs: Any) -> Any: ...
    def _hp_search_setup(self, *args: Any, **kwargs: Any) -> Any: ...
    def _report_to_hp_search(self, *args: Any, **kwargs: Any) -> Any: ...
    def store_flos(self, *args: Any, **kwargs: Any) -> Any: ...


class HookUser:
    """Base of everything behind a trainer: the attributes of the user's trainer, read at each use."""

    trainer: Hooks
    """The user's trainer: overrides and attributes are always taken from it."""

    # Getters in C: these attributes are read dozens of times in an update, and a Python function is a call each time.
    args: BaseArguments = property(attrgetter("trainer.args"))  # type: ignore[assignment]
    state: TrainerState = property(attrgetter("trainer.state"))  # type: ignore[assignment]
    control: TrainerControl = property(attrgetter("trainer.control"))  # type: ignore[assignment]
    model: Any = property(attrgetter("trainer.model"))

    @property
    def callback_handler(self) -> CallbackHandler:
        handler, state = self.trainer.callback_handler, self.trainer.state
        if handler.state is not state:  # a new one; a user may assign it at any time
            handler.bind(self.trainer.args, state, self.trainer.control, self.trainer._loopwright.agree)
        return handler
