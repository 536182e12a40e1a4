"""JAXTrainer: TFTrainer's methods for Keras 3 on JAX (KERAS_BACKEND=jax), on the same core."""

from __future__ import annotations

from typing import ClassVar

from ..tf.internals import TFInternals
from ..tf.trainer import TFTrainer
from .internals import JaxInternals


class JAXTrainer(TFTrainer):
    """Trains Keras 3 models with JAX on the devices of this process.

    Overrides of `compute_loss` and `run_model` are traced by JAX; `training_step` and `apply_gradients`, which take
    TensorFlow's gradients, are not called and therefore refused.
    """

    _loopwright_class: ClassVar[type[TFInternals]] = JaxInternals
