"""Batches on their way: what is staged, what is walked, what stays out of it; on a GPU see tests/gpu."""

from __future__ import annotations

from collections import OrderedDict, UserDict, namedtuple
from typing import Any

import pytest
import torch
from hypothesis import given, settings, strategies as st

from loopwright.pt.precision import Precision
from loopwright.pt.strategies.single import SingleDevice
from loopwright.speed.device.prefetch import NoPrefetch, Staging, leaves, prefetch_for

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


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_what_arrives_is_what_was_sent() -> None:
    from tests.gpu.test_speed_parts import test_prefetched_batches_are_equal_and_nobody_waits as check

    check()
