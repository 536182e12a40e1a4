"""Where a stream stands: its own state if it has one that resumes exactly, else the batches are read again."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from typing import Any

from torch.utils.data import DataLoader

SAY_EVERY = 5.0
"""Seconds between two lines about a replay."""


def stream_state(loader: Any) -> Any:
    """The state of a loader or its dataset, if loading it goes on at the next sample; else None."""
    owner = _owner(loader)
    if owner is None:
        return None
    state = owner.state_dict()
    try:
        json.dumps(state)
    except (TypeError, ValueError):
        return None  # a checkpoint holds JSON and tensors, nothing else
    return state


def load_stream_state(loader: Any, state: Any) -> bool:
    """Put a stream where it was; returns whether it could be."""
    owner = _owner(loader)
    if owner is None:
        return False
    owner.load_state_dict(state)
    return True


def _owner(loader: Any) -> Any:
    """Who knows the position: a loader with a state of its own, or the dataset when it is read in this process."""
    if _has_state(loader):
        return loader
    dataset = getattr(loader, "dataset", None)
    here = isinstance(loader, DataLoader) and loader.num_workers == 0
    return dataset if here and _has_state(dataset) and not loses_samples(dataset) else None


def _has_state(thing: Any) -> bool:
    return callable(getattr(thing, "state_dict", None)) and callable(getattr(thing, "load_state_dict", None))


def loses_samples(dataset: Any) -> bool:
    """Whether a `datasets` stream has a shuffle buffer, whose contents its own state leaves out."""
    source, seen = getattr(dataset, "_ex_iterable", None), 0
    while source is not None and seen < 100:
        if "Shuffled" in type(source).__name__ and hasattr(source, "buffer_size"):
            return True
        source, seen = getattr(source, "ex_iterable", None), seen + 1
    return False


def replay(batches: Iterator[Any], count: int, say: Callable[[str], None]) -> int:
    """Read batches and leave them out; says how fast it goes. Returns how many there were."""
    started = said = time.monotonic()
    for done in range(count):
        if next(batches, None) is None:
            return done
        now = time.monotonic()
        if now - said > SAY_EVERY:
            said = now
            rate = (done + 1) / (now - started)
            left = (count - done) / rate
            say(f"reading again: {done + 1:,} of {count:,} batches, {rate:,.0f} a second, {left:,.0f} s left")
    return count
