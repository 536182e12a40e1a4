"""JaxInternals: the implementation of JAXTrainer."""

from __future__ import annotations

from typing import Any

import jax
import keras

from ..errors import ModelError, OverrideError
from ..keras.arguments import KerasTrainingArguments
from ..keras.data.batches import KerasData
from ..keras.data.sources import Source
from ..keras.evaluation import KerasEvaluation
from ..keras.internals import KerasInternals
from ..keras.loss.loss_step import LossStep
from .arguments import Devices, JAXTrainingArguments
from .strategy import JaxStrategy


class JaxData(KerasData):
    """Sources of batches; those of tf.data where a user who has TensorFlow passes one."""

    def open_pipeline(self, dataset: Any, **options: Any) -> Source:
        from ..tf.pipelines import TFDataSource

        return TFDataSource(dataset, finish=self.finish, **options)


class JaxLossStep(LossStep):
    """Gradients as JAX differentiates them."""

    def micro_gradients(self, trained: Any, states: Any, features: Any, labels: Any, weights: Any, items: Any) -> Any:
        """(loss, items, gradients) of a micro-batch, and the non-trainable variables after it."""

        def loss_of(values: Any) -> Any:
            with self.variables_as(values, states) as scope:
                self.row_weights = weights
                total, summed = self.summed(self.called_compute_loss(features, labels), labels)
                return total / items, (summed, self._after(scope, states))

        (loss, (summed, after)), gradients = jax.value_and_grad(loss_of, has_aux=True)(trained)
        return (loss, summed, gradients), after

    def variables_as(self, trained: Any, states: Any) -> Any:
        model = self.model
        pairs = [*zip(model.trainable_variables, trained, strict=True),
                 *zip(model.non_trainable_variables, states, strict=True)]  # fmt: skip
        return keras.StatelessScope(state_mapping=pairs, collect_losses=True)

    def _after(self, scope: Any, states: Any) -> list[Any]:
        found = [scope.get_current_value(variable) for variable in self.model.non_trainable_variables]
        return [old if new is None else new for new, old in zip(found, states, strict=True)]


class JaxEvaluation(KerasEvaluation):
    """Predictions as JAX compiles them."""

    internals: JaxInternals

    def _compile_prediction(self) -> Any:
        @jax.jit
        def predict(trained: Any, states: Any, batch: Any, items: Any) -> Any:
            with self.internals.loss.variables_as(trained, states):
                features, labels, weights = batch
                return self.traced_prediction(features, labels, weights, items)

        def call(batch: Any, items: Any) -> Any:
            model = self.model
            trained = [variable.value for variable in model.trainable_variables]
            states = [variable.value for variable in model.non_trainable_variables]
            return predict(trained, states, batch, items)

        return call


class JaxInternals(KerasInternals):
    """Updates and predictions, differentiated and compiled by JAX."""

    strategy: JaxStrategy
    trainer_name = "JAXTrainer"
    arguments_class = JAXTrainingArguments
    loss: JaxLossStep
    data_class, loss_class, evaluation_class = JaxData, JaxLossStep, JaxEvaluation

    def _make_strategy(self, args: KerasTrainingArguments) -> JaxStrategy:
        if keras.backend.backend() != "jax":
            raise ModelError(
                f"JAXTrainer needs Keras on JAX, but keras.backend() is {keras.backend.backend()!r}; set "
                "KERAS_BACKEND=jax before keras is imported"
            )
        dead = [name for name in ("training_step", "apply_gradients") if hasattr(self.trainer, name)]
        if dead:
            raise OverrideError(f"JAXTrainer does not call {', '.join(dead)}; override compute_loss or run_model")
        devices = args.strategy
        assert isinstance(devices, Devices)
        return JaxStrategy(devices.devices)

    def _writer_callback(self, writer: Any) -> Any:
        from ..tf.summary_writer import SummaryWriterCallback

        return SummaryWriterCallback(writer)
