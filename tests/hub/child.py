"""A run in a process of its own: `python -m tests.hub.child FOLDER STRATEGY STEP`. It waits at a step for a signal."""

from __future__ import annotations

import sys
import time
from typing import Any

from loopwright import TrainerCallback

from .runs import trainer_of


class Waits(TrainerCallback):
    """Lets no update begin after a step until a signal is received."""

    def __init__(self, step: int) -> None:
        self.step, self.trainer = step, None

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        while state.global_step == self.step and not self.trainer._loopwright.run.signals.received:
            time.sleep(0.01)


def main(folder: str, strategy: str, step: str) -> None:
    waits = Waits(int(step))
    waits.trainer = trainer_of(folder, hub_strategy=strategy, callbacks=[waits])
    waits.trainer.train(resume_from_checkpoint="auto")


if __name__ == "__main__":
    main(*sys.argv[1:])
