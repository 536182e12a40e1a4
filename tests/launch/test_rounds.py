"""Processes that start again on an old store agree on a new name, with any entries left in it and in any order."""

from __future__ import annotations

import random
import threading
import time
from datetime import timedelta

import pytest
import torch.distributed as dist

from loopwright.errors import PeerError
from loopwright.pt.distributed.rendezvous import agree_on_round


@pytest.fixture
def store():
    return dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=60))


def started(store, world: int, *, seconds: float = 20.0, order: random.Random | None = None) -> list[str]:
    """The names that so many processes come to, each coming a little later or earlier than the others."""
    names: list[str] = [""] * world
    waits = [order.random() / 10 if order else 0.0 for _ in range(world)]

    def one(rank: int) -> None:
        time.sleep(waits[rank])
        names[rank] = agree_on_round(store.clone(), rank, world, timedelta(seconds=seconds))

    threads = [threading.Thread(target=one, args=(rank,)) for rank in range(world)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return names


@pytest.mark.parametrize("seed", range(3))
def test_each_start_has_a_name_of_its_own(store, seed):
    """The same store serves starts of different sizes, as when machines come and go."""
    order = random.Random(seed)
    seen = set()
    for world in (1, 2, 4, 1, 3, 3):
        names = started(store, world, order=order)
        assert len(set(names)) == 1 and names[0] and names[0] not in seen
        seen.add(names[0])


def test_who_does_not_come_is_named(store):
    with pytest.raises(PeerError, match="rank 1, 2 of 3 did not join"):
        agree_on_round(store, 0, 3, timedelta(seconds=0.2))
    with pytest.raises(PeerError, match="rank 0 did not join"):
        agree_on_round(store, 1, 3, timedelta(seconds=0.2))


def test_what_an_unfinished_start_left_behind_does_not_matter(store):
    with pytest.raises(PeerError):
        agree_on_round(store, 0, 2, timedelta(seconds=0.1))
    with pytest.raises(PeerError):
        agree_on_round(store, 1, 2, timedelta(seconds=0.1))
    assert len(set(started(store, 2))) == 1
