"""The state each rank adds to a checkpoint, and restores from one written by any number of ranks."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from ...core.checkpoint.folder import RANKS
from ...core.checkpoint.schema import maybe, named, record
from ...snapshot import restore_rng, snapshot_rng
from ..rng import SAVED_RNG, set_seed
from .tensors import read_json, write_json

RECORD = record({"rng": maybe(SAVED_RNG), "parts": named()})
"""The state of one rank."""


@dataclass
class SavingCrew:
    """A rank, and the ranks with which it writes a checkpoint."""

    rank: int
    leader: int
    gather: Callable[[Any], list[Any]]


def keep_records(folder: Path, records: dict[int, dict[str, Any]]) -> None:
    """Write the state of each rank, one file per rank."""
    (folder / RANKS).mkdir(exist_ok=True)
    for rank, state in records.items():
        write_json(place_of_record(folder, rank), state)


def record_of(folder: Path, rank: int) -> dict[str, Any] | None:
    """The state that a rank saved in a checkpoint, or None if there is none."""
    path = place_of_record(folder, rank)
    return read_json(path, RECORD) if path.is_file() else None


def place_of_record(folder: Path, rank: int) -> Path:
    return folder / RANKS / f"{rank:05d}.json"


def is_visible_to_all(folder: str | os.PathLike[str], rank: int, gather: Callable[[Any], list[Any]]) -> bool:
    """Whether all ranks see the same folder: rank 0 writes a file there, and all ranks check for it."""
    probe = Path(folder) / gather(f".loopwright-shared-{os.getpid()}")[0]
    if rank == 0:
        Path(folder).mkdir(parents=True, exist_ok=True)
        probe.write_bytes(b"")
    gather(None)
    seen = gather(probe.exists())
    if rank == 0:
        probe.unlink()
    return all(seen)


def own_random_states(seed: int, rank: int, step: int) -> dict[str, Any]:
    """Random states for a rank that has none: a function of the seed, the rank and the step at which it joins."""
    words = hashlib.sha256(f"{seed}/{rank}/{step}".encode()).digest()
    before = snapshot_rng()
    set_seed(int(np.frombuffer(words[:4], dtype=np.uint32)[0]))
    states = snapshot_rng()
    restore_rng(before)
    return states
