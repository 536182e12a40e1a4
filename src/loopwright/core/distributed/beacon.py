"""Positions of the ranks for the hang detector: update, phase, and which rank the others wait for.

A second thread reads the phase from the stack of the main thread, so training itself does no work for it. Positions can
be compared: a rank behind the furthest one is late.
"""

from __future__ import annotations

import traceback
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from types import FrameType
from typing import Any

PACKAGE = str(Path(__file__).resolve().parents[2])

# Functions of loopwright that identify a phase; the innermost one on the stack is used.
PHASES = {
    "backward": "backward",
    "training_step": "forward",
    "run_micro_batches": "forward",
    "run_update": "forward",
    "clip_gradients": "clipping",
    "optimizer_step": "optimizer step",
    "epoch_batches": "data",
    "next_batches": "data",
    "make_update": "data",
    "sync_update": "data",
    "log_now": "logging",
    "evaluate": "evaluation",
    "evaluate_now": "evaluation",
    "predict": "evaluation",
    "save_now": "saving",
    "save_and_exit": "saving",
    "save_model": "saving",
    "prepare_training": "getting ready",
    "fire": "callbacks",
    "updates": "data",
    "apply_update": "optimizer step",
    "_finish_training": "ending",
}
# An update is counted before its callbacks run, so they and the actions they request precede the next update's data.
ORDER = ("getting ready", "callbacks", "logging", "evaluation", "saving", "data", "forward", "backward", "clipping",
         "optimizer step", "ending")  # fmt: skip
# Methods of a strategy that wait for the other ranks.
WAITING = frozenset(
    {"barrier", "any_rank", "reduce", "gather", "gather_each", "broadcast", "all_gather_numbers", "mean_count"}
)


@dataclass(frozen=True)
class Sighting:
    """The last reported position of a rank."""

    rank: int
    host: str
    process: int
    step: int
    phase: str
    waits: str = ""
    """The method in which it waits for the other ranks; empty if it does not wait."""
    still: float = 0.0
    """Seconds without progress."""
    beat: int = 0
    stack: str = ""
    """Its Python stack, once it has made no progress for a while."""

    @property
    def position(self) -> tuple[int, int]:
        """Step and phase, in comparable form."""
        return self.step, ORDER.index(self.phase) if self.phase in ORDER else 0

    @property
    def name(self) -> str:
        return f"rank {self.rank} on {self.host} (process {self.process})"

    @property
    def where(self) -> str:
        waiting = f", waiting in {self.waits}" if self.waits else ""
        return f"step {self.step}, in {self.phase}{waiting}"

    def as_json(self) -> dict[str, Any]:
        return asdict(self)


def phase_of(frame: FrameType | None) -> tuple[str, str]:
    """The phase of a stack, and the method in which it waits for other ranks (or an empty string)."""
    waits = ""
    while frame is not None:
        code = frame.f_code
        if code.co_filename.startswith(PACKAGE):
            if code.co_name in WAITING:
                waits = waits or code.co_name
            elif code.co_name in PHASES:
                return PHASES[code.co_name], waits
        frame = frame.f_back
    return "outside training", waits


def stack_text(frame: FrameType | None, most: int = 12) -> str:
    """The innermost calls of a stack."""
    return "".join(traceback.format_stack(frame)[-most:]) if frame is not None else ""


def late_ones(seen: Iterable[Sighting]) -> list[Sighting]:
    """The ranks that the others wait for: those behind, or, at equal positions, those that are not waiting."""
    seen = list(seen)
    furthest = max((each.position for each in seen), default=None)
    behind = [each for each in seen if each.position != furthest]
    if behind:
        least = min(each.position for each in behind)
        return [each for each in behind if each.position == least]
    busy = [each for each in seen if not each.waits]
    return busy if len(busy) < len(seen) else []


def describe(seen: Mapping[int, Sighting], silent: Mapping[int, float], world: int, waited: float) -> str:
    """A report on the ranks of a run without progress: which are missing or late, and their positions and stacks."""
    lines = [f"no progress for {waited:.0f} s"]
    unseen = [rank for rank in range(world) if rank not in seen]
    lines += [f"rank {rank} was never seen; it was not started, or cannot reach the other ranks" for rank in unseen]
    for rank in sorted(silent):
        last = seen[rank]
        lines.append(
            f"missing: {last.name} has sent no heartbeat for {silent[rank]:.0f} s (last: {last.where}); its process "
            "exited, or its node is unreachable"
        )
    if not silent and not unseen:
        lines += _late_lines(seen)
    return "\n  ".join(lines)


def _late_lines(seen: Mapping[int, Sighting]) -> list[str]:
    late = late_ones(seen.values())
    if not late:
        lines = ["no rank is behind the others:"]
        return [*lines, *(line for each in seen.values() for line in _lines(each, "standing"))]
    others = [each for each in seen.values() if each not in late]
    return [*(line for each in late for line in _lines(each, "late")), f"the other ranks are at {others[0].where}"]


def _lines(each: Sighting, word: str) -> list[str]:
    lines = [f"{word}: {each.name} is at {each.where}, for {each.still:.0f} s"]
    return [*lines, *(f"    {line}" for line in each.stack.splitlines())]
