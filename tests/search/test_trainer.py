"""`Trainer.hyperparameter_search` and `train(trial=...)`, as scripts written for transformers call them."""

from __future__ import annotations

import inspect
import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import loopwright
from loopwright import BestRun, HPSearchBackend, Trainer, TrainerCallback
from loopwright.core.trial import default_objective
from loopwright.errors import ArgumentsError
from tests.search.torch_toy import BEST, DATA, Shrinking, arguments, make_model, space, torch_toy


class Teaching(Trainer):
    """A subclass with arguments of its own, and a callback that it adds."""

    def __init__(self, *, teacher: nn.Module, **given: Any) -> None:
        super().__init__(**given)
        self.teacher, self.seen = teacher, 0
        self.add_callback(Counts())

    def compute_loss(self, model: nn.Module, inputs: Any, return_outputs: bool = False, **kwargs: Any) -> Any:
        assert isinstance(self.teacher, nn.Linear)
        return super().compute_loss(model, inputs, return_outputs, **kwargs)


class Counts(TrainerCallback):
    """Counts the updates of a trial; writes them at its end."""

    def __init__(self) -> None:
        self.updates = 0

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.updates += 1

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        (Path(args.output_dir) / "updates").write_text(f"{self.updates} {os.getpid()}", encoding="utf-8")


def test_the_signature_is_that_of_transformers() -> None:
    transformers = pytest.importorskip("transformers")
    for name in ("hyperparameter_search", "_hp_search_setup", "_report_to_hp_search", "call_model_init"):
        own, other = (
            list(inspect.signature(getattr(kind, name)).parameters) for kind in (Trainer, transformers.Trainer)
        )
        assert own == other
    assert BestRun._fields == transformers.trainer_utils.BestRun._fields
    metrics = {"eval_loss": 2.0, "eval_runtime": 1.0, "eval_samples_per_second": 3.0, "epoch": 1.0}
    for given in (metrics, {**metrics, "eval_f1": 0.5, "eval_accuracy": 0.25}):
        assert default_objective(given) == transformers.trainer_utils.default_compute_objective(given)
    with pytest.raises(ArgumentsError, match="no eval_loss and no metric.*pass compute_objective"):
        default_objective({"epoch": 1.0})


def test_a_subclass_is_searched_with_its_attributes_in_another_process(tmp_path: Path) -> None:
    trainer = Teaching(
        teacher=nn.Linear(1, 1), model_init=make_model, args=arguments(tmp_path), train_dataset=DATA, eval_dataset=DATA
    )
    best = trainer.hyperparameter_search({"learning_rate": [BEST]}, backend="grid", n_trials=1)
    assert best.objective == 0 and best.hyperparameters == {"learning_rate": BEST}
    updates, process = (tmp_path / "run-0" / "updates").read_text(encoding="utf-8").split()
    assert updates == "4" and process != str(os.getpid())
    assert torch.equal(trainer.model.weight.detach(), torch.tensor(1.0))  # the model here has not been trained


def test_a_trial_does_not_inherit_from_the_one_before(tmp_path: Path) -> None:
    """Callbacks count from 0, and a value that only one trial has is not kept for the next."""
    trainer = torch_toy(tmp_path, callbacks=[Counts()])
    trainer.hyperparameter_search(
        lambda trial: {"learning_rate": 0.5, **({"weight_decay": 0.25} if trial.number == 0 else {})},
        backend="random", n_trials=2, in_process=True,
    )  # fmt: skip
    saved = [
        json.loads((tmp_path / f"run-{n}" / "checkpoint-4" / "arguments.json").read_text(encoding="utf-8"))
        for n in range(2)
    ]
    assert [each["weight_decay"] for each in saved] == [0.25, 0.0]
    assert [(tmp_path / f"run-{n}" / "updates").read_text(encoding="utf-8").split()[0] for n in range(2)] == ["4", "4"]


def test_values_for_the_model_need_a_model_init_that_takes_them(tmp_path: Path) -> None:
    best = torch_toy(tmp_path / "a").hyperparameter_search(
        {"start": [0.5, 2.0]}, backend="grid", n_trials=2, in_process=True, direction="maximize"
    )
    assert best.hyperparameters == {"start": 2.0}
    other = Trainer(model_init=Shrinking0, args=arguments(tmp_path / "b"), train_dataset=DATA, eval_dataset=DATA)
    with pytest.raises(ArgumentsError, match="'start', which is not an argument.*let model_init take the trial"):
        other.hyperparameter_search({"start": [0.5, 2.0]}, backend="grid", n_trials=2, in_process=True)


def Shrinking0() -> nn.Module:
    return Shrinking()


def test_a_search_needs_model_init(tmp_path: Path) -> None:
    with pytest.raises(ArgumentsError, match="pass model_init"):
        Trainer(Shrinking(), arguments(tmp_path), train_dataset=DATA, eval_dataset=DATA).hyperparameter_search()


# ---- an objective of the user's own: train(trial=...) ----------------------------------------------------------------


class Trial:
    """A trial of another package, with the methods that Optuna's have."""

    number = 3
    params = {"learning_rate": 0.5}

    def __init__(self, *, prunes: bool = False) -> None:
        self.prunes, self.reports = prunes, []  # type: ignore[var-annotated]

    def report(self, value: float, step: int) -> None:
        self.reports.append((step, value))

    def should_prune(self) -> bool:
        return self.prunes


def test_train_passes_the_trial_to_the_model_and_the_overrides(tmp_path: Path) -> None:
    seen: list[Any] = []

    class Seeing(Trainer):
        def _evaluate(self, trial: Any, *given: Any, **options: Any) -> Any:
            seen.append(trial)
            return super()._evaluate(trial, *given, **options)

        def _save_checkpoint(self, model: Any, trial: Any) -> None:
            seen.append(trial)
            super()._save_checkpoint(model, trial)

    given: list[Any] = []

    def model(trial: Any) -> nn.Module:
        given.append(trial)
        return Shrinking()

    trainer = Seeing(model_init=model, args=arguments(tmp_path), train_dataset=DATA, eval_dataset=DATA)
    trial = Trial()
    trainer.train(trial=trial)
    assert given == [None, trial] and seen == [trial] * 4 and not trial.reports
    assert (tmp_path / "checkpoint-4").is_dir() and trainer.state.is_hyper_param_search
    assert trainer.state.trial_params == {"learning_rate": 0.5} and trainer.args.learning_rate == 5e-5


def test_a_backend_set_by_the_user_applies_the_values_during_train(tmp_path: Path) -> None:
    trainer = torch_toy(tmp_path)
    trainer.hp_search_backend, trainer.hp_name = HPSearchBackend.OPTUNA, lambda trial: "named"
    trainer.hp_space, trainer.compute_objective = lambda trial: trial.params, lambda metrics: metrics["eval_loss"]
    trial = Trial()
    before = trainer.args
    trainer.train(trial=trial)
    assert [step for step, _ in trial.reports] == [2, 4] and trainer.objective == trial.reports[-1][1]
    assert trainer.args is before and trainer.callback_handler.args is before
    assert (tmp_path / "named" / "checkpoint-4").is_dir() and trainer.state.trial_name == "named"
    assert trainer.state.log_history[0]["learning_rate"] == 0.5


def test_a_pruned_trial_raises_the_exception_of_its_package(tmp_path: Path) -> None:
    optuna = pytest.importorskip("optuna")
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    trainer = torch_toy(tmp_path)
    trainer.hp_search_backend, trainer.hp_space = "optuna", space

    def objective(trial: Any) -> float:
        trainer.train(trial=trial)
        return trainer.objective

    study = optuna.create_study(pruner=optuna.pruners.ThresholdPruner(upper=1e-30))
    study.optimize(objective, n_trials=2)
    assert [each.state.name for each in study.trials] == ["PRUNED", "PRUNED"]
    assert trainer.state.global_step == 2 and loopwright.__version__
