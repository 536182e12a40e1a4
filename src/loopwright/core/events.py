"""The sixteen events of a run, and the callbacks that handle them.

on_init_end
on_train_begin
  on_epoch_begin
    on_step_begin
      (micro-batch; on_substep_end between two of them)
    on_pre_optimizer_step, on_optimizer_step
    on_step_end
    [on_log] [on_prediction_step ... on_evaluate] [on_save] [on_push_begin]
  on_epoch_end      (then again log, evaluate, save as requested)
on_train_end
on_predict
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any, Self

from ..args.field import Counterpart
from ..args.problems import short
from ..errors import ArgumentsError, OverrideError
from ..notices import logger
from .state import TrainerControl, TrainerState
from .user_code.error_notes import add_note, describe, is_wrong_call, moment
from .user_code.overrides import accepts, names_parameter

if TYPE_CHECKING:
    from ..args.base import BaseArguments

EVENTS: dict[str, tuple[str, ...]] = {
    "on_init_end": (),
    "on_train_begin": ("should_training_stop",),
    "on_train_end": (),
    "on_epoch_begin": ("should_epoch_stop",),
    "on_epoch_end": (),
    "on_step_begin": ("should_log", "should_evaluate", "should_save"),
    "on_pre_optimizer_step": (),
    "on_optimizer_step": (),
    "on_substep_end": (),
    "on_step_end": (),
    "on_evaluate": ("should_evaluate",),
    "on_predict": (),
    "on_save": ("should_save",),
    "on_log": ("should_log",),
    "on_prediction_step": (),
    "on_push_begin": (),
}
"""Each event and the control flags it fulfils, which are cleared before its callbacks are called."""


class TrainerCallback(metaclass=Counterpart):
    """Base class of callbacks: override the events you need.

    Every event gets `args`, `state`, `control` and, by keyword, `model`, `processing_class`, `optimizer`,
    `lr_scheduler`, `train_dataloader`, `eval_dataloader` (plus `metrics` or `logs` where they exist).

    A callback makes requests by changing `control` (or by returning another control). Its changes to the model, the
    optimizer, the arguments or the trainer apply from the next update on, or are refused:
    docs/changes-while-training.md.
    """

    def on_init_end(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> Any:
        """The trainer was created."""

    def on_train_begin(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> Any:
        """Training starts."""

    def on_train_end(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> Any:
        """Training is over."""

    def on_epoch_begin(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> Any:
        """An epoch starts."""

    def on_epoch_end(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> Any:
        """An epoch is over."""

    def on_step_begin(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> Any:
        """An update starts."""

    def on_pre_optimizer_step(
        self, args: BaseArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> Any:
        """Gradients are complete and clipped; the optimizer has not stepped."""

    def on_optimizer_step(
        self, args: BaseArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> Any:
        """The optimizer has stepped; gradients still exist."""

    def on_substep_end(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> Any:
        """A micro-batch ended that was not the last of its update."""

    def on_step_end(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> Any:
        """An update ended."""

    def on_evaluate(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> Any:
        """An evaluation ended; `metrics` holds its numbers."""

    def on_predict(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> Any:
        """A prediction ended; `metrics` holds its numbers."""

    def on_save(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> Any:
        """A checkpoint was saved: its folder is complete, and files that are added to it stay in it."""

    def on_log(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> Any:
        """Numbers were logged; `logs` holds them."""

    def on_prediction_step(
        self, args: BaseArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> Any:
        """A batch of an evaluation or prediction ended."""

    def on_push_begin(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> Any:
        """A push to a hub is about to start."""


class _Context:
    """An attribute of the handler that every callback receives by keyword."""

    def __set_name__(self, owner: type, name: str) -> None:
        self.name = name

    def __get__(self, handler: CallbackHandler, owner: type | None = None) -> Any:
        return handler.context[self.name]

    def __set__(self, handler: CallbackHandler, value: Any) -> None:
        handler.context[self.name] = value


class CallbackHandler(TrainerCallback):
    """The list of callbacks, and the dispatch of events to those that override them."""

    model = _Context()
    processing_class = _Context()
    optimizer = _Context()
    lr_scheduler = _Context()
    train_dataloader = _Context()
    eval_dataloader = _Context()

    args: BaseArguments
    state: Any = None
    control: TrainerControl

    def __init__(
        self,
        callbacks: Iterable[Any],
        model: Any = None,
        processing_class: Any = None,
        optimizer: Any = None,
        lr_scheduler: Any = None,
    ) -> None:
        self.callbacks: list[Any] = []
        self.agree: Callable[[CallbackHandler, str], None] | None = None
        """Called after an event: with several ranks, they adopt each other's flags."""
        self.context: dict[str, Any] = {
            "model": model,
            "processing_class": processing_class,
            "optimizer": optimizer,
            "lr_scheduler": lr_scheduler,
            "train_dataloader": None,
            "eval_dataloader": None,
        }
        self.pace: dict[str, float] | None = None
        """Throughput of the current log interval, passed only to callbacks with a parameter `pace`."""
        self._listeners: dict[str, list[tuple[Any, Callable[..., Any]]]] = {}
        self._known: list[Any] = []
        for callback in callbacks:
            self.add_callback(callback)
        classes = {each.__name__ for callback in self.callbacks for each in type(callback).__mro__}
        if "DefaultFlowCallback" not in classes:
            logger.warning(
                "there is no DefaultFlowCallback, so nothing logs, evaluates, saves or stops as the arguments say; "
                "add it, or let a callback set the flags of control"
            )

    def bind(
        self,
        args: Any,
        state: TrainerState,
        control: TrainerControl,
        agree: Callable[[CallbackHandler, str], None] | None = None,
    ) -> Self:
        """Set what every callback receives by position; called for a new handler, also one assigned by a user."""
        self.args, self.state, self.control, self.agree = args, state, control, agree
        return self

    @property
    def callback_list(self) -> str:
        return "\n".join(type(callback).__name__ for callback in self.callbacks)

    def add_callback(self, callback: Any) -> None:
        made = _checked(callback)
        if made is not callback and any(type(each) is callback for each in self.callbacks):
            logger.warning(f"the callback {type(made).__name__} is added a second time; its events are called twice")
        elif any(each is made for each in self.callbacks):
            logger.warning(f"the same {type(made).__name__} object is added twice; its events are called twice")
        self.callbacks.append(made)

    def pop_callback(self, callback: Any) -> Any:
        for index, each in enumerate(self.callbacks):
            if each is callback or (isinstance(callback, type) and isinstance(each, callback)):
                return self.callbacks.pop(index)
        return None

    def remove_callback(self, callback: Any) -> None:
        self.pop_callback(callback)

    def listens(self, event: str) -> bool:
        """Whether any callback overrides this event."""
        return bool(self.listening_to(event))

    def is_heard_by_user(self, event: str) -> bool:
        """Whether an event reaches code that is not loopwright's."""
        if "call_event" in self.__dict__ or type(self).call_event is not CallbackHandler.call_event:
            return True
        return any(not _is_ours(callback, event) for callback, _ in self.listening_to(event))

    def fire(self, event: str, **extra: Any) -> TrainerControl:
        """Clear the flags this event fulfils, then call the callbacks that override it, in order."""
        control = self.control
        for flag in EVENTS[event]:
            control.__dict__[flag] = False  # one assignment, no call: this runs several times per update
        if "call_event" in self.__dict__ or self.__class__.call_event is not CallbackHandler.call_event:
            answer = self.call_event(event, self.args, self.state, control, **extra)
            if answer is not None and answer is not control:
                control.adopt(answer)
        elif self._known != self.callbacks or event not in self._listeners or self._listeners[event]:
            self._dispatch(event, self.args, self.state, control, extra)
        if self.agree is not None:
            self.agree(self, event)
        return control

    def fire_unfulfilled(self, event: str) -> None:
        """Clear the flags of an event that could not happen; only loopwright's own callbacks get it, for intervals."""
        for flag in EVENTS[event]:
            setattr(self.control, flag, False)
        for callback, method in self.listening_to(event):
            if _is_ours(callback, event):
                method(self.args, self.state, self.control, **self.context)
        if self.agree is not None:
            self.agree(self, event)

    def _dispatch(self, event: str, args: Any, state: Any, control: Any, extra: dict[str, Any]) -> None:
        fresh = self._known == self.callbacks and event in self._listeners
        for callback, method in self._listeners[event] if fresh else self.listening_to(event):
            try:
                answer = method(args, state, control, **self.context, **extra)
            except Exception as error:  # a callback may raise anything; the error is re-raised with a note
                self._add_note(error, callback, event, state, extra)
                raise
            if answer is not None and answer is not control:
                _check_control(answer, callback, event)
                control.adopt(answer)

    def _add_note(self, error: Exception, callback: Any, event: str, state: Any, extra: dict[str, Any]) -> None:
        add_note(
            error,
            f"the callback {type(callback).__name__}.{event}",
            when=moment(state.global_step, state.epoch),
            given=describe(extra) if extra else "",
            advice=f"define it as {event}(self, args, state, control, **kwargs)" if is_wrong_call(error) else "",
        )

    def leave_training(self) -> None:
        """Call `left` of callbacks that have it; called when training ends, also after an error."""
        for callback in self.callbacks:
            left = getattr(callback, "left", None)
            if callable(left):
                left()

    def call_event(self, event: str, args: Any, state: Any, control: Any, **kwargs: Any) -> TrainerControl:
        """Call the callbacks of an event; an override is called for every event."""
        self._dispatch(event, args, state, control, kwargs)
        return control  # type: ignore[no-any-return]

    def on_init_end(self, *given: Any, **kwargs: Any) -> TrainerControl:
        return self.fire("on_init_end", **kwargs)

    def on_train_begin(self, *given: Any, **kwargs: Any) -> TrainerControl:
        return self.fire("on_train_begin", **kwargs)

    def on_train_end(self, *given: Any, **kwargs: Any) -> TrainerControl:
        return self.fire("on_train_end", **kwargs)

    def on_epoch_begin(self, *given: Any, **kwargs: Any) -> TrainerControl:
        return self.fire("on_epoch_begin", **kwargs)

    def on_epoch_end(self, *given: Any, **kwargs: Any) -> TrainerControl:
        return self.fire("on_epoch_end", **kwargs)

    def on_step_begin(self, *given: Any, **kwargs: Any) -> TrainerControl:
        return self.fire("on_step_begin", **kwargs)

    def on_pre_optimizer_step(self, *given: Any, **kwargs: Any) -> TrainerControl:
        return self.fire("on_pre_optimizer_step", **kwargs)

    def on_optimizer_step(self, *given: Any, **kwargs: Any) -> TrainerControl:
        return self.fire("on_optimizer_step", **kwargs)

    def on_substep_end(self, *given: Any, **kwargs: Any) -> TrainerControl:
        return self.fire("on_substep_end", **kwargs)

    def on_step_end(self, *given: Any, **kwargs: Any) -> TrainerControl:
        return self.fire("on_step_end", **kwargs)

    def on_prediction_step(self, *given: Any, **kwargs: Any) -> TrainerControl:
        return self.fire("on_prediction_step", **kwargs)

    def on_save(self, *given: Any, **kwargs: Any) -> TrainerControl:
        return self.fire("on_save", **kwargs)

    def on_push_begin(self, *given: Any, **kwargs: Any) -> TrainerControl:
        return self.fire("on_push_begin", **kwargs)

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> TrainerControl:
        return self.fire("on_log", logs=logs, **kwargs)

    def on_evaluate(self, args: Any, state: Any, control: Any, metrics: Any = None, **kwargs: Any) -> TrainerControl:
        return self.fire("on_evaluate", metrics=metrics, **kwargs)

    def on_predict(self, args: Any, state: Any, control: Any, metrics: Any = None, **kwargs: Any) -> TrainerControl:
        return self.fire("on_predict", metrics=metrics, **kwargs)

    def listening_to(self, event: str) -> list[tuple[Any, Callable[..., Any]]]:
        if self._known != self.callbacks:
            self._known = list(self.callbacks)
            self._listeners = {}
        if event not in self._listeners:
            self._listeners[event] = [
                (callback, self._prepared(getattr(callback, event)))
                for callback in self.callbacks
                if _overrides(callback, event)
            ]
        return self._listeners[event]

    def _prepared(self, method: Callable[..., Any]) -> Callable[..., Any]:
        """The method, called with the arguments it accepts, including `tokenizer` and `pace` if it has them."""
        wants_tokenizer, wants_pace = names_parameter(method, "tokenizer"), names_parameter(method, "pace")
        takes_anything = accepts(method, "an argument without any name")
        if takes_anything and not wants_tokenizer and not wants_pace:
            return method

        def call(args: BaseArguments, state: Any, control: Any, **kwargs: Any) -> Any:
            if wants_tokenizer:
                kwargs["tokenizer"] = kwargs["processing_class"]
            if wants_pace:
                kwargs["pace"] = self.pace
            return method(args, state, control, **{k: v for k, v in kwargs.items() if accepts(method, k)})

        return call


def _check_control(answer: Any, callback: Any, event: str) -> None:
    """Raise if what a callback returned is not a control."""
    if not hasattr(answer, "should_training_stop"):
        raise OverrideError(
            f"the callback {type(callback).__name__}.{event} returned {short(answer)}; return nothing, or the control"
        )


def _checked(callback: Any) -> Any:
    """The callback, created if it is a class; raises for objects that have no event."""
    is_class = isinstance(callback, type)
    if not any(callable(getattr(callback, event, None)) for event in EVENTS):
        raise ArgumentsError(
            f"{short(callback)} is not a callback: it has no method of an event, such as on_step_end; pass an instance "
            "of TrainerCallback"
        )
    if not is_class:
        return callback
    try:
        inspect.signature(callback).bind()
    except TypeError as error:
        raise ArgumentsError(
            f"the callback class {callback.__name__} cannot be created without arguments ({error}); pass an instance"
        ) from None
    except ValueError:  # a class whose signature is unknown
        pass
    return callback()


def _is_ours(callback: Any, event: str) -> bool:
    """Whether a callback's method is loopwright's, or the empty one of transformers' base class."""
    method = getattr(callback, event)
    is_empty = getattr(method, "__qualname__", "") == f"{TrainerCallback.__name__}.{event}"
    return is_empty or (getattr(method, "__module__", None) or "").startswith("loopwright.")


def _overrides(callback: Any, event: str) -> bool:
    own = getattr(type(callback), event, None)
    if event in getattr(callback, "__dict__", ()):
        return True
    return own is not None and own is not getattr(TrainerCallback, event)
