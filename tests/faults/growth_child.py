"""A long run of a tiny model that measures itself: `python -m tests.faults.growth_child FOLDER KIND UPDATES`.

Prints one line of JSON for each measurement: the step, memory in MB, what a save does in the main thread (calls of
functions, and characters of JSON), and the number of files in the output folder.
"""

from __future__ import annotations

import gc
import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple

from loopwright import TrainerCallback

OPTIONS: dict[str, Any] = {"logging_steps": 1, "save_total_limit": 2, "per_device_train_batch_size": 2}


def memory() -> float:
    """Resident memory of this process in MB."""
    gc.collect()
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / 1e6


class Measured(TrainerCallback):
    """Measures at the given steps, after a save."""

    def __init__(self, folder: str, steps: list[int]) -> None:
        self.folder, self.steps, self.saves = Path(folder), steps, list[Work]()

    def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step in self.steps:
            files = sum(path.is_file() for path in self.folder.rglob("*") if ".partial-" not in str(path))
            middle = sorted(self.saves)[len(self.saves) // 2]  # the first save after a log of another kind does more
            row = {"step": state.global_step, "rss": memory(), "calls": middle.calls, "characters": middle.characters,
                   "files": files, "size": (self.folder / "metrics.jsonl").stat().st_size}  # fmt: skip
            self.saves.clear()
            print(json.dumps(row), flush=True)


class Work(NamedTuple):
    """What a save has done in this thread: counted, since times depend on the machine."""

    calls: int
    characters: int


def counted(save: Callable[..., Any], saves: list[Work]) -> Callable[..., Any]:
    def counting(*args: Any, **kwargs: Any) -> None:
        trainer = save.__self__  # type: ignore[attr-defined]
        trainer._loopwright.run.checkpoints.wait()
        calls = characters = 0

        def count(frame: FrameType, event: str, value: Any) -> None:
            nonlocal calls, characters
            calls += event in ("call", "c_call")
            if event == "return" and frame.f_code is json.dumps.__code__ and isinstance(value, str):
                characters += len(value)

        sys.setprofile(count)
        try:
            save(*args, **kwargs)
        finally:
            sys.setprofile(None)
        saves.append(Work(calls, characters))

    return counting


def numpy_trainer(folder: str, updates: int, callback: Any) -> Any:
    import numpy as np

    from loopwright.args.base import BaseArguments
    from tests.core.numpy_strategy import LinearModel
    from tests.core.numpy_trainer import NumpyTrainer

    data = [(np.arange(2.0), np.ones(1)) for _ in range(64)]
    args = BaseArguments(folder, max_steps=updates, save_steps=updates // 100, **OPTIONS)
    return NumpyTrainer(LinearModel(2), args, data, callbacks=[callback])


def torch_trainer(folder: str, updates: int, callback: Any) -> Any:
    import torch

    from loopwright import Trainer, TrainingArguments

    class Tiny(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = torch.nn.Linear(2, 1)

        def forward(self, x: Any, labels: Any) -> Any:
            y = self.linear(x).squeeze(-1)
            return {"loss": torch.nn.functional.mse_loss(y, labels), "y": y}

    torch.set_num_threads(1)
    data = [{"x": torch.randn(2), "labels": torch.tensor(1.0)} for _ in range(4096)]
    args = TrainingArguments(
        folder, max_steps=updates, save_steps=updates // 100, use_cpu=True, disable_tqdm=True, report_to=[],
        log_level="error", **OPTIONS,
    )  # fmt: skip
    return Trainer(Tiny(), args, train_dataset=data, callbacks=[callback])


def main(folder: str, kind: str, updates: int) -> None:
    callback = Measured(folder, [updates // 100, updates // 10, updates])
    trainer = {"numpy": numpy_trainer, "torch": torch_trainer}[kind](folder, updates, callback)
    trainer._save_checkpoint = counted(trainer._save_checkpoint, callback.saves)
    trainer.train()


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]))
