"""Objects with a state of their own that are saved in every checkpoint: `accelerator.register_for_checkpointing`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from ...core.checkpoint.schema import label, list_of, named, record, restoring, text
from ...errors import ArgumentsError, CheckpointError
from .described_values import Owner, decode_value, encode_value
from .tensors import read_json, read_tensors, write_json, write_tensors

REGISTERED = "registered"
_DOCUMENT = list_of(record({"class": text, "state": named()}))


class Registered:
    """Objects in the order of their registration, and saved states of those that are not registered yet."""

    def __init__(self) -> None:
        self._objects: list[Any] = []
        self._waiting: dict[int, tuple[Path, dict[str, Any]]] = {}

    def add(self, each: Any) -> None:
        """Register an object; if the run was resumed before, its state is restored now."""
        if not callable(getattr(each, "state_dict", None)) or not callable(getattr(each, "load_state_dict", None)):
            raise ArgumentsError(
                f"register_for_checkpointing: a {type(each).__name__} has no state_dict() and load_state_dict(); give "
                "it both, or keep its state in a callback that has them"
            )
        number = len(self._objects)
        _described(each, number, {})  # now, so that a state that cannot be saved is known before the first step
        self._objects.append(each)
        if number in self._waiting:
            self._restore(number, *self._waiting.pop(number))

    def writer(self, keep: Callable[[Mapping[str, Tensor]], Mapping[str, Tensor]]) -> Callable[[Path], None]:
        """A function that writes the states as they are now; `keep` copies tensors that may change until then."""
        tensors: dict[str, Tensor] = {}
        described = [_described(each, number, tensors) for number, each in enumerate(self._objects)]
        kept = keep(tensors)

        def write(folder: Path) -> None:
            if described:
                write_json(folder / f"{REGISTERED}.json", described)
                write_tensors(folder / f"{REGISTERED}.safetensors", kept)

        return write

    def resume(self, folder: Path, tell: Callable[[str], None]) -> None:
        """Restore the objects from a checkpoint; states of objects that are not registered yet wait for them."""
        self._waiting = {}
        path = folder / f"{REGISTERED}.json"
        if not path.is_file():
            if self._objects:
                names = ", ".join(type(each).__name__ for each in self._objects)
                tell(f"{folder.name} has no state of the objects registered for checkpointing: {names}")
            return
        states, tensors = read_json(path, _DOCUMENT), read_tensors(path.with_suffix(".safetensors"))
        for number, saved in enumerate(states):
            with restoring(path, f"the state of object {number}"):
                state = {name: decode_value(value, tensors) for name, value in saved["state"].items()}
            self._waiting[number] = (path, {**saved, "state": state})
        for number in range(min(len(states), len(self._objects))):
            self._restore(number, *self._waiting.pop(number))
        for number in range(len(states), len(self._objects)):
            tell(f"{label(path)} has no state of the registered object {number}, a {_class_of(self._objects[number])}")

    def report_missing(self, tell: Callable[[str], None]) -> None:
        """Report saved states whose objects were never registered: later checkpoints do not have them."""
        for number, (path, saved) in sorted(self._waiting.items()):
            tell(f"{label(path)} has the state of a {saved['class']} (object {number}), which is not registered")
        self._waiting = {}

    def _restore(self, number: int, path: Path, saved: dict[str, Any]) -> None:
        each = self._objects[number]
        if saved["class"] != _class_of(each):
            raise CheckpointError(
                f"{label(path)}: object {number} is a {saved['class']}, but a {_class_of(each)} is registered; "
                "register the same objects in the same order"
            )
        with restoring(path, f"the state of object {number}, a {saved['class']}"):
            each.load_state_dict(saved["state"])


def _class_of(each: Any) -> str:
    return f"{type(each).__module__}.{type(each).__qualname__}"


def _described(each: Any, number: int, tensors: dict[str, Tensor]) -> dict[str, Any]:
    state, whose = each.state_dict(), f"the state of a registered {type(each).__name__}: "
    if not isinstance(state, Mapping) or not all(isinstance(name, str) for name in state):
        raise CheckpointError(f"{whose}state_dict() returned a {type(state).__name__}, expected a dict with names")
    values = {name: encode_value(value, f"{number}/{name}", tensors, Owner(whose)) for name, value in state.items()}
    return {"class": _class_of(each), "state": values}
