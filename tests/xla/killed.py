"""A run that is killed after its third update, with a checkpoint of the second: `python killed.py FOLDER`."""

from __future__ import annotations

import os
import signal
import sys
from typing import Any

import loopwright
from tests.xla.runs import trainer


class Kill(loopwright.TrainerCallback):
    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step == 3:
            os.kill(os.getpid(), signal.SIGKILL)


if __name__ == "__main__":
    trainer("dropped", sys.argv[1], save_strategy="steps", save_steps=2, callbacks=[Kill()]).train()
