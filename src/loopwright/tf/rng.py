"""Random states with TensorFlow: its global generator, in addition to those of Python, numpy and Keras."""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from ..keras.rng import RandomStreams


class TFStreams(RandomStreams):
    """The random streams of Python, numpy, TensorFlow and Keras."""

    name = "tensorflow"

    def seed(self, seed: int, *, deterministic: bool = False) -> None:
        super().seed(seed)
        tf.random.set_seed(seed)
        tf.random.set_global_generator(tf.random.Generator.from_seed(seed))  # otherwise its seed is random
        if deterministic:
            tf.config.experimental.enable_op_determinism()

    def variables(self) -> list[Any]:
        return [tf.random.get_global_generator().state, *super().variables()]

    def value(self, variable: Any) -> Any:
        return tf.convert_to_tensor(variable).numpy()
