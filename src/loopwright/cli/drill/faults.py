"""Faults that `loopwright drill` injects into a training process."""

from __future__ import annotations

import errno
import os
import random
import re
import signal
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

SLOW_SECONDS = 0.1
"""How long a slow disk takes to open, rename or write one file."""
WRITING = os.O_WRONLY | os.O_RDWR
MOVING = frozenset({"os.rename", "os.mkdir"})
FILES_IN_A_SAVE = 7
"""The least number of file writes of a checkpoint that can be intercepted."""
_STEP = re.compile(r"checkpoint-(\d+)")


@dataclass
class Moment:
    """When a fault is injected, and the function that records it."""

    step: int
    save_every: int
    seed: int
    output: Path
    tell: Callable[[str], None]
    """Called with a short description when the fault is injected."""


class Fault:
    """Base class; injects nothing."""

    def __init__(self, moment: Moment) -> None:
        self.moment = moment
        self.random = random.Random(moment.seed)

    def install(self) -> None:
        """Called before the user's script runs."""

    def step_begins(self, trainer: Any, step: int, seconds: float) -> None:
        """Called before an update; `seconds` is the time of an update so far."""


class Signal(Fault):
    """Sends a signal at a random moment of a step."""

    number = signal.SIGKILL

    def step_begins(self, trainer: Any, step: int, seconds: float) -> None:
        if step == self.moment.step:
            threading.Timer(self.random.random() * seconds, self._send).start()

    def _send(self) -> None:
        self.moment.tell(self.number.name)
        os.kill(os.getpid(), self.number)


class Terminate(Signal):
    number = signal.SIGTERM


class Interrupt(Signal):
    number = signal.SIGINT


class MicroStepFault(Fault):
    """Injected after forward and backward of one micro-batch, when gradients exist and random numbers were drawn."""

    def step_begins(self, trainer: Any, step: int, seconds: float) -> None:
        if step != self.moment.step:
            return
        run = trainer._loopwright.run
        original = run.step
        struck: list[int] = []

        def striking(*args: Any, **kwargs: Any) -> Any:
            loss = original(*args, **kwargs)
            if struck:
                return loss
            struck.append(1)
            self.moment.tell(type(self).__name__)
            return self.strike(trainer, loss)

        run.step = striking

    def strike(self, trainer: Any, loss: Any) -> Any:
        raise NotImplementedError


class OutOfMemory(MicroStepFault):
    """One out-of-memory error."""

    def strike(self, trainer: Any, loss: Any) -> Any:
        import torch

        raise torch.OutOfMemoryError("out of memory (caused by loopwright drill)")


class NotANumber(MicroStepFault):
    """The loss and the gradients of one micro-batch become NaN."""

    def strike(self, trainer: Any, loss: Any) -> Any:
        for parameter in trainer.model.parameters():
            if parameter.grad is not None:
                parameter.grad.mul_(float("nan"))
        return loss * float("nan")


class DiskFault(Fault):
    """Injected just before a checkpoint file is written, by any thread or library."""

    def install(self) -> None:
        root = os.fspath(self.moment.output) + os.sep

        def noticed(path: Any, how: str) -> None:
            if isinstance(path, (str, os.PathLike)) and os.fspath(path).startswith(root):
                found = _STEP.search(os.fspath(path)[len(root) :])
                if found:
                    self.writing(int(found.group(1)), os.fspath(path), how)

        def audit(event: str, values: tuple[Any, ...]) -> None:
            if event == "open" and _writes(*values[1:3]) or event in MOVING:
                noticed(values[0], "file")

        sys.addaudithook(audit)
        _watch_tensor_files(lambda path: noticed(path, "tensors"))

    def writing(self, step: int, path: str, how: str) -> None:
        raise NotImplementedError


class KillInSave(DiskFault):
    """SIGKILL before a random file of one checkpoint is written."""

    def __init__(self, moment: Moment) -> None:
        super().__init__(moment)
        self.left = self.random.randint(1, FILES_IN_A_SAVE)

    def writing(self, step: int, path: str, how: str) -> None:
        if step < self.moment.step:
            return
        self.left -= 1
        if self.left == 0:
            self.moment.tell(f"SIGKILL while writing {os.path.basename(path)}")
            os.kill(os.getpid(), signal.SIGKILL)


class FullDisk(DiskFault):
    """Two saves fail with a full disk: one while safetensors writes its tensors, the next at a small file."""

    def writing(self, step: int, path: str, how: str) -> None:
        first, second = self.moment.step, self.moment.step + self.moment.save_every
        if (step, how) not in ((first, "tensors"), (second, "file")):
            return
        self.moment.tell(f"no space for {os.path.basename(path)}")
        if how == "tensors":
            from safetensors import SafetensorError

            raise SafetensorError("Error while serializing: I/O error: No space left on device (os error 28)")
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), path)


class SlowDisk(DiskFault):
    """Every file write of two saves is delayed."""

    def writing(self, step: int, path: str, how: str) -> None:
        if self.moment.step <= step <= self.moment.step + self.moment.save_every:
            self.moment.tell("slow")
            time.sleep(SLOW_SECONDS)


def _writes(mode: Any, flags: Any) -> bool:
    """Whether a file is opened for writing."""
    if isinstance(mode, str):
        return any(letter in mode for letter in "wax+")
    return isinstance(flags, int) and bool(flags & WRITING)


def _watch_tensor_files(notice: Callable[[Any], None]) -> None:
    """Make every module that writes safetensors files call `notice` first: the writes happen outside Python."""
    from safetensors import torch as home

    from ...pt import trainer  # noqa: F401  (it binds the function at import)

    original = home.save_file

    def save_file(tensors: Any, filename: Any, metadata: Any = None) -> None:
        notice(filename)
        original(tensors, filename, metadata)

    for module in list(sys.modules.values()):
        for name, value in list(getattr(module, "__dict__", {}).items()):
            if value is original:
                setattr(module, name, save_file)


FAULTS: dict[str, type[Fault]] = {
    "none": Fault,
    "kill": Signal,
    "kill-in-save": KillInSave,
    "sigterm": Terminate,
    "ctrl-c": Interrupt,
    "out-of-memory": OutOfMemory,
    "nan": NotANumber,
    "full-disk": FullDisk,
    "slow-disk": SlowDisk,
}
"""Faults injected inside the training process; checkpoints are damaged from outside, after a kill."""
