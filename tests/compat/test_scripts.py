"""Scripts as users write them, and the tasks of transformers' example scripts, have the same numbers on both libraries.

All of them run in one process for each library.
"""

from __future__ import annotations

import pytest

from . import habits, patterns, questions, routines, scripts
from .running import Results, compare, results_of, selected

pytest.importorskip("datasets")
pytest.importorskip("peft")
pytestmark = pytest.mark.xdist_group("scripts")

ALWAYS = (
    "the_arguments_of_log", "names_of_metrics_before_and_after_training", "adversarial_noise_in_a_training_step",
    "an_evaluation_of_the_training_data_by_a_callback", "a_stream_accumulated_and_resumed",
)  # fmt: skip
QUESTIONS = [pytest.param(name, marks=() if name in ALWAYS else pytest.mark.grid) for name in questions.RECIPES]


@pytest.fixture(scope="module")
def results(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Results:
    modules = {"patterns": patterns, "habits": habits, "scripts": scripts, "questions": questions,
               "routines": routines}  # fmt: skip
    names = {name: selected(request, module.RECIPES) for name, module in modules.items()}
    return results_of(names, tmp_path_factory.mktemp("scripts"))


@pytest.mark.parametrize("name", patterns.RECIPES)
def test_a_script_gives_the_same_numbers(name: str, results: Results) -> None:
    compare(name, results)


@pytest.mark.parametrize("name", habits.RECIPES)
def test_an_unusual_script_gives_the_same_numbers(name: str, results: Results) -> None:
    compare(name, results)


@pytest.mark.parametrize("name", routines.RECIPES)
def test_a_script_finds_the_same_files_and_values(name: str, results: Results) -> None:
    compare(name, results)


@pytest.mark.parametrize("name", QUESTIONS)
def test_a_trainer_of_a_forum_gives_the_same_numbers(name: str, results: Results) -> None:
    compare(name, results)


@pytest.mark.parametrize("name", scripts.RECIPES)
def test_an_example_script_gives_the_same_numbers(name: str, results: Results) -> None:
    compare(name, results)
    assert any("eval_loss" in row for row in results["ours"][name]["rows"])
