"""Which checkpoints may be deleted, decided without touching the disk."""

from __future__ import annotations

from collections.abc import Iterable


def to_delete(steps: Iterable[int], *, keep: int | None, protect: Iterable[int | None] = ()) -> list[int]:
    """The oldest steps beyond `keep`; the newest and the protected ones are kept and count towards the limit."""
    ordered = sorted(set(steps))
    if keep is None or keep <= 0 or len(ordered) <= keep:
        return []
    safe = {step for step in protect if step is not None} | {ordered[-1]}
    candidates = [step for step in ordered if step not in safe]
    return candidates[: len(ordered) - keep]
