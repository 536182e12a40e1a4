"""Checkpoints move between loopwright and transformers, in both directions."""

from __future__ import annotations

import copy
import functools
import json
import pickle
import shutil
from collections.abc import Callable
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


Runs = Callable[..., tuple[Any, Path]]


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Runs:
    """Whole runs with checkpoints, each trained once: a trainer and its folder, in which nothing may be changed."""

    @functools.cache
    def run(library: Any, name: str, **options: Any) -> tuple[Any, Path]:
        folder = tmp_path_factory.mktemp("whole")
        return trained(library, name, folder, **options), folder

    return run


@pytest.mark.parametrize("step", [4, 12, 20])
@pytest.mark.parametrize("name", ["regression", "llama"])
def test_a_run_of_transformers_goes_on_here(name: str, step: int, whole: Runs, tmp_path: Path) -> None:
    theirs, folder = whole(transformers, name)
    ours = trained(loopwright, name, tmp_path / "ours", resume=str(folder / f"checkpoint-{step}"))
    assert_close(ours, theirs)
    assert losses(ours) == pytest.approx(losses(theirs), rel=1e-5)


class Norms(torch.nn.Module):
    """A norm that transformers does not recognise by its class, before and after other parameters."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.bn1, self.hidden = torch.nn.BatchNorm1d(4), torch.nn.Linear(4, 8)
        self.bn2, self.out = torch.nn.BatchNorm1d(8), torch.nn.Linear(8, 1)

    def forward(self, x: Any, labels: Any) -> Any:
        y = self.out(self.bn2(self.hidden(self.bn1(x)))).squeeze(-1)
        return {"loss": torch.nn.functional.mse_loss(y, labels), "y": y}


def test_a_run_of_transformers_with_other_groups_of_parameters_goes_on_here(tmp_path: Path) -> None:
    def run(library: Any, folder: str, resume: str | None = None) -> Any:
        args = library.TrainingArguments(
            str(tmp_path / folder), max_steps=8, save_steps=4, use_cpu=True, learning_rate=0.1, disable_tqdm=True
        )
        trainer = library.Trainer(Norms(), args, train_dataset=TASKS["regression"].data(32))
        trainer.train(resume_from_checkpoint=resume)
        return trainer

    theirs = run(transformers, "theirs")
    ours = run(loopwright, "ours", resume=str(tmp_path / "theirs" / "checkpoint-4"))
    assert_close(ours, theirs)


@pytest.mark.parametrize("first", ["theirs", "ours"])
def test_a_greedy_schedule_goes_on(first: str, tmp_path: Path) -> None:
    """It is restored with all its counters, in both directions."""
    libraries = {"theirs": transformers, "ours": loopwright}
    own = {"theirs": {}, "ours": {"checkpoint_format": "transformers"}}

    def run(name: str, resume: str | None = None) -> Any:
        args = libraries[name].TrainingArguments(
            str(tmp_path / name), max_steps=12, save_steps=5, use_cpu=True, disable_tqdm=True, learning_rate=0.01,
            lr_scheduler_type="greedy", metric_for_best_model="score", greater_is_better=True, eval_strategy="steps",
            lr_scheduler_kwargs={"patience": 1, "factor": 0.5, "mode": "max", "smooth": True, "window_size": 3},
            eval_steps=1, per_device_train_batch_size=4, logging_steps=1, **own[name],
        )  # fmt: skip
        torch.manual_seed(0)
        trainer = libraries[name].Trainer(
            TASKS["regression"].model(0.0), args, train_dataset=TASKS["regression"].data(32),
            eval_dataset=TASKS["regression"].data(4),
            compute_metrics=lambda prediction: {"score": float(trainer.state.global_step % 4)},
        )  # fmt: skip
        trainer.train(resume_from_checkpoint=resume)
        return trainer

    def rates(trainer: Any) -> list[float]:
        return [row["learning_rate"] for row in trainer.state.log_history if "loss" in row]

    whole = run(first)
    for second in ("theirs", "ours"):
        rest = run(second, resume=str(tmp_path / first / "checkpoint-5"))
        assert rates(rest) == pytest.approx(rates(whole)) and len({*rates(whole)}) > 2
        assert_close(rest, whole)


def test_the_best_checkpoint_of_transformers_may_be_older_than_the_best_evaluation(tmp_path: Path) -> None:
    def run(library: Any, resume: str | None = None) -> Any:
        args = library.TrainingArguments(
            str(tmp_path), max_steps=8, save_steps=4, use_cpu=True, learning_rate=0.0, disable_tqdm=True,
            eval_strategy="steps", eval_steps=2, metric_for_best_model="score", greater_is_better=True,
        )  # fmt: skip
        trainer = library.Trainer(
            TASKS["regression"].model(0.0), args, train_dataset=TASKS["regression"].data(32),
            eval_dataset=TASKS["regression"].data(4),
            compute_metrics=lambda prediction: {"score": {4: 1.0, 6: 2.0}.get(trainer.state.global_step, 0.0)},
        )  # fmt: skip
        trainer.train(resume_from_checkpoint=resume)
        return trainer

    run(transformers)
    state = run(loopwright, resume=str(tmp_path / "checkpoint-8")).state
    assert (state.best_global_step, state.best_model_checkpoint) == (6, str(tmp_path / "checkpoint-4"))


@pytest.mark.parametrize("step", [4, 12])
@pytest.mark.parametrize("async_save", [True, False])
def test_a_run_of_ours_goes_on_in_transformers(step: int, async_save: bool, whole: Runs, tmp_path: Path) -> None:
    ours, folder = whole(loopwright, "llama", checkpoint_format="transformers", async_save=async_save)
    theirs = trained(transformers, "llama", tmp_path / "theirs", resume=str(folder / f"checkpoint-{step}"))
    assert_close(ours, theirs)


@pytest.mark.parametrize("step", [4, 12])
def test_their_format_resumes_bit_by_bit_here(step: int, whole: Runs, tmp_path: Path) -> None:
    first, folder = whole(loopwright, "llama", checkpoint_format="transformers", async_save=True)
    part = trained(
        loopwright, "llama", tmp_path / "part", resume=str(folder / f"checkpoint-{step}"),
        checkpoint_format="transformers",
    )  # fmt: skip
    for name, value in first.model.state_dict().items():
        assert torch.equal(value, part.model.state_dict()[name]), name
    assert losses(part) == losses(first)


class Payload:
    """Runs code when it is unpickled."""

    def __init__(self, path: str) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return (open, (self.path, "w"))


@pytest.mark.parametrize("slot", ["optimizer.pt", "scheduler.pt", "rng_state.pth", "training_args.bin"])
def test_a_malicious_file_runs_nothing(slot: str, whole: Runs, tmp_path: Path) -> None:
    folder, trace = tmp_path / "checkpoint-4", tmp_path / "trace"
    shutil.copytree(whole(transformers, "regression")[1] / "checkpoint-4", folder)
    (folder / slot).write_bytes(pickle.dumps(Payload(str(trace))))
    try:
        trained(loopwright, "regression", tmp_path / "ours", resume=str(folder))
    except CheckpointError as error:
        assert slot in str(error)
    else:
        assert slot == "training_args.bin"  # never read
    assert not trace.exists()


def test_missing_optimizer_state_is_an_error_not_a_fresh_start(whole: Runs, tmp_path: Path) -> None:
    folder = tmp_path / "checkpoint-4"
    shutil.copytree(whole(transformers, "regression")[1] / "checkpoint-4", folder)
    (folder / "scheduler.pt").unlink()
    with pytest.raises(CheckpointError, match="scheduler"):
        trained(loopwright, "regression", tmp_path / "ours", resume=str(folder))


def test_a_checkpoint_that_its_user_has_changed(whole: Runs, tmp_path: Path) -> None:
    """Changed files are refused; without the manifest they are used, but an optimizer does not begin anew."""
    folder = tmp_path / "checkpoint-4"
    shutil.copytree(whole(loopwright, "regression", checkpoint_format="transformers")[1] / folder.name, folder)
    state = json.loads((folder / "trainer_state.json").read_text())
    (folder / "trainer_state.json").write_text(json.dumps({**state, "log_history": []}))
    with pytest.raises(CheckpointError, match=r"changed its files on purpose, delete its manifest\.json"):
        trained(loopwright, "regression", tmp_path / "ours", resume=str(folder))
    (folder / "manifest.json").unlink()
    assert min(losses(trained(loopwright, "regression", tmp_path / "ours", resume=str(folder)))) == 5
    (folder / "optimizer.pt").unlink()
    with pytest.raises(CheckpointError, match="has no state of the optimizer: it was removed, or DeepSpeed saved it"):
        trained(loopwright, "regression", tmp_path / "more", resume=str(folder))


def test_parameters_are_matched_by_name_in_their_format(tmp_path: Path) -> None:
    """torch numbers the parameters of an optimizer; a model that lists them in another order resumes correctly."""

    class Two(torch.nn.Module):
        def __init__(self, names: str) -> None:
            super().__init__()
            for name in names:
                setattr(self, name, torch.nn.Parameter(torch.full((1,), float(ord(name)))))

        def forward(self, x: Any, labels: Any) -> Any:
            return {"loss": ((self.a * x + self.b * x**2 - labels) ** 2).mean() * 1e-4}

    data = [{"x": [float(i)], "labels": [i / 2]} for i in range(8)]

    def run(names: str, folder: str, resume: str | None = None) -> Any:
        args = loopwright.TrainingArguments(
            str(tmp_path / folder), checkpoint_format="transformers", max_steps=4, save_steps=2, use_cpu=True,
            per_device_train_batch_size=2, learning_rate=0.1, disable_tqdm=True,
        )  # fmt: skip
        trainer = loopwright.Trainer(Two(names), args, train_dataset=data)
        trainer.train(resume_from_checkpoint=resume)
        return trainer

    whole = run("ab", "whole")
    part = run("ba", "part", resume=str(tmp_path / "whole" / "checkpoint-2"))
    for name in "ab":
        assert torch.equal(getattr(whole.model, name), getattr(part.model, name)), name


def test_changed_intervals_are_logged(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    trained(loopwright, "regression", tmp_path / "first", max_steps=4)
    args = loopwright.TrainingArguments(
        str(tmp_path / "second"), per_device_train_batch_size=4, save_steps=10, eval_steps=7, logging_steps=1,
        max_steps=6, use_cpu=True, disable_tqdm=True,
    )  # fmt: skip
    task = TASKS["regression"]
    trainer = loopwright.Trainer(task.model(0.1), args, train_dataset=task.data(22))
    trainer.train(resume_from_checkpoint=str(tmp_path / "first" / "checkpoint-4"))
    assert "save_steps: 10 (from args) != 4 (from trainer_state.json)" in caplog.text
    assert "per_device_train_batch_size: 4 (from args) != 2 (from trainer_state.json)" in caplog.text
