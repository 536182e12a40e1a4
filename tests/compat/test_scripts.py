"""The tasks of transformers' example scripts give the same losses, metrics and predictions on both libraries."""

from __future__ import annotations

import pytest

from .running import Results, cases, compare, results_of, selected
from .scripts import SCRIPTS

pytest.importorskip("datasets")
ALWAYS = ("token_classification", "summarization")


@pytest.fixture(scope="module")
def results(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Results:
    return results_of("scripts", selected(request, SCRIPTS), tmp_path_factory.mktemp("scripts"))


@pytest.mark.xdist_group("scripts")
@pytest.mark.parametrize("name", cases(SCRIPTS, ALWAYS))
def test_an_example_script_gives_the_same_numbers(name: str, results: Results) -> None:
    compare(name, results)
    assert any("eval_loss" in row for row in results["ours"][name]["rows"])
