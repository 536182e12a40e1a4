"""Positions of streaming datasets: their own state if it resumes exactly, otherwise batches are read again."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils.data import DataLoader, get_worker_info
from torch.utils.data._utils import worker as worker_module

from ...core.checkpoint.schema import check_part, count, list_of
from ...snapshot import snapshot_rng
from ..rng import rng_from_json, rng_to_json

SAY_EVERY = 5.0
"""Seconds between two progress messages of a replay."""


class StreamPosition(NamedTuple):
    """A state of a stream, and how many batches are read after it to get to the position."""

    state: Any
    batches: int = 0


def stream_state(loader: Any) -> Any:
    """A copy of the state of a loader or its dataset, if loading it resumes at the next sample; else None."""
    owner = _owner(loader)
    if owner is None:
        return None
    try:
        return json.loads(json.dumps(owner.state_dict()))  # the stream may change what it has returned
    except (TypeError, ValueError):
        return None  # checkpoints hold only JSON and tensors


class CountedBatches:
    """The batches of an iterator, counted up to its end."""

    def __init__(self, batches: Iterator[Any]) -> None:
        self.batches, self.count, self.has_ended = batches, 0, False

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        try:
            batch = next(self.batches)
        except StopIteration:
            self.has_ended = True
            raise
        self.count += 1
        return batch


def end_position(loader: Any, read: CountedBatches, before: StreamPosition | None) -> StreamPosition | None:
    """The position at the end of a stream, where it may start over: that before the update, and what was read after it.

    None if reading has not met the end, for a missing or an incomplete batch.
    """
    met = read.has_ended or getattr(getattr(read.batches, "_dataset_fetcher", None), "ended", False)
    return StreamPosition(before.state, read.count) if met and before is not None and not knows_end(loader) else None


def knows_end(loader: Any) -> bool:
    """Whether the states of a loader contain that its stream has ended, in each of its workers."""
    return isinstance(loader, StreamLoader)


def load_stream_state(loader: Any, state: Any) -> bool:
    """Restore the position of a stream; returns whether this was possible."""
    owner = _owner(loader)
    if owner is None or (isinstance(owner, StreamLoader) and state.get("number") != owner.num_workers):
        return False
    owner.load_state_dict(state)
    return True


def _owner(loader: Any) -> Any:
    """The object that holds the position: a loader with state, or the dataset if it is read in this process."""
    if _has_state(loader):
        return loader
    dataset = getattr(loader, "dataset", None)
    here = isinstance(loader, DataLoader) and loader.num_workers == 0
    return dataset if here and has_exact_state(dataset) else None


def has_exact_state(dataset: Any) -> bool:
    """Whether a stream has a state from which it resumes without losing samples."""
    return _has_state(dataset) and not loses_samples(dataset)


def _has_state(thing: Any) -> bool:
    return callable(getattr(thing, "state_dict", None)) and callable(getattr(thing, "load_state_dict", None))


def loses_samples(dataset: Any) -> bool:
    """Whether a `datasets` stream has a shuffle buffer, whose contents are not part of its state."""
    sources, seen = [getattr(dataset, "_ex_iterable", None)], set()
    while sources:
        source = sources.pop()
        if source is None or id(source) in seen:
            continue
        if "Shuffled" in type(source).__name__ and hasattr(source, "buffer_size"):
            return True
        seen.add(id(source))
        sources += [getattr(source, "ex_iterable", None), *getattr(source, "ex_iterables", ())]
    return False


def own_generators(loader: Any) -> list[torch.Generator]:
    """The random generators that a loader and its samplers were given."""
    found: dict[int, torch.Generator] = {}
    parts, seen = [loader], set()
    while parts:
        part = parts.pop()
        if part is None or id(part) in seen:
            continue
        seen.add(id(part))
        generator = getattr(part, "generator", None)
        if isinstance(generator, torch.Generator):
            found[id(generator)] = generator
        parts += [getattr(part, name, None) for name in ("sampler", "batch_sampler", "batches", "loader")]
    return list(found.values())


def read_generators(saved: Any) -> list[Tensor]:
    """The states of random generators in a checkpoint; raises for a damaged one."""
    check_part(saved, list_of(list_of(count(most=255))))
    states = [torch.tensor(state, dtype=torch.uint8) for state in saved]
    for state in states:
        torch.Generator().set_state(state)
    return states


class Start(NamedTuple):
    """Positions of the workers of a stream: the worker of the last batch, and the state of each."""

    last: int
    workers: dict[int, dict[str, Any]]


class Carried(NamedTuple):
    """A batch with the state of its worker afterwards."""

    batch: Any
    worker: int
    state: dict[str, Any]


class CarryState:
    """A collator that sends the worker's stream and random states with each batch."""

    def __init__(self, collate: Callable[[Any], Any], stream: Any) -> None:
        self.collate, self.stream = collate, stream

    def __call__(self, samples: list[Any]) -> Carried:
        worker = get_worker_info()
        assert worker is not None, "only workers carry their state"
        batch = self.collate(samples)
        state = {"stream": self.stream.dataset.state_dict(), "rng": snapshot_rng(), "ended": self.stream.has_ended}
        return Carried(batch, worker.id, state)


class StreamLoader(DataLoader[Any]):
    """A loader of a stream read by workers, which records the state of every worker after each batch."""

    def __init__(self, stream: Any, *, collate_fn: Callable[[Any], Any], **options: Any) -> None:
        super().__init__(stream, collate_fn=CarryState(collate_fn, stream), **options)
        self._last = -1
        self._worker_states: dict[int, dict[str, Any]] = {}

    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]
        # Here, not at the first batch: the loader draws its seed in this call.
        carried = super().__iter__()
        stream: Any = self.dataset
        if stream.start is None:
            self._last, self._worker_states = -1, {}
        stream.start = None  # the workers have received it; the next epoch starts at its beginning
        return self._batches(carried)

    def _batches(self, carried: Iterator[Carried]) -> Iterator[Any]:
        for each in carried:
            self._last = each.worker
            self._worker_states[each.worker] = each.state
            yield each.batch

    def state_dict(self) -> dict[str, Any]:
        workers = {
            str(worker): {**state, "rng": rng_to_json(state["rng"])}
            for worker, state in self._worker_states.items()
        }
        return {"last": self._last, "number": self.num_workers, "workers": workers}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._last = state["last"]
        self._worker_states = {
            int(worker): {**each, "rng": rng_from_json(each["rng"])}
            for worker, each in state["workers"].items()
        }
        stream: Any = self.dataset
        stream.start = Start(self._last, dict(self._worker_states))


def become_worker(role: int) -> None:
    """Set the id that `get_worker_info` returns, by which a stream divides itself among workers."""
    info = get_worker_info()
    if info is None or info.id == role:
        return
    parts = {name: getattr(info, name) for name in ("num_workers", "seed", "dataset")}
    worker_module._worker_info = worker_module.WorkerInfo(id=role, **parts)


def replay(batches: Iterator[Any], count: int, say: Callable[[str], None]) -> int:
    """Read and discard batches, reporting progress; returns how many there were."""
    started = said = time.monotonic()
    for done in range(count):
        if next(batches, None) is None:
            return done
        now = time.monotonic()
        if now - said > SAY_EVERY:
            said = now
            rate = (done + 1) / (now - started)
            left = (count - done) / rate
            say(f"re-reading: {done + 1:,} of {count:,} batches, {rate:,.0f} per second, {left:,.0f} s left")
    return count
