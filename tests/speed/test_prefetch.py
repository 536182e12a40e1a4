"""Batches on their way: what is staged, what is walked, what stays out of it; on a GPU see tests/gpu."""

from __future__ import annotations

from collections import OrderedDict, UserDict, namedtuple
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings, strategies as st

from loopwright.pt.precision import Precision
from loopwright.pt.strategies.single import SingleDevice
from loopwright.speed.device.prefetch import NoPrefetch, Prefetch, Staging, leaves, prefetch_for

CPU = torch.device("cpu")
Pair = namedtuple("Pair", "a b")


class Flight:
    """An event of a copy that ends when the test says so."""

    def __init__(self) -> None:
        self.done = True

    def query(self) -> bool:
        return self.done


def test_devices_without_streams_get_a_stand_in_that_copies_at_use() -> None:
    for kind in ("cpu", "mps", "meta"):
        ahead = prefetch_for(torch.device(kind))
        assert isinstance(ahead, NoPrefetch) and not ahead.runs
    ahead = prefetch_for(CPU)
    ahead.begin([{"x": torch.ones(2)}])
    assert torch.equal(ahead.take(torch.ones(2)), torch.ones(2))
    assert prefetch_for(torch.device("meta")).take(torch.ones(2)).device.type == "meta"


def test_every_tensor_of_nested_containers_is_found_in_order() -> None:
    a, b, c, d, e = (torch.full((2,), float(i)) for i in range(5))
    batch = {"a": a, "list": [b, "text", 3, None], "pair": Pair(c, (d,)), "mapping": UserDict(e=e), "o": OrderedDict()}
    found = list(leaves(batch))
    assert len(found) == 5 and all(mine is theirs for mine, theirs in zip(found, (a, b, c, d, e), strict=True))


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(st.integers(1, 20_000), st.booleans()), max_size=40), st.randoms())
def test_a_staging_buffer_in_flight_is_never_given_out(requests: list[tuple[int, bool]], chance: Any) -> None:
    staging, flying = Staging(Flight, pin=False), []
    for size, land in requests:
        buffer, event = staging.take(size)
        assert buffer.numel() >= size
        assert all(buffer is not other for other, _ in flying), "still being read"
        event.done = False
        flying.append((buffer, event))
        if land:  # copies of one stream end in the order they were issued
            for _, oldest in flying[: chance.randint(1, len(flying))]:
                oldest.done = True
            flying = [each for each in flying if not each[1].done]


def test_staging_buffers_are_used_again() -> None:
    staging = Staging(Flight, pin=False)
    for size in (100, 4096, 5000, 200, 8000):
        for _ in range(10):
            staging.take(size)
    assert len(staging) == 2


def test_placement_on_the_host_copies_nothing_and_announces_nothing() -> None:
    strategy = SingleDevice(CPU, Precision())
    batch = {"x": torch.ones(2), "n": 3, "deep": [torch.ones(1), (torch.zeros(1),)]}
    placed = strategy.put(batch)
    assert placed is not batch and placed["x"] is batch["x"] and placed["deep"][1][0] is batch["deep"][1][0]
    assert not strategy._ahead.runs


class Line(torch.Stream):
    """A stream of torch, with its comparisons, that notes which events it waits for."""

    def __new__(cls, *given: Any) -> Line:
        made: Line = super().__new__(cls, device="cpu")
        made.waits = []
        return made

    def __init__(self, *given: Any) -> None:
        pass

    def wait_event(self, event: Any) -> None:
        self.waits.append(event)


class Streams:
    """The module of a device with streams, on the host."""

    def __init__(self) -> None:
        self.main, self.side, self.copied = Line(), Line(), []

    def Stream(self, device: Any) -> Line:
        return self.side

    def current_stream(self, device: Any) -> Line:
        return self.main

    def stream(self, stream: Line) -> Any:
        return nullcontext()

    def Event(self) -> Any:
        return SimpleNamespace(record=self.copied.append, query=lambda: True)


def test_computing_waits_for_every_copy(monkeypatch: pytest.MonkeyPatch) -> None:
    """A tensor is used only after the event of its copy: torch's streams are neither equal nor unequal to None."""
    monkeypatch.setattr(torch, "cpu", streams := Streams())
    monkeypatch.setattr(Staging.__init__, "__kwdefaults__", {"pin": False})
    monkeypatch.setattr(torch.Tensor, "record_stream", lambda tensor, stream: None)
    ahead = Prefetch(CPU)
    for _ in range(3):  # updates
        batches = [{"x": torch.randn(3), "labels": torch.ones(1)} for _ in range(2)]
        ahead.begin(batches)
        for batch in batches:
            for tensor in batch.values():
                arrival = ahead._copies[id(tensor)].arrival
                moved = ahead.take(tensor)
                assert streams.main.waits and streams.main.waits[-1] is arrival
                assert moved is not tensor and torch.equal(moved, tensor)
    assert len(streams.main.waits) == 12 and not streams.side.waits
    assert all(stream is streams.side for stream in streams.copied)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_what_arrives_is_what_was_sent() -> None:
    from tests.gpu.test_speed_parts import test_prefetched_batches_are_equal_and_nobody_waits as check

    check()
