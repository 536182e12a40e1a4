"""A callback that changes the working directory while a run with a relative output folder trains."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
from core.numpy_runs import outcome, samples, trainer_of

from loopwright.callbacks.metrics_file import read_metrics
from loopwright.core.events import TrainerCallback


class Leaves(TrainerCallback):
    """Changes the working directory in a step."""

    def __init__(self, folder: Path, step: int) -> None:
        self.folder, self.step = folder, step

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step == self.step:
            os.chdir(self.folder)


def make(folder: str, **options: Any) -> Any:
    return trainer_of(
        folder, eval_data=samples(6, seed=2), save_strategy="steps", save_steps=2, eval_strategy="steps", eval_steps=2,
        load_best_model_at_end=True, max_steps=8, save_total_limit=2, **options,
    )  # fmt: skip


@pytest.mark.parametrize("step", [1, 2, 5])
@pytest.mark.parametrize("async_save", [True, False])
def test_everything_stays_in_the_folder_where_the_run_began(
    async_save: bool, step: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    home, other = tmp_path / "home", tmp_path / "other"
    home.mkdir()
    other.mkdir()
    monkeypatch.chdir(home)
    whole = make("whole", async_save=async_save)
    whole.train()
    run = make("run", async_save=async_save)
    run.callback_handler.add_callback(Leaves(other, step))
    run.train()
    assert not list(other.iterdir())
    monkeypatch.chdir(home)
    assert outcome(run)["weights"] == outcome(whole)["weights"]
    names = [sorted(path.name for path in (home / each).iterdir()) for each in ("run", "whole")]
    assert names[0] == names[1] and "checkpoint-8" in names[0] and "run.lock" not in names[0]
    steps = [[row["step"] for row in read_metrics(home / each)] for each in ("run", "whole")]
    assert steps[0] == steps[1]
    best = run.state.best_model_checkpoint
    assert best is not None and os.path.basename(best) == os.path.basename(whole.state.best_model_checkpoint)


def test_a_run_with_an_absolute_folder_needs_no_working_directory(tmp_path: Path) -> None:
    """The folder that a script was started in may be removed, for example by a clean-up of temporary files."""
    gone, home = tmp_path / "gone", os.getcwd()
    gone.mkdir()
    try:
        os.chdir(gone)
        gone.rmdir()
        run = make(str(tmp_path / "run"))
        run.train()
    finally:
        os.chdir(home)
    assert run.state.global_step == 8 and (tmp_path / "run" / "checkpoint-8").is_dir()
