"""on_spike="rollback": a jump of the loss takes the run back to the last good checkpoint, past the bad samples."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from hypothesis import given, strategies as st

from loopwright import Trainer, TrainingArguments
from loopwright.core.measure.spikes import SpikeWatch
from tests.models import Regression, regression_data


class Jumpy(Trainer):
    """Whose updates 13 and 14 are poisoned the first time they come."""

    seen: int = 0

    def compute_loss(self, model: Any, inputs: Any) -> Any:
        loss = model(**inputs)["loss"]
        self.seen += 1
        return loss * (1e4 if self.seen in (13, 14) else 1)


def run(folder: Path, **options: Any) -> Jumpy:
    torch.manual_seed(0)
    args = TrainingArguments(
        str(folder), per_device_train_batch_size=16, max_steps=24, logging_steps=2, save_steps=4, learning_rate=1e-3,
        use_cpu=True, disable_tqdm=True, **options,
    )  # fmt: skip
    trainer = Jumpy(Regression(), args, train_dataset=regression_data(800))
    trainer.train()
    return trainer


def test_the_run_goes_back_and_leaves_the_window_out(tmp_path: Path) -> None:
    trainer = run(tmp_path, on_spike="rollback")
    assert trainer.state.global_step == 24
    assert trainer.seen == 24 + 2, "updates 13 and 14 were undone: back to checkpoint 12"
    assert trainer._loopwright.run.progress.samples_seen == 26 * 16, "their samples were not used again"
    steps = [row["step"] for row in trainer.state.log_history if "loss" in row]
    assert steps == list(range(2, 25, 2))
    rows = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows if "loss" in row] == steps
    assert max(row["loss"] for row in trainer.state.log_history if "loss" in row) < 100


def test_without_it_the_jump_stays(tmp_path: Path) -> None:
    trainer = run(tmp_path)
    assert trainer.seen == 24
    assert max(row["loss"] for row in trainer.state.log_history if "loss" in row) > 100


def test_without_an_earlier_checkpoint_the_run_goes_on(tmp_path: Path) -> None:
    trainer = run(tmp_path, on_spike="rollback", save_strategy="no")
    assert trainer.seen == 24 and trainer.state.global_step == 24


def test_a_rolled_back_run_resumes_exactly(tmp_path: Path) -> None:
    whole = run(tmp_path / "a", on_spike="rollback")
    torch.manual_seed(0)
    args = TrainingArguments(
        str(tmp_path / "b"), per_device_train_batch_size=16, max_steps=24, logging_steps=2, save_steps=4,
        learning_rate=1e-3, use_cpu=True, disable_tqdm=True, on_spike="rollback",
    )  # fmt: skip
    part = Trainer(Regression(), args, train_dataset=regression_data(800))
    part.train(resume_from_checkpoint=str(tmp_path / "a" / "checkpoint-16"))
    for a, b in zip(whole.model.parameters(), part.model.parameters(), strict=True):
        assert torch.equal(a, b)


@given(st.lists(st.floats(0.5, 9.0), min_size=4, max_size=40))
def test_noise_below_the_factor_is_no_spike(losses: list[float]) -> None:
    watch = SpikeWatch()
    low = min(losses)
    assert not any(watch.is_spike(loss) for loss in losses if loss < 4 * low)


def test_nan_is_a_spike_once_there_is_a_past() -> None:
    watch = SpikeWatch()
    assert not watch.is_spike(float("nan"))
    assert not any(watch.is_spike(1.0) for _ in range(4))
    assert watch.is_spike(float("nan")) and watch.is_spike(4.5) and not watch.is_spike(3.5)
