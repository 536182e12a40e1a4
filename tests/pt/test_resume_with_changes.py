"""Runs started again in their folder or resumed with other arguments: what is kept, and what is reported."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from loopwright import EarlyStoppingCallback, Trainer
from tests.models import regression_run as run


def test_a_finished_run_started_again_does_nothing(tmp_path: Path) -> None:
    first = run(tmp_path, max_steps=4, resume_from_checkpoint="auto")
    again = run(tmp_path, max_steps=4, resume_from_checkpoint="auto")
    assert again.state.global_step == 4
    assert sorted(path.name for path in tmp_path.glob("checkpoint-*")) == ["checkpoint-2", "checkpoint-4"]
    for a, b in zip(first.model.parameters(), again.model.parameters(), strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize(("before", "after"), [(2, 1), (1, 2), (4, 3)])
def test_another_batch_size_goes_on_at_the_right_sample_and_ends_with_the_epochs(
    before: int, after: int, tmp_path: Path
) -> None:
    run(tmp_path, num_train_epochs=3, per_device_train_batch_size=before, save_steps=15)
    resumed = str(tmp_path / "checkpoint-15")
    part = run(
        tmp_path / "b", num_train_epochs=3, per_device_train_batch_size=after, save_steps=1000,
        resume_from_checkpoint=resumed,
    )  # fmt: skip
    assert part._loopwright.run.progress.samples_seen == 120, "three epochs of forty samples"
    assert part.state.epoch == 3.0
    assert part.state.global_step == part.state.max_steps
    assert (tmp_path / "b" / f"checkpoint-{part.state.max_steps}").is_dir(), "the last step is saved"
    assert part.lr_scheduler.get_last_lr()[0] == 0.0, "the schedule ends with the run"


class Milestones(Trainer):
    def create_scheduler(self, num_training_steps: int, optimizer: Any = None) -> Any:
        optimizer = optimizer or self.optimizer
        self.lr_scheduler = torch.optim.lr_scheduler.MultiStepLR(optimizer, milestones=[3, 7])
        return self.lr_scheduler


def test_a_users_scheduler_resumes(tmp_path: Path) -> None:
    rates = [
        [row["learning_rate"] for row in trainer.state.log_history if "loss" in row]
        for trainer in (
            run(tmp_path, cls=Milestones, max_steps=10),
            run(tmp_path / "b", cls=Milestones, max_steps=10, resume_from_checkpoint=str(tmp_path / "checkpoint-2")),
        )
    ]
    assert rates[0] == rates[1] and len(set(rates[0])) == 3


def test_a_new_run_in_an_old_folder_keeps_its_own_checkpoint(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    run(tmp_path, max_steps=10, save_steps=5)
    run(tmp_path, max_steps=4, save_steps=2, save_total_limit=1)
    assert [path.name for path in sorted(tmp_path.glob("checkpoint-*"))] == [
        "checkpoint-10",
        "checkpoint-4",
        "checkpoint-5",
    ]
    assert "holds 2 checkpoints of a finished run" in caplog.text and "steps 5, 10)" in caplog.text


def test_patience_given_on_resume_counts(tmp_path: Path) -> None:
    options = {"eval_strategy": "steps", "eval_steps": 1, "metric_for_best_model": "loss", "max_steps": 8}
    run(tmp_path, callbacks=[EarlyStoppingCallback(1)], **options)
    again = EarlyStoppingCallback(50)
    run(tmp_path / "b", callbacks=[again], resume_from_checkpoint=str(tmp_path / "checkpoint-2"), **options)
    assert again.early_stopping_patience == 50


def test_changed_arguments_are_named_on_resume(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    run(tmp_path, max_steps=4)
    run(tmp_path / "b", max_steps=4, learning_rate=0.5, resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
    assert "learning_rate (0.01 -> 0.5)" in caplog.text
