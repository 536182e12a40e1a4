"""A run that waits for its data, evaluates and saves; started again by the same command, it resumes.

python -m tests.core.ledger_child FOLDER
"""

from __future__ import annotations

import sys
import time
from typing import Any

from loopwright.core.measure import ledger_file

from .numpy_runs import trainer_of
from .numpy_trainer import NumpyTrainer

OPTIONS: dict[str, Any] = {
    "max_steps": 60, "save_strategy": "steps", "save_steps": 10, "eval_strategy": "steps", "eval_steps": 10,
    "logging_steps": 2,
}  # fmt: skip


class SlowSamples(list):  # type: ignore[type-arg]
    """Samples that take a while."""

    def __getitem__(self, index: Any) -> Any:
        time.sleep(0.005)
        return super().__getitem__(index)


class Slow(NumpyTrainer):
    """Takes a while for each forward pass."""

    def compute_loss(self, model: Any, inputs: Any, num_items_in_batch: Any) -> Any:
        time.sleep(0.005)
        return super().compute_loss(model, inputs, num_items_in_batch)


if __name__ == "__main__":
    ledger_file.BEAT = 0.05
    trainer = trainer_of(sys.argv[1], cls=Slow, **OPTIONS)
    trainer.eval_dataset = list(trainer.train_dataset)
    trainer.train_dataset = SlowSamples(trainer.train_dataset)
    trainer.train("auto")
