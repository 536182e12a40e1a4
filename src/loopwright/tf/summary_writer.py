"""Logging to a tf.summary writer created by the user."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import tensorflow as tf

from ..core.events import TrainerCallback

if TYPE_CHECKING:
    from ..args.base import BaseArguments


class SummaryWriterCallback(TrainerCallback):
    """Writes logs to a tf.summary writer created by the user."""

    def __init__(self, writer: Any) -> None:
        self.writer = writer

    def on_log(self, args: BaseArguments, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
        if not state.is_world_process_zero or not logs:
            return
        with self.writer.as_default():
            for name, value in logs.items():
                if isinstance(value, (int, float)):
                    tf.summary.scalar(name, value, step=state.global_step)

    def on_train_end(self, args: BaseArguments, state: Any, control: Any, **kwargs: Any) -> None:
        self.writer.flush()
