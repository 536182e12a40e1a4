"""TFInternals: the implementation of TFTrainer."""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from ..args.paths import working_folder
from ..core.incident import write_incident
from ..keras.host_batch import HostBatch
from ..keras.models import ModelInfo, is_built
from ..keras.sources import Source
from .arguments import TFTrainingArguments
from .gradients import GradientMethods
from .incident import bad_weights, examine
from .old_checkpoints import OldCheckpointMethods
from .pipelines import TFDataSource
from .strategy import TFStrategy
from .summary_writer import SummaryWriterCallback
from .variables import in_scope, rebuilt


class TFInternals(GradientMethods, OldCheckpointMethods):
    """Updates and predictions, differentiated and compiled by TensorFlow."""

    trainer_name = "TFTrainer"
    arguments_class = TFTrainingArguments

    def _make_strategy(self, args: Any) -> TFStrategy:
        return TFStrategy(
            args.strategy, apply=self._apply, rank=args.process_index, world_size=args.world_size, xla=args.xla
        )

    def _writer_callback(self, writer: Any) -> SummaryWriterCallback:
        return SummaryWriterCallback(writer)

    def _open_pipeline(self, dataset: Any, **options: Any) -> Source:
        return TFDataSource(dataset, finish=self._finish, **options)

    def _placed_model(self, model: Any, info: ModelInfo) -> Any:
        if not self.strategy.spreads or not is_built(model) or in_scope(model, self.args.strategy):
            return model
        model = rebuilt(model, self.args.strategy, info.family)
        self.notices.warn_once(
            "the model was built outside args.strategy.scope(); trainer.model is a copy built inside the scope"
        )
        return model

    # ---- prediction -------------------------------------------------------------------------------------------------

    def _compile_prediction(self) -> Any:
        return tf.function(self._predicted, reduce_retracing=True)

    def _predicted(self, batches: Any, items: Any) -> tuple[Any, Any, Any]:
        """Outputs of the local replicas, and loss and items summed over replicas."""
        strategy = self.strategy
        step: Any = self._traced_prediction
        step = tf.function(step, jit_compile=True) if strategy.xla else step
        if not strategy.spreads:
            return step(*batches, items)
        outputs, loss, count = strategy.distribution.run(step, args=(*batches, items))
        if loss is not None:
            loss = strategy.distribution.reduce("SUM", loss, axis=None)
            count = None if count is None else strategy.distribution.reduce("SUM", count, axis=None)
        return outputs, loss, count

    # ---- updates that were not finite -------------------------------------------------------------------------------

    def write_incident(self, step: int) -> str:
        place = self._places.get(step)
        found = self.samples_at(place) if place is not None else None
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
        found = tf.function(self._micro_gradients)(_tensors(batch.features), _tensors(batch.labels), None, items)
        return found[0], found[1]


def _tensors(value: Any) -> Any:
    return tf.nest.map_structure(lambda leaf: None if leaf is None else tf.convert_to_tensor(leaf), value)
