"""What a checkpoint contains about the loss: its inferred properties, and how micro-batches are split."""

from __future__ import annotations

from ...core.checkpoint.schema import any_number, count, flag, list_of, maybe, named, number, record, text

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
