"""TFTrainer: the methods it adds to KerasTrainer (`keras/trainer.py`)."""

from __future__ import annotations

from typing import Any, ClassVar

from ..keras.internals import KerasInternals
from ..keras.trainer import KerasTrainer
from .arguments import TFTrainingArguments
from .internals import TFInternals


class TFTrainer(KerasTrainer):
    """Trains, evaluates and saves any Keras model with TensorFlow, and the TensorFlow models of older transformers."""

    _loopwright: TFInternals
    _loopwright_class: ClassVar[type[KerasInternals]] = TFInternals
    args: TFTrainingArguments

    def training_step(self, features: Any, labels: Any, nb_instances_in_global_batch: Any) -> list[Any]:
        """The gradients of one micro-batch on one replica, divided by the items of the whole update."""
        return self._loopwright.loss.training_step(features, labels, nb_instances_in_global_batch)

    def apply_gradients(self, features: Any, labels: Any, nb_instances_in_global_batch: Any) -> Any:
        """One update on one replica: `features` and `labels` are lists of its micro-batches.

        Returns the loss, the gradient norm before clipping, and whether loss scaling applied the step (None without
        it). Gradients are summed over replicas before they are clipped.
        """
        return self._loopwright.loss.apply_gradients(features, labels, nb_instances_in_global_batch)
