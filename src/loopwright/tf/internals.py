"""TFInternals: the implementation of TFTrainer."""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from ..keras.arguments import KerasTrainingArguments
from ..keras.data.batches import KerasData
from ..keras.data.sources import Source
from ..keras.evaluation import KerasEvaluation
from ..keras.models import ModelInfo, is_built
from .arguments import TFTrainingArguments
from .gradients import TFLossStep
from .old_checkpoints import OldCheckpoints
from .pipelines import TFDataSource
from .strategy import TFStrategy, undivided_losses
from .summary_writer import SummaryWriterCallback
from .variables import in_scope, rebuilt


class TFData(KerasData):
    """Sources of batches, tf.data pipelines among them."""

    def open_pipeline(self, dataset: Any, **options: Any) -> Source:
        return TFDataSource(dataset, finish=self.finish, **options)


class TFEvaluation(KerasEvaluation):
    """Predictions as TensorFlow compiles them."""

    strategy: TFStrategy

    def _compile_prediction(self) -> Any:
        predict = tf.function(self._predicted, reduce_retracing=True)

        def call(batch: Any, items: Any) -> Any:
            with undivided_losses():
                return predict(batch, items)

        return call

    def _predicted(self, batches: Any, items: Any) -> tuple[Any, Any, Any]:
        """Outputs of the local replicas, and loss and items summed over replicas."""
        strategy = self.strategy
        step: Any = self.traced_prediction
        step = tf.function(step, jit_compile=True) if strategy.xla else step
        if not strategy.spreads:
            return step(*batches, items)
        outputs, loss, count = strategy.distribution.run(step, args=(*batches, items))
        if loss is not None:
            loss = strategy.distribution.reduce("SUM", loss, axis=None)
            count = None if count is None else strategy.distribution.reduce("SUM", count, axis=None)
        return outputs, loss, count


class TFInternals(OldCheckpoints):
    """Updates and predictions, differentiated and compiled by TensorFlow."""

    trainer_name = "TFTrainer"
    arguments_class = TFTrainingArguments
    strategy: TFStrategy
    loss: TFLossStep
    data_class, loss_class, evaluation_class = TFData, TFLossStep, TFEvaluation

    def _make_strategy(self, args: KerasTrainingArguments) -> TFStrategy:
        return TFStrategy(
            args.strategy, apply=self._apply, rank=args.process_index, world_size=args.world_size, xla=args.xla
        )

    def _apply(self, batches: Any, items: Any, loop: bool) -> tuple[Any, Any, Any]:
        return self.loss.apply(batches, items, loop)

    def _writer_callback(self, writer: Any) -> SummaryWriterCallback:
        return SummaryWriterCallback(writer)

    def _placed_model(self, model: Any, info: ModelInfo) -> Any:
        if not self.strategy.spreads or not is_built(model) or in_scope(model, self.args.strategy):
            return model
        model = rebuilt(model, self.args.strategy, info.family)
        self.notices.warn_once(
            "the model was built outside args.strategy.scope(); trainer.model is a copy built inside the scope"
        )
        return model
