"""Checkpoints move between loopwright and transformers, in both directions."""

from __future__ import annotations

import copy
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch

import loopwright
from loopwright.errors import CheckpointError
from tests.models import TASKS

transformers = pytest.importorskip("transformers")


def trained(library: Any, name: str, folder: Path, resume: str | None = None, **options: Any) -> Any:
    torch.manual_seed(0)
    task = TASKS[name]
    model, data = task.model(0.1), task.data(22)
    args = library.TrainingArguments(
        str(folder), per_device_train_batch_size=2, gradient_accumulation_steps=1, num_train_epochs=2, logging_steps=1,
        save_steps=4, use_cpu=True, disable_tqdm=True, learning_rate=1e-2, seed=3, **options,
    )  # fmt: skip
    trainer = library.Trainer(copy.deepcopy(model), args, train_dataset=data)
    trainer.train(resume_from_checkpoint=resume)
    return trainer


def losses(trainer: Any) -> dict[int, float]:
    return {row["step"]: row["loss"] for row in trainer.state.log_history if "loss" in row}


def assert_close(a: Any, b: Any) -> None:
    for name, value in a.model.state_dict().items():
        torch.testing.assert_close(value, b.model.state_dict()[name], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("step", [4, 12, 20])
@pytest.mark.parametrize("name", ["regression", "llama"])
def test_a_run_of_transformers_goes_on_here(name: str, step: int, tmp_path: Path) -> None:
    theirs = trained(transformers, name, tmp_path / "theirs")
    ours = trained(loopwright, name, tmp_path / "ours", resume=str(tmp_path / "theirs" / f"checkpoint-{step}"))
    assert_close(ours, theirs)
    assert losses(ours) == pytest.approx(losses(theirs), rel=1e-5)


@pytest.mark.parametrize("step", [4, 12])
@pytest.mark.parametrize("async_save", [True, False])
def test_a_run_of_ours_goes_on_in_transformers(step: int, async_save: bool, tmp_path: Path) -> None:
    ours = trained(
        loopwright, "llama", tmp_path / "ours", checkpoint_format="transformers", async_save=async_save
    )
    folder = tmp_path / "ours" / f"checkpoint-{step}"
    theirs = trained(transformers, "llama", tmp_path / "theirs", resume=str(folder))
    assert_close(ours, theirs)


@pytest.mark.parametrize("step", [4, 12])
def test_their_format_resumes_bit_by_bit_here(step: int, tmp_path: Path) -> None:
    whole = trained(loopwright, "llama", tmp_path / "whole", checkpoint_format="transformers")
    part = trained(
        loopwright, "llama", tmp_path / "part", resume=str(tmp_path / "whole" / f"checkpoint-{step}"),
        checkpoint_format="transformers",
    )  # fmt: skip
    for name, value in whole.model.state_dict().items():
        assert torch.equal(value, part.model.state_dict()[name]), name
    assert losses(part) == losses(whole)


class Payload:
    """Runs code when it is unpickled."""

    def __init__(self, path: str) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return (open, (self.path, "w"))


@pytest.mark.parametrize("slot", ["optimizer.pt", "scheduler.pt", "rng_state.pth", "training_args.bin"])
def test_a_malicious_file_runs_nothing(slot: str, tmp_path: Path) -> None:
    trained(transformers, "regression", tmp_path / "theirs")
    folder, trace = tmp_path / "theirs" / "checkpoint-4", tmp_path / "trace"
    (folder / slot).write_bytes(pickle.dumps(Payload(str(trace))))
    try:
        trained(loopwright, "regression", tmp_path / "ours", resume=str(folder))
    except CheckpointError as error:
        assert slot in str(error)
    else:
        assert slot == "training_args.bin"  # never read
    assert not trace.exists()


def test_missing_optimizer_state_is_an_error_not_a_fresh_start(tmp_path: Path) -> None:
    trained(transformers, "regression", tmp_path / "theirs")
    folder = tmp_path / "theirs" / "checkpoint-4"
    (folder / "scheduler.pt").unlink()
    with pytest.raises(CheckpointError, match="scheduler"):
        trained(loopwright, "regression", tmp_path / "ours", resume=str(folder))
