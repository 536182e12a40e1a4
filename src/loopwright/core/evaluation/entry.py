"""The entry points evaluate and predict; a framework supplies the loop over batches."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from ...errors import DataError
from ..outputs import EvalLoopOutput, PredictionOutput, speed_metrics
from ..part import Part
from ..randomness import untouched_rng
from ..user_code.error_notes import add_note_of_call
from ..user_code.overrides import is_overridden
from .loop import EvalPlan
from .metric_objects import MetricObjects

PREPARATION = "model_preparation_time"
"""The metric of an evaluation before training: seconds of preparing the model, which its runtime leaves out."""


def named_eval_dataset(datasets: Any, name: str) -> Any:
    """One of several named evaluation datasets."""
    sets = datasets if isinstance(datasets, Mapping) else {}
    if name not in sets:
        known = ", ".join(sets) or "no named sets"
        raise DataError(f"there is no evaluation dataset {name!r}; eval_dataset has {known}")
    return sets[name]


class Evaluation(Part):
    """Entry points of evaluation and prediction."""

    _wants_predictions: bool = False
    _evaluating_each: bool = False

    # ---- what a framework brings ------------------------------------------------------------------------------------

    def _eval_batches(self, eval_dataset: Any) -> Any:
        """The batches of the evaluation data, or of one of its named datasets."""
        raise NotImplementedError

    def _test_batches(self, test_dataset: Any) -> Any:
        """The batches of the data to predict."""
        raise NotImplementedError

    def _run_loop(
        self, batches: Any, description: str, loss_only: bool | None, ignore_keys: Any, prefix: str
    ) -> EvalLoopOutput:
        """Predictions, labels and metrics of batches."""
        raise NotImplementedError

    def evaluation_mode(self) -> AbstractContextManager[Any]:
        """A context at whose end a model that was training is in training mode again; logs are written before."""
        return nullcontext()

    def report_device(self) -> None:
        """Print what the arguments request about the device; called after an evaluation is logged."""

    # ---- the loop ---------------------------------------------------------------------------------------------------

    def _go_through(
        self,
        make_loader: Callable[[], Any],
        description: str,
        *,
        loss_only: bool | None,
        ignore_keys: Any,
        prefix: str,
    ) -> EvalLoopOutput:
        """Run and time the evaluation loop; random states are restored afterwards."""
        started = time.time()
        if not self.args.skip_memory_metrics:
            self.internals.memory.start()
        with self.strategy.alarm, untouched_rng(self.strategy), self.internals.data.ended_with_errors():
            try:
                output = self._run_loop(make_loader(), description, loss_only, ignore_keys, prefix)
            except Exception as error:  # anything that the user's code raises; re-raised with a note
                add_note_of_call(error, description.lower(), self.internals.moment())
                raise
        if self._should_have_numbers(output) and not output.metrics.keys() - {f"{prefix}_{PREPARATION}"}:
            self.internals.notices.warn_once(
                "the evaluation has neither a loss nor metrics, because its batches have no labels: add labels to the "
                "data, or name their columns by label_names"
            )
        started += output.metrics.get(f"{prefix}_{PREPARATION}", 0.0)
        batches = -(-output.num_samples // max(self.args.eval_batch_size, 1))
        output.metrics.update(speed_metrics(prefix, started, num_samples=output.num_samples, num_steps=batches))
        self.internals.add_memory_metrics(prefix, output.metrics)
        return output

    def _should_have_numbers(self, output: EvalLoopOutput) -> bool:
        """Whether the batches of an evaluation should have a loss: with a step of the user, it may be none."""
        own_step = is_overridden(self.trainer, "prediction_step")
        return output.num_samples > 0 and not self._wants_predictions and not own_step

    def _make_evaluation_plan(self, loss_only: bool, expected_rows: int | None) -> EvalPlan:
        """The EvalPlan of the arguments; `expected_rows` is None if the dataset has no length."""
        metrics, args = self.trainer.compute_metrics, self.args
        return EvalPlan(
            compute_metrics=metrics,
            loss_only=loss_only,
            per_batch_metrics=args.batch_eval_metrics or isinstance(metrics, MetricObjects),
            concat=args.eval_do_concat_batches,
            include=list(args.include_for_metrics),
            weight_by_items=args.eval_loss_reduction == "item_mean",
            host_every=args.eval_accumulation_steps or 1,
            expected_rows=expected_rows,
            # On the CPU, keeping a small tensor fragments the memory that its batch frees.
            read_every=1 if self.strategy.reads_are_free else 512,
            keep_always=self._wants_predictions,
            moment=self.internals.moment(),
        )

    # ---- what users call --------------------------------------------------------------------------------------------

    def evaluate(
        self,
        eval_dataset: Any = None,
        ignore_keys: list[str] | None = None,
        metric_key_prefix: str = "eval",
    ) -> dict[str, float]:
        """The metrics of a dataset; by default of eval_dataset, or of each of its named datasets."""
        dataset = self.trainer.eval_dataset if eval_dataset is None else eval_dataset
        if isinstance(dataset, Mapping):
            return self._evaluate_each(dataset, ignore_keys, metric_key_prefix)
        with self.evaluation_mode():
            output = self._go_through(
                lambda: self._eval_batches(eval_dataset),
                "Evaluation",
                loss_only=True if self.trainer.compute_metrics is None else None,
                ignore_keys=ignore_keys,
                prefix=metric_key_prefix,
            )
            self.internals.log_numbers(output.metrics)
            self.report_device()
            self.callback_handler.fire("on_evaluate", metrics=output.metrics)
        return output.metrics

    def _evaluate_each(self, datasets: Mapping[str, Any], ignore_keys: Any, prefix: str) -> dict[str, float]:
        metrics: dict[str, float] = {}
        own = self.trainer.eval_dataset
        self._evaluating_each = True
        try:
            for name, dataset in datasets.items():
                known = isinstance(own, Mapping) and own.get(name) is dataset
                metrics.update(self.trainer.evaluate(name if known else dataset, ignore_keys, f"{prefix}_{name}"))
        finally:
            self._evaluating_each = False
        return metrics

    def predict(
        self, test_dataset: Any, ignore_keys: list[str] | None = None, metric_key_prefix: str = "test"
    ) -> PredictionOutput:
        """Predictions in the dataset's order, its labels if it has any, and metrics."""
        self._wants_predictions = True
        try:
            output = self._go_through(
                lambda: self._test_batches(test_dataset),
                "Prediction",
                loss_only=None,
                ignore_keys=ignore_keys,
                prefix=metric_key_prefix,
            )
        finally:
            self._wants_predictions = False
        self.callback_handler.fire("on_predict", metrics=output.metrics)
        return PredictionOutput(output.predictions, output.label_ids, output.metrics)
