"""The trainer's methods that infer the properties of its loss, in training and in evaluation."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import nn

from ...core.evaluation.loop import UndecidedWeight
from ...core.measure.ledger import PROVING
from ...core.part import LossPart
from ...core.user_code.overrides import accepts, is_overridden, reaches_ours
from ...speed.memory.out_of_memory import is_out_of_memory
from ...speed.proof.audit import is_turn
from ...speed.users_loss import users_loss_of
from ..data.columns import innermost
from ..devices import is_lazy
from ..part import TorchPart
from ..precision import Autocast
from ..restoring.kept_state import first_iterator, iterator_of_loss
from ..restoring.sandbox import sandbox
from .accounting import LossAccounting
from .denominator import SAMPLES, Denominator
from .find import find_loss
from .messages import MAY_BE_EITHER
from .probe import LossProbe
from .splitter import BatchSplitter
from .targets import USES_ITEMS, LossKind, is_mean_over_samples, predicts_next_token


class LossLearning(TorchPart, LossPart):
    """Tests the loss if an update or an evaluation has several parts."""

    splitter: BatchSplitter
    called_compute_loss: Callable[..., Any]
    for_model: Callable[..., Any]
    _items_overridden: bool
    forward_takes: list[str] | None

    def has_custom_loss(self) -> bool:
        """Whether the loss is user-defined: `compute_loss` is overridden, or `compute_loss_func` was given."""
        return is_overridden(self.trainer, "compute_loss") or self.trainer.compute_loss_func is not None

    # ---- accounting -------------------------------------------------------------------------------------------------

    def make_accounting(self) -> LossAccounting:
        """The accounting of the loss, with the properties known before it is computed."""
        has_custom_step = is_overridden(self.trainer, "training_step")
        has_custom_loss = self.has_custom_loss()
        kind = None
        if self.trainer.loss_is_scaled_for_ga is not None:
            kind = LossKind.SCALED if self.trainer.loss_is_scaled_for_ga else LossKind.MEAN
        elif has_custom_step and not reaches_ours(self.trainer, "training_step"):
            kind = LossKind.SCALED  # a step that does not call loopwright's divides its loss itself
        elif self.trainer.label_smoother is not None and not has_custom_loss:
            kind = LossKind.SCALED
        loss_function = (
            self.trainer.compute_loss if is_overridden(self.trainer, "compute_loss") else self.trainer.compute_loss_func
        )
        is_of_transformers = not has_custom_loss and _has_loss_of_transformers(innermost(self.model))
        # On a lazy device a test would add a graph; the losses of transformers' models are known.
        known = is_lazy(self.device) and not has_custom_loss and hasattr(innermost(self.model), "loss_function")
        self._eval_accounting = None
        accounting = LossAccounting(
            self.trainer.label_names,
            guessed_shift=predicts_next_token(self.model),
            shift=predicts_next_token(self.model) if known else None,
            kind=kind,
            wants_items=has_custom_step or (loss_function is not None and accepts(loss_function, "num_items_in_batch")),
            accepts_items=self.trainer.model_accepts_loss_kwargs
            or (loss_function is not None and accepts(loss_function, "num_items_in_batch")),
            is_trusted=is_of_transformers or (self.trainer.label_smoother is not None and not has_custom_loss),
            padding=self.internals.data.padding_token(),
        )
        accounting.may_compare = not is_lazy(self.device)
        accounting.may_pad_labels = self.device.type == "cpu" or is_of_transformers
        if is_of_transformers and kind is None and is_mean_over_samples(innermost(self.model)):
            accounting.record_mean_over_samples()
        return accounting

    def make_splitter(self) -> BatchSplitter:
        config = getattr(innermost(self.model), "config", None)
        token = getattr(config, "image_token_id", getattr(config, "image_token_index", None))
        return BatchSplitter(
            self.trainer.label_names,
            image_token=token,
            # Models with two towers, such as CLIP, encode text and image separately; others may have images in the
            # text.
            has_images_in_text=token is not None
            or not (hasattr(config, "text_config") and hasattr(config, "vision_config")),
            two_samples=self._batches_of_two,
        )

    def _batches_of_two(self) -> tuple[Any, Any, Any] | None:
        """Batches of one training sample, of another and of both, to find per-sample entries; None if that fails."""
        data = self.trainer.eval_dataset if self.trainer.train_dataset is None else self.internals.data.training_data()
        if data is None or not hasattr(data, "__getitem__"):
            return None
        try:
            with sandbox(self.model, self.trainer):
                collate = self.trainer._get_collator_with_removed_columns(self.trainer.data_collator)
                pair = [data[0], data[1]]
                return collate(pair[:1]), collate(pair[1:]), collate(pair)
        except Exception:  # a dataset may lack these indices, a collator may need more samples
            return None

    def _must_know_shift(self) -> bool:
        accounting = self.run.accounting
        wanted = accounting.wants_items or self._items_overridden
        return wanted and accounting.undecided_shift and not accounting.is_claimed and self._why_not_tried() is None

    def _why_not_tried(self) -> str | None:
        """Why the loss must not be computed as a test; None if it may be."""
        if not self.has_custom_loss():
            return None
        drawn = first_iterator(self.trainer)
        if drawn is not None:
            return f"the trainer's {drawn!r} is an iterator, and testing would consume it"
        kind = iterator_of_loss(self.trainer)
        return None if kind is None else f"it uses an iterator ({kind}), and testing would consume it"

    def _inputs_are_made_from(self, batches: Any) -> bool:
        """Whether `_prepare_inputs` turns lists of samples into inputs: it may generate them."""
        is_list = type(batches) is list and not any(isinstance(batch, Mapping) for batch in batches)
        return is_list and is_overridden(self.trainer, "_prepare_inputs")

    def _look_at_empty(self, batches: list[Any]) -> bool:
        """Whether a micro-batch without items has a loss, so that items are not its denominator."""
        empty = self.run.accounting.empty_in(batches)
        for batch in empty if empty and self._why_not_tried() is None else []:
            try:
                found = self.probe(with_gradients=False).measure(batch, 1)
            except Exception as error:  # a user's loss may refuse a batch without targets
                if is_out_of_memory(error):
                    raise
                continue  # it has no loss
            if found.is_defined and found.value:
                self.run.accounting.record_loss_without_items()
                self._report_trouble()
                return True
        return False

    def learn_loss(self, batches: Any, *, reports: bool = True) -> bool:
        """Infer the properties of the loss; returns whether they are known and the loss is additive."""
        accounting = self.run.accounting
        reason = self._why_not_tried()
        if reason is not None:
            accounting.give_up(reason)
        elif self._inputs_are_made_from(batches):
            accounting.record_loss_without_items()
            accounting.give_up("_prepare_inputs makes the model's inputs from samples, and a test would do it again")
        elif accounting.is_open or len(accounting.rivals) > 1 or accounting.is_additive is None:
            accounting.learn_from_all(batches, self.probe(), self.splitter)
            if self.args.gradient_accumulation_steps > 1 and self.has_custom_loss():
                first = batches[0] if type(batches) is list else batches
                accounting.learn_division(first, self.probe(), self._said_to_accumulate)
            # From now on num_items_in_batch is passed only to a model whose loss depends on it.
            self.trainer.model_accepts_loss_kwargs &= accounting.kind in USES_ITEMS or self.has_custom_loss()
        elif accounting.kind is LossKind.SCALED:
            accounting.learn_shift(batches[0] if type(batches) is list else batches, self.shift_probe())
        normed = any(getattr(module, "track_running_stats", False) for module in self.model.modules())
        if accounting.is_additive is False and normed and "running" not in accounting.reason:
            accounting.reason += " (the model keeps running statistics of its batches)"
        if reports:
            self._report_trouble()
        return self.is_additive()

    def _is_recheck_due(self) -> bool:
        """Whether a custom loss is tested again in this update; uses the updates that are audited for speed.

        A part of it may have been zero so far, such as a penalty on the distance to the initial model, or an annealed
        term.
        """
        accounting, update = self.run.accounting, self.state.global_step + 1
        is_turn_of_it = is_turn(update, is_small=True) or update <= accounting.watched_until
        if not (is_turn_of_it or accounting.is_postponed) or accounting.is_additive is not True:
            return False
        is_custom = self.has_custom_loss() or not accounting.is_trusted
        return is_custom and accounting.may_compare and not accounting.is_claimed

    def _check_loss_again(self, batches: list[Any], *, after_change: bool) -> None:
        """Infer the denominator again; unless the model was changed, only a contradiction changes the result."""
        before, known = self.run.accounting, (self.trainer.model_accepts_loss_kwargs, self._eval_accounting)
        self.run.accounting = now = self.make_accounting()
        self.learn_loss(batches, reports=False)
        if not after_change and not _contradicts(now, before):
            self.run.accounting = before
            self.trainer.model_accepts_loss_kwargs, self._eval_accounting = known
            return
        now.keep_weights_of(before)
        now.watched_until = before.watched_until
        if not after_change:
            now.record_change(before, self.state.global_step + 1)
        self._report_trouble()

    def is_additive(self) -> bool:
        return self.run.accounting.kind is not None and self.run.accounting.is_additive is True

    def _report_trouble(self) -> None:
        trouble, self.run.accounting.trouble = self.run.accounting.trouble, None
        if trouble is not None:
            self.notices.warn_once(trouble)

    @contextmanager
    def _said_to_accumulate(self, *, arguments: int = 1, update: int = 1) -> Iterator[None]:
        """Report a multiple of the accumulation in the arguments or the update, for a loss that may divide by it."""
        args, steps, current = self.args, self.args.gradient_accumulation_steps, self.run.micro_batches
        object.__setattr__(args, "gradient_accumulation_steps", arguments * steps)
        self.run.micro_batches = update * steps
        try:
            yield
        finally:
            object.__setattr__(args, "gradient_accumulation_steps", steps)
            self.run.micro_batches = current

    # ---- evaluation -------------------------------------------------------------------------------------------------

    _eval_accounting: LossAccounting | None = None

    def eval_items(self, inputs: Any, learn: Callable[[Any], Any] | None = None) -> Any:
        unknown = learn is not None and self.run.accounting.undecided_shift and self.is_alone
        if unknown and self.internals.evaluation.labels_in(inputs) and self._why_not_tried() is None:
            self.run.accounting.learn_shift(inputs, self.shift_probe(learn if is_lazy(self.device) else None))
        return self.run.accounting.items_in(inputs)

    def accounting_of_evaluation(self) -> LossAccounting:
        """The accounting of training if it is sufficient; otherwise a separate one for evaluation."""
        known = self.run.accounting
        if not known.may_compare or (known.is_additive and known.kind is not None):
            return known
        if self._eval_accounting is None:
            self._eval_accounting = self._make_eval_accounting()
        return self._eval_accounting

    def _make_eval_accounting(self) -> LossAccounting:
        own = self.run.accounting
        made = LossAccounting(
            self.trainer.label_names,
            guessed_shift=own.shifts,
            shift=None if own.undecided_shift else own.shifts,
            accepts_items=own.accepts_items,
            is_trusted=own.is_trusted,
            padding=self.internals.data.padding_token(),
        )
        made.may_compare, made.may_pad_labels = own.may_compare, own.may_pad_labels
        return made

    def learn_eval_loss(self, batches: list[Any]) -> None:
        """Infer the properties of the evaluation loss, if its batches have to be weighted."""
        accounting = self.accounting_of_evaluation()
        if not accounting.may_compare or not accounting.wants_test(batches):
            return
        if self._why_not_tried() is not None or self._inputs_are_made_from(batches):
            return
        accounting.learn_from_all(batches, self.probe(with_gradients=False), self.splitter)
        accounting.trouble = None
        if accounting.kind is LossKind.OTHER or accounting.is_additive is False:
            self.notices.warn_once(
                "eval_loss depends on per_device_eval_batch_size: the loss of a batch is neither the mean nor the "
                f"sum of the losses of its parts. Batches are weighted by {accounting.denominator.described()}; "
                "return (sum, count) from compute_loss to be exact"
            )
        elif accounting.kind is LossKind.TOTAL:
            self.notices.warn_once(
                "the loss is a sum over its batch: eval_loss is the total divided by the number of samples"
            )

    def learn_from_later(self, batch: Any, first: Any) -> None:
        """Infer the denominator of the evaluation loss again, if it makes a difference in this batch."""
        accounting = self.accounting_of_evaluation()
        if self._report_undecided(accounting, batch, warns=accounting.is_settled):
            self.learn_eval_loss([batch, first])
            self._report_undecided(self.accounting_of_evaluation(), batch)

    def _report_undecided(self, accounting: LossAccounting, batch: Any, *, warns: bool = True) -> bool:
        """Whether possible denominators of the loss weight a batch differently; warns that the first is assumed."""
        possible = accounting.rivals
        is_so = accounting.disagrees([batch]) or len(accounting.rivals) < len(possible)
        if is_so and warns:
            accounting.trouble = None
            self.notices.warn_once("eval_loss: " + MAY_BE_EITHER.format(*(by.described() for by in possible[:2])))
        return is_so

    def weight_of_evaluated(self, inputs: Any, weight: Any) -> Any:
        """The weight of a batch's mean loss; if later batches may show another denominator, its weight by each."""
        accounting = self.accounting_of_evaluation()
        if len(accounting.rivals) < 2:
            return weight
        if not self.is_alone:
            self._report_undecided(accounting, inputs)
            return weight
        counts = {by: by.count(inputs, self.trainer.label_names) for by in (*accounting.rivals, Denominator(SAMPLES))}
        if not all(isinstance(count, int) for count in (weight, *counts.values())):
            return weight
        return UndecidedWeight(counts, weight, self._eval_denominator)

    def _eval_denominator(self) -> Denominator:
        return self.accounting_of_evaluation().denominator

    def weighed(self, loss: Any, inputs: Any, samples: int) -> tuple[Any, Any]:
        """A batch's mean loss, and its weight."""
        accounting = self.accounting_of_evaluation()
        if accounting.kind is LossKind.TOTAL:
            return (None if loss is None else loss / samples), samples
        if accounting.kind is None or not accounting.rivals or accounting.denominator.is_usual:
            items = accounting.items_in(inputs)
            return loss, samples if items is None else items
        return loss, accounting.weight_in(inputs)

    def probe(self, step: Callable[[Any], Any] | None = None, *, with_gradients: bool = True) -> LossProbe:
        """A probe of the loss as in training or, with `step`, of an evaluation step, whose graph is needed anyway."""

        def compute(inputs: dict[str, Any], items: Any) -> Any:
            self.internals.is_probing = True  # logs of overrides here belong to no update
            try:
                if step is not None:
                    outputs = step(inputs)  # all outputs are kept until the graph is built, as in an evaluation
                    self.strategy.boundary()
                    return outputs[0].cpu()
                inputs = self.trainer._prepare_inputs(inputs)
                as_written = self.internals.acceleration.as_written()
                with self.trainer.compute_loss_context_manager(), self._in_full(probe), as_written:
                    model = self.strategy.unwrap(self.trainer.model_wrapped)
                    return self.called_compute_loss(model, inputs, num_items_in_batch=items)
            finally:
                self.internals.is_probing = False

        # Gradients of shards are reduced during the backward, which is only valid in training.
        with_gradients = with_gradients and not self.strategy.is_sharded and not is_lazy(self.device)
        probe = LossProbe(compute, self.model, trainer=self.trainer, with_gradients=with_gradients)
        probe.may_leave_half = isinstance(self.strategy.precision, Autocast)
        probe.measured = lambda: self.run.ledger.during(PROVING)
        return probe

    def _in_full(self, probe: LossProbe) -> AbstractContextManager[Any]:
        """A context without autocast for comparisons: half precision would hide small differences."""
        return torch.autocast(self.device.type, enabled=False) if probe.may_leave_half else nullcontext()

    def shift_probe(self, step: Callable[[Any], Any] | None = None) -> LossProbe:
        """A probe for the shift; with label smoothing, which shifts like the model's own loss, of the model's loss."""
        if self.trainer.label_smoother is None or self.has_custom_loss() or "labels" not in (self.forward_takes or ()):
            return self.probe(step)

        def compute(inputs: dict[str, Any], items: Any) -> Any:
            inputs = self.trainer._prepare_inputs(inputs)
            with self.trainer.compute_loss_context_manager(), self.internals.acceleration.as_written():
                loss = find_loss(self.strategy.unwrap(self.trainer.model_wrapped)(**self.for_model(inputs)))
            return torch.zeros(()) if loss is None else loss  # without a loss it is not informative

        return LossProbe(compute, self.model, trainer=self.trainer)


def _contradicts(now: LossAccounting, before: LossAccounting) -> bool:
    """Whether the second inference contradicts the first one."""
    if now.is_additive is not True or not now.rivals:
        return now.is_additive is False
    return bool(before.rivals) and not set(now.rivals) & set(before.rivals)


def _has_loss_of_transformers(model: nn.Module) -> bool:
    """Whether the model's loss is a function of transformers that was not replaced."""
    return type(model).__module__.startswith("transformers.") and users_loss_of(model) is None
