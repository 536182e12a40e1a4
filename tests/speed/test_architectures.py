"""Loss and all gradients of an update, laid out by what was proved, against the update as the collator made it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from loopwright.speed.planner.decision import COLLATED, FLAT, GROUPED, PAIRED, UNMASKED, UNPADDED
from loopwright.speed.proof.distance import gradient_distance
from tests.speed.architectures import DECODERS, ENCODERS, PAIRS, build, samples
from tests.speed.training import Run, gradients_of

pytest.importorskip("transformers")

EXPECTED = {
    **{(kind, "causal"): FLAT for kind in DECODERS},
    ("gptj", "causal"): UNMASKED,  # adds masks to scores by itself
    ("falcon", "causal"): UNMASKED,
    ("bloom", "causal"): UNMASKED,
    ("mpt", "causal"): UNMASKED,
    **{(kind, "class"): UNPADDED for kind in ENCODERS},
    ("albert", "class"): GROUPED,
    ("modernbert", "class"): GROUPED,
    ("deberta-v2", "class"): GROUPED,
    **{(kind, task): FLAT for kind in ENCODERS for task in ("masked", "tokens")},
    **{(kind, task): UNPADDED for kind in ("roberta", "camembert") for task in ("masked", "tokens")},
    **{("deberta-v2", task): GROUPED for task in ("masked", "tokens")},
    **{(kind, "pair"): PAIRED for kind in PAIRS},
    ("m2m_100", "pair"): GROUPED,  # counts positions of tokens by itself
}
"""What the proof is known to accept; docs/speed.md shows this table."""
IN_SINGLE_PRECISION = {"gemma2", "cohere", "gptj", "bloom"}
"""Compute a part in single precision whatever the weights are."""


MIXED = {"gemma2", "gemma3_text", "modernbert"}
"""Have layers of two kinds."""

ENCODED = ("class", "masked", "tokens")
ALWAYS = {(kind, ENCODED[number % 3]) for number, kind in enumerate(ENCODERS)}
"""Of each encoder one task; the others run with `-m grid`."""


def cases() -> list[Any]:
    """Every architecture with every task; of encoders a spread in which each comes once is not marked."""
    rest = {(kind, task) for kind in ENCODERS for task in ENCODED} - ALWAYS
    return [pytest.param(*case, marks=pytest.mark.grid if case in rest else ()) for case in sorted(EXPECTED)]


@pytest.mark.parametrize(("kind", "task"), cases())
def test_the_update_is_the_one_of_padded_batches(kind: str, task: str, doubles_stay: None, tmp_path: Any) -> None:
    model = build(kind, task, layers=2 if kind in MIXED else 1)
    tolerance = 1e-5 if kind in IN_SINGLE_PRECISION else 1e-10
    data = samples(12, task)
    plain: Run = gradients_of(model, data, tmp_path, speed="off")
    laid = gradients_of(model, data, tmp_path, speed="max")
    assert laid.plan.layout == EXPECTED[kind, task], laid.plan.lines()
    assert laid.plan.layout != COLLATED
    assert laid.loss == pytest.approx(plain.loss, rel=tolerance)
    assert plain.gradients.keys() == laid.gradients.keys()
    assert gradient_distance([*plain.gradients.values()], [*laid.gradients.values()]) < tolerance


def test_at_least_twenty_architectures_are_covered() -> None:
    assert len({kind for kind, _ in EXPECTED}) >= 20


TASKS = {
    "causal": "next token", "class": "class of a sample", "masked": "masked tokens", "tokens": "class of a token",
    "pair": "source to target",
}  # fmt: skip


def table() -> str:
    """What is accepted for which architecture, as docs/speed.md shows it."""
    rows: dict[tuple[str, str], list[str]] = {}
    for (kind, task), layout in EXPECTED.items():
        rows.setdefault((layout, task), []).append(kind)
    lines = [f"| `{layout}` | {TASKS[task]} | {', '.join(sorted(kinds))} |" for (layout, task), kinds in rows.items()]
    return "\n".join(["| layout | task | accepted for |", "|---|---|---|", *sorted(lines)])


def test_the_documentation_lists_what_is_accepted() -> None:
    assert table() in (Path(__file__).parents[2] / "docs" / "speed.md").read_text(encoding="utf-8")
