"""Functions that restore a container's entries, or the state of a random generator."""

from __future__ import annotations

import ast
import itertools
import operator
import random
from collections import deque
from collections.abc import Callable
from copy import copy
from typing import Any

import numpy as np
import torch

Undo = Callable[[], None]


def refilling(value: Any) -> Undo | None:
    """A function that restores a container's entries; None for an immutable one."""
    if isinstance(value, (list, deque)):
        entries = list(value)

        def refill_list() -> None:
            if len(value) != len(entries) or any(a is not b for a, b in zip(value, entries, strict=True)):
                value.clear()
                value.extend(entries)

        return refill_list
    if isinstance(value, dict):
        return _refilling_dict(value)
    if isinstance(value, set):
        members = set(value)

        def refill_set() -> None:
            if value != members:
                value.clear()
                value.update(members)

        return refill_set
    return None


def _refilling_dict(value: dict[Any, Any]) -> Undo:
    kept = dict(value)

    def refill() -> None:
        same = len(value) == len(kept) and all(a is b and value[a] is kept[b] for a, b in zip(value, kept, strict=True))
        if not same:
            value.clear()
            for key, each in kept.items():  # one at a time: works for every kind of dict
                value[key] = each

    return refill


def random_stream(value: Any) -> Undo | None:
    """A function that restores a user's random generator; None for any other object."""
    if isinstance(value, torch.Generator):
        state = value.get_state()
        return lambda: value.set_state(state) and None
    if isinstance(value, random.Random):
        stands = value.getstate()
        return lambda: value.setstate(stands)
    if isinstance(value, np.random.Generator):
        bits = value.bit_generator.state
        return lambda: setattr(value.bit_generator, "state", bits)
    if isinstance(value, np.random.RandomState):
        kept = value.get_state(legacy=True)
        return lambda: value.set_state(kept)
    return None


def left_in(iterator: Any) -> Any:
    """What an iterator that can be copied yields next: differs once items were taken."""
    return repr(iterator) if type(iterator) is itertools.count else operator.length_hint(iterator)


def copied(iterator: Any) -> Any:
    """A copy of an iterator at its current position; None if it cannot be copied."""
    if type(iterator) is itertools.count:
        return itertools.count(*ast.literal_eval(f"[{repr(iterator)[6:-1]}]"))
    return copy(iterator) if type(iterator) in (type(iter([])), type(iter(())), type(iter(range(0)))) else None
