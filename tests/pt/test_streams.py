"""Streams read by workers: each batch brings the state of its worker along, so nothing is read again."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import IterableDataset, get_worker_info

from loopwright import Trainer, TrainerCallback, TrainingArguments
from loopwright.pt.data.streams import StreamLoader
from tests.models import Regression, losses, regression_data
from tests.spreads import spread


class Shards(IterableDataset):
    """A stream that shares itself out by worker, unevenly, draws noise, and writes down what it reads."""

    def __init__(self, n: int, log: Path) -> None:
        self.samples, self.log = regression_data(n), log
        self._next: int | None = None

    def __iter__(self) -> Any:
        worker = get_worker_info()
        parts, part = (worker.num_workers, worker.id) if worker else (1, 0)
        mine = [i for i in range(len(self.samples)) if i % (parts + 1) in ((part,) if part else (part, parts))]
        start, self._next = self._next or 0, None
        for place in range(start, len(mine)):
            self.place = place + 1
            with open(self.log, "a") as file:
                file.write(f"{mine[place]}\n")
            noise = 0.1 * float(torch.randn(())) + 0.1 * float(np.random.rand())
            yield {"x": self.samples[mine[place]]["x"] + noise, "labels": self.samples[mine[place]]["labels"]}

    def state_dict(self) -> dict[str, Any]:
        return {"place": getattr(self, "place", 0)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._next = self.place = state["place"]


def run(folder: Path, *, resume: str | None = None, **options: Any) -> Trainer:
    folder.mkdir(parents=True, exist_ok=True)
    torch.manual_seed(0)
    args = TrainingArguments(
        str(folder), per_device_train_batch_size=2, max_steps=16, logging_steps=1, save_steps=1, learning_rate=1e-2,
        use_cpu=True, disable_tqdm=True, dataloader_prefetch_factor=2,
        **{"dataloader_num_workers": 2, **options},
    )  # fmt: skip
    trainer = Trainer(Regression(0.1), args, train_dataset=Shards(23, folder / "read.txt"))
    trainer.train(resume_from_checkpoint=resume)
    return trainer


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Callable[[bool], tuple[Trainer, Path]]:
    """A run with checkpoints after every step, by whether its workers are persistent; each is trained once."""

    @functools.cache
    def of(persistent: bool) -> tuple[Trainer, Path]:
        folder = tmp_path_factory.mktemp("whole")
        return run(folder, dataloader_persistent_workers=persistent), folder

    return of


@pytest.mark.parametrize(("step", "persistent"), spread([1, 4, 9, 13], [False, True]))
def test_resume_is_exact_and_reads_nothing_twice(step: int, persistent: bool, whole: Any, tmp_path: Path) -> None:
    first, folder = whole(persistent)
    assert isinstance(first._loopwright.run.loader, StreamLoader)
    part = run(tmp_path, resume=str(folder / f"checkpoint-{step}"), dataloader_persistent_workers=persistent)
    assert losses(part) == losses(first)
    for a, b in zip(first.model.parameters(), part.model.parameters(), strict=True):
        assert torch.equal(a, b)
    read = len((tmp_path / "read.txt").read_text().splitlines())
    assert read < len((folder / "read.txt").read_text().splitlines())


def test_resume_twice(tmp_path: Path) -> None:
    whole = run(tmp_path / "whole", gradient_accumulation_steps=2)
    once = run(tmp_path / "once", resume=str(tmp_path / "whole" / "checkpoint-3"), gradient_accumulation_steps=2)
    twice = run(tmp_path / "twice", resume=str(tmp_path / "once" / "checkpoint-5"), gradient_accumulation_steps=2)
    assert losses(once) == losses(twice) == losses(whole)


def test_another_number_of_workers_reads_again_and_says_so(
    whole: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    part = run(tmp_path / "part", resume=str(whole(False)[1] / "checkpoint-4"), dataloader_num_workers=1)
    assert part.state.global_step == 16
    assert "re-reading and skipping" in caplog.text


def test_states_of_workers_are_converted_for_checkpoints_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """They contain large random states."""
    converted = []
    state_dict = StreamLoader.state_dict
    monkeypatch.setattr(StreamLoader, "state_dict", lambda loader: converted.append(1) or state_dict(loader))
    run(tmp_path, save_strategy="no")
    assert not converted


class Rewinding(IterableDataset):
    """A stream that starts over when its end is reached, as its state does, which it returns as it is."""

    def __init__(self, n: int) -> None:
        self.samples, self.now = regression_data(n), {"place": 0}

    def __iter__(self) -> Any:
        while self.now["place"] < len(self.samples):
            self.now["place"] += 1
            yield self.samples[self.now["place"] - 1]
        self.now["place"] = 0

    def state_dict(self) -> dict[str, Any]:
        return self.now

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.now.update(state)


class ReadsBatches(Trainer):
    def get_batch_samples(self, epoch_iterator: Any, num_batches: int, device: Any) -> Any:
        return list(itertools.islice(epoch_iterator, num_batches)), None


def run_rewinding(
    folder: Path,
    resume: str | None,
    *,
    workers: int = 0,
    accumulation: int = 1,
    cls: type[Trainer] = Trainer,
    callbacks: list[TrainerCallback] | None = None,
) -> Trainer:
    torch.manual_seed(0)
    args = TrainingArguments(
        str(folder), per_device_train_batch_size=2, max_steps=9, logging_steps=1, save_steps=1, learning_rate=1e-2,
        use_cpu=True, disable_tqdm=True, dataloader_num_workers=workers, gradient_accumulation_steps=accumulation,
    )  # fmt: skip
    trainer = cls(Regression(0.1), args, train_dataset=Rewinding(13), callbacks=callbacks)
    trainer.train(resume_from_checkpoint=resume)
    return trainer


@pytest.mark.parametrize(
    ("workers", "accumulation", "cls"),
    [(0, 1, Trainer), (0, 3, Trainer), (1, 1, Trainer), (0, 1, ReadsBatches), (0, 3, ReadsBatches)],
)
def test_a_stream_that_starts_over_at_its_end_resumes_from_there(
    workers: int, accumulation: int, cls: type[Trainer], tmp_path: Path
) -> None:
    def trained(folder: str, resume: str | None = None) -> Trainer:
        return run_rewinding(tmp_path / folder, resume, workers=workers, accumulation=accumulation, cls=cls)

    whole = trained("whole")
    last = -(-7 // accumulation)
    part = trained("part", str(tmp_path / "whole" / f"checkpoint-{last}"))
    assert losses(part) == losses(whole)
    assert part.state.epoch == whole.state.epoch


class StopsAtTheEnd(TrainerCallback):
    def on_epoch_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        control.should_training_stop = control.should_save = True


def test_a_run_that_stops_where_it_was_resumed_is_still_at_the_end_of_its_stream(tmp_path: Path) -> None:
    whole = run_rewinding(tmp_path / "whole", None)
    run_rewinding(tmp_path / "stopped", str(tmp_path / "whole" / "checkpoint-7"), callbacks=[StopsAtTheEnd()])
    part = run_rewinding(tmp_path / "part", str(tmp_path / "stopped" / "checkpoint-7"))
    assert losses(part) == losses(whole)
