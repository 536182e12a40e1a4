"""JaxInternals: the implementation of JAXTrainer."""

from __future__ import annotations

from typing import Any

import jax
import keras

from ..errors import ModelError, OverrideError
from ..keras.internals import KerasInternals
from ..keras.sources import Source
from .arguments import JAXTrainingArguments
from .strategy import JaxStrategy


class JaxInternals(KerasInternals):
    """Updates and predictions, differentiated and compiled by JAX."""

    trainer_name = "JAXTrainer"
    arguments_class = JAXTrainingArguments

    def _make_strategy(self, args: Any) -> JaxStrategy:
        if keras.backend.backend() != "jax":
            raise ModelError(
                f"JAXTrainer needs Keras on JAX, but keras.backend() is {keras.backend.backend()!r}; set "
                "KERAS_BACKEND=jax before keras is imported"
            )
        dead = [name for name in ("training_step", "apply_gradients") if hasattr(self.trainer, name)]
        if dead:
            raise OverrideError(f"JAXTrainer does not call {', '.join(dead)}; override compute_loss or run_model")
        return JaxStrategy(args.strategy.devices)

    def _writer_callback(self, writer: Any) -> Any:
        from ..tf.summary_writer import SummaryWriterCallback

        return SummaryWriterCallback(writer)

    def _open_pipeline(self, dataset: Any, **options: Any) -> Source:
        from ..tf.pipelines import TFDataSource

        return TFDataSource(dataset, finish=self._finish, **options)

    def _micro_gradients(
        self, trained: Any, states: Any, features: Any, labels: Any, weights: Any, items: Any
    ) -> Any:
        """(loss, items, gradients) of a micro-batch, and the non-trainable variables after it."""

        def loss_of(values: Any) -> Any:
            with self._variables_as(values, states) as scope:
                self._row_weights = weights
                total, summed = self._summed(self._called_compute_loss(features, labels, items), labels)
                return total / items, (summed, self._after(scope, states))

        (loss, (summed, after)), gradients = jax.value_and_grad(loss_of, has_aux=True)(trained)
        return (loss, summed, gradients), after

    def _variables_as(self, trained: Any, states: Any) -> Any:
        model = self.model
        pairs = [*zip(model.trainable_variables, trained, strict=True),
                 *zip(model.non_trainable_variables, states, strict=True)]  # fmt: skip
        return keras.StatelessScope(state_mapping=pairs, collect_losses=True)

    def _after(self, scope: Any, states: Any) -> list[Any]:
        found = [scope.get_current_value(variable) for variable in self.model.non_trainable_variables]
        return [old if new is None else new for new, old in zip(found, states, strict=True)]

    def _compile_prediction(self) -> Any:
        @jax.jit
        def predict(trained: Any, states: Any, batch: Any, items: Any) -> Any:
            with self._variables_as(trained, states):
                features, labels, weights = batch
                return self._traced_prediction(features, labels, weights, items)

        def call(batch: Any, items: Any) -> Any:
            model = self.model
            trained = [variable.value for variable in model.trainable_variables]
            states = [variable.value for variable in model.non_trainable_variables]
            return predict(trained, states, batch, items)

        return call
