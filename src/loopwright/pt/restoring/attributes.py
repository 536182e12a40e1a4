"""The attributes and slots of an object, and how to restore them."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Iterator
from types import MemberDescriptorType as Slot
from typing import Any

from torch import Tensor, nn

from .refilling import Undo, copied

PLAIN = frozenset({int, float, bool, str, bytes, complex, type(None)})
DICTS = frozenset({dict, OrderedDict})
NO_ITERATORS = PLAIN | DICTS | {list, tuple, set, nn.Parameter, Tensor}


def attributes_of(owner: Any) -> dict[str, Any]:
    """The `__dict__` of an object, empty if it has none; not by `vars`, which may call `__getattr__`."""
    try:
        found: dict[str, Any] = object.__getattribute__(owner, "__dict__")
    except AttributeError:
        return {}
    return found


def rebinding(attributes: dict[str, Any], without: frozenset[str] = frozenset()) -> Undo:
    """A function that binds attributes as they are now, and removes later ones; iterators continue where they were."""
    before = dict(attributes)  # a copy in one step: a thread of the user may add to it
    for name in without:
        before.pop(name, None)
    drawn = {
        name: copied(value)
        for name, value in before.items()
        if type(value) not in NO_ITERATORS and isinstance(value, Iterator)
    }

    def undo() -> None:
        if len(attributes) > len(before):
            for name in [name for name in attributes if name not in before and name not in without]:
                del attributes[name]
        for name, value in before.items():
            if attributes.get(name, attributes) is not value:
                attributes[name] = value
        for name, value in drawn.items():
            if value is not None:
                attributes[name] = copied(value)

    return undo


def read_slots(owner: Any, slots: Iterable[Slot]) -> dict[Slot, Any]:
    """The values of an object's slots; one that is not set has the slot itself as its value."""
    return {slot: _value_of(slot, owner) for slot in slots}


def _value_of(slot: Slot, owner: Any) -> Any:
    try:
        return slot.__get__(owner, type(owner))  # not by name, which may be a property or call __getattr__
    except AttributeError:
        return slot


def write_slots(owner: Any, slots: dict[Slot, Any]) -> None:
    """Restore what `read_slots` has read."""
    for slot, value in slots.items():
        if _value_of(slot, owner) is value:
            continue
        if value is slot:
            slot.__delete__(owner)
        else:
            slot.__set__(owner, value)
