"""Evaluation and prediction of PyTorch models."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from copy import copy
from functools import partial
from itertools import islice
from typing import Any

import torch
from torch import Tensor, nn

from ...args.names import DebugOption
from ...core.evaluation.entry import PREPARATION, Evaluation
from ...core.evaluation.loop import EvalPlan, EvalStep, run_evaluation
from ...core.evaluation.metric_objects import MetricObjects
from ...core.outputs import EvalLoopOutput
from ...core.shutdown.signals import Interrupted
from ...core.update import MicroBatch, Update
from ...core.user_code.error_notes import add_note, add_note_of_step, describe
from ...core.user_code.overrides import adapt, is_overridden
from ...errors import DataError
from ..checkpoint.callback_tensors import evaluation_weights, uses_averages
from ..data.columns import LABEL_COLUMNS
from ..data.loaders import has_length
from ..data.loading_errors import add_note_of_loading, each_of
from ..data.prepared import PreparedLoader
from ..data.shard import whole_dataset
from ..data.static_shapes import Static
from ..device_traits import kind_of
from ..loss.targets import check_loss, count_samples
from ..part import TorchPart
from ..precision import full_eval_dtype
from .metric_inputs import metrics_function
from .outputs import detached, logits_of, single, to_numpy
from .read_ahead import ReadAhead, kept


class TorchEvaluation(TorchPart, Evaluation):
    """`evaluate` and `predict`."""

    _is_evaluating: bool = False
    """Whether an evaluation is in progress that restores the training mode at its end."""
    _preparation_seconds: float | None = None
    """How long the first evaluation prepared a model that was not trained before; None if there was none."""

    def _eval_batches(self, eval_dataset: Any) -> Any:
        return self.trainer.get_eval_dataloader(eval_dataset)

    def _test_batches(self, test_dataset: Any) -> Any:
        return self.trainer.get_test_dataloader(test_dataset)

    def _run_loop(
        self, batches: Any, description: str, loss_only: bool | None, ignore_keys: Any, prefix: str
    ) -> EvalLoopOutput:
        output: EvalLoopOutput = self.trainer.evaluation_loop(
            self.internals.data.share_loader(batches),
            description=description,
            prediction_loss_only=loss_only,
            ignore_keys=ignore_keys,
            metric_key_prefix=prefix,
        )
        return output

    # ---- the loop ---------------------------------------------------------------------------------------------------

    def evaluation_loop(
        self,
        dataloader: Any,
        description: str,
        prediction_loss_only: bool | None = None,
        ignore_keys: list[str] | None = None,
        metric_key_prefix: str = "eval",
    ) -> EvalLoopOutput:
        """Run `prediction_step` over a loader; collects losses, metrics and, if needed, predictions."""
        loss_only = self.args.prediction_loss_only if prediction_loss_only is None else prediction_loss_only
        # The function may have been assigned since the last evaluation.
        self.trainer.compute_metrics = metrics_function(self.trainer.compute_metrics, self.device)
        if isinstance(self.trainer.compute_metrics, MetricObjects):
            self.trainer.compute_metrics.restart()
        if "gather_function" in vars(self.trainer) and not self.is_alone:
            self.notices.warn_once(
                "trainer.gather_function was assigned and is not used: results are gathered in order"
            )
        if isinstance(dataloader, PreparedLoader):  # of a user who calls this method
            dataloader = self.internals.data.share_loader(dataloader)
        plan = self._evaluation_plan(dataloader, loss_only)
        self.callback_handler.context["eval_dataloader"] = dataloader
        strategy = self.strategy
        if not self.trainer.is_in_train:
            self._prepare()
        self.internals.changes.follow_overrides()
        casts = nullcontext() if self.trainer.is_in_train else full_eval_dtype(self.model, self.args)
        averages = [type(each).__name__ for each in self.callback_handler.callbacks if uses_averages(each)]
        if len(averages) > 1:
            self.notices.warn_once(
                f"evaluations use the weights of {averages[-1]}, not those of {', '.join(averages[:-1])}; set "
                "use_in_evaluation=False on all but one"
            )
        with self.evaluation_mode(), evaluation_weights(self.callback_handler.callbacks), casts:
            strategy.evaluating()
            if self.model is not strategy.model:
                self.model.eval()
            steps = self.internals.fast_evaluation.steps(dataloader, plan, ignore_keys)
            output = run_evaluation(steps, plan, to_host=to_numpy, read=strategy.read, prefix=metric_key_prefix)
        if output.num_samples == 0 and not self._is_empty_on_purpose(dataloader):
            raise DataError(f"{description}: the data returned no batch")
        if self._preparation_seconds is not None:
            output.metrics[f"{metric_key_prefix}_{PREPARATION}"] = self._preparation_seconds
        return output

    def _prepare(self) -> None:
        """Place the model and bind overrides; a run has done so, and may have replaced its training step by graphs."""
        started = time.time()
        if self.model is not self.strategy.model:
            self.internals.adopt_model(self.model)
        self.internals.loss.bind_overrides()
        if self._preparation_seconds is None and not self.run.has_begun:
            self._preparation_seconds = round(time.time() - started, 4)

    def report_device(self) -> None:
        metrics = kind_of(self.device).metrics
        if DebugOption.TPU_METRICS_DEBUG in self.args.debug and metrics is not None:
            if self.trainer.is_world_process_zero():
                print(metrics())

    def _is_empty_on_purpose(self, dataloader: Any) -> bool:
        """Whether a subclass made an empty loader, for example because its own evaluators compute all metrics."""
        return is_overridden(self.trainer, "get_eval_dataloader") and has_length(dataloader) and len(dataloader) == 0

    @contextmanager
    def evaluation_mode(self) -> Iterator[None]:
        if self._is_evaluating:
            yield
            return
        was_training, self._is_evaluating = self.strategy.model.training, True
        modes = {module: module.training for model in (self.strategy.model, self.model) for module in model.modules()}
        try:
            yield
        finally:
            self._is_evaluating = False
            if was_training:
                self.strategy.training()
            for module, mode in modes.items():
                module.training = mode

    def is_plain(self, loss_only: bool) -> bool:
        """Whether a step is a forward of the model, and not, for example, the generation of text."""
        return not is_overridden(self.trainer, "prediction_step")

    def _evaluation_plan(self, dataloader: Any, loss_only: bool) -> EvalPlan:
        dataset: Any = whole_dataset(dataloader)
        return self._make_evaluation_plan(loss_only, len(dataset) if has_length(dataset) else None)

    def eval_steps(self, loader: Any, loss_only: bool, ignore_keys: list[str] | None) -> Iterator[EvalStep]:
        step = self.step_of(loss_only, ignore_keys)
        for inputs in self.looked_at(loader):
            yield step(inputs)

    def step_of(self, loss_only: bool, ignore_keys: list[str] | None) -> Callable[[Any], EvalStep]:
        """A function that evaluates one batch."""
        predict, model = adapt(self.trainer.prediction_step, "ignore_keys"), self.evaluated_model()
        plain = TorchEvaluation.prediction_step
        learn = partial(plain, self, model, prediction_loss_only=loss_only, ignore_keys=ignore_keys)

        def evaluate(inputs: Any) -> EvalStep:
            self.eval_items(inputs, learn=learn)
            # A training step that evaluates has a micro-batch of its own, which its backward still needs.
            trained, micro = self.run.micro_batch, MicroBatch(Update([inputs]), 0, inputs)
            self.run.micro_batch = micro
            try:
                loss, logits, labels = predict(model, inputs, loss_only, ignore_keys=ignore_keys)
            except Exception as error:  # of the model or the loss; re-raised with a note
                cause = self.internals.loss.explain(error, inputs, "evaluation")
                add_note_of_step(error, self.internals.moment(), describe(inputs), "evaluation", cause=cause)
                raise
            finally:
                self.run.micro_batch = trained
            self.strategy.boundary()
            if type(inputs) is Static:
                logits, labels = self.internals.data.trimmed(inputs, logits, labels)
            samples = count_samples(inputs)
            if isinstance(loss, Tensor) and loss.dim():  # of an override: one loss for each sample
                loss = loss.mean()
            if micro.update.summed is not None:  # the loss was given as (sum, count)
                weight = micro.update.summed
            else:
                loss, weight = self.internals.loss.weighed(loss, inputs, samples)
                weight = self.internals.loss.weight_of_evaluated(inputs, weight)
            return self.finished(inputs, EvalStep(loss, logits, labels, None, weight, samples))

        return evaluate

    def finished(self, inputs: Any, step: EvalStep) -> EvalStep:
        """The step of a batch with what metrics need; callbacks are called for it."""
        if isinstance(self.trainer.compute_metrics, MetricObjects):
            self.trainer.compute_metrics.shifted = self._predicts_next_token()
        if step.logits is not None and self.trainer.preprocess_logits_for_metrics is not None:
            step.logits = self._preprocessed(step.logits, step.labels)
        self.callback_handler.fire("on_prediction_step")
        if self.internals.wants_to_leave:
            raise Interrupted
        if "inputs" in self.args.include_for_metrics:
            step.inputs = self._metric_inputs(inputs)
        return step

    def _preprocessed(self, logits: Any, labels: Any) -> Any:
        assert self.trainer.preprocess_logits_for_metrics is not None
        try:
            return self.trainer.preprocess_logits_for_metrics(logits, labels)
        except Exception as error:  # a function of the user's; re-raised with a note
            given = f"{describe(logits)} and labels {describe(labels)}"
            add_note(error, "preprocess_logits_for_metrics", when=self.internals.moment(), given=given)
            raise

    def looked_at(self, loader: Any) -> Iterator[Any]:
        """The batches of a loader; the first two, and later ones if needed, show how batches are weighted."""
        if (
            not self.is_alone
            or self.args.eval_loss_reduction != "item_mean"
            or is_overridden(self.trainer, "prediction_step")
        ):
            yield from self._loaded(loader)
            return
        batches = self._loaded(loader)
        own = isinstance(loader, ReadAhead)
        first = [batch if own else kept(batch) for batch in islice(batches, 2)]
        if first and self.has_loss(first[0]):
            self.internals.loss.learn_eval_loss(first)
        earlier = [kept(batch) for batch in first[:1]] if self._may_show_more() else []
        yield from first
        first.clear()
        for batch in batches:
            if earlier and not self._may_show_more():
                earlier.clear()
            if earlier and self.has_loss(batch):
                self.internals.loss.learn_from_later(batch, earlier[0])
            yield batch

    def _may_show_more(self) -> bool:
        """Whether the loss has several possible denominators, and a later batch may show which is right."""
        return len(self.internals.loss.accounting_of_evaluation().rivals) > 1

    def _loaded(self, loader: Any) -> Iterator[Any]:
        try:
            yield from each_of(loader)
        except Exception as error:  # dataset and collator may raise anything; re-raised with a note
            add_note_of_loading(error, "evaluation", self.internals.moment())
            raise

    def has_loss(self, inputs: Any) -> bool:
        """Whether evaluation computes a loss for such a batch."""
        if not isinstance(inputs, Mapping):
            return False
        return bool(self.labels_in(inputs)) or self._is_asked_for_loss(inputs)

    def _is_asked_for_loss(self, inputs: Mapping[str, Any]) -> bool:
        """Whether a batch without labels has a loss: `return_loss` of the batch, or of the model's forward."""
        given = inputs.get("return_loss")
        return not self.trainer.label_names and bool(self.trainer.can_return_loss if given is None else given)

    def evaluated_model(self) -> nn.Module:
        """The model in training, or one that replaced it for an evaluation, such as averaged weights."""
        if self.model is not self.strategy.model:
            return self.model
        return self.strategy.unwrap(self.trainer.model_wrapped)  # type: ignore[no-any-return]

    def _predicts_next_token(self) -> bool:
        """Whether a prediction corresponds to the next label."""
        return self.run.accounting.shifts

    def eval_items(self, inputs: Any, learn: Callable[[Any], Any] | None = None) -> Any:
        """The targets of an evaluation batch; with `learn`, the first batch shows which targets the loss counts."""
        return self.internals.loss.eval_items(inputs, learn)

    def _on_device(self, inputs: Any) -> Any:
        """A whole batch where its predictions and labels are, in a container of the same class."""
        if not isinstance(inputs, Mapping) or type(inputs) is dict:
            return self.strategy.put(inputs)
        own: Any = copy(inputs)
        own.update(self.strategy.put(inputs))
        return own

    def _metric_inputs(self, inputs: Any) -> Any:
        """The whole batch if metrics are computed for each; else the main input, or without one all but the labels."""
        is_padded = type(inputs) is Static
        inputs = inputs.real() if is_padded else inputs
        if self.args.batch_eval_metrics:
            return inputs if is_padded else self._on_device(inputs)  # outputs of padded batches are in host memory
        name = getattr(self.model, "main_input_name", "input_ids")
        if not isinstance(inputs, Mapping) or name in inputs:
            return inputs[name] if isinstance(inputs, Mapping) else inputs
        labels = {*LABEL_COLUMNS, *self.trainer.label_names}
        return {name: value for name, value in inputs.items() if name not in labels}

    def prediction_step(
        self,
        model: nn.Module,
        inputs: dict[str, Any],
        prediction_loss_only: bool,
        ignore_keys: list[str] | None = None,
    ) -> tuple[Any, Any, Any]:
        """Loss, logits and labels of one batch."""
        inputs = self.trainer._prepare_inputs(inputs)
        labels = detached(self.labels_of(inputs))  # the loss may remove them from the batch
        with torch.no_grad():
            loss, outputs = self._loss_and_outputs(model, inputs)
        if prediction_loss_only:
            return loss, None, None
        logits = logits_of(outputs, self.ignored_outputs(ignore_keys), None if labels is None else loss)
        return loss, single(detached(logits)), single(labels)

    def labels_of(self, inputs: Any) -> tuple[Any, ...] | None:
        """The labels of a batch; none of them, `()`, if its loss needs no labels, so that metrics are computed."""
        return tuple(inputs[name] for name in self.labels_in(inputs)) if self.has_loss(inputs) else None

    def labels_in(self, inputs: Any) -> list[str]:
        """The labels in a batch: all of the model's label names, or the usual names of labels."""
        if not isinstance(inputs, Mapping):
            return []
        wanted = self.trainer.label_names or [name for name in LABEL_COLUMNS if name in inputs]
        present = [name for name in wanted if inputs.get(name) is not None]
        return present if len(present) == len(wanted) else []

    def _loss_and_outputs(self, model: nn.Module, inputs: dict[str, Any]) -> tuple[Any, Any]:
        if not self.has_loss(inputs):
            with self.trainer.compute_loss_context_manager():
                outputs = model(**self.internals.loss.for_model(inputs))
            loss = outputs.get("loss") if isinstance(outputs, Mapping) else None
            return (loss.detach().mean() if isinstance(loss, Tensor) else None), outputs
        items = self.eval_items(inputs)
        seen: list[Any] = []
        # An override may return only the loss: the outputs are then captured when they leave the model.
        handle = model.register_forward_hook(lambda module, args, output: seen.append(output))
        try:
            with self.trainer.compute_loss_context_manager():
                result = self.internals.loss.called_compute_loss(
                    model, inputs, return_outputs=True, num_items_in_batch=items
                )
        finally:
            handle.remove()
        loss, outputs = self._split_result(result, seen)
        return check_loss(loss).detach(), outputs

    def _split_result(self, result: Any, seen: list[Any]) -> tuple[Any, Any]:
        """(loss, outputs), from any result of the loss computation."""
        last = seen[-1] if seen else None
        loss, outputs = result if isinstance(result, (tuple, list)) and len(result) == 2 else (result, last)
        if isinstance(outputs, (int, float)) or (isinstance(outputs, Tensor) and not outputs.dim()):
            loss, outputs = (loss, outputs), last  # a number is not an output: this is (sum, count)
        if isinstance(loss, (tuple, list)):
            total, count = loss
            self.run.micro_batch.update.summed = count
            loss = total / count
        return loss, outputs

    def ignored_outputs(self, ignore_keys: list[str] | None) -> list[str]:
        if ignore_keys is not None:
            return ignore_keys
        configured = getattr(getattr(self.model, "config", None), "keys_to_ignore_at_inference", None)
        return ["past_key_values"] if configured is None else list(configured)
