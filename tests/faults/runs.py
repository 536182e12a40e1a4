"""What the forked processes do: small training runs that write down how they ended."""

from __future__ import annotations

import errno
import fcntl
import hashlib
import json
import os
import pty
import random
import signal
import tempfile
import termios
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import nullcontext, suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.utils.data import Dataset, IterableDataset, get_worker_info

from loopwright import Trainer, TrainerCallback, TrainingArguments
from tests.models import StopAt

from .boundaries import At, Boundaries, Cut, FullDisk, Listed

CLOCKED = ("runtime", "per_second")
ROWS = 14


class Record(list[list[int]]):
    """What one life of a run has seen: no plain list, which would come back from a checkpoint."""


class Net(nn.Module):
    """Two layers with dropout and a buffer; remembers which samples it was trained on."""

    def __init__(self) -> None:
        super().__init__()
        self.hidden, self.out = nn.Linear(4, 8), nn.Linear(8, 1)
        self.register_buffer("mean", torch.zeros(8))
        self.dropout = nn.Dropout(0.3)
        self.seen = Record()
        self.before: Callable[[Net], None] = lambda net: None

    def forward(self, x: torch.Tensor, labels: torch.Tensor, ids: torch.Tensor) -> dict[str, torch.Tensor]:
        hidden = torch.tanh(self.hidden(x))
        if self.training:
            self.mean.mul_(0.9).add_(hidden.detach().mean(0), alpha=0.1)
        else:
            self.before(self)
        y = self.out(self.dropout(hidden - self.mean)).squeeze(-1)
        return {"loss": nn.functional.mse_loss(y, labels), "y": y}


def row(index: int) -> dict[str, Any]:
    """A sample with noise from Python's, numpy's and torch's streams."""
    g = torch.Generator().manual_seed(100 + index)
    x = torch.randn(4, generator=g)
    noise = random.random() + float(np.random.rand()) + torch.rand(()).item()
    return {"x": x + noise, "labels": x.sum(), "ids": index}


class Rows(Dataset):
    def __init__(self, n: int = ROWS, before: Callable[[int], None] | None = None) -> None:
        self.n, self.before = n, before

    def __len__(self) -> int:
        return self.n

    def __getitem__(self, index: int) -> dict[str, Any]:
        if self.before is not None:
            self.before(index)
        return row(index)


class Stream(IterableDataset):
    """A stream without a state of its own; every worker has its share."""

    def __init__(self, n: int = ROWS) -> None:
        self.n, self.epoch = n, 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[dict[str, Any]]:
        worker = get_worker_info()
        first, step = (worker.id, worker.num_workers) if worker else (0, 1)
        return (row((i + self.epoch) % self.n) for i in range(first, self.n, step))


class Stateful(Stream):
    """A stream that can say where it stands and go back there."""

    def __init__(self, n: int = ROWS) -> None:
        super().__init__(n)
        self.position = 0
        self._resumed = False

    def __iter__(self) -> Iterator[dict[str, Any]]:
        worker = get_worker_info()
        first, step = (worker.id, worker.num_workers) if worker else (0, 1)
        if not self._resumed:
            self.position = 0
        self._resumed = False
        mine = range(first, self.n, step)
        while self.position < len(mine):
            self.position += 1
            yield row((mine[self.position - 1] + self.epoch) % self.n)

    def state_dict(self) -> dict[str, Any]:
        return {"position": self.position, "epoch": self.epoch}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.position, self.epoch, self._resumed = state["position"], state["epoch"], True


def noisy(sample: dict[str, Any]) -> dict[str, Any]:
    return row(sample["ids"])


def streamed(n: int = ROWS, *, buffer: int = 0) -> Any:
    """A `datasets` stream of two shards, mapped; shuffled through a buffer if it has one."""
    import datasets

    made = datasets.Dataset.from_dict({"ids": list(range(n))}).to_iterable_dataset(num_shards=2)
    if buffer:
        made = made.shuffle(seed=5, buffer_size=buffer)
    return made.map(noisy).with_format("torch")


DATA: dict[str, Callable[[], Any]] = {
    "map": Rows,
    "iterable": Stream,
    "stateful": Stateful,
    "datasets": streamed,
    "datasets shuffled": lambda: streamed(buffer=5),
}


class Trace(TrainerCallback):
    """Writes what happens to a file that survives a kill."""

    def __init__(self, path: str) -> None:
        self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)

    def write(self, text: str) -> None:
        os.write(self._file, f"{text}\n".encode())

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.write(f"begin {state.global_step}")

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.write(f"step {state.global_step}")

    def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.write(f"saved {state.global_step}")

    def on_evaluate(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.write(f"evaluated {state.global_step}")


class Traced(Trainer):
    """Says when a save begins, and keeps the samples it was trained on."""

    trace: Trace

    largest = 0
    """More samples than this in a micro-batch, and memory runs out; 0 for no limit."""

    def training_step(self, model: Any, inputs: Any, num_items_in_batch: Any = None) -> torch.Tensor:
        if self.largest and len(inputs["ids"]) > self.largest:
            raise torch.OutOfMemoryError("CUDA out of memory (simulated)")
        self.model.seen.append(inputs["ids"].tolist())
        self.model.before(self.model)
        return super().training_step(model, inputs, num_items_in_batch)

    def _save_checkpoint(self, model: Any, trial: Any = None) -> None:
        self._loopwright.run.checkpoints.wait()  # as saving does: only then does this one begin
        self.trace.write(f"saving {self.state.global_step}")
        super()._save_checkpoint(model, trial)


class SaveTwice(TrainerCallback):
    """Asks for the checkpoint of an epoch's last step a second time."""

    def on_epoch_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        control.should_save = True


class Pause(TrainerCallback):
    """Makes updates slow enough for something to happen in them."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        time.sleep(self.seconds)


def make(
    folder: str,
    *,
    data: str = "map",
    workers: int = 0,
    accumulation: int = 1,
    save_twice: bool = False,
    pause: float = 0.0,
    train_dataset: Any = None,
    notes: str | None = None,
    largest: int = 0,
    model: nn.Module | None = None,
    **options: Any,
) -> Traced:
    """The trainer every case uses: four updates (three, with three micro-batches each) make an epoch of 14 samples."""
    torch.manual_seed(0)
    os.fsync = lambda descriptor: None  # a killed process loses nothing that the system already has
    trace = Trace(f"{notes or folder}.trace")
    arguments = TrainingArguments(
        folder,
        **{
            "per_device_train_batch_size": 4 if accumulation == 1 else 2,
            "gradient_accumulation_steps": accumulation,
            "dataloader_num_workers": workers,
            "max_steps": 10,
            "logging_steps": 1,
            "save_steps": 3,
            "learning_rate": 1e-2,
            "warmup_steps": 2,
            "weight_decay": 0.1,
            "use_cpu": True,
            "disable_tqdm": True,
            "report_to": [],
            "html_report": False,  # its thread would add file operations at any moment
            **options,
        },
    )
    callbacks = [trace, *([SaveTwice()] if save_twice else []), *([Pause(pause)] if pause else [])]
    trainer = Traced(
        Net() if model is None else model,
        arguments,
        train_dataset=DATA[data]() if train_dataset is None else train_dataset,
        eval_dataset=Rows(6),
        callbacks=callbacks,
    )
    trainer.trace, trainer.largest = trace, largest
    return trainer


def digest(tensor: Any) -> str:
    """A hash of the values; of a tensor that is divided among ranks, of this rank's."""
    tensor = tensor.to_local() if hasattr(tensor, "to_local") else tensor
    return hashlib.sha256(torch.as_tensor(tensor).detach().contiguous().numpy().tobytes()).hexdigest()[:16]


def ending(trainer: Any, loss: float) -> dict[str, Any]:
    """Everything that must be equal at the end of a run, and the samples this process saw."""
    slots = {
        f"{index}/{name}": digest(value)
        for index, values in trainer.optimizer.state_dict()["state"].items()
        for name, value in values.items()
    }
    rates = [group["lr"] for group in trainer.optimizer.param_groups]
    rows = [{k: v for k, v in each.items() if not k.endswith(CLOCKED)} for each in trainer.state.log_history]
    same = {
        "weights": {name: digest(value) for name, value in trainer.model.state_dict().items()},
        "optimizer": slots,
        "rates": rates,
        "scheduler": trainer.lr_scheduler.state_dict(),
        "log": rows,
        "train_loss": loss,
        "step": trainer.state.global_step,
        "epoch": trainer.state.epoch,
        "samples": trainer._loopwright.run.progress.samples_seen,
        "random": [random.random(), float(np.random.rand()), torch.rand(()).item()],
    }
    return {"same": json.loads(json.dumps(same)), "seen": trainer.model.seen}


def finish(trainer: Any, resume: Any, notes: str | None = None, during: Any = None) -> None:
    """Train to the end, within a context, and write down how it was, beside the run's folder."""
    with during or nullcontext():
        output = trainer.train(resume_from_checkpoint=resume)
    result = json.dumps(ending(trainer, output.training_loss))
    Path(f"{notes or trainer.args.output_dir}.result").write_text(result)


def warm_up() -> None:
    """Import what a run needs, and run once without anything that starts a thread: those would be lost in a fork."""
    import importlib

    torch.set_num_threads(1)
    for name in ("loopwright.pt.trainer", "loopwright.callbacks.defaults", "torch.optim.adamw", "safetensors.torch"):
        importlib.import_module(name)
    try:
        importlib.import_module("datasets")
    except ImportError:
        pass
    with tempfile.TemporaryDirectory() as folder:
        make(os.path.join(folder, "warm"), save_strategy="no", max_steps=2).train()


# ---- what a forked process can be asked to do -----------------------------------------------------------------------


def train(folder: str, *, resume: Any = "auto", **options: Any) -> None:
    """A run without a fault."""
    finish(make(folder, **options), resume)


def listed(folder: str, **options: Any) -> None:
    """A run that writes down every boundary it passes."""
    trainer = make(folder, **options)
    Boundaries(folder, Listed(f"{folder}.boundaries")).install()
    finish(trainer, None)


def cut(folder: str, *, boundary: int, resume: Any = "auto", **options: Any) -> None:
    """A run that is killed at one boundary."""
    trainer = make(folder, **options)
    Boundaries(folder, Cut(boundary)).install()
    finish(trainer, resume)


def full(folder: str, *, number: int, error: int = errno.ENOSPC, **options: Any) -> None:
    """A run whose disk is full, or fails, for one operation."""
    trainer = make(folder, **options)
    Boundaries(folder, FullDisk(number, trainer.trace.write, error)).install()
    finish(trainer, None)


def killed(folder: str, *, forward: int, resume: Any = "auto", **options: Any) -> None:
    """A run that is killed in its n-th micro-batch (counted from the start of this process)."""
    trainer = make(folder, **options)

    def die(net: Net) -> None:
        if net.training and len(net.seen) == forward:
            os.kill(os.getpid(), signal.SIGKILL)

    trainer.model.before = die
    finish(trainer, resume)


SENT = SimpleNamespace(signals=[], lock=threading.Lock())
"""The signals this process has sent itself; with a lock, because other state is restored after a loss was tested."""


class Sender(TrainerCallback):
    """Sends this process a signal, once, at one place of one step."""

    def __init__(self, number: int, where: str, step: int, times: int) -> None:
        self.number, self.where, self.step, self.times = number, where, step, times
        self.trainer: Any = None
        self._seen_before = 0

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._seen_before = len(self.trainer.model.seen)

    def send(self) -> None:
        if SENT.signals:
            return
        SENT.signals.append(self.number)
        self.trainer.trace.write(f"signal in {self.where} at {self.trainer.state.global_step}")
        for _ in range(self.times):
            os.kill(os.getpid(), self.number)

    def loading(self, index: int) -> None:
        if self.where == "loading" and self.trainer.state.global_step == self.step - 1:
            self.send()

    def computing(self, net: Net) -> None:
        done = self.trainer.state.global_step
        if not net.training:
            due = self.where == "evaluation" and done == self.step
        else:
            second = len(net.seen) - self._seen_before == 2
            due = done == self.step - 1 and (self.where in ("step", "part") or (self.where == "micro-batch" and second))
        if due:
            self.send()


def signalled(
    folder: str, *, number: int, where: str, step: int, times: int = 1, earlier: bool = False, **options: Any
) -> None:
    """A run that gets a signal at one place of one step."""
    sender = Sender(number, where, step, times)
    own = {"train_dataset": Rows(before=sender.loading)} if where == "loading" else {}
    sender.trainer = trainer = make(folder, **own, **options)
    trainer.add_callback(sender)
    trainer.model.before = sender.computing
    if where == "save":
        Boundaries(folder, At(".partial", 6, sender.send)).install()
    if earlier:
        signal.signal(number, lambda *given: trainer.trace.write("earlier handler"))
    finish(trainer, "auto")


class Unread(TrainerCallback):
    """Closes the other end of this run's output in its third step, and sends its processes a signal, if any."""

    def __init__(self, output: str, number: int) -> None:
        self.number = number
        self.reader, writer = pty.openpty() if output == "terminal" else os.pipe()
        os.set_blocking(self.reader, False)
        if output == "terminal":
            fcntl.ioctl(writer, termios.TIOCSCTTY, 0)
        for descriptor in (0, 1, 2):
            os.dup2(writer, descriptor)
        os.close(writer)

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step > 2:
            return
        with suppress(BlockingIOError):
            while os.read(self.reader, 1 << 16):
                pass
        if state.global_step == 2:
            os.close(self.reader)
            if self.number:
                os.killpg(os.getpgrp(), self.number)  # like a terminal: its loader workers too


def unread(folder: str, *, output: str, number: int = 0, ignored: bool = False, **options: Any) -> None:
    """A run in a session of its own whose terminal is closed, or whose pipe loses its reader."""
    pid = os.fork()
    if pid:
        status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        raise SystemExit(status if status >= 0 else 128 - status)
    os.setsid()
    signal.signal(signal.SIGHUP, signal.SIG_IGN if ignored else signal.SIG_DFL)
    unread = Unread(output, number)
    trainer = make(folder, **options)
    trainer.add_callback(unread)
    finish(trainer, "auto")


def stop(folder: str, *, step: int, resume: Any = "auto", **options: Any) -> None:
    """A run that saves and stops after a step."""
    trainer = make(folder, **options)
    trainer.add_callback(StopAt(step))
    trainer.train(resume_from_checkpoint=resume)
    os.unlink(f"{folder}.trace")


def filling(folder: str, *, disk: str, **options: Any) -> None:
    """A run whose disk fills up with its checkpoints; logging finds a little room at the end."""
    trainer = make(os.path.join(disk, "run"), notes=folder, **options)
    trainer.add_callback(Room(Path(disk) / "reserve"))
    finish(trainer, None, notes=folder)


class Room(TrainerCallback):
    """Gives back what was reserved, once saving has used up the rest."""

    def __init__(self, reserve: Path) -> None:
        self.reserve = reserve

    def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step >= 6:
            self.reserve.unlink(missing_ok=True)


def unsynced_metrics(folder: str, *, error: int, **options: Any) -> None:
    """A run whose disk fails to flush metrics.jsonl."""
    trainer = make(folder, **options)

    def refuse() -> None:
        raise OSError(error, os.strerror(error))

    Boundaries(folder, At("fsync metrics.jsonl: before", 2, refuse)).install()
    finish(trainer, None)


def full_metrics(folder: str, *, number: int, **options: Any) -> None:
    """A run whose disk is full for one row of metrics.jsonl."""
    trainer = make(folder, **options)

    def refuse() -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    Boundaries(folder, At("open metrics.jsonl", number, refuse)).install()
    finish(trainer, None)


class Touch(TrainerCallback):
    """Makes a file before a step."""

    def __init__(self, path: str, step: int) -> None:
        self.path, self.step = path, step

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step == self.step - 1:
            Path(self.path).touch()


def triggered(folder: str, *, trigger: str, step: int, **options: Any) -> None:
    """A run that is asked from outside to save."""
    trainer = make(folder, save_trigger_file=trigger, **options)
    trainer.add_callback(Touch(trigger, step))
    trainer.train()


class Strike:
    """Sends a signal to this process, once, in the second batch of an evaluation."""

    def __init__(self, number: int) -> None:
        self.number, self.batches = number, 0

    def __call__(self, net: Net) -> None:
        self.batches += 1
        if self.batches == 2:
            os.kill(os.getpid(), self.number)


def train_and_predict(folder: str, *, moment: str = "", number: int = 0) -> None:
    """Train, evaluate and predict, with a signal in the evaluation, between both, or in the prediction."""
    trainer = make(folder, per_device_eval_batch_size=2)
    finish(trainer, "auto")

    def reach(place: str) -> None:
        trainer.model.before = Strike(number) if place == moment else lambda net: None

    reach("evaluation")
    metrics = trainer.evaluate()
    if moment == "between":
        os.kill(os.getpid(), number)
    reach("prediction")
    output = trainer.predict(Rows(5))
    numbers = {name: value for name, value in metrics.items() if not name.endswith(CLOCKED)}
    Path(f"{folder}.after").write_text(json.dumps([numbers, output.predictions.tolist()]))
