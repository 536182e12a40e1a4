"""What the TensorFlow tests share. Nothing here imports TensorFlow before a test runs."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import numpy as np

from tests.contract.frameworks import FRAMEWORKS, needs_tensorflow, rows, sentences

TF = FRAMEWORKS["tensorflow"]
MARKS = needs_tensorflow

__all__ = ["MARKS", "TF", "arrays", "kept", "logged", "rows", "sentences", "trainer", "two_replicas", "weights"]


@functools.cache
def two_replicas() -> Any:
    """The strategy over two logical CPU devices of this process; a second one would mix up TensorFlow's collectives."""
    import tensorflow as tf

    return tf.distribute.MirroredStrategy(["CPU:0", "CPU:1"])


def arrays(n: int = 12) -> tuple[Any, Any]:
    data = rows(n)
    return np.stack([row["x"] for row in data]), np.stack([row["labels"] for row in data])


def trainer(folder: Any, model: Any = None, data: Any = None, *, strategy: Any = None, **options: Any) -> Any:
    """A trainer of the small net on twelve samples; nothing is saved unless asked for."""
    given = {"save_strategy": "no", "max_steps": 3, **options}
    if strategy is None:
        return TF.trainer(folder, TF.net() if model is None else model, rows(12) if data is None else data, **given)
    own = TF.arguments

    class On(type(TF)):  # the same framework, on another strategy
        def arguments(self, folder: Any, **more: Any) -> Any:
            args = own(folder, **more)
            args.strategy = strategy
            return args

    return On().trainer(folder, TF.net() if model is None else model, rows(12) if data is None else data, **given)


def logged(trainer: Any, key: str) -> list[Any]:
    return [row[key] for row in trainer.state.log_history if key in row]


def weights(trainer: Any) -> list[Any]:
    return [variable.numpy() for variable in trainer.model.trainable_variables]


def kept(folder: Any) -> list[int]:
    return sorted(int(path.name.split("-")[1]) for path in Path(folder).glob("checkpoint-*"))
