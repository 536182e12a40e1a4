"""One checkpoint written by several ranks: each writes its shard, and one publishes when all are done."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Protocol

from ...errors import CheckpointError
from .disk_errors import disk_error
from .manifest import Entry, Manifest, describe, file_entry


@dataclass
class Part:
    """The files written by one rank, and the tensors in them as boxes (index ranges) of full tensors."""

    files: list[str] = field(default_factory=list)
    tensors: dict[str, Entry] = field(default_factory=dict)
    record: dict[str, Any] | None = None
    """Per-rank state (random states, streams), written by the rank that publishes."""


class Crew(Protocol):
    """The ranks that write a checkpoint together, from the view of one rank."""

    rank: int
    leader: int
    """The rank that stages and publishes for this one."""

    def gather(self, value: Any) -> list[Any]:
        """All-gather a value; the results are in rank order."""


class Publishing(Protocol):
    """Where a checkpoint is written: staged first, then published under its name."""

    def staging(self, step: int) -> AbstractContextManager[Path]: ...
    def publish(self, staged: Path, step: int) -> None: ...


Write = Callable[[Path], Any]
Keep = Callable[[Path, dict[int, dict[str, Any]]], None]
"""Writes the per-rank states to a folder."""


@dataclass
class Trouble:
    """An error of one rank, as sent to the others."""

    rank: int
    text: str
    errno: int | None = None


def publish_together(
    storage: Publishing, step: int, write: Write, *, format: str, run: str | None, crew: Crew, keep: Keep
) -> None:
    """Write a checkpoint with all ranks of the crew; raises on every rank if one fails."""
    leads, described = crew.rank == crew.leader, partial(describe, step=step, format=format, run=run)
    with ExitStack() as stack:
        staged = _attempt(crew, lambda: str(stack.enter_context(storage.staging(step))) if leads else None)
        folder = Path(staged[crew.leader])
        parts = _attempt(crew, lambda: _written(write, folder))
        if leads:
            own = {rank: part for rank, (leader, part) in enumerate(_with_leaders(crew, parts)) if leader == crew.rank}
        else:
            _with_leaders(crew, parts)
            own = {}
        _attempt(crew, lambda: _publish(storage, folder, own, described, keep) if leads else None)


def _with_leaders(crew: Crew, parts: list[Any]) -> list[tuple[int, Any]]:
    return list(zip(crew.gather(crew.leader), parts, strict=True))


def _written(write: Write, folder: Path) -> tuple[Part, dict[str, Entry]]:
    """Write this rank's shard; the rank hashes its own files."""
    part = write(folder)
    part = part if isinstance(part, Part) else Part()
    if part.files and not folder.is_dir():
        raise CheckpointError(f"{folder} does not exist")
    return part, {name: file_entry(folder / name) for name in part.files}


def _publish(
    storage: Publishing,
    folder: Path,
    parts: dict[int, tuple[Part, dict[str, Entry]]],
    described: Callable[..., Manifest],
    keep: Keep,
) -> None:
    records = {rank: part.record for rank, (part, _) in parts.items() if part.record is not None}
    keep(folder, records)
    known = {name: entry for _, entries in parts.values() for name, entry in entries.items()}
    manifest = described(folder, known=known)
    manifest.tensors.update(joined([part.tensors for part, _ in parts.values()]))
    manifest.write(folder)
    storage.publish(folder, manifest.step)


def joined(parts: list[dict[str, Entry]]) -> dict[str, Entry]:
    """Tensors with the boxes of all ranks."""
    tensors: dict[str, Entry] = {}
    for part in parts:
        for name, entry in part.items():
            known = tensors.setdefault(name, {**entry, "boxes": []})
            known["boxes"] = [*known["boxes"], *entry["boxes"]]
    return tensors


def _attempt(crew: Crew, action: Callable[[], Any]) -> list[Any]:
    """Run a function on every rank; returns all results, or raises the first error on every rank."""
    result, error = None, None
    try:
        result = action()
    except Exception as raised:  # the other ranks wait, so any error is sent to them
        error = raised
    number = getattr(disk_error(error) or error, "errno", None)
    problem = None if error is None else Trouble(crew.rank, f"{type(error).__name__}: {error}", number)
    found = crew.gather((problem, result))
    troubles = [trouble for trouble, _ in found if trouble is not None]
    if error is not None:
        raise error
    if troubles:
        first = troubles[0]
        text = f"rank {first.rank} could not write its shard: {first.text}"
        raise OSError(first.errno, text) if first.errno is not None else CheckpointError(text)
    return [value for _, value in found]
