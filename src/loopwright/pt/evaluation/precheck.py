"""A check before the first step, on one evaluation batch, that the metric for the best model exists."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import islice
from typing import Any

from torch.utils.data import IterableDataset

from ...core.evaluation.loop import run_evaluation
from ...core.evaluation.metrics import full_name
from ...core.user_code.overrides import is_overridden
from ...errors import LoopwrightError, MetricError
from ...notices import logger
from ...snapshot import untouched_rng
from ..data.shard import whole_dataset
from .step import TorchEvaluation, to_numpy

ALWAYS = ("runtime", "samples_per_second", "steps_per_second")


class Precheck(TorchEvaluation):
    """Checks that would otherwise fail hours into a run."""

    def check_metric_name(self) -> None:
        """Raise if the metric for the best model is not one of the evaluation's metrics."""
        args, wanted = self.args, self.args.best_model_metric
        if wanted is None or args.eval_strategy == "no" or self.trainer.eval_dataset is None:
            return
        if is_overridden(self.trainer, "evaluate") or is_overridden(self.trainer, "evaluation_loop"):
            return  # the names of an override are not known
        names = self._metric_names()
        full = full_name(wanted)
        if names is None or full in names:
            return
        problem = (
            f"metric_for_best_model={wanted!r} is not one of the metrics of this evaluation: "
            f"{', '.join(sorted(name for name in names if not name.endswith(ALWAYS)))}"
        )
        if not self._names_may_be_added():
            raise MetricError(problem)
        logger.warning(f"{problem}. Continuing, since an overridden log() or a callback's on_evaluate may add it")

    def _names_may_be_added(self) -> bool:
        """Whether user code receives the metrics of an evaluation before the best model is chosen."""
        listeners = [getattr(callback, "on_evaluate", None) for callback in self.callback_handler.callbacks]
        homes = [getattr(listener, "__module__", None) or "loopwright." for listener in listeners]
        custom = [home for home in homes if not home.startswith(("loopwright.", "transformers."))]
        return is_overridden(self.trainer, "log") or bool(custom)

    def _metric_names(self) -> set[str] | None:
        """The names of the metrics of one batch of every evaluation set; None if one batch is not enough."""
        named = isinstance(self.trainer.eval_dataset, Mapping)
        sets = {f"eval_{name}": name for name in self.trainer.eval_dataset} if named else {"eval": None}
        names: set[str] = set()
        for prefix, key in sets.items():
            try:
                found = self._names_of_one_batch(key, prefix)
            except LoopwrightError:
                raise
            except Exception as error:  # a metric that needs more than one batch must not stop the run
                logger.info(f"one batch is not enough to determine the metrics of {prefix}: {error}")
                return None
            if found is None:
                return None
            names |= found
        return names

    def _names_of_one_batch(self, key: str | None, prefix: str) -> set[str] | None:
        events, self.callback_handler.callbacks = self.callback_handler.callbacks, []
        was_training = self.model.training
        self.strategy.evaluating()
        try:
            with untouched_rng():
                loader = self.trainer.get_eval_dataloader(key)
                if _may_continue(loader):
                    return None
                plan = self._evaluation_plan(
                    loader, self.trainer.compute_metrics is None or self.args.prediction_loss_only
                )
                steps = self.eval_steps(islice(loader, 1), plan.loss_only, self.run.ignore_keys_for_eval)
                plan.expected_rows = None
                output = run_evaluation(steps, plan, to_host=to_numpy, read=self.strategy.read, prefix=prefix)
        finally:
            self.callback_handler.callbacks = events
            if was_training:
                self.strategy.training()
        return {*output.metrics, *(f"{prefix}_{name}" for name in ALWAYS)}


def _may_continue(loader: Any) -> bool:
    """Whether the data may continue where reading stopped, so that a batch read now would be missing later."""
    dataset = whole_dataset(loader)
    is_stream = isinstance(dataset, IterableDataset) and not type(dataset).__module__.startswith("datasets.")
    return is_stream or isinstance(loader, Iterator)
