"""A small run that reports to real trackers, started by the tests as a process of its own.

It needs no torch: `python tracked_run.py FOLDER tracker,tracker [STEP]` trains to step 8 and saves at steps 3 and 6;
with STEP it kills itself after that step, whatever the trackers are doing.
"""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path
from typing import Any

OFFLINE = {
    "WANDB_MODE": "offline",
    "WANDB_SILENT": "true",
    "WANDB_ERROR_REPORTING": "false",
    "MLFLOW_DISABLE_TELEMETRY": "true",
    "MLFLOW_DISABLE_AGENT_TIPS": "true",
    "COMET_START_ONLINE": "false",
    "COMET_DISABLE_AUTO_LOGGING": "1",
    "COMET_ERROR_TRACKING_ENABLE": "false",
    "COMET_LOGGING_CONSOLE": "ERROR",
    "CLEARML_OFFLINE_MODE": "1",
    "SWANLAB_MODE": "offline",
    "DVC_NO_ANALYTICS": "1",
    "ITERATIVE_DO_NOT_TRACK": "1",
    "HF_HUB_OFFLINE": "1",
    "HF_HUB_DISABLE_TELEMETRY": "1",
    "DO_NOT_TRACK": "true",
    "CODECARBON_COUNTRY_ISO_CODE": "FRA",
    "CODECARBON_LOG_LEVEL": "error",
    "TENSORBOARD_LOGGING_DIR": "tensorboard",
}
"""Every tracker stores on this machine, and no package reports its use."""
STEPS = 8


def environment(folder: Path) -> dict[str, str]:
    """The environment of a run in this folder."""
    places = {
        "WANDB_DIR": folder,
        "TRACKIO_DIR": folder / "trackio",
        "COMET_OFFLINE_DIRECTORY": folder / "comet",
        "CLEARML_CACHE_DIR": folder / "clearml",
        "SWANLAB_LOG_DIR": folder / "swanlab",
        "SWANLAB_SAVE_DIR": folder / ".swanlab",
        "HOME": folder,
    }
    database = {"MLFLOW_TRACKING_URI": os.environ.get("MLFLOW_TRACKING_URI") or f"sqlite:///{folder}/mlflow.db"}
    named = {"MLFLOW_EXPERIMENT_NAME": "experiment", "WANDB_PROJECT": "project", "CLEARML_PROJECT": "project"}
    kept = {name: os.environ[name] for name in ("PATH", "PYTHONPATH", "LANG") if name in os.environ}
    return {**kept, "OMP_NUM_THREADS": "1", **OFFLINE, **named, **database, **{k: str(v) for k, v in places.items()}}


def train(folder: str, trackers: list[str], die_after: int | None) -> None:
    import numpy as np

    from loopwright.args.base import BaseArguments
    from loopwright.core.events import TrainerCallback
    from loopwright.reporters.callback import ReporterCallback
    from loopwright.reporters.registry import reporter_callbacks
    from tests.core.numpy_strategy import LinearModel
    from tests.core.numpy_trainer import NumpyTrainer

    # A busy machine may need longer than a user should wait; the limits have tests of their own.
    ReporterCallback.start_seconds = ReporterCallback.finish_seconds = 500.0

    class Killer(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            if state.global_step == die_after:
                os.kill(os.getpid(), signal.SIGKILL)

    random = np.random.default_rng(0)
    inputs = random.normal(size=(32, 3)).astype(np.float32)
    samples = [(row, row.sum(keepdims=True)) for row in inputs]
    args = BaseArguments(
        folder, max_steps=STEPS, per_device_train_batch_size=4, logging_steps=1, save_steps=3, eval_steps=4,
        eval_strategy="steps", report_to=trackers, run_name="the-run", project="project", disable_tqdm=True,
        async_save=False, learning_rate=0.1,
    )
    model = LinearModel(3, 1)
    model.config, model.num_parameters = {"layers": 1}, lambda: 4  # type: ignore[attr-defined]
    trainer = NumpyTrainer(
        model, args, samples, samples[:8], callbacks=[*reporter_callbacks(trackers), Killer()]
    )
    trainer.train(resume_from_checkpoint="auto")


if __name__ == "__main__":
    train(sys.argv[1], sys.argv[2].split(","), int(sys.argv[3]) if len(sys.argv) > 3 else None)
