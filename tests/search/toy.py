"""A problem whose best learning rate is known, on numpy: its trials take a moment, also in processes of their own."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from loopwright.args.base import BaseArguments
from loopwright.core.events import TrainerCallback
from loopwright.search.entry import hyperparameter_search
from loopwright.search.session import Request
from tests.core.numpy_strategy import LinearModel, Momentum
from tests.core.numpy_trainer import NumpyInternals, NumpyTrainer, ScheduledRate

DATA = [(np.ones(1), np.zeros(1)) for _ in range(8)]
LEARNING_RATES = {"learning_rate": {"uniform": [0.01, 0.49]}}
BEST = 0.25
"""Each update multiplies the weight by 1 - 4 * learning_rate: weight and bias have the same gradient."""


def space(trial: Any) -> dict[str, Any]:
    return {"learning_rate": trial.suggest_float("learning_rate", 0.01, 0.49)}


def make_model(trial: Any = None) -> LinearModel:
    """A model with a dropout that is chosen with the trial, if there is one."""
    model = LinearModel(1)
    model.parameters["weight"][:] = model.parameters["bias"][:] = 1.0
    params = trial if isinstance(trial, Mapping) else getattr(trial, "params", {})
    model.dropout = params.get("dropout", 0.0)
    return model


class ToyInternals(NumpyInternals):
    """The parts of a trainer on numpy, with a model for each run."""

    def construct(  # type: ignore[override]
        self, args: BaseArguments, callbacks: Any = (), model_init: Any = None, compute_metrics: Any = None
    ) -> None:
        trainer = self.trainer
        trainer.model_init, trainer.compute_metrics = model_init, compute_metrics
        trainer.train_dataset = trainer.eval_dataset = DATA
        trainer.model = model_init(None)
        super().construct(args, callbacks or ())

    def given_to_constructor(self) -> dict[str, Any]:
        return {"model_init": self.trainer.model_init, "compute_metrics": self.trainer.compute_metrics}

    def prepare_training(self, checkpoint: str | None) -> None:
        self.trainer.model = self.trainer.model_wrapped = self.strategy.setup_model(
            self.trainer.model_init(self.run.trial)
        )
        super().prepare_training(checkpoint)

    def _prepare_optimizer(self) -> None:
        super()._prepare_optimizer()
        optimizer = self.strategy.setup_optimizer(Momentum(self.model.parameters, self.args.learning_rate, 0.0))
        schedule = self.trainer.lr_scheduler
        self.trainer.optimizer = optimizer
        self.trainer.lr_scheduler = ScheduledRate(optimizer, schedule.base, schedule.schedule)


class ToyTrainer(NumpyTrainer):
    """A trainer on numpy that can search."""

    _loopwright_class = ToyInternals
    hp_search_backend: Any = None
    hp_name: Any = None
    objective: Any = None

    def __init__(self, args: BaseArguments, model_init: Any = make_model, callbacks: Any = (), **more: Any) -> None:
        self._loopwright = ToyInternals(self)
        self._loopwright.construct(args, callbacks, model_init, **more)

    def train(self, resume_from_checkpoint: Any = None, trial: Any = None) -> Any:
        return self._loopwright.train(resume_from_checkpoint, trial)

    def _hp_search_setup(self, trial: Any) -> None:
        self._loopwright.trials.set_up(trial)

    def _report_to_hp_search(self, trial: Any, step: int, metrics: dict[str, float]) -> None:
        self._loopwright.trials.report(trial, step, metrics)

    def _get_output_dir(self, trial: Any = None) -> str:
        return self._loopwright.trials.folder_of(trial)

    def search(
        self, hp_space: Any = None, backend: Any = "random", n_trials: int = 4, direction: Any = "minimize",
        compute_objective: Any = None, hp_name: Any = None, frame: Any = None, **options: Any,
    ) -> Any:  # fmt: skip
        request = Request(
            LEARNING_RATES if hp_space is None else hp_space, compute_objective, n_trials, direction, backend, hp_name,
            options,
        )  # fmt: skip
        return hyperparameter_search(self, request, frame)


def arguments(folder: Path | str, **more: Any) -> BaseArguments:
    usual = {
        "max_steps": 6, "per_device_train_batch_size": 2, "eval_strategy": "steps", "eval_steps": 2, "save_steps": 2,
        "logging_steps": 2, "lr_scheduler_type": "constant", "max_grad_norm": 0.0,
    }  # fmt: skip
    return BaseArguments(os.fspath(folder), **{**usual, **more})


def toy(folder: Path | str, callbacks: Any = (), model_init: Any = make_model, **more: Any) -> ToyTrainer:
    return ToyTrainer(arguments(folder, **more), model_init, callbacks)


class Counting(TrainerCallback):
    """Writes a line for every update of every trial."""

    def __init__(self, folder: Path | str) -> None:
        self.path = Path(folder) / "updates.txt"

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        with open(self.path, "a", encoding="utf-8") as file:
            file.write(f"{Path(args.output_dir).name} {state.global_step} {os.getpid()}\n")


class WaitsInside(TrainerCallback):
    """Waits inside a trial until a file exists, so that the search can be killed there."""

    def __init__(self, folder: Path | str, trial: str, step: int) -> None:
        self.folder, self.trial, self.step = Path(folder), trial, step

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step == self.step and Path(args.output_dir).name == self.trial:
            (self.folder / "waiting").write_text(str(os.getpid()), encoding="utf-8")
            while not (self.folder / "go").exists():
                time.sleep(0.02)


def updates(folder: Path | str) -> list[tuple[str, int]]:
    """The updates of all trials, in order."""
    lines = (Path(folder) / "updates.txt").read_text(encoding="utf-8").splitlines()
    return [(line.split()[0], int(line.split()[1])) for line in lines]
