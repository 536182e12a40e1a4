"""JAXTrainer: KerasTrainer (`keras/trainer.py`) for Keras 3 on JAX (KERAS_BACKEND=jax)."""

from __future__ import annotations

from typing import ClassVar

from ..keras.internals import KerasInternals
from ..keras.trainer import KerasTrainer
from .arguments import JAXTrainingArguments
from .internals import JaxInternals


class JAXTrainer(KerasTrainer):
    """Trains Keras 3 models with JAX on the devices of this process.

    Overrides of `compute_loss` and `run_model` are traced by JAX. `training_step` and `apply_gradients` need
    TensorFlow's gradients; defining them raises an error.
    """

    _loopwright: JaxInternals
    _loopwright_class: ClassVar[type[KerasInternals]] = JaxInternals
    args: JAXTrainingArguments
