"""Searching with Optuna: the known optimum, pruning, several objectives, its options, and a study that is continued."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from loopwright.errors import ArgumentsError, SearchError
from tests.search.toy import BEST, Counting, space, toy, updates

optuna = pytest.importorskip("optuna", reason="Optuna is not installed")


@pytest.fixture(autouse=True)
def _quiet() -> None:
    optuna.logging.set_verbosity(optuna.logging.ERROR)


def seeded() -> Any:
    return optuna.samplers.TPESampler(seed=1)


def test_twenty_trials_find_the_optimum_and_some_are_pruned(tmp_path: Path) -> None:
    trainer = toy(tmp_path / "run", [Counting(tmp_path)])
    best = trainer.search(space, "optuna", n_trials=20, sampler=seeded(), in_process=True)
    assert best.hyperparameters["learning_rate"] == pytest.approx(BEST, abs=0.03)
    trials = best.run_summary.trials
    states = [each.state.name for each in trials]
    assert len(states) == 20 and {*states} == {"COMPLETE", "PRUNED"}
    done = updates(tmp_path)
    for each in trials:
        steps = [step for name, step in done if name == f"run-{each.number}"]
        assert steps == list(range(1, (6 if each.state.name == "COMPLETE" else max(each.intermediate_values)) + 1))
    assert best.objective == min(each.value for each in trials if each.state.name == "COMPLETE")
    assert (Path(best.checkpoint) / "manifest.json").is_file() and f"run-{best.run_id}/" in best.checkpoint


def test_the_journal_is_read_by_optuna_itself(tmp_path: Path) -> None:
    best = toy(tmp_path).search(space, "optuna", n_trials=2, in_process=True)
    storage = optuna.storages.JournalStorage(optuna.storages.journal.JournalFileBackend(str(tmp_path / "study.log")))
    study = optuna.load_study(study_name="search", storage=storage)
    assert study.best_value == best.objective and study.best_trial.user_attrs["checkpoint"] == best.checkpoint


def test_a_finished_study_is_not_repeated_and_more_trials_are_added_to_it(tmp_path: Path) -> None:
    def search(n_trials: int) -> Any:
        return toy(tmp_path / "run", [Counting(tmp_path)]).search(
            space, "optuna", n_trials=n_trials, pruner=optuna.pruners.NopPruner(), in_process=True
        )

    first = search(2)
    assert search(2)[:3] == first[:3]
    assert len(updates(tmp_path)) == 12
    assert len(search(3).run_summary.trials) == 3 and len(updates(tmp_path)) == 18


def test_several_objectives_give_several_best_trials(tmp_path: Path) -> None:
    found = toy(tmp_path).search(
        space, "optuna", n_trials=4, direction=["minimize", "maximize"], in_process=True,
        compute_objective=lambda metrics: [metrics["eval_loss"], metrics["eval_loss"]],
    )  # fmt: skip
    assert isinstance(found, list) and len(found) == 4
    assert all(len(each.objective) == 2 and Path(each.checkpoint).is_dir() for each in found)


def test_a_study_of_the_user_is_used(tmp_path: Path) -> None:
    storage = optuna.storages.InMemoryStorage()
    best = toy(tmp_path).search(
        space, "optuna", n_trials=2, storage=storage, study_name="mine", hp_name=lambda trial: f"t-{trial.number}",
        in_process=True,
    )  # fmt: skip
    assert optuna.load_study(study_name="mine", storage=storage).best_value == best.objective
    assert not (tmp_path / "study.log").exists() and (tmp_path / "t-0" / "checkpoint-6").is_dir()


def test_without_an_evaluation_the_model_is_evaluated_at_the_end(tmp_path: Path) -> None:
    best = toy(tmp_path, eval_strategy="no").search(space, "optuna", n_trials=2, in_process=True)
    assert best.objective < 4 and len(best.run_summary.trials) == 2


def test_errors_are_raised_unless_they_are_caught(tmp_path: Path) -> None:
    def fails(trial: Any = None) -> Any:
        from tests.search.toy import make_model

        if trial is not None:
            raise ZeroDivisionError
        return make_model()

    with pytest.raises(ZeroDivisionError):
        toy(tmp_path / "a", model_init=fails).search(space, "optuna", n_trials=2, in_process=True)
    with pytest.raises(SearchError, match="no trial of .* was completed"):
        toy(tmp_path / "b", model_init=fails).search(
            space, "optuna", n_trials=2, catch=(ZeroDivisionError,), in_process=True
        )


def test_unknown_options_are_named(tmp_path: Path) -> None:
    with pytest.raises(ArgumentsError, match="prunner is not an option of a search with Optuna; there are .*pruner"):
        toy(tmp_path).search(space, "optuna", prunner=None, in_process=True)
    with pytest.raises(ArgumentsError, match="n_jobs=2"):
        toy(tmp_path).search(space, "optuna", n_jobs=2, in_process=True)


def test_another_space_in_the_same_folder_is_refused(tmp_path: Path) -> None:
    toy(tmp_path).search(space, "optuna", n_trials=1, in_process=True)
    with pytest.raises(ArgumentsError, match="differs in space"):
        toy(tmp_path).search({"learning_rate": [0.1]}, "optuna", n_trials=2, in_process=True)
