"""After an error no loader worker is left: /proc lists no child of this process, not even a zombie."""

from __future__ import annotations

import gc
import multiprocessing
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset, IterableDataset

from loopwright import Trainer, TrainerCallback, TrainingArguments
from loopwright.core.shutdown.signals import outlive_signals
from loopwright.launch.guard import is_alive
from loopwright.pt.data.workers import end_workers

pytestmark = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="processes are read from /proc")

ROWS, BAD = 32, 11


class Failure(Exception):
    """Raised where a test wants it."""


def children() -> set[int]:
    """The children of this process, zombies too."""
    return {int(path.parent.name) for path in Path("/proc").glob("[0-9]*/stat") if _parent(path) == os.getpid()}


def _parent(stat: Path) -> int | None:
    try:
        return int(stat.read_text().rpartition(")")[2].split()[1])
    except OSError:  # it has ended meanwhile
        return None


class Rows(Dataset):
    def __init__(self, how: str = "") -> None:
        self.how, self.read = how, 0

    def __len__(self) -> int:
        return ROWS

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        self.read += torch.utils.data.get_worker_info() is not None
        if self.how == "stuck" and self.read > 1:  # each worker has a copy
            time.sleep(600)
        if self.how == "dataset" and index == BAD:
            raise Failure
        return {"x": torch.ones(2), "labels": torch.ones(1)}


class Stream(IterableDataset):
    def __init__(self, how: str = "") -> None:
        self.rows = Rows(how)

    def __iter__(self):
        return (self.rows[index] for index in range(ROWS))


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(2, 1)

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"loss": (self.layer(x) - labels).square().mean()}


class Collate:
    def __init__(self, how: str) -> None:
        self.how = how

    def __call__(self, rows: list[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
        if self.how == "collator":
            raise Failure
        return torch.utils.data.default_collate(rows)


class Raises(TrainerCallback):
    def __init__(self, error: type[BaseException]) -> None:
        self.error = error

    def on_step_end(self, args, state, control, **kwargs):
        raise self.error

    def on_prediction_step(self, args, state, control, **kwargs):
        raise self.error


class OfTheUser(Trainer):
    """A loader and a loop over it that loopwright did not write."""

    def get_train_dataloader(self):
        return DataLoader(self.train_dataset, batch_size=2, num_workers=2, persistent_workers=True)

    def get_eval_dataloader(self, eval_dataset=None):
        yield from DataLoader(self.eval_dataset, batch_size=2, num_workers=2)


ERRORS = {"callback": Failure, "interrupt": KeyboardInterrupt, "memory": MemoryError, "stuck": Failure}


def trainer_that_fails(how: str, folder: Path, kind: type[Trainer] = Trainer, data: type = Rows, **options) -> Trainer:
    args = TrainingArguments(
        str(folder), per_device_train_batch_size=1, per_device_eval_batch_size=1, use_cpu=True, report_to="none",
        max_steps=ROWS, save_strategy="no", disable_tqdm=True, dataloader_num_workers=2, **options,
    )  # fmt: skip
    callbacks = [Raises(ERRORS[how])] if how in ERRORS else []
    return kind(
        Net(), args, train_dataset=data(how), eval_dataset=data(how), data_collator=Collate(how), callbacks=callbacks
    )


CASES = [
    *((how, "train", {}) for how in ("dataset", "collator", "interrupt", "stuck")),
    ("callback", "train", {"dataloader_persistent_workers": True}),
    ("dataset", "evaluate", {}),
    pytest.param("stuck", "predict", {}, marks=pytest.mark.grid),
    ("callback", "train", {"kind": OfTheUser}),
    ("callback", "evaluate", {"kind": OfTheUser}),
    ("dataset", "train", {"data": Stream}),
    ("memory", "train", {"dataloader_multiprocessing_context": "fork"}),
]


@pytest.mark.parametrize(("how", "call", "options"), CASES)
def test_no_worker_is_left_after_an_error(how, call, options, tmp_path):
    """The error is kept, as by a debugger or a notebook: its traceback refers to the iterator of the loader."""
    trainer = trainer_that_fails(how, tmp_path, **options)
    words = [trainer.eval_dataset] if call == "predict" else []
    before = children()
    with pytest.raises((Failure, KeyboardInterrupt, MemoryError)) as caught:
        getattr(trainer, call)(*words)
    assert not children() - before
    assert caught.value.__traceback__ is not None
    begun = time.monotonic()
    del caught, trainer
    gc.collect()
    assert time.monotonic() - begun < 10  # it took ten seconds for each worker


SCRIPT = """
import os, time
from torch.utils.data import Dataset
from loopwright import TrainingArguments
from loopwright.pt.data.loaders import build_loader

class Stuck(Dataset):
    def __len__(self):
        return 8
    def __getitem__(self, index):
        os.write(1, f"worker {os.getpid()}\\n".encode())  # one write: two workers may print at once
        time.sleep(600)

if __name__ == "__main__":
    args = TrainingArguments("out", dataloader_num_workers=2, use_cpu=True, report_to="none",
                             dataloader_multiprocessing_context="CONTEXT")
    next(iter(build_loader(Stuck(), args=args, batch_size=1, collate_fn=list)))
"""


@pytest.mark.parametrize("context", ["fork", pytest.param("forkserver", marks=pytest.mark.grid)])
def test_stuck_workers_end_with_a_killed_process(context, tmp_path):
    script = tmp_path / "stuck.py"
    script.write_text(SCRIPT.replace("CONTEXT", context))
    process = subprocess.Popen([sys.executable, str(script)], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    workers = [int(process.stdout.readline().split()[1]) for _ in range(2)]
    try:
        assert all(map(is_alive, workers))
        process.kill()
        process.wait()
        deadline = time.monotonic() + 30
        while any(map(is_alive, workers)):
            assert time.monotonic() < deadline
            time.sleep(0.05)
    finally:
        for pid in workers:
            if is_alive(pid):
                os.kill(pid, signal.SIGKILL)


def test_a_lock_that_a_killed_worker_held_stops_nobody():
    before = children()
    iterator = iter(DataLoader(Rows(), num_workers=2))
    next(iterator)
    iterator._workers_done_event._cond.acquire()  # nobody will release it
    end_workers(iterator)
    assert not children() - before


def test_a_process_does_not_wait_for_workers_when_it_exits(tmp_path):
    """As after an evaluation whose workers are persistent, and kept for the next one."""
    script = tmp_path / "script.py"
    script.write_text(EXITS_BESIDE_WORKERS)
    process = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, timeout=40)
    assert (process.returncode, process.stderr) == (0, "")


EXITS_BESIDE_WORKERS = """
from torch.utils.data import default_collate

from loopwright import TrainingArguments
from loopwright.pt.data.loaders import build_loader

args = TrainingArguments("out", dataloader_num_workers=1, use_cpu=True)
batches = iter(build_loader([1, 2, 3, 4], args=args, batch_size=1, collate_fn=default_collate))
next(batches)
"""


def _worker_loop(done_event) -> None:
    """Named and written like torch's loop, interrupted where it holds the event's lock."""
    outlive_signals(0)
    with done_event._cond:
        os.kill(os.getpid(), signal.SIGTERM)
    if not done_event.is_set():
        os._exit(3)
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(60)


@pytest.mark.parametrize("ended", [True, False])
def test_a_signal_while_a_worker_asks_whether_it_was_ended(ended):
    context = multiprocessing.get_context("fork")
    done = context.Event()
    if ended:
        done.set()
    worker = context.Process(target=_worker_loop, args=(done,), daemon=True)
    worker.start()
    worker.join(120)
    if worker.is_alive():
        worker.kill()
        worker.join()
    assert worker.exitcode == (0 if ended else 3)
