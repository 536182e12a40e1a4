"""Evaluation in proved layouts: samples of several batches together, with results in the order of the data."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ...args.names import DebugOption
from ...core.evaluation.loop import EvalPlan, EvalStep
from ...core.evaluation.metric_objects import MetricObjects
from ...core.shutdown.signals import Interrupted
from ...core.update import MicroBatch, Update
from ...core.user_code.overrides import is_overridden
from ...errors import first_line
from ...notices import logger
from ...speed.evaluation.engine import WINDOW_BATCHES, EvaluationEngine
from ...speed.evaluation.evaluation_setup import EvaluationSetup, Forward
from ...speed.evaluation.pieces import Piece
from ...speed.memory.out_of_memory import is_out_of_memory
from ...speed.planner.decision import SpeedPlan
from ..acceleration import KEEP_INPUTS, hooked_module
from ..data.loaders import has_length
from ..devices import copies_while_computing
from ..loss.targets import LossKind, check_loss, count_samples
from ..part import TorchPart
from .host_copies import HostCopy, sent_ahead
from .outputs import logits_of, single
from .read_ahead import ACTS_BETWEEN, acts_between_batches, kept

KEEPS_BATCHES = {
    "prediction_step": "prediction_step is overridden",
    "_get_num_items_in_batch": "_get_num_items_in_batch is overridden",
    **KEEP_INPUTS,
    "autocast_smart_context_manager": "autocast_smart_context_manager is overridden",
}
"""Overrides that see batches or their loss; with one of them, the collator's batches are evaluated."""
KNOWN_KINDS = (LossKind.MEAN, LossKind.SAMPLES, LossKind.TOTAL, LossKind.SCALED)


@dataclass
class Window:
    """Some consecutive batches, and the results of their samples."""

    batches: list[Any]
    losses: list[tuple[Any, Any, int]]
    """Loss, weight and number of samples of each micro-batch."""
    outputs: HostCopy
    """The outputs of all samples, in the order of the data; none if they are not kept."""


class FastEvaluation(TorchPart):
    """Evaluates batches in a layout that is proved to give the same results, and others as they are."""

    def __init__(self, internals: Any) -> None:
        super().__init__(internals)
        self._engines: dict[Any, EvaluationEngine] = {}
        self._kept_reason: str | None = None

    def steps(self, loader: Any, plan: EvalPlan, ignore_keys: list[str] | None) -> Iterator[EvalStep]:
        """The steps of an evaluation, in the order of the data."""
        evaluation, loss_only = self.internals.evaluation, plan.loss_only
        self._kept_reason = self._why_not(plan)
        if self._kept_reason is not None:
            steps = evaluation.eval_steps(loader, loss_only, ignore_keys)
            return sent_ahead(steps) if self._reads_on_host(plan) else steps
        run = _Evaluating(self, self._engine(plan, ignore_keys), plan, ignore_keys)
        steps = run.steps(evaluation.looked_at(loader), _length(loader))
        return sent_ahead(steps) if self._reads_on_host(plan) else steps

    def _reads_on_host(self, plan: EvalPlan) -> bool:
        """Whether predictions are copied to the host batch by batch, and not needed on the device."""
        is_read = plan.keeps_predictions and plan.host_every == 1 and not plan.per_batch_metrics
        return is_read and self.is_alone and copies_while_computing(self.device)

    def forget(self) -> None:
        """Drop all plans, and with them the model they were made for."""
        self._engines.clear()

    def choices(self) -> list[tuple[str, bool, str]]:
        """The rows of the speed report about evaluations."""
        if self._kept_reason is not None:
            return [("evaluation", False, self._kept_reason)]
        return [
            (f"{'predictions' if engine.keeps_outputs else 'evaluation'}: {row.name}", row.is_on, row.reason)
            for engine in self._engines.values()
            for row in engine.plan.choices
        ]

    # ---- whether ----------------------------------------------------------------------------------------------------

    def _why_not(self, plan: EvalPlan) -> str | None:
        """Why the collator's batches are evaluated as they are; None if a layout may be used."""
        args, trainer = self.args, self.trainer
        if args.speed == "off":
            return "speed='off'"
        hooked = hooked_module(self.model)
        overridden = [reason for name, reason in KEEPS_BATCHES.items() if is_overridden(trainer, name)]
        reasons = (
            *((reason, True) for reason in overridden[:1]),
            (f"a hook on {hooked} may read batches", hooked is not None),
            ("compute_loss_func is set and may read the outputs of padded batches", trainer.compute_loss_func),
            (ACTS_BETWEEN, acts_between_batches(self.callback_handler)),
            ("text is generated", not self.internals.evaluation.is_plain(plan.loss_only)),
            ("there is more than one rank", not self.is_alone),
            ("parameters are sharded, which is not supported yet", self.strategy.is_sharded),
            (
                "this device compiles for each shape, so batches keep few shapes",
                self.internals.data.wants_static_shapes(),
            ),
            ("eval_loss_reduction='batch_mean' depends on the batches", not plan.weight_by_items),
            ("include_for_metrics has the loss of each batch", "loss" in plan.include and not plan.loss_only),
            (
                "debug=underflow_overflow checks every module of the model as it is",
                DebugOption.UNDERFLOW_OVERFLOW in args.debug,
            ),
            ("an update is being computed", self.run.speed is not None and self.run.speed.is_installed),
            ("use_liger_kernel replaces the layers that layouts are made for", self.internals.kernels.is_used),
        )
        return next((reason for reason, is_so in reasons if is_so), None)

    def _engine(self, plan: EvalPlan, ignore_keys: list[str] | None) -> EvaluationEngine:
        """The engine of evaluations of this kind of the current model."""
        model, keeps = self.internals.evaluation.evaluated_model(), not plan.loss_only
        kinds = tuple(sorted({str(each.dtype) for each in model.parameters()}))
        inputs = self._inputs(keeps, ignore_keys)
        key = (id(model), keeps, tuple(ignore_keys or ()), kinds, inputs.described())
        known = self._engines.get(key)
        if known is None:
            known = self._engines[key] = EvaluationEngine(
                inputs, announce=self._announce, warn=self._warn, log=logger.info
            )
        known.begin()
        return known

    def _warn(self, text: str) -> None:
        self.notices.warn_once(text)

    def _announce(self, plan: SpeedPlan) -> None:
        if self.args.should_log:
            say = logger.warning if plan.changes_anything else logger.info
            say("\n".join(["speed of evaluations:", *(f"  {line}" for line in plan.lines())]))

    # ---- inputs of the plan -----------------------------------------------------------------------------------------

    def _inputs(self, keeps: bool, ignore_keys: list[str] | None) -> EvaluationSetup:
        training = self.internals.acceleration.training_setup()
        return EvaluationSetup.of(
            training,
            forward_of=lambda inputs, samples: self.forward(inputs, samples, ignore_keys),
            keeps_outputs=keeps,
            learn=self._learn,
            wants_test=lambda batches: self._accounting.disagrees(batches),
            why_not_additive=lambda: self._accounting.reason if self._accounting.is_additive is False else None,
            operations_per_token=training.operations_per_token / 3,
            updates_left=lambda: 1,
            token_budget=None,
        )

    @property
    def _accounting(self) -> Any:
        return self.internals.loss.accounting_of_evaluation()

    def _learn(self, batches: list[Any]) -> bool:
        """Infer the form of the loss; returns whether the loss of batches is composed of those of their samples."""
        evaluation = self.internals.evaluation
        evaluation.eval_items(batches[0], learn=lambda inputs: None)
        if not evaluation.has_loss(batches[0]):
            return True
        self.internals.loss.learn_eval_loss(batches)
        known = self._accounting
        return bool(known.is_additive) and known.kind in KNOWN_KINDS and not known.disagrees(batches)

    def forward(self, inputs: dict[str, Any], samples: int, ignore_keys: list[str] | None) -> Forward:
        """Loss, its weight, and the outputs of inputs on the device that hold this many samples."""
        evaluation, calls = self.internals.evaluation, self.internals.loss
        model = evaluation.evaluated_model()
        given = dict(inputs)
        has_loss = evaluation.has_loss(inputs)
        with torch.no_grad():
            if has_loss:
                items = calls.eval_items(inputs)
                loss, outputs = calls.called_compute_loss(
                    model, inputs, return_outputs=True, num_items_in_batch=items
                )
                loss = check_loss(loss)
            else:
                outputs = model(**calls.for_model(inputs))
                loss = outputs.get("loss") if isinstance(outputs, Mapping) else None
        if loss is not None and loss.dim():
            loss = loss.mean()
        weight: Any = samples
        own = loss if has_loss else None
        if loss is not None:
            loss, weight = calls.weighed(loss, given, samples)
        return Forward(loss, weight, logits_of(outputs, evaluation.ignored_outputs(ignore_keys), own))

    def around(self) -> AbstractContextManager[Any]:
        return self.trainer.compute_loss_context_manager()  # type: ignore[no-any-return]


class _Evaluating:
    """One evaluation, window by window."""

    def __init__(
        self, part: FastEvaluation, engine: EvaluationEngine, plan: EvalPlan, ignore_keys: list[str] | None
    ) -> None:
        self._part, self._engine, self._ignore_keys = part, engine, ignore_keys
        self._internals, self._strategy = part.internals, part.strategy
        self._keeps, self._on_device = not plan.loss_only, self._stays_on_device()
        self._as_collated = self._internals.evaluation.step_of(plan.loss_only, ignore_keys)

    def _stays_on_device(self) -> bool:
        """Whether predictions are needed on the device, by functions of the user."""
        trainer = self._part.trainer
        return (
            trainer.preprocess_logits_for_metrics is not None
            or isinstance(trainer.compute_metrics, MetricObjects)
            or self._part.args.batch_eval_metrics
        )

    def steps(self, batches: Iterator[Any], total: int | None) -> Iterator[EvalStep]:
        """The steps of all batches; a window is launched before the results of the one before it are read."""
        waiting: Window | None = None
        for window in self._windows(batches, total):
            found = self._laid_out(window, _times(window, total))
            if waiting is not None:
                yield from self._steps_of(waiting)
            waiting = found
            if found is None:
                for batch in window:
                    yield self._as_collated(batch)
        if waiting is not None:
            yield from self._steps_of(waiting)

    def _windows(self, batches: Iterator[Any], total: int | None) -> Iterator[list[Any]]:
        """Batches to lay out together; single ones as long as that is not known to pay off."""
        window: list[Any] = []
        seen = tokens = 0
        for batch in batches:
            seen, tokens = seen + 1, tokens + _padded(batch)
            pays = self._engine.pays(tokens if total is None else tokens * max(1.0, total / seen))
            window.append(kept(batch) if pays else batch)
            size = sum(map(_padded, window))
            if pays and size < self._engine.window_tokens and len(window) < WINDOW_BATCHES:
                continue
            yield window
            window = []
        if window:
            yield window

    def _laid_out(self, batches: list[Any], times: float) -> Window | None:
        """The results of a window in the plan's layout; None if it is to be evaluated as collated."""
        if not all(isinstance(batch, Mapping) for batch in batches):
            self._engine.switch_off("the batches are not dicts")
            return None
        while True:
            pieces = self._engine.arrange(batches, times)
            if pieces is None:
                return None
            try:
                return self._run(batches, pieces)
            except Interrupted:
                raise
            except Exception as error:  # of the model; the collator's batches show whether it is the user's
                if not is_out_of_memory(error):
                    self._engine.switch_off(f"{type(error).__name__}: {first_line(error)[:120]}")
                    return None
            self._strategy.free_memory()
            if not self._engine.halve(batches):
                self._engine.switch_off("memory ran out")
                return None

    def _run(self, batches: list[Any], pieces: list[Piece]) -> Window:
        losses: list[tuple[Any, Any, int]] = []
        outputs: list[tuple[Any, ...]] = []
        host = [dict(piece) for piece in pieces]
        self._strategy.begin_update(Update(host))
        run, trained = self._part.run, self._part.run.micro_batch
        try:
            with self._engine.active():
                for piece, batch in zip(pieces, host, strict=True):
                    if self._internals.wants_to_leave:
                        raise Interrupted
                    run.micro_batch = MicroBatch(Update([batch]), 0, batch)
                    found = self._forward(piece, batch)
                    losses.append((found.loss, found.weight, len(piece.members)))
                    outputs.append(found.outputs if self._keeps else ())
                    del found
        finally:
            run.micro_batch = trained
        joined = self._in_order(pieces, outputs) if self._keeps else []
        return Window(batches, losses, HostCopy(tuple(joined), moves=not self._on_device))

    def _forward(self, piece: Piece, batch: dict[str, Any]) -> Forward:
        """The forward of a piece; the weight of its loss is counted on the host."""
        with self._part.around():
            found = self._part.forward(self._engine.inputs_of(piece, batch), len(piece.members), self._ignore_keys)
        if found.loss is None:
            return found
        weight = self._internals.loss.weighed(found.loss, batch, len(piece.members))[1]
        return found._replace(weight=self._internals.loss.weight_of_evaluated(batch, weight))

    def _in_order(self, pieces: list[Piece], outputs: list[tuple[Any, ...]]) -> list[Tensor]:
        """The outputs of all samples in the order of the data."""
        members = np.concatenate([piece.members for piece in pieces])
        places = torch.from_numpy(np.argsort(members, kind="stable")).to(self._part.device, non_blocking=True)
        for piece, each in zip(pieces, outputs, strict=True):
            for mine, first in zip(each, outputs[0], strict=True):
                if mine.shape[:1] != (len(piece.members),) or mine.shape[1:] != first.shape[1:]:
                    raise ValueError(f"an output has the shape {tuple(mine.shape)}, which depends on the batch")
        return [torch.cat(parts).index_select(0, places) for parts in zip(*outputs, strict=True)]

    def _steps_of(self, window: Window) -> Iterator[EvalStep]:
        """The losses of a window's micro-batches, then the predictions and labels of each of its batches."""
        for loss, weight, _ in window.losses:
            yield EvalStep(loss, None, None, None, weight, 0)
        evaluation, outputs, first = self._internals.evaluation, window.outputs.result(), 0
        for batch in window.batches:
            samples = count_samples(batch)
            logits, labels = None, None
            if self._keeps:
                logits = single(tuple(each[first : first + samples] for each in outputs))
                given = evaluation.labels_of(batch)
                labels = single(self._strategy.put(given) if self._on_device else given)
            first += samples
            yield evaluation.finished(batch, EvalStep(None, logits, labels, None, 0, samples))


def _padded(batch: Any) -> int:
    ids = batch.get("input_ids") if isinstance(batch, Mapping) else None
    return ids.numel() if isinstance(ids, Tensor) else 0


def _length(loader: Any) -> int | None:
    return len(loader) if has_length(loader) else None


def _times(window: list[Any], total: int | None) -> float:
    return 1.0 if total is None else max(1.0, total / len(window))

