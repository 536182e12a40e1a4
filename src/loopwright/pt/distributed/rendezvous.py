"""A rendezvous id, unique per (re)start.

torchrun restarts processes on the store of the first start (seen in torch 2.13), so addresses of ended processes are
still in it, and a rank that reads too early connects to a dead address. Restart counts do not distinguish the starts:
they do not change when a machine joins. So each rank draws a random number, rank 0 writes all numbers and a new name to
the store, and a rank accepts the name that comes with its own number.
"""

from __future__ import annotations

import json
import secrets
import time
from datetime import timedelta
from typing import Any

from ...errors import PeerError

PAUSE = 0.02


def agree_on_round(store: Any, rank: int, world: int, timeout: timedelta) -> str:
    """The name of this start, the same on every rank."""
    own = secrets.token_hex(8)
    deadline = time.monotonic() + timeout.total_seconds()
    store.set(f"round/number/{rank}", own)
    return _lead(store, own, world, deadline) if rank == 0 else _follow(store, own, rank, deadline)


def _lead(store: Any, own: str, world: int, deadline: float) -> str:
    """Propose a name for the current numbers, again if one of them changes, until every rank has accepted it."""
    numbers: list[str | None] = []
    name = ""
    while True:
        found = [own, *(_read(store, f"round/number/{rank}") for rank in range(1, world))]
        if found != numbers:
            numbers, name = found, secrets.token_hex(8)
            store.set("round/proposal", json.dumps({"name": name, "numbers": numbers}))
        taken = [_read(store, f"round/taken/{name}/{rank}") for rank in range(world)]
        absent = [rank for rank in range(1, world) if taken[rank] is None or taken[rank] != numbers[rank]]
        if not absent:
            store.set(f"round/agreed/{name}", "yes")
            return name
        _wait(deadline, f"rank {', '.join(map(str, absent))} of {world}")


def _follow(store: Any, own: str, rank: int, deadline: float) -> str:
    """Accept the proposal that contains this rank's number, once all ranks have."""
    while True:
        proposal = json.loads(_read(store, "round/proposal") or "{}")
        numbers = proposal.get("numbers", [])
        if rank < len(numbers) and numbers[rank] == own:
            name: str = proposal["name"]
            store.set(f"round/taken/{name}/{rank}", own)
            if _read(store, f"round/agreed/{name}"):
                return name
        _wait(deadline, "rank 0")


def _read(store: Any, key: str) -> str | None:
    return store.get(key).decode() if store.check([key]) else None


def _wait(deadline: float, whom: str) -> None:
    if time.monotonic() > deadline:
        raise PeerError(
            f"{whom} did not join the rendezvous in time; check that it is started and can reach the other ranks"
        )
    time.sleep(PAUSE)
