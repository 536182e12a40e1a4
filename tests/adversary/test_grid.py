"""Any losses, models, data, callbacks and hooks: at every speed, however an update is cut, resumed or not."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, given, settings, strategies as st

from .cases import Case
from .recipes import ACTS, HOMES, HOOKS, LOSSES, ODD, TWISTS, Recipe
from .reference import difference
from .running import Split, by_hand, forget, judge, observe

pytest.importorskip("transformers")
SPREAD, AT_LENGTH = 60, 3000
SPLITS = (Split(1, 8), Split(2, 4), Split(4, 2), Split(8, 1))
SPEEDS = ("off", "auto", "max", "tight")


def recipes() -> Any:
    lengths = st.lists(st.integers(2, 16), min_size=8, max_size=32).map(tuple)
    return st.builds(
        Recipe,
        twist=st.sampled_from(sorted(TWISTS)),
        only_training=st.booleans(),
        over=st.sampled_from(sorted(LOSSES)),
        home=st.sampled_from(HOMES),
        lengths=lengths,
        side=st.sampled_from(["right", "right", "left"]),
        width=st.sampled_from([0, 0, 20]),
        odd=st.sampled_from(sorted(ODD)),
        odd_update=st.integers(0, 3),
        act=st.sampled_from(sorted(ACTS)),
        hook=st.sampled_from(sorted(HOOKS)),
        clip=st.sampled_from([0.0, 0.0, 0.3]),
    )


def tame() -> Any:
    """What nobody would call odd, so that accelerations are on and must be right."""
    return st.builds(
        Recipe,
        twist=st.just("none"),
        over=st.sampled_from(["tokens", "sequences", "a sum"]),
        home=st.sampled_from(HOMES),
        lengths=st.lists(st.integers(2, 16), min_size=8, max_size=32).map(tuple),
        side=st.sampled_from(["right", "left"]),
        odd=st.sampled_from(sorted(ODD)),
        odd_update=st.integers(0, 3),
        act=st.sampled_from(["nothing", "freezing", "a smaller weight"]),
        clip=st.sampled_from([0.0, 0.3]),
    )


def wrong_with(case: Case, speed: str, split: Split, resume: int | None) -> str | None:
    """What is wrong with a run of this case; of one that is resumed, what is wrong with the rest."""
    saved = {} if resume is None else {"save_strategy": "steps", "save_steps": resume}
    with tempfile.TemporaryDirectory() as folder:
        whole = observe(case, Path(folder), speed=speed, split=split, **saved)
        wrong = judge(case, whole, split)
        if wrong is not None or resume is None:
            return wrong
        checkpoint = f"{folder}/checkpoint-{resume}"
        rest = observe(case, Path(folder), speed=speed, split=split, resume=checkpoint, **saved)
    wrong = difference(whole.gradients[resume:], rest.gradients)
    return None if wrong is None else f"resumed after {resume}: {wrong}; layout: {rest.layout}; told: {rest.told}"


def can_be_resumed(recipe: Recipe) -> bool:
    """Whether all that a run depends on is in its checkpoint: a counter in Python is not, nor is a collator's."""
    return recipe.twist != "counter" and recipe.odd == "nothing"


def is_defined(case: Case, split: Split) -> bool:
    """Whether the loop by hand has a gradient in every update."""
    loop = by_hand(case, split, written=case.loss is None)
    return all(value.isfinite().all() for each in loop.gradients for value in each.values())


def tried(recipe: Recipe, speed: str, split: Split, resume: int | None) -> None:
    case = recipe.case()
    try:
        if not is_defined(case, split):
            return
        wrong = wrong_with(case, speed, split, resume if can_be_resumed(recipe) else None)
    finally:
        forget()
    assert wrong is None, f"{recipe}, speed={speed}, {split}: {wrong}"


WAYS = {
    "speed": st.sampled_from(SPEEDS),
    "split": st.sampled_from(SPLITS),
    "resume": st.sampled_from([None, None, 1, 2, 3]),
}
SETTINGS = {
    "derandomize": True, "deadline": None, "suppress_health_check": list(HealthCheck),
    "phases": (Phase.explicit, Phase.generate), "report_multiple_bugs": False,
}  # fmt: skip


@settings(max_examples=SPREAD, **SETTINGS)
@given(recipe=recipes(), **WAYS)
def test_a_spread_of_the_grid(recipe: Recipe, speed: str, split: Split, resume: int | None) -> None:
    tried(recipe, speed, split, resume)


@settings(max_examples=SPREAD // 2, **SETTINGS)
@given(recipe=tame(), **WAYS)
def test_a_spread_of_the_grid_where_accelerations_are_on(
    recipe: Recipe, speed: str, split: Split, resume: int | None
) -> None:
    tried(recipe, speed, split, resume)


@pytest.mark.grid
@pytest.mark.parametrize("speed", SPEEDS)
@settings(max_examples=AT_LENGTH // 4, **SETTINGS)
@given(recipe=st.one_of(recipes(), tame()), split=WAYS["split"], resume=WAYS["resume"])
def test_the_grid_at_length(speed: str, recipe: Recipe, split: Split, resume: int | None) -> None:
    tried(recipe, speed, split, resume)
