"""Searches without a package: random values, grids, successive halving, populations; in this process."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from loopwright.errors import ArgumentsError, BusyError, SearchError
from loopwright.search.journal import FILE, Journal
from tests.search.toy import BEST, LEARNING_RATES, Counting, toy, updates


def rows(folder: Path) -> list[dict[str, Any]]:
    lines = (folder / FILE).read_text(encoding="utf-8").splitlines()
    return [row for row in map(json.loads, lines) if "end" in row]


def test_a_grid_finds_its_best_point_and_names_its_checkpoint(tmp_path: Path) -> None:
    best = toy(tmp_path).search({"learning_rate": [0.05, BEST, 0.45], "seed": [1, 2]}, "grid", 20, in_process=True)
    assert best.hyperparameters == {"learning_rate": BEST, "seed": 1} and best.run_id == "2"
    assert len(best) == 4 and best.checkpoint == str(tmp_path / "run-2" / "checkpoint-6")
    assert (Path(best.checkpoint) / "manifest.json").is_file()
    assert len(best.run_summary) == 6 and best.objective == min(each.objective for each in best.run_summary)


def test_values_are_read_and_checked_like_arguments(tmp_path: Path) -> None:
    best = toy(tmp_path).search({"learning_rate": ["0.1"], "bf16_full_eval": ["False"]}, "grid", in_process=True)
    saved = json.loads((Path(best.checkpoint) / "arguments.json").read_text(encoding="utf-8"))
    assert saved["learning_rate"] == 0.1 and saved["bf16_full_eval"] is False
    with pytest.raises(ArgumentsError, match="learning_rate"):
        toy(tmp_path / "other").search({"learning_rate": [-1]}, "grid", in_process=True)


def test_the_arguments_of_the_trainer_are_unchanged_after_a_search(tmp_path: Path) -> None:
    trainer = toy(tmp_path)
    before = trainer.args.to_dict()
    trainer.search(n_trials=2, in_process=True)
    assert trainer.args.to_dict() == before


def test_the_state_names_the_trial(tmp_path: Path) -> None:
    best = toy(tmp_path).search(n_trials=1, hp_name=lambda trial: f"t{trial.number}", in_process=True)
    state = json.loads((Path(best.checkpoint) / "trainer_state.json").read_text(encoding="utf-8"))
    assert state["trial_name"] == "t0" and state["is_hyper_param_search"] is True
    assert state["trial_params"] == best.hyperparameters and Path(best.checkpoint).parent == tmp_path / "t0"


def test_halving_promotes_the_best_and_their_numbers_are_those_of_a_run_without_pauses(tmp_path: Path) -> None:
    options = {"max_steps": 20, "model_init": with_dropout}
    whole = toy(tmp_path / "whole", **options).search(n_trials=6, in_process=True)
    halved = toy(tmp_path / "halved", [Counting(tmp_path)], **options).search(
        backend="asha", n_trials=6, min_steps=2, reduction_factor=3, in_process=True
    )
    same = whole.run_summary[int(halved.run_id)]  # bit for bit the same objective
    assert (halved.objective, halved.hyperparameters) == (same.objective, same.params)
    done = updates(tmp_path)
    assert len(done) == len({*done}) < 6 * 20  # no update twice
    assert {row["step"] for row in rows(tmp_path / "halved") if row["state"] == "paused"} >= {2, 6}


def with_dropout(trial: Any = None) -> Any:
    """A model whose training draws random numbers, which a resumed trial must repeat."""
    from tests.search.toy import make_model

    model = make_model(trial)
    model.dropout = 0.5
    return model


def test_a_population_continues_from_the_best_with_other_values(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    assert torch
    from tests.search.torch_toy import torch_toy

    best = torch_toy(tmp_path, max_steps=8).hyperparameter_search(
        {"learning_rate": {"log_uniform": [1e-3, 0.9]}}, n_trials=4, backend="population", in_process=True
    )
    journal = Journal(tmp_path)
    taken = [each for each in map(json.loads, (tmp_path / FILE).read_text().splitlines()) if "begin" in each]
    taken = [each for each in taken if each["begin"]["source"] is not None]
    assert taken and len(journal.entries) == 4
    for each in taken:
        rate, source = each["values"]["learning_rate"], journal.entries[each["begin"]["source"]]
        assert 1e-3 <= rate <= 0.9
        number = each["begin"]["number"]
        logged = [json.loads(line) for line in (tmp_path / f"run-{number}" / "metrics.jsonl").open()]
        assert source.number != number and logged
    worst = taken[-1]
    number = worst["begin"]["number"]
    state = json.loads((tmp_path / f"run-{number}" / "checkpoint-8" / "trainer_state.json").read_text())
    assert state["log_history"][-2]["learning_rate"] == pytest.approx(journal.entries[number].values["learning_rate"])
    assert best.checkpoint and best.objective == min(each.objective for each in best.run_summary)


def test_a_search_that_was_stopped_continues(tmp_path: Path) -> None:
    class Stop(Exception):
        pass

    calls = []

    def objective(metrics: dict[str, float]) -> float:
        calls.append(metrics)
        if len(calls) == 4:  # inside the second trial
            raise Stop
        return metrics["eval_loss"]

    with pytest.raises(Stop):
        toy(tmp_path).search(n_trials=3, compute_objective=objective, in_process=True)
    begun = [each.state for each in Journal(tmp_path).entries.values()]
    assert begun == ["complete", "failed"]
    best = toy(tmp_path).search(n_trials=3, in_process=True)
    assert [each.state for each in best.run_summary] == ["complete", "failed", "complete"]
    again = toy(tmp_path).search(n_trials=3, compute_objective=never_called, in_process=True)
    assert again == best


def never_called(metrics: dict[str, float]) -> float:
    raise AssertionError


def test_errors_that_are_caught_do_not_end_the_search(tmp_path: Path) -> None:
    def fails_once(trial: Any = None) -> Any:
        from tests.search.toy import make_model

        if getattr(trial, "number", None) == 1:
            raise ZeroDivisionError
        return make_model(trial)

    best = toy(tmp_path, model_init=fails_once).search(n_trials=3, in_process=True, catch=ZeroDivisionError)
    assert [each.state for each in best.run_summary] == ["complete", "failed", "complete"]
    with pytest.raises(SearchError, match="no trial of .* was completed"):
        toy(tmp_path / "b", model_init=fails_always).search(n_trials=2, in_process=True, catch=ZeroDivisionError)


def fails_always(trial: Any = None) -> Any:
    from tests.search.toy import make_model

    if trial is not None:
        raise ZeroDivisionError
    return make_model()


@pytest.mark.parametrize(
    ("given", "problem"),
    [
        ({"n_trials": 0}, "n_trials=0: must be an integer above 0"),
        ({"n_trials": 2.5}, "n_trials=2.5"),
        ({"direction": "up"}, "direction='up': must be one of minimize, maximize"),
        ({"direction": []}, "at least one direction"),
        ({"direction": ["minimize", "maximize"]}, "has one objective"),
        ({"backend": "optun"}, "did you mean 'optuna'"),
        ({"backend": "sigopt"}, "backend='sigopt': not one of optuna, ray, wandb"),
        ({"hp_space": 3}, "hp_space must be a function of the trial, or a dict"),
        ({"compute_objective": 3}, "compute_objective must be a function"),
        ({"hp_space": {"lerning_rate": [1]}, "model_init": "plain"}, "not an argument.*did you mean 'learning_rate'"),
        ({"hp_space": {"output_dir": ["x"]}}, "name the folders of trials by hp_name"),
        ({"hp_name": lambda trial: "a/b"}, "hp_name returned 'a/b'"),
        ({"hp_name": lambda trial: "same"}, "for trial 0 and for trial 1"),
        ({"n_job": 2}, "has no option 'n_job'.*did you mean 'n_jobs'"),
        ({"n_jobs": 2}, "n_jobs=2: several trials at a time need a process"),
        ({"backend": "grid"}, "a grid needs a list of values"),
        ({"backend": "grid", "hp_space": lambda trial: {}}, "needs hp_space as a dict"),
        ({"backend": "asha", "reduction_factor": 1}, "reduction_factor=1: must be an integer of at least 2"),
        ({"backend": "population", "quantile": 0.9}, "quantile=0.9"),
        ({"backend": "population", "n_trials": 1}, "at least 2 trials"),
        ({"compute_objective": lambda metrics: "x"}, "compute_objective returned 'x'"),
    ],
)
def test_bad_requests_say_what_to_do(given: dict[str, Any], problem: str, tmp_path: Path) -> None:
    given = dict(given)
    plain = {"model_init": lambda: None} if given.pop("model_init", None) else {}
    trainer = toy(tmp_path)
    trainer.model_init = plain.get("model_init", trainer.model_init)
    with pytest.raises((ArgumentsError, SearchError), match=problem):
        trainer.search(**{"n_trials": 2, "in_process": True, **given})


@pytest.mark.parametrize("backend", ["asha", "population"])
def test_comparing_trials_needs_evaluations(backend: str, tmp_path: Path) -> None:
    with pytest.raises(ArgumentsError, match="compares trials at evaluations; set eval_strategy"):
        toy(tmp_path, eval_strategy="no").search(backend=backend)


def test_a_model_for_each_trial_is_needed(tmp_path: Path) -> None:
    trainer = toy(tmp_path)
    trainer.model_init = None
    with pytest.raises(ArgumentsError, match="pass model_init to the trainer"):
        trainer.search()
    trainer = toy(tmp_path)
    trainer._loopwright.is_training = True
    with pytest.raises(BusyError):
        trainer.search()


def test_a_study_of_another_search_is_refused(tmp_path: Path) -> None:
    toy(tmp_path).search(n_trials=1, in_process=True)
    with pytest.raises(ArgumentsError, match="differs in space; choose another output_dir, or delete it"):
        toy(tmp_path).search({"learning_rate": [0.1]}, n_trials=2, in_process=True)
    with pytest.raises(ArgumentsError, match="differs in arguments"):
        toy(tmp_path, max_steps=8).search(n_trials=2, in_process=True)
    with pytest.raises(ArgumentsError, match="backend='random'"):
        toy(tmp_path).search(LEARNING_RATES, "asha", n_trials=2, in_process=True)


def test_a_torn_last_line_of_the_journal_is_dropped_and_a_damaged_one_is_named(tmp_path: Path) -> None:
    best = toy(tmp_path).search(n_trials=2, in_process=True)
    path = tmp_path / FILE
    whole = path.read_text(encoding="utf-8")
    path.write_text(whole + '{"begin": {"num', encoding="utf-8")
    assert toy(tmp_path).search(n_trials=2, in_process=True) == best
    assert path.read_text(encoding="utf-8") == whole
    path.write_text(whole.replace('"end"', '"emd"', 1), encoding="utf-8")
    with pytest.raises(SearchError, match="line 3 is damaged"):
        toy(tmp_path).search(n_trials=2, in_process=True)
