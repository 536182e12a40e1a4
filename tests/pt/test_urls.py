"""Training with checkpoints in a store: the same run, with checkpoints elsewhere and everything else here."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

import loopwright
from loopwright import CheckpointError, OutputError, Trainer, TrainingArguments
from tests.models import Regression, StopAt, regression_data

fsspec = pytest.importorskip("fsspec")


def make(place: Any, callbacks: Any = None, **options: Any) -> Trainer:
    torch.manual_seed(0)
    options = {"per_device_train_batch_size": 4, "max_steps": 8, "logging_steps": 1, "save_steps": 2, "use_cpu": True,
               "disable_tqdm": True, "report_to": "tensorboard", "save_total_limit": 2, **options}  # fmt: skip
    data = regression_data(14)
    args = TrainingArguments(str(place), **options)
    return Trainer(Regression(0.3), args, train_dataset=data, eval_dataset=data[:6], callbacks=callbacks)


def stored(url: str) -> list[str]:
    """The files of checkpoints; beside them is only the id of the run."""
    fs = fsspec.filesystem("memory")
    root = "/" + url.removeprefix("memory://")
    return sorted({each.removeprefix(root + "/") for each in fs.find(root)} - {"current_run.json"})


def same_weights(one: Trainer, other: Trainer) -> bool:
    theirs = other.model.state_dict()
    return all(torch.equal(value, theirs[name]) for name, value in one.model.state_dict().items())


@pytest.mark.parametrize("async_save", [False, True])
def test_resume_from_a_store_is_exact(url: str, tmp_path: Path, async_save: bool) -> None:
    whole = make(tmp_path / "whole")
    whole.train()
    make(url, callbacks=[StopAt(5)], async_save=async_save).train()
    assert {name.split("/")[0] for name in stored(url)} == {"checkpoint-4.1", "checkpoint-5.1"}
    assert loopwright.get_last_checkpoint(url) == f"{url}/checkpoint-5"
    again = make(url, async_save=async_save)
    again.train(resume_from_checkpoint=True)
    assert same_weights(again, whole)
    losses = [[row["loss"] for row in each.state.log_history if "loss" in row] for each in (again, whole)]
    assert losses[0] == losses[1]


def test_what_is_no_checkpoint_stays_on_this_machine(url: str, tmp_path: Path) -> None:
    trainer = make(url)
    trainer.train()
    trainer.save_metrics("train", {"a": 1.0})
    trainer.save_state()
    here = tmp_path / "trainer_output" / "memory" / url.removeprefix("memory://")
    names = sorted(path.name for path in here.iterdir() if not path.name.startswith("metrics.sent."))
    assert names == [
        "all_results.json", "metrics.jsonl", "report.data.js", "report.html", "run.json", "runs", "time_ledger.json",
        "train_results.json", "trainer_state.json",
    ]  # fmt: skip
    assert all(name.startswith("checkpoint-") for name in stored(url))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["trainer_output"]
    assert trainer.args.get_tensorboard_dir().startswith("trainer_output/memory/")


def test_the_best_model_of_a_store_is_loaded(url: str) -> None:
    class BestAtFour(Trainer):
        def evaluation_loop(self, *args: Any, **kwargs: Any) -> Any:
            output = super().evaluation_loop(*args, **kwargs)
            output.metrics["eval_score"] = -abs(self.state.global_step - 4.0)
            return output

    torch.manual_seed(0)
    args = TrainingArguments(
        url, per_device_train_batch_size=4, max_steps=8, eval_strategy="steps", eval_steps=2, save_steps=2,
        metric_for_best_model="score", load_best_model_at_end=True, save_total_limit=1, use_cpu=True, disable_tqdm=True,
    )  # fmt: skip
    data = regression_data(14)
    trainer = BestAtFour(Regression(0.3), args, train_dataset=data, eval_dataset=data[:6])
    trainer.train()
    assert trainer.state.best_model_checkpoint == f"{url}/checkpoint-4"
    best = loopwright.load_model(Regression(0.3), trainer._loopwright.run.checkpoints.local(f"{url}/checkpoint-4"))
    assert all(torch.equal(value, trainer.model.state_dict()[name]) for name, value in best.state_dict().items())


def test_a_model_is_saved_to_a_url(url: str) -> None:
    trainer = make(url)
    trainer.save_model()
    trainer.save_model(f"{url}/final")
    names = stored(url)
    assert {"model.safetensors", "final/model.safetensors", "arguments.json"} <= set(names)


def test_a_run_of_this_machine_goes_on_from_a_store(url: str, tmp_path: Path) -> None:
    whole = make(tmp_path / "whole")
    whole.train()
    make(url, callbacks=[StopAt(5)]).train()
    again = make(tmp_path / "here")
    again.train(resume_from_checkpoint=f"{url}/checkpoint-5")
    assert same_weights(again, whole)
    with pytest.raises(CheckpointError, match="no such folder"):
        make(tmp_path / "here").train(resume_from_checkpoint=f"{url}/checkpoint-3")


def test_file_urls_are_folders(tmp_path: Path) -> None:
    trainer = make(f"file://{tmp_path}/run")
    assert trainer.args.output_dir == f"{tmp_path}/run"
    trainer.train()
    assert json.loads((tmp_path / "run/checkpoint-8/trainer_state.json").read_text())["global_step"] == 8


def test_a_store_that_cannot_be_written_is_said_before_training(url: str, monkeypatch: Any) -> None:
    def refuse(*args: Any, **options: Any) -> None:
        raise PermissionError("Forbidden")

    monkeypatch.setattr(fsspec.filesystem("memory"), "pipe_file", refuse)
    with pytest.raises(OutputError, match="memory://.*cannot be written .*Forbidden"):
        make(url)
