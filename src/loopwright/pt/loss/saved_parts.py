"""What a checkpoint contains about the loss: its inferred properties, and how micro-batches are split."""

from __future__ import annotations

from typing import Any

from ...core.checkpoint.schema import any_number, count, flag, list_of, maybe, named, number, record, text
from .inference import LOOKS, LossFindings

_DENOMINATOR = record({}, {"what": text, "column": maybe(text), "ignored": number(), "shifted": flag})
SAVED_LOSS = record(
    {
        "kind": maybe(text),
        "shift": maybe(flag),
        "additive": maybe(flag),
        "reason": maybe(text),
        "divides": maybe(text),
        "looks": count(),
        "rivals": list_of(_DENOMINATOR),
        "ratios": maybe(list_of(any_number)),
    }
)
"""The inferred properties of a loss in a checkpoint."""

PARTS = record({}, {"micro_split": count(1, 1 << 20), "loss": SAVED_LOSS, "speed": maybe(named())})
"""The parts of progress.json about the loss."""


def found_together(findings: LossFindings) -> dict[str, Any]:
    """The properties of a loss that all ranks of a run have inferred from the same batches."""
    state = findings.state_dict()
    found = {name: state[name] for name in ("kind", "shift", "additive", "divides", "looks", "rivals")}
    if found["looks"] >= LOOKS:
        found["rivals"] = found["rivals"][:1]  # a rank without data in the last update still has the others
    return found
