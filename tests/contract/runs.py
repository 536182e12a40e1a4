"""What the forked processes of the contract do: small runs that write down how they ended."""

from __future__ import annotations

import hashlib
import json
import os
import signal
from pathlib import Path
from typing import Any

from .frameworks import Rows

CLOCKED = ("runtime", "per_second")


def at_step(framework: Any, number: int, step: int, times: int = 1) -> Any:
    """A callback that sends this process a signal before a step."""
    from loopwright import TrainerCallback

    class Sender(TrainerCallback):
        def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            if state.global_step == step - 1:
                for _ in range(times):
                    os.kill(os.getpid(), number)

    return Sender()


def make(framework: Any, folder: str, callbacks: Any = (), **options: Any) -> Any:
    """Twelve updates of four samples, four of them (the last of two) an epoch; dropout, noise, warm-up, decay."""
    os.fsync = lambda descriptor: None  # a killed process loses nothing that the system already has
    return framework.trainer(
        folder, framework.net(dropout=0.3), Rows(14, noise=0.5), evaluation=Rows(6), callbacks=list(callbacks),
        **{"max_steps": 10, "save_steps": 3, "warmup_steps": 2, "weight_decay": 0.1, **options},
    )  # fmt: skip


def digest(arrays: list[Any]) -> str:
    return hashlib.sha256(b"".join(array.tobytes() for array in arrays)).hexdigest()


def finish(framework: Any, trainer: Any, resume: Any) -> None:
    output = trainer.train(resume_from_checkpoint=resume)
    rows = [{k: v for k, v in each.items() if not k.endswith(CLOCKED)} for each in trainer.state.log_history]
    same = {
        "weights": digest(framework.weights(trainer)),
        "optimizer": digest(framework.memory(trainer)),
        "log": rows,
        "loss": output.training_loss,
        "samples": trainer._loopwright.run.progress.samples_seen,
        "draws": framework.draws(),
    }
    Path(f"{trainer.args.output_dir}.result").write_text(json.dumps(same))


class Calls:
    """The functions of one framework, as the forking server calls them."""

    def __init__(self, framework: Any) -> None:
        self.framework = framework

    def train(self, folder: str, resume: Any = "auto", **options: Any) -> None:
        finish(self.framework, make(self.framework, folder, **options), resume)

    def signalled(self, folder: str, number: int, step: int, times: int = 1, **options: Any) -> None:
        sender = at_step(self.framework, number, step, times)
        finish(self.framework, make(self.framework, folder, [sender], **options), "auto")

    def killed(self, folder: str, step: int, **options: Any) -> None:
        self.signalled(folder, number=int(signal.SIGKILL), step=step, **options)
