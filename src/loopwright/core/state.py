"""The state of a run (TrainerState, Progress) and the flags of callbacks (TrainerControl)."""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from .checkpoint.folder import STATE
from .checkpoint.schema import (
    Shape,
    any_number,
    check,
    count,
    either,
    flag,
    like,
    list_of,
    maybe,
    named,
    number,
    one_of,
    record,
    restoring,
    text,
)
from .logs.log_history import LogHistory

if TYPE_CHECKING:
    from ..args.base import BaseArguments


class ExportableState:
    """A callback (or control) whose state is saved in checkpoints.

    `state()` returns {"args": constructor arguments, "attributes": values set afterwards}.
    """

    saved_shapes: ClassVar[dict[str, Shape]] = {}
    """What values may be that are None in a new object, by name; those of others are like the new object's."""

    def state(self) -> dict[str, Any]:
        raise NotImplementedError(f"{type(self).__name__} is exportable, so it must define state()")

    @classmethod
    def from_state(cls, state: dict[str, Any]) -> Any:
        instance = cls(**state["args"])
        for name, value in state["attributes"].items():
            setattr(instance, name, value)
        return instance


class KeptDuringRun:
    """Values for callbacks outside the fields of the state, whose JSON stays compatible with other tools."""

    samples_seen: int = 0
    last_save_seconds: float = 0.0


@dataclass
class TrainerState(KeptDuringRun):
    """The public progress of a run, saved in every checkpoint as trainer_state.json."""

    epoch: float | None = 0
    global_step: int = 0
    max_steps: int = 0
    logging_steps: float = 500
    eval_steps: float = 500
    save_steps: float = 500
    train_batch_size: int | None = None
    num_train_epochs: int = 0
    num_input_tokens_seen: int = 0
    total_flos: float = 0
    log_history: list[dict[str, Any]] = field(default_factory=LogHistory)
    best_metric: float | None = None
    best_global_step: int | None = None
    best_model_checkpoint: str | None = None
    is_local_process_zero: bool = True
    is_world_process_zero: bool = True
    is_hyper_param_search: bool = False
    trial_name: str | None = None
    trial_params: dict[str, Any] | None = None
    stateful_callbacks: dict[str, Any] = field(default_factory=dict)

    def save_to_json(self, json_path: str | os.PathLike[str]) -> None:
        with open(json_path, "w", encoding="utf-8") as file:
            file.write(self.to_json_string())

    def to_json_string(self) -> str:
        return json.dumps(dataclasses.asdict(self), indent=2, sort_keys=True) + "\n"

    @classmethod
    def load_from_json(cls, json_path: str | os.PathLike[str]) -> TrainerState:
        with open(json_path, encoding="utf-8") as file:
            return cls.from_dict(json.load(file))

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> TrainerState:
        known = {f.name for f in dataclasses.fields(cls)}
        return cls(**{name: value for name, value in values.items() if name in known})

    def compute_steps(self, args: BaseArguments, max_steps: int) -> None:
        """Convert the intervals of `args` to updates; a value below 1 is a fraction of all updates."""
        for name in ("logging_steps", "eval_steps", "save_steps"):
            value = getattr(args, name)
            if value is None:
                continue
            setattr(self, name, interval_in_updates(value, max_steps))


def interval_in_updates(value: float, max_steps: int) -> int:
    """An interval in updates; a value below 1 is a fraction of all updates."""
    if value < 1:
        return max(1, -int(-max_steps * value // 1))
    return int(value)


@dataclass
class Progress:
    """The position in the data, which resuming needs besides TrainerState."""

    epoch: int = 0
    samples_in_epoch: int = 0
    batches_in_epoch: int = 0
    samples_seen: int = 0
    last_logged_step: int = 0
    has_ended: bool = False
    """Whether training stopped inside this epoch, and the callbacks of its end were called."""
    pending: list[str] = field(default_factory=list)
    """Flags of control that were pending when a signal stopped the run; handled first after resuming."""

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> Progress:
        known = {each.name for each in dataclasses.fields(cls)}
        return cls(**{name: value for name, value in values.items() if name in known})

    def add(self, batches: int, samples: int) -> None:
        """Count an update."""
        self.has_ended = False
        self.batches_in_epoch += batches
        self.samples_in_epoch += samples
        self.samples_seen += samples

    @property
    def is_open(self) -> bool:
        """Whether this epoch has begun and its end is still to come."""
        return self.batches_in_epoch > 0 and not self.has_ended

    def close_epoch(self) -> None:
        """Advance to the next epoch, where a resumed run would then start."""
        self.epoch += 1
        self.samples_in_epoch = self.batches_in_epoch = 0


@dataclass
class TrainerControl(ExportableState):
    """Five flags that callbacks may set; the loop does what they request and clears them."""

    should_training_stop: bool = False
    should_epoch_stop: bool = False
    should_save: bool = False
    should_evaluate: bool = False
    should_log: bool = False

    def adopt(self, other: TrainerControl) -> None:
        """Copy the flags of a control object that a callback returned."""
        for each in dataclasses.fields(self):
            setattr(self, each.name, getattr(other, each.name))

    def state(self) -> dict[str, Any]:
        return {"args": dataclasses.asdict(self), "attributes": {}}

    def _new_training(self) -> None:
        self.should_training_stop = False

    def _new_epoch(self) -> None:
        self.should_epoch_stop = False

    def _new_step(self) -> None:
        self.should_save = self.should_evaluate = self.should_log = False


_CALLBACK = record({}, {"args": named(), "attributes": named()})
_STATE_NEEDED: dict[str, Shape] = {"global_step": count()}
_STATE: dict[str, Shape] = {
    "epoch": maybe(number(0)),
    "num_input_tokens_seen": count(),
    "total_flos": number(0, 1e60),
    "log_history": list_of(named()),
    "best_metric": maybe(any_number),
    "best_global_step": maybe(count()),
    "best_model_checkpoint": maybe(text),
    "stateful_callbacks": named(either(list_of(_CALLBACK), _CALLBACK)),
}
SAVED_STATE = record({**_STATE_NEEDED, **_STATE, "epoch": number(0)})
"""trainer_state.json of loopwright; sizes and flags in it belong to the run that saved it, and are not read."""
STATE_OF_OTHERS = record(_STATE_NEEDED, _STATE)
"""That of other trainers and versions, which may have fewer fields."""
_FLAGS = ("should_evaluate", "should_save", "should_epoch_stop", "should_training_stop")
SAVED_PROGRESS = record(
    {
        "epoch": count(),
        "samples_in_epoch": count(),
        "batches_in_epoch": count(),
        "samples_seen": count(),
        "last_logged_step": count(),
    },
    {"pending": list_of(one_of(*_FLAGS)), "has_ended": flag, "learning_rate": any_number},
)


def callback_states(callbacks: Iterable[Any]) -> dict[str, Any]:
    """The JSON-compatible states of all callbacks that have one, by class name (a list if a class occurs twice)."""
    states: dict[str, Any] = {}
    for callback in callbacks:
        state = _state_of(callback)
        if state is None:
            continue
        name = type(callback).__name__
        if name in states:
            previous = states[name] if isinstance(states[name], list) else [states[name]]
            states[name] = [*previous, state]
        else:
            states[name] = state
    return states


def _state_of(callback: Any) -> dict[str, Any] | None:
    if hasattr(callback, "state_dict"):
        return {"state_dict": callback.state_dict()}
    if hasattr(callback, "state") and hasattr(callback, "from_state"):
        return dict(callback.state())
    return None


def restore_callback_states(callbacks: Iterable[Any], states: dict[str, Any]) -> list[str]:
    """Restore the saved state of each callback; returns the names of saved states without a callback."""
    left = {name: list(value) if isinstance(value, list) else [value] for name, value in states.items()}
    for callback in callbacks:
        own, name = _state_of(callback), type(callback).__name__
        if own is not None and left.get(name):
            with restoring(Path(STATE), f"the state of the callback {name}"):
                _give_back(callback, left[name].pop(0), own)
    return [name for name, waiting in left.items() if waiting]


def _give_back(callback: Any, state: dict[str, Any], own: dict[str, Any]) -> None:
    if "state_dict" in state:
        callback.load_state_dict(state["state_dict"])
        return
    shapes = callback.saved_shapes if isinstance(callback, ExportableState) else {}
    for part in ("args", "attributes"):
        values = check(state.get(part, {}), like(own.get(part, {}), complete=False), Path(STATE))
        check(values, record({}, shapes), Path(STATE))
        for name, value in values.items():
            if part == "args" and name in getattr(callback, "given", ()):
                continue  # the user chose another value for the resumed run
            if callable(getattr(type(callback), name, None)):
                raise ValueError(f"{name} is a method")
            setattr(callback, name, value)
