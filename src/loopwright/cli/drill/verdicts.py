"""The result table of a drill: one row for all attempts of a case; see docs/drill.md."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Any

_ERROR = re.compile(r"^(?:[\w.]*\.)?(\w*(?:Error|Exception|Interrupt|Exit)): ?(.*)$", re.M)
EXITS = {
    75: "saved and stopped (exit code 75)",
    130: "was interrupted",
    -2: "was interrupted",
    -9: "was killed",
    -15: "was terminated",
    None: "timed out",
}
"""Meaning of an attempt's exit code."""


@dataclass(frozen=True)
class Case:
    """A fault, and how many save intervals it may cost at most."""

    help: str
    intervals: int
    fault: str = ""
    """Name of the fault injected in the training process, if it differs from the name of the case."""
    stays_up: bool = False
    """Whether the run must continue without a restart."""


CASES: dict[str, Case] = {
    # Saves run in the background, so a kill may cost the interval of the save and the next one.
    "kill": Case("SIGKILL at a random moment", 2),
    "kill-in-save": Case("SIGKILL while a checkpoint is written", 2),
    "sigterm": Case("SIGTERM, as a scheduler sends it", 0),
    "ctrl-c": Case("Ctrl-C", 1),
    "out-of-memory": Case("out of memory in one micro-batch", 1),
    "nan": Case("a NaN loss in one micro-batch", 2),
    "full-disk": Case("disk full during two checkpoints", 0, stays_up=True),
    "slow-disk": Case("slow disk during two checkpoints", 0, stays_up=True),
    "truncated": Case("a kill, then the newest checkpoint is truncated", 3, fault="kill"),
    "bit-flip": Case("a kill, then one bit of the newest checkpoint is flipped", 3, fault="kill"),
}
"""Every case of the drill."""


@dataclass
class Attempt:
    """One training process: its exit code (None: stopped by the time limit), journal and printed text."""

    code: int | None
    journal: list[dict[str, Any]]
    text: str = ""

    def last(self, event: str) -> dict[str, Any]:
        return next((each for each in reversed(self.journal) if each["event"] == event), {})

    @property
    def began(self) -> int | None:
        return self.last("begin").get("step")

    @property
    def reached(self) -> int:
        return self.last("step").get("step", self.began or 0)

    @property
    def finished(self) -> bool:
        return bool(self.last("end"))

    @property
    def weights(self) -> tuple[str, str] | None:
        end = self.last("end")
        return (end["model"], end["optimizer"]) if end else None

    def outcome(self) -> str:
        """How it ended, as text."""
        if self.finished:
            return "finished"
        if self.code in EXITS:
            return EXITS[self.code]
        errors = _ERROR.findall(self.text)
        name, message = errors[-1] if errors else (f"exit code {self.code}", "")
        return f"{name} ({re.split('[;.] ', message)[0][:100]})" if message else name


def is_hopeless(attempts: list[Attempt]) -> bool:
    """Whether a restart is useless: the time limit is over, or the last two starts ended alike at the same step."""
    if attempts[-1].code is None:
        return True
    ends = [(attempt.outcome(), attempt.reached) for attempt in attempts[-2:]]
    return len(ends) == 2 and ends[0] == ends[1]


@dataclass
class VerdictRow:
    """One line of the table."""

    name: str
    happened: str
    survived: str
    """yes, no, or as requested: the arguments request what happened, and the weights are affected."""
    lost: int | None = None
    same: str = "-"
    """Whether the weights equal those of the run without faults: yes, no, or - where that is not expected."""
    trouble: list[str] = field(default_factory=list)


def judge(
    name: str,
    attempts: list[Attempt],
    reference: Attempt,
    *,
    save_every: int,
    comparable: bool = True,
    damage: str | None = None,
) -> VerdictRow:
    """The row of a case. `comparable`: two runs without faults are equal; `damage`: problems on disk."""
    case, first, final = CASES[name], attempts[0], attempts[-1]
    facts = first.last("begin").get("facts", {})
    row = VerdictRow(name, _story(attempts), "yes", lost=_lost(attempts) if final.finished else None)
    row.trouble = [*_trouble(case, attempts), *([damage] if damage else [])]
    allowed = _allowed(name, case, facts, save_every)
    if row.lost is not None and row.lost > allowed:
        row.trouble.append(f"{row.lost} steps were lost, at most {allowed} expected")
    if final.finished and _must_be_equal(name, facts, attempts) and comparable:
        row.same = "yes" if final.weights == reference.weights else "no"
        if row.same == "no":
            row.trouble.append("the weights differ from those of the run without faults")
    if name == "nan":
        _judge_nan(row, facts.get("on_nonfinite"), first)
    if row.trouble:
        row.survived = "no"
    return row


def _story(attempts: list[Attempt]) -> str:
    parts = []
    for attempt, following in zip(attempts, [*attempts[1:], None], strict=True):
        if attempt.finished:
            parts.append("finished")
            break
        parts.append(f"{attempt.outcome()} at step {attempt.reached}")
        if following is not None and following.began is not None:
            parts.append(f"resumed from {following.began}" if following.began else "started from scratch")
    return "; ".join(parts)


def _lost(attempts: list[Attempt]) -> int:
    """Number of steps that were trained more than once."""
    pairs = zip(attempts, attempts[1:], strict=False)
    return sum(max(0, one.reached - (other.began or 0)) for one, other in pairs)


def _trouble(case: Case, attempts: list[Attempt]) -> list[str]:
    first, final = attempts[0], attempts[-1]
    if not first.last("fault"):
        return ["the fault could not be injected"]
    if not final.finished:
        return [f"the run did not finish in {len(attempts)} starts"]
    if case.stays_up and len(attempts) > 1:
        return ["training did not continue on its own"]
    return []


def _allowed(name: str, case: Case, facts: dict[str, Any], save_every: int) -> int:
    # Without enable_jit_checkpoint a signal has the effect of a kill.
    intervals = 2 if name == "sigterm" and not facts.get("enable_jit_checkpoint", True) else case.intervals
    return intervals * save_every


def _must_be_equal(name: str, facts: dict[str, Any], attempts: list[Attempt]) -> bool:
    """Whether the weights must be unchanged by the fault; not if an update is skipped, or split to save memory."""
    went_on = len(attempts) == 1
    if name == "nan":
        return not went_on
    return not (name == "out-of-memory" and went_on and facts.get("auto_find_batch_size"))


def _judge_nan(row: VerdictRow, policy: str | None, first: Attempt) -> None:
    if not first.finished:
        if "NonFiniteError" not in first.text:
            row.trouble.append("the run did not end with a NonFiniteError")
        return
    if policy == "raise":
        row.trouble.append("on_nonfinite='raise', but nothing was raised")
    elif first.last("end")["finite"]:
        row.happened += "; the step was skipped"
    elif policy == "skip":
        row.trouble.append("on_nonfinite='skip', but the weights are NaN now")
    else:
        row.survived = "as requested"
        row.happened += f"; on_nonfinite={policy!r}, so the weights became NaN: set it to 'raise' or 'skip'"


def table(rows: list[VerdictRow]) -> str:
    """The rows as aligned text."""
    head = ("fault", "survived", "steps lost", "same weights", "what happened")
    lines = [head, *(_cells(row) for row in rows)]
    widths = [max(len(line[column]) for line in lines) for column in range(len(head) - 1)]
    rule = tuple("-" * width for width in [*widths, len(head[-1])])
    padded = [lines[0], rule, *lines[1:]]
    return "\n".join(
        "  ".join([*(cell.ljust(width) for cell, width in zip(line, widths, strict=False)), line[-1]])
        for line in padded
    )


def _cells(row: VerdictRow) -> tuple[str, ...]:
    lost = "-" if row.lost is None else str(row.lost)
    return (row.name, row.survived, lost, row.same, "; ".join([row.happened, *row.trouble]))
