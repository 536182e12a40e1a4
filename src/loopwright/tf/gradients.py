"""Gradients with TensorFlow, inside the compiled update."""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from ..args.paths import working_folder
from ..core.logs.incident import write_incident
from ..errors import ModelError
from ..keras.data.host_batch import HostBatch
from ..keras.loss.loss_step import LossNote, LossStep
from .hooks import TFHooks
from .incident import bad_weights, examine
from .strategy import TFStrategy
from .variables import raw


class TFLossStep(LossStep):
    """Gradients on one replica; every public method may be overridden, and is traced."""

    trainer: TFHooks
    strategy: TFStrategy

    def training_step(self, features: Any, labels: Any, nb_instances_in_global_batch: Any) -> list[Any]:
        """The gradients of one micro-batch on one replica, divided by the items of the whole update."""
        variables = [raw(variable) for variable in self.model.trainable_variables]
        with tf.GradientTape() as tape:
            loss = self.called_compute_loss(features, labels)
            total, items = self.summed(loss, labels)
            total = total / nb_instances_in_global_batch
            scaled = self.trainer.optimizer.scale_loss(total) if self._scales_loss() else total
        self.trainer.train_loss.update_state(total, items)
        return tape.gradient(scaled, variables)

    def apply_gradients(self, features: Any, labels: Any, nb_instances_in_global_batch: Any) -> Any:
        """One update on one replica: `features` and `labels` are lists of its micro-batches.

        Returns the loss, the gradient norm before clipping, and whether loss scaling applied the step (None without
        it). Gradients are summed over replicas before they are clipped.
        """
        batches, loop = self._micro_batches(features, labels)
        found = self.strategy.accumulate(batches, nb_instances_in_global_batch, loop)
        return self.strategy.finish(*found, nb_instances_in_global_batch)

    # ---- inside the compiled update ---------------------------------------------------------------------------------

    def apply(self, batches: Any, items: Any, loop: bool) -> tuple[Any, Any, Any]:
        """One update on one replica: calls `apply_gradients` and adds what an override did not return."""
        self._weights_of = [each[2] for each in batches] if not loop else batches[2]
        self._loops = loop
        features = batches[0] if loop else [each[0] for each in batches]
        labels = batches[1] if loop else [each[1] for each in batches]
        with self.trainer.train_loss.collecting() as note:
            result = self.trainer.apply_gradients(features, labels, items)
            if isinstance(result, tuple):
                return result
            return self._reduced_note(note), None, None

    def _micro_batches(self, features: Any, labels: Any) -> tuple[Any, bool]:
        if self._loops:
            return (features, labels, self._weights_of), True
        return list(zip(features, labels, self._weights_of, strict=True)), False

    def _reduced_note(self, note: LossNote) -> Any:
        loss = tf.constant(float("nan")) if note.loss is None else note.loss
        context = tf.distribute.get_replica_context()
        return context.all_reduce("SUM", loss) if self.strategy.spreads and context is not None else loss

    def micro_gradients(self, features: Any, labels: Any, weights: Any, items: Any) -> tuple[list[Any], Any, Any]:
        """Gradients, loss and items of one micro-batch; dense, so that repeated indices add up."""
        self.row_weights = weights
        before = (self.trainer.train_loss.loss, self.trainer.train_loss.items)
        with self.trainer.train_loss.collecting() as note:
            gradients = self._called_training_step(features, labels, items)
            loss, summed = note.loss, note.items
        self.trainer.train_loss.loss, self.trainer.train_loss.items = before
        if gradients is None:
            raise ModelError("training_step returned None; it must return the gradients of the micro-batch")
        dense = [
            tf.zeros_like(raw(variable)) if gradient is None else tf.convert_to_tensor(gradient)
            for gradient, variable in zip(gradients, self.model.trainable_variables, strict=True)
        ]
        return dense, tf.constant(float("nan")) if loss is None else loss, summed

    def bind_overrides(self) -> None:
        super().bind_overrides()
        self._called_training_step = self.trainer.training_step

    def _scales_loss(self) -> bool:
        return self.strategy.scales and hasattr(self.trainer.optimizer, "scale_loss")

    # ---- updates that were not finite -------------------------------------------------------------------------------

    def write_incident(self, step: int) -> str:
        place = self.run.places.get(step)
        found = self.internals.data.samples_at(place) if place is not None else None
        ids, batches = found if found else (None, None)
        folder = write_incident(
            working_folder(self.args.output_dir),
            step=step,
            sample_ids=ids,
            bad_weights=bad_weights(self.model),
            examine=None if batches is None else lambda place: examine(place, self.model, batches, self._run_again),
        )
        return str(folder)

    def _run_again(self, batch: HostBatch) -> tuple[list[Any], Any]:
        items = tf.constant(float(max(self.trainer._compute_nb_instances((batch.features, batch.labels)), 1)))
        found = tf.function(self.micro_gradients)(_tensors(batch.features), _tensors(batch.labels), None, items)
        return found[0], found[1]


def _tensors(value: Any) -> Any:
    return tf.nest.map_structure(lambda leaf: None if leaf is None else tf.convert_to_tensor(leaf), value)
