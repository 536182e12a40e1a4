"""Files beside the checkpoints that cannot be written: a record is left out, and no error is hidden."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from loopwright import NonFiniteError, OutputError, Trainer, TrainerCallback, TrainingArguments


class Line(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(1, 1)

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"loss": (self.layer(x).squeeze(-1) - labels).square().mean()}


def make(folder: Path, *, target: float = 1.0, **options: Any) -> Trainer:
    args = TrainingArguments(
        str(folder), max_steps=4, save_steps=2, use_cpu=True, disable_tqdm=True, report_to="none", logging_steps=1,
        **options,
    )  # fmt: skip
    return Trainer(Line(), args, train_dataset=[{"x": torch.ones(1), "labels": torch.tensor(target)}] * 8)


@pytest.mark.parametrize("name", ["run.json", "speed_plan.json", "time_ledger.json", "report.html", "report.data.js"])
def test_a_record_that_cannot_be_written_does_not_stop_the_run(
    name: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "run" / name).mkdir(parents=True)  # nothing can be written in its place
    trainer = make(tmp_path / "run")
    trainer.train()
    assert trainer.state.global_step == 4 and (tmp_path / "run/checkpoint-4/manifest.json").is_file()
    assert name in caplog.text and "annot be written" in caplog.text
    assert not list((tmp_path / "run").glob(".run.json.*"))


def test_a_report_that_cannot_be_written_does_not_hide_the_error(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run/incident-step-1").write_text("")
    trainer = make(tmp_path / "run", target=float("nan"), on_nonfinite="raise", speed="off")
    with pytest.raises(NonFiniteError, match="at step 1;.* could not be written"):
        trainer.train()


def test_an_output_folder_that_was_removed_is_named(tmp_path: Path) -> None:
    class Removes(TrainerCallback):
        def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            if state.global_step == 2:
                shutil.rmtree(tmp_path / "run")

    trainer = make(tmp_path / "run", async_save=False)
    trainer.add_callback(Removes())
    with pytest.raises(OutputError, match="the folder .*run was removed, or its disk disconnected"):
        trainer.train()
