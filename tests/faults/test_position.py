"""Resuming at step 1,000,000: no earlier sample is read."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import Dataset

from loopwright import Trainer, TrainerCallback, TrainingArguments
from loopwright.core.checkpoint.folder import PROGRESS, SCHEDULER, STATE, folder_name
from loopwright.core.checkpoint.manifest import describe
from tests.models import Regression

SAMPLES, BATCH, STEP = 8_400_000, 8, 1_000_000


class Counting(Dataset):
    """Many samples that exist only when asked for."""

    def __init__(self, n: int = SAMPLES) -> None:
        self.n = n
        self.calls: list[int] = []

    def __len__(self) -> int:
        return self.n

    def __getitem__(self, index: int) -> dict[str, Any]:
        self.calls.append(index)
        x = torch.full((4,), index % 97 / 97)
        return {"x": x, "labels": x.sum()}


class Collator:
    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, samples: list[dict[str, Any]]) -> dict[str, Any]:
        self.calls += 1
        return {name: torch.stack([sample[name] for sample in samples]) for name in samples[0]}


class Watch(TrainerCallback):
    """When the epoch began, and when the samples of its first update were there."""

    begun = found = 0.0

    def on_epoch_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.begun = self.begun or time.perf_counter()

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.found = self.found or time.perf_counter()


def make(folder: Path, max_steps: int, *, samples: int = SAMPLES, **options: Any) -> Any:
    torch.manual_seed(0)
    arguments = TrainingArguments(
        str(folder),
        **{"per_device_train_batch_size": BATCH, "max_steps": max_steps, "use_cpu": True, "disable_tqdm": True,
           "report_to": [], "save_steps": 1, "lr_scheduler_type": "constant", "logging_steps": 1, **options},
    )  # fmt: skip
    return Trainer(Regression(0.1), arguments, train_dataset=Counting(samples), data_collator=Collator())


def moved_to(folder: Path, step: int, samples_in_epoch: int, epoch: int = 0) -> Path:
    """A checkpoint of step 1 that says it is one of another step, at another place in the data."""
    target = folder.with_name(folder_name(step))
    folder.rename(target)
    (target / "manifest.json").unlink()

    def change(name: str, edit: Any) -> None:
        values = json.loads((target / name).read_text())
        edit(values)
        (target / name).write_text(json.dumps(values))

    def progress(values: dict[str, Any]) -> None:
        values["progress"].update(
            epoch=epoch, samples_in_epoch=samples_in_epoch, batches_in_epoch=samples_in_epoch // BATCH,
            samples_seen=epoch * SAMPLES + samples_in_epoch, last_logged_step=step,
        )  # fmt: skip

    change(PROGRESS, progress)
    change(STATE, lambda values: values.update(global_step=step, epoch=epoch + samples_in_epoch / SAMPLES))
    change(SCHEDULER, lambda values: values.update(last_epoch=step))
    describe(target, step, format="native").write(target)
    return target


@pytest.mark.parametrize("workers", [0, 2])
def test_going_on_at_step_one_million_reads_no_skipped_sample(workers: int, tmp_path: Path) -> None:
    make(tmp_path / "run", 1).train()
    folder = moved_to(tmp_path / "run/checkpoint-1", STEP, STEP * BATCH)
    trainer = make(tmp_path / "run", STEP + 3, dataloader_num_workers=workers, save_strategy="no")
    expected = trainer._get_train_sampler().order.epoch(0)[STEP * BATCH : (STEP + 3) * BATCH].tolist()

    watch = Watch()
    trainer.add_callback(watch)
    trainer.train(resume_from_checkpoint=str(folder))
    assert trainer.state.global_step == STEP + 3
    if workers == 0:  # the calls of workers are counted in their own processes
        assert trainer.train_dataset.calls == expected
        assert trainer.data_collator.calls == 3
    assert trainer._loopwright.run.progress.samples_in_epoch == (STEP + 3) * BATCH
    assert watch.found - watch.begun < (1.0 if workers == 0 else 3.0), "finding the place took too long"


def test_a_later_epoch_is_found_as_fast(tmp_path: Path) -> None:
    make(tmp_path / "run", 1).train()
    per_epoch = SAMPLES // BATCH
    folder = moved_to(tmp_path / "run/checkpoint-1", 3 * per_epoch + 77, 77 * BATCH, epoch=3)
    trainer = make(tmp_path / "run", 3 * per_epoch + 79, save_strategy="no")
    expected = trainer._get_train_sampler().order.epoch(3)[77 * BATCH : 79 * BATCH].tolist()
    trainer.train(resume_from_checkpoint=str(folder))
    assert trainer.train_dataset.calls == expected


def test_a_changed_batch_size_goes_on_at_the_same_sample(tmp_path: Path) -> None:
    make(tmp_path / "run", 100, samples=2_000, save_steps=100).train()
    trainer = make(tmp_path / "run", 102, samples=2_000, per_device_train_batch_size=4, gradient_accumulation_steps=2)
    trainer.train(resume_from_checkpoint=True)
    calls = trainer.train_dataset.calls
    # An update of several micro-batches: the first two samples are collated once, to see which entries go by samples.
    assert calls[:8] + calls[10:] == list(trainer._get_train_sampler())[800:816] and calls[8:10] == [0, 1]
