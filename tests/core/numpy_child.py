"""A slow run in its own process: resumes where an earlier one was stopped, and prints its result.

    python -m tests.core.numpy_child FOLDER [--twice]

With --twice it gets two signals in its third forward pass.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from typing import Any

from loopwright.core.events import TrainerCallback

from .numpy_runs import outcome, trainer_of
from .numpy_trainer import NumpyTrainer

OPTIONS: dict[str, Any] = {"num_train_epochs": 10, "save_strategy": "steps", "save_steps": 1000, "logging_steps": 3}


class Slow(NumpyTrainer):
    """Takes so long for each forward pass that a signal finds it at work."""

    passes = 0

    def compute_loss(self, model: Any, inputs: Any, num_items_in_batch: Any) -> Any:
        self.passes += 1
        time.sleep(0.004)
        if "--twice" in sys.argv and self.passes == 3:
            os.kill(os.getpid(), signal.SIGTERM)
            os.kill(os.getpid(), signal.SIGTERM)
        return super().compute_loss(model, inputs, num_items_in_batch)


class Counting(TrainerCallback):
    """Says that an update is over."""

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        print(state.global_step, flush=True)


def main() -> None:
    trainer = trainer_of(sys.argv[1], Counting(), cls=Slow, **OPTIONS)
    trainer.train("auto")
    print(json.dumps(outcome(trainer)), flush=True)


if __name__ == "__main__":
    main()
