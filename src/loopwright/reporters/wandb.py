"""Weights & Biases, online or offline."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from ..notices import logger
from .base import END_OF_TRAINING, Reporter, Row, RunInfo, require, without_stored
from .callback import ReporterCallback, checkpoint_of
from .model_files import saved_model, wait_for

if TYPE_CHECKING:
    from ..args.base import BaseArguments

STEP = "train/global_step"
LOG_MODEL = ("false", "end", "checkpoint")


class WandbReporter(Reporter):
    """Metrics as history, the values of the end of training as summary, the arguments as configuration.

    A run that you started with `wandb.init` is used, and not finished.
    """

    name: ClassVar[str] = "wandb"
    logs_predictions: ClassVar[bool] = True
    ends_with_training: ClassVar[bool] = False

    def __init__(self) -> None:
        require("wandb", "wandb")
        self._run: Any = None
        self._is_own = False

    def start(self, run: RunInfo) -> None:
        import wandb

        self._is_own = wandb.run is None
        self._run = wandb.run or wandb.init(
            project=os.environ.get("WANDB_PROJECT") or "huggingface",
            id=os.environ.get("WANDB_RUN_ID") or run.run_id,
            resume=os.environ.get("WANDB_RESUME") or "allow",
            name=run.run_name,
            group=_group(run),
        )
        self._run.config.update(_json_like(run.hyper_parameters), allow_val_change=True)
        if run.num_parameters is not None:
            self._run.config.update({"model/num_parameters": run.num_parameters}, allow_val_change=True)
        self._run.define_metric(STEP)
        self._run.define_metric("*", step_metric=STEP, step_sync=True)
        watched = os.environ.get("WANDB_WATCH", "false")
        if watched in ("all", "parameters", "gradients") and run.model is not None:
            every = max(100, int(getattr(run.arguments, "logging_steps", 100)))
            self._run.watch(run.model, log=watched, log_freq=every)

    def log(self, values: dict[str, Any], step: int) -> None:
        once = {name.removeprefix("train/"): value for name, value in values.items() if name in END_OF_TRAINING}
        if once:
            self._run.summary.update(once)
        charted = {name: value for name, value in values.items() if name not in END_OF_TRAINING}
        self._run.log({**charted, STEP: step})

    def artifact(self, path: str | os.PathLike[str], name: str) -> None:
        import wandb

        wait_for(path)
        artifact = wandb.Artifact(name=f"model-{self._run.id}", type="model")
        add = artifact.add_dir if os.path.isdir(path) else artifact.add_file
        add(os.fspath(path))
        self._run.log_artifact(artifact, aliases=[name])

    def flush(self) -> bool:
        return False  # W&B has no call that waits until its process has written everything

    def unstored(self, rows: Sequence[Row]) -> list[Row] | None:
        if not self._run.offline:
            import wandb

            history = wandb.Api().run(self._run.path).scan_history()
            return without_stored(rows, _by_step(history))
        # The folder of a run is wandb/offline-run-<time>-<id>/files.
        folders = Path(self._run.dir).parents[1].glob(f"offline-run-*-{self._run.id}")
        files = [each for folder in folders for each in folder.glob("*.wandb")]
        return without_stored(rows, _by_step(item for file in files for item in history_of(file)))

    def finish(self, status: str) -> None:
        if self._is_own:
            self._run.finish(exit_code=0 if status == "finished" else 1)

    def as_callback(self) -> WandbCallback:
        return WandbCallback(reporter=self)


class WandbCallback(ReporterCallback):
    """Reports to Weights & Biases."""

    def __init__(self, *, reporter: WandbReporter | None = None) -> None:
        super().__init__(reporter or WandbReporter())
        self._log_model = os.environ.get("WANDB_LOG_MODEL", "false").lower()
        if self._log_model not in LOG_MODEL:
            logger.warning(f"WANDB_LOG_MODEL={self._log_model!r} is not one of {', '.join(LOG_MODEL)}: nothing is sent")

    @property
    def _wandb(self) -> Any:
        """The package; subclasses written for transformers use this name."""
        import wandb

        return wandb

    @property
    def _initialized(self) -> bool:
        return self._sender is not None

    def on_save(self, args: BaseArguments, state: Any, control: Any, **kwargs: Any) -> None:
        if self._log_model == "checkpoint" and state.is_world_process_zero:
            self.artifact(checkpoint_of(args, state), f"checkpoint_global_step_{state.global_step}")

    def on_train_end(self, args: BaseArguments, state: Any, control: Any, **kwargs: Any) -> None:
        if self._log_model in ("end", "checkpoint") and state.is_world_process_zero:
            folder = saved_model(kwargs.get("model"), kwargs.get("processing_class"))
            if folder is not None:
                self.artifact(folder, "final_model")
        super().on_train_end(args, state, control, **kwargs)


def records_of(path: Path) -> list[dict[str, Any]]:
    """The records in a file of an offline run; W&B's own command reads it."""
    command = [sys.executable, "-m", "wandb", "leet", "inspect", "--json", str(path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    return [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]


def history_of(path: Path) -> list[dict[str, Any]]:
    """The logged rows in a file of an offline run."""
    return [record["history"]["item"] for record in records_of(path) if record.get("type") == "history"]


def _by_step(items: Iterable[dict[str, Any]]) -> Iterator[tuple[int, dict[str, Any]]]:
    return ((int(item[STEP]), item) for item in items if STEP in item)


def _group(run: RunInfo) -> str | None:
    """Trials of a search are grouped."""
    if run.trial_name is None:
        return None
    return getattr(run.arguments, "run_name", None) or run.output_dir


def _json_like(values: dict[str, Any]) -> dict[str, Any]:
    return dict(json.loads(json.dumps(values, default=str)))
