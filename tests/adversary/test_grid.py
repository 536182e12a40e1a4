"""Any losses, models, data, callbacks and hooks: at every speed, for any split of an update, resumed or not."""

from __future__ import annotations

import random
import tempfile
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from hypothesis import HealthCheck, Phase, given, settings, strategies as st

from .cases import Case
from .recipes import ACTS, HOMES, HOOKS, LOSSES, ODD, TWISTS, Recipe
from .reference import difference
from .running import Split, by_hand, forget, judge, observe

pytest.importorskip("transformers")
SPREAD, AT_LENGTH = 20, 3000
SPLITS = (Split(1, 8), Split(2, 4), Split(4, 2), Split(8, 1))
SPEEDS = ("off", "auto", "max", "tight")


class Way(NamedTuple):
    """A recipe, and how it is trained."""

    recipe: Recipe
    speed: str
    split: Split
    resume: int | None


def drawn(seed: int, *, odd: bool, speed: str | None = None) -> Way:
    """A way to train that this number stands for: neighbours have nothing in common, as examples of a search would."""
    pick = random.Random(seed)
    recipe = Recipe(
        twist=pick.choice(sorted(TWISTS)) if odd else "none",
        only_training=odd and pick.random() < 0.5,
        over=pick.choice(sorted(LOSSES) if odd else ["tokens", "tokens", "sequences", "a sum"]),
        home=pick.choice(HOMES),
        lengths=tuple(pick.randint(2, 16) for _ in range(pick.choice([8, 16, 32]))),
        side=pick.choice(["right", "right", "left"]),
        width=pick.choice([0, 0, 20]),
        odd=pick.choice(["nothing", *sorted(ODD)]),
        odd_update=pick.randrange(4),
        act=pick.choice(["nothing", "nothing", *sorted(ACTS)]),
        hook=pick.choice(["nothing", "nothing", *sorted(HOOKS)]) if odd else "nothing",
        clip=pick.choice([0.0, 0.0, 0.3]),
    )
    return Way(recipe, speed or pick.choice(SPEEDS), pick.choice(SPLITS), pick.choice([None, None, 1, 2, 3]))


def ways(*, odd: bool, speed: str | None = None) -> Any:
    """What nobody would call odd is drawn as well: there accelerations are on, and must be right."""
    return st.integers(0, 10**9).map(lambda seed: drawn(seed, odd=odd, speed=speed))


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


def tried(way: Way) -> None:
    recipe, speed, split, resume = way
    case = recipe.case()
    try:
        if not is_defined(case, split):
            return
        wrong = wrong_with(case, speed, split, resume if can_be_resumed(recipe) else None)
    finally:
        forget()
    assert wrong is None, f"{way}: {wrong}"


SETTINGS: dict[str, Any] = {
    "derandomize": True, "deadline": None, "suppress_health_check": list(HealthCheck),
    "phases": (Phase.explicit, Phase.generate), "report_multiple_bugs": False,
}  # fmt: skip


@settings(max_examples=SPREAD, **SETTINGS)
@given(way=ways(odd=True))
def test_a_spread_of_the_grid(way: Way) -> None:
    tried(way)


@settings(max_examples=SPREAD // 2, **SETTINGS)
@given(way=ways(odd=False))
def test_a_spread_of_the_grid_where_accelerations_are_on(way: Way) -> None:
    tried(way)


@pytest.mark.grid
@pytest.mark.parametrize("speed", SPEEDS)
@pytest.mark.parametrize("odd", [True, False], ids=["odd", "plain"])
def test_the_grid_at_length(speed: str, odd: bool) -> None:
    @settings(max_examples=AT_LENGTH // 8, **SETTINGS)
    @given(way=ways(odd=odd, speed=speed))
    def each(way: Way) -> None:
        tried(way)

    each()
