"""What a checkpoint contains about the loss: its inferred properties, how micro-batches are split, the speed plan."""

from __future__ import annotations

from typing import Any

from ...core.checkpoint.schema import any_number, count, flag, list_of, maybe, named, number, record, text
from .findings import LOOKS, LossFindings

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
    },
    {"watched_until": count(), "postponed": flag},
)
"""The inferred properties of a loss in a checkpoint."""

_CHOICE = record({}, {"name": text, "is_on": flag, "reason": text, "numbers": named(any_number)})
_SWITCHES = ("linear_loss", "padded_head", "compiled", "short_rows", "widened", "channels_last", "varied", "graphed")
_PLAN = record(
    {},
    {
        **dict.fromkeys(("layout", "region", "activations", "made_for"), text),
        **dict.fromkeys((*_SWITCHES, "fill"), flag),
        **dict.fromkeys(("joined", "round_to"), count(1)),
        **dict.fromkeys(("budget", "overhead"), number(0)),
        "choices": list_of(_CHOICE),
    },
)
_SEEN = record(
    {},
    {
        **dict.fromkeys(("shortest", "longest", "stretched", "first_targets"), named(count())),
        **dict.fromkeys(("ragged", "without_targets"), flag),
        "entries": named(list_of()),
        "constants": named(),
        "paddings": named(list_of(any_number)),
        "sides": list_of(text),
        "row": count(),
    },
)
_VERIFICATION = record(
    {},
    {
        **dict.fromkeys(("updates", "audits", "proofs", "failures", "left", "last_audit"), count()),
        "coverage": list_of(_SEEN),
    },
)
SAVED_SPEED = record(
    {},
    {
        **dict.fromkeys(("looks", "region_looks"), count()),
        **dict.fromkeys(("tokens", "micro_batches", "widest"), number(0)),
        **dict.fromkeys(("whole", "shapes", "varied", "region_shapes"), list_of(text)),
        "work": maybe(named(number(0))),
        "times": named(count()),
        "plan": maybe(_PLAN),
        "verification": _VERIFICATION,
    },
)
"""The plan of the accelerations in a checkpoint, and what it was proved with."""

PARTS = record(
    {},
    {
        "micro_split": count(1, 1 << 20),
        "loss": SAVED_LOSS,
        "eval_loss": maybe(SAVED_LOSS),
        "speed": maybe(SAVED_SPEED),
    },
)
"""The parts of progress.json about the loss."""


def found_together(findings: LossFindings) -> dict[str, Any]:
    """The properties of a loss that all ranks of a run have inferred from the same batches."""
    state = findings.state_dict()
    found = {name: state[name] for name in ("kind", "shift", "additive", "divides", "looks", "rivals")}
    if found["looks"] >= LOOKS:
        found["rivals"] = found["rivals"][:1]  # a rank without data in the last update still has the others
    return found
