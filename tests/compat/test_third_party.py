"""Trainers of third-party libraries: the rows they log on loopwright are those they log on transformers' Trainer."""

from __future__ import annotations

import pytest

from . import preferences, variants
from .recipes import RECIPES
from .running import Results, compare, results_of, selected

pytestmark = pytest.mark.xdist_group("third-party")  # else each worker would run all recipes

NEEDS = {
    **{name: "trl" for name in RECIPES if name.startswith("sft")},
    **dict.fromkeys(("dpo", "reward", "kto", "grpo", "rloo"), "trl"),
    **dict.fromkeys(("sentence_transformer", "cross_encoder", "sparse_encoder"), "sentence_transformers"),
    "setfit": "setfit",
    "adapters": "adapters",
}
"""The package of every recipe."""
MORE = {"preferences": preferences.RECIPES, "variants": variants.RECIPES}
ALWAYS = ("online_dpo", "cpo", "a2po", "dpo_with_a_moving_reference", "sentences_cached_with_adapters")
"""Of the other trainers and options, those with overrides that no trainer above has."""
OTHERS = [
    pytest.param(name, marks=() if name in ALWAYS else pytest.mark.grid, id=name)
    for recipes in MORE.values()
    for name in recipes
]


@pytest.fixture(scope="module")
def results(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Results:
    """What each recipe logged, by owner of the Trainer and name."""
    names = [name for name in selected(request, RECIPES) if name in NEEDS and _is_installed(NEEDS[name])]
    has_all = all(map(_is_installed, ("trl", "sentence_transformers", "peft")))
    others = {module: selected(request, recipes) for module, recipes in MORE.items() if has_all}
    return results_of({"recipes": names, **others}, tmp_path_factory.mktemp("third-party"))


def _is_installed(package: str) -> bool:
    from importlib.util import find_spec

    return find_spec(package) is not None


@pytest.mark.parametrize("name", NEEDS)
def test_a_third_party_trainer_logs_the_same_rows(name: str, results: Results) -> None:
    if name not in results["theirs"]:
        pytest.skip(f"{NEEDS[name]} is not installed")
    compare(name, results)
    assert len(results["ours"][name]["rows"]) > 3


@pytest.mark.parametrize("name", OTHERS)
def test_another_trainer_or_option_logs_the_same_rows(name: str, results: Results) -> None:
    if name not in results["theirs"]:
        pytest.skip("trl, sentence-transformers or peft is not installed")
    compare(name, results)
    assert len(results["ours"][name]["rows"]) > 3
