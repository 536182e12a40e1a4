"""Scripts as users write them give the same numbers on loopwright as on transformers' Trainer."""

from __future__ import annotations

import pytest

from .patterns import PATTERNS
from .running import Results, cases, compare, results_of, selected

pytest.importorskip("datasets")
pytest.importorskip("peft")
ALWAYS = (
    "weighted_loss", "early_stopping", "layerwise_learning_rates", "several_evaluation_sets", "resume",
    "flags_of_a_command_line", "copy_of_a_checkpoint",
)  # fmt: skip


@pytest.fixture(scope="module")
def results(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Results:
    return results_of("patterns", selected(request, PATTERNS), tmp_path_factory.mktemp("patterns"))


@pytest.mark.xdist_group("patterns")
@pytest.mark.parametrize("name", cases(PATTERNS, ALWAYS))
def test_a_script_gives_the_same_numbers(name: str, results: Results) -> None:
    compare(name, results)
