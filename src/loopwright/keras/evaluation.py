"""Methods for evaluation and prediction."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
from keras import ops

from ..core.evaluation.entry import Evaluation
from ..core.evaluation.loop import EvalStep, run_evaluation
from ..core.evaluation.metric_objects import MetricObjects
from ..core.evaluation.metrics import full_name
from ..core.outputs import EvalLoopOutput, PredictionOutput
from ..core.shutdown.signals import Interrupted
from ..core.user_code.overrides import is_overridden
from ..errors import DataError, MetricError
from ..notices import logger
from .data.host_batch import HostBatch
from .data.sources import INFINITE, Columns, Source, is_columns, is_tf_data
from .part import KerasPart
from .strategy import plain_errors

TIMES = ("runtime", "samples_per_second", "steps_per_second")


class KerasEvaluation(KerasPart, Evaluation):
    """evaluate, predict and their parts."""

    compiled_prediction: Any = None
    """The compiled prediction step."""

    # ---- what users call --------------------------------------------------------------------------------------------

    def evaluate(
        self, eval_dataset: Any = None, ignore_keys: list[str] | None = None, metric_key_prefix: str = "eval"
    ) -> dict[str, float]:
        """The metrics of a dataset; by default of eval_dataset, or of each of its named datasets."""
        if isinstance(eval_dataset, Mapping) and is_columns(eval_dataset):
            eval_dataset = Columns(eval_dataset)  # a dict of arrays is one dataset, not several
        return super().evaluate(eval_dataset, ignore_keys, metric_key_prefix)

    def _eval_batches(self, eval_dataset: Any) -> Any:
        return self._as_source(self.trainer.get_eval_tfdataset(eval_dataset))

    def _test_batches(self, test_dataset: Any) -> Any:
        return self._as_source(self.trainer.get_test_tfdataset(test_dataset))

    def _as_source(self, given: Any) -> Source:
        """The source for the result of an overridden get_*_tfdataset: (dataset, steps, examples), or the dataset."""
        dataset, steps, *_ = (*given, None) if isinstance(given, tuple) else (given, None)
        if isinstance(dataset, Source):
            return dataset
        if not is_tf_data(dataset):
            raise DataError(f"the override returned a {type(dataset).__name__}; return a batched tf.data pipeline")
        if int(dataset.cardinality()) == INFINITE:
            if steps is None:
                raise DataError("the override returned a pipeline that never ends; return (dataset, steps, examples)")
            dataset = dataset.take(steps)
        return self.internals.data.open_pipeline(dataset)

    def _run_loop(
        self, source: Any, description: str, loss_only: bool | None, ignore_keys: Any, prefix: str
    ) -> EvalLoopOutput:
        """Run `prediction_loop` if it is overridden, else the built-in loop."""
        if not is_overridden(self.trainer, "prediction_loop"):
            return self._evaluation(source, description, loss_only, ignore_keys, prefix)
        self._prefix = prefix
        output = self.trainer.prediction_loop(source, source.batches, source.examples, description, loss_only)
        return EvalLoopOutput(output.predictions, output.label_ids, output.metrics, source.examples or 0)

    def prediction_loop(
        self,
        dataset: Any,
        steps: int | None = None,
        num_examples: int | None = None,
        description: str = "Prediction",
        prediction_loss_only: bool | None = None,
    ) -> PredictionOutput:
        """Predictions, labels and metrics of batches, as evaluation and prediction compute them."""
        source = dataset if isinstance(dataset, Source) else self._as_source((dataset, steps))
        prefix = getattr(self, "_prefix", "eval")
        output = self._evaluation(source, description, prediction_loss_only, None, prefix)
        return PredictionOutput(output.predictions, output.label_ids, output.metrics)

    def _evaluation(
        self, source: Any, description: str, loss_only: bool | None, ignore_keys: Any, prefix: str
    ) -> EvalLoopOutput:
        only = self.args.prediction_loss_only if loss_only is None else loss_only
        if isinstance(self.trainer.compute_metrics, MetricObjects):
            self.trainer.compute_metrics.restart()
        self.callback_handler.context["eval_dataloader"] = source
        steps = self.eval_steps(source.open(0), only)
        plan = self._make_evaluation_plan(only, source.examples)
        output = run_evaluation(steps, plan, to_host=lambda value: value, read=self.strategy.read, prefix=prefix)
        if output.num_samples == 0:
            raise DataError(f"{description}: the dataset returned no batches")
        return output

    # ---- one batch --------------------------------------------------------------------------------------------------

    def prediction_step(self, features: Any, labels: Any, nb_instances_in_global_batch: Any) -> Any:
        """The outputs of one batch on one replica; its loss is added to `eval_loss`. Traced, and may be overridden."""
        more = {"return_outputs": True, "training": False}
        if labels is None:
            return self.trainer.run_model(features, None, False)[1]
        result = self.internals.loss.called_compute_loss(features, labels, **more)
        loss, outputs = _loss_and_outputs(result)
        if outputs is None:  # an override that returns the loss only
            outputs = self.trainer.run_model(features, None, False)[1]
        if loss is not None:
            total, items = self.internals.loss.summed(loss, labels)
            self.trainer.eval_loss.update_state(total / nb_instances_in_global_batch, items)
        return outputs

    def traced_prediction(self, features: Any, labels: Any, weights: Any, items: Any) -> tuple[Any, Any, Any]:
        self.internals.loss.row_weights = weights
        with self.trainer.eval_loss.collecting() as note:
            outputs = self.trainer.prediction_step(features, labels, items)
            if outputs is not None and self.trainer.preprocess_logits_for_metrics is not None:
                outputs = self.trainer.preprocess_logits_for_metrics(outputs, labels)
            return outputs, note.loss, note.items

    def _compile_prediction(self) -> Any:
        """`_traced_prediction` as a compiled function of a placed batch and its items, on all replicas."""
        raise NotImplementedError

    def eval_steps(self, batches: Iterator[HostBatch], loss_only: bool) -> Iterator[EvalStep]:
        if self.compiled_prediction is None:
            self.internals.loss.bind_overrides()
            self.compiled_prediction = self._compile_prediction()
        for batch in batches:
            items = np.float32(max(self.trainer._compute_nb_instances((batch.features, batch.labels)), 1))
            placed = self.strategy.placed([self.strategy.padded(batch)])[0]
            with plain_errors():
                outputs, loss, count = self.compiled_prediction(placed, items)
            if loss is not None and count is not None:
                loss = loss * items / ops.where(count > 0, count, 1.0)
            kept = None if loss_only else self.strategy.rows(outputs, batch.rows)
            self.callback_handler.fire("on_prediction_step")
            if self.internals.wants_to_leave:
                raise Interrupted
            yield EvalStep(
                loss=loss,
                logits=kept,
                labels=None if loss_only else _plain(batch.labels),
                inputs=self._metric_inputs(batch) if "inputs" in self.args.include_for_metrics else None,
                items=batch.rows if count is None else count,
                samples=batch.rows,
            )

    def _metric_inputs(self, batch: HostBatch) -> Any:
        features = batch.features
        if isinstance(features, Mapping):
            name = getattr(self.model, "main_input_name", "input_ids")
            return features.get(name, features)
        return features

    # ---- before step 1 ----------------------------------------------------------------------------------------------

    def check_metric_name(self) -> None:
        """Evaluate one batch before training and raise if metric_for_best_model is not among its metrics."""
        wanted = self.args.best_model_metric
        if wanted is None or self.args.eval_strategy == "no" or self.trainer.eval_dataset is None:
            return
        if any(is_overridden(self.trainer, name) for name in ("evaluate", "prediction_loop", "log")):
            return  # an override may return other names
        if isinstance(self.trainer.eval_dataset, Mapping):
            return
        names = self._names_of_one_batch()
        if names is not None and full_name(wanted) not in {*names, *(f"eval_{each}" for each in TIMES)}:
            known = ", ".join(sorted(names))
            problem = f"metric_for_best_model={wanted!r} is not a metric of this evaluation; available"
            raise MetricError(f"{problem}: {known}")

    def _names_of_one_batch(self) -> set[str] | None:
        callbacks, self.callback_handler.callbacks = self.callback_handler.callbacks, []
        loss_only = self.trainer.compute_metrics is None or self.args.prediction_loss_only
        try:
            with self.strategy.streams.untouched():
                source = self._eval_batches(None)
                first = source.first()
                plan = self._make_evaluation_plan(loss_only, None)
                steps = self.eval_steps(iter([] if first is None else [first]), loss_only)
                found = run_evaluation(steps, plan, to_host=lambda each: each, read=self.strategy.read, prefix="eval")
            return set(found.metrics)
        except (DataError, MetricError):
            raise
        except Exception as error:  # a metric may need more than one batch; that must not stop training
            logger.info(f"metric_for_best_model is not checked; evaluating one batch failed: {error}")
            return None
        finally:
            self.callback_handler.callbacks = callbacks


def _loss_and_outputs(result: Any) -> tuple[Any, Any]:
    """(loss, outputs) of `compute_loss` with return_outputs; an override may have returned the loss only."""
    if not isinstance(result, tuple) or len(result) != 2:
        return result, None
    loss, outputs = result
    is_count = isinstance(outputs, (int, float)) or getattr(outputs, "ndim", None) == 0
    return ((loss, outputs), None) if is_count else (loss, outputs)


def _plain(labels: Any) -> Any:
    """Labels in the form passed to metrics: a dict becomes a tuple of its values."""
    return tuple(labels.values()) if isinstance(labels, Mapping) else labels
