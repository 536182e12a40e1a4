"""Small runs of the NumpyTrainer, and what is left of one when it is over."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from loopwright.args.base import BaseArguments
from loopwright.callbacks.metrics_file import read_metrics
from loopwright.core.events import EVENTS, TrainerCallback
from tests.core.numpy_strategy import LinearModel

from .numpy_trainer import NumpyTrainer, Sample

TIMES = ("_runtime", "_per_second")


def samples(n: int = 20, seed: int = 1) -> list[Sample]:
    """Points of a linear function with some noise."""
    drawn = np.random.default_rng(seed)
    inputs = drawn.normal(size=(n, 3))
    return [(row, np.array([row.sum() + 0.1 * drawn.normal()])) for row in inputs]


class Counted(Sequence[Sample]):
    """Samples that note which of them are taken."""

    def __init__(self, items: list[Sample]) -> None:
        self.items, self.taken = items, list[int]()

    def __len__(self) -> int:
        return len(self.items)

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, int):
            self.taken.append(index)
        return self.items[index]


class Recorder(TrainerCallback):
    """Notes every event with its step."""

    def __init__(self) -> None:
        self.seen: list[tuple[str, int]] = []

    @property
    def events(self) -> list[str]:
        return [event for event, _ in self.seen]


class Interfering(TrainerCallback):
    """Does something at the n-th event of a kind, once."""

    def __init__(self, event: str, at: int, action: Callable[..., Any]) -> None:
        self._wanted, self._left, self._action = event, at, action

    def _happened(self, event: str, *given: Any, **context: Any) -> None:
        if event != self._wanted:
            return
        self._left -= 1
        if self._left == 0:
            self._action(*given, **context)


def _listener(event: str) -> Callable[..., None]:
    def record(self: Recorder, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.seen.append((event, state.global_step))

    return record


def _interference(event: str) -> Callable[..., None]:
    def happen(self: Interfering, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._happened(event, args, state, control, **kwargs)

    return happen


for _event in EVENTS:
    setattr(Recorder, _event, _listener(_event))
    setattr(Interfering, _event, _interference(_event))


def trainer_of(
    folder: str | os.PathLike[str],
    *callbacks: Any,
    cls: type[NumpyTrainer] = NumpyTrainer,
    data: Sequence[Sample] | None = None,
    eval_data: Any = None,
    compute_metrics: Any = None,
    dropout: float = 0.2,
    **options: Any,
) -> NumpyTrainer:
    """A trainer of a model that draws random numbers: 20 samples, updates of 2 x 3, three epochs of four updates."""
    args: dict[str, Any] = {
        "per_device_train_batch_size": 3,
        "gradient_accumulation_steps": 2,
        "num_train_epochs": 3,
        "learning_rate": 0.02,
        "logging_steps": 2,
        "save_strategy": "no",
        **options,
    }
    return cls(
        LinearModel(3, dropout=dropout),
        BaseArguments(os.fspath(folder), **args),
        samples() if data is None else data,
        eval_data,
        compute_metrics,
        callbacks,
    )


def outcome(trainer: NumpyTrainer) -> dict[str, Any]:
    """Everything that two equal runs have in common, to the last bit: all but times."""
    model, velocity = trainer.model.parameters, trainer.optimizer.velocity
    return {
        "weights": {name: value.tolist() for name, value in model.items()},
        "velocity": {name: value.tolist() for name, value in velocity.items()},
        "learning_rate": trainer.optimizer.learning_rate,
        "state": {name: getattr(trainer.state, name) for name in ("global_step", "epoch", "max_steps", "best_metric")},
        "log_history": [timeless(row) for row in trainer.state.log_history],
        "random": trainer._loopwright.strategy.rng_state(),
        "rows": rows(trainer.args.output_dir),
    }


def rows(folder: str | os.PathLike[str]) -> list[dict[str, Any]]:
    """The rows of metrics.jsonl, without times."""
    return [timeless(row) for row in read_metrics(folder)]


def timeless(row: dict[str, Any]) -> dict[str, Any]:
    kept = {name: value for name, value in row.items() if name not in ("time", "pace") and not name.endswith(TIMES)}
    return kept


def steps_in(folder: str | os.PathLike[str]) -> list[int]:
    """The steps of the checkpoints in a folder."""
    return sorted(int(path.name.split("-")[1]) for path in Path(folder).glob("checkpoint-*"))
