"""The trainer's methods around the loss: forward, backward, and who divides by what."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from ..args.places import working_folder
from ..core.batches import Update
from ..core.overrides import accepts, adapt, is_overridden, reaches_ours
from ..core.signals import Interrupted
from .accounting import ARGUMENTS, LossAccounting
from .columns import LABEL_COLUMNS, innermost
from .data import DataMethods
from .devices import is_lazy
from .evaluating import EvaluationMethods
from .incident import write_incident
from .loss import LabelSmoother, LossKind, check_has_gradient, count_samples, predicts_next_token
from .loss_stamp import stamp_of
from .oom import is_out_of_memory, run_or_halve
from .outputs import decodes_from_labels, find_loss, loss_in
from .precision import Autocast
from .probing import LossProbe
from .sandbox import first_iterator, sandbox
from .speeding import SpeedMethods
from .splitting import BatchSplitter, CannotSplit


class LossMethods(SpeedMethods, DataMethods, EvaluationMethods):
    """Forward and backward of micro-batches; every public method may be overridden."""

    args: Any
    strategy: Any
    device: torch.device
    accounting: LossAccounting
    label_names: list[str]
    label_smoother: LabelSmoother | None
    compute_loss_func: Callable[..., Any] | None
    model_accepts_loss_kwargs: bool
    loss_is_scaled_for_ga: bool | None
    micro_split: int
    _micro_batches: int | None = None
    """How many the current update has; None before the first."""
    _loss_function: Callable[..., Any]
    """compute_loss_func with the arguments it takes."""
    work: Any
    _forward_takes: list[str] | None
    _forward_takes_any: bool
    splitter: BatchSplitter

    # ---- loss -------------------------------------------------------------------------------------------------------

    def training_step(self, model: nn.Module, inputs: dict[str, Any], num_items_in_batch: Any = None) -> Tensor:
        """Forward and backward of one micro-batch; returns its share of the update's loss."""
        self.strategy.training()
        if not model.training:  # what the model is wrapped in
            model.train()
        inputs = self._prepare_inputs(inputs)
        with self.compute_loss_context_manager():
            loss = self._compute_loss(model, inputs, num_items_in_batch=num_items_in_batch)
        loss = self.accounting.weigh(loss)
        try:
            self.strategy.backward(loss)
        except RuntimeError:
            check_has_gradient(loss)
            raise
        return loss.detach()

    def compute_loss(
        self, model: nn.Module, inputs: dict[str, Any], return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        """The loss of a batch: the model's own, or that of `compute_loss_func` or label smoothing.

        An override may return the mean over its targets, or `(sum, count)` to be exact in every case.
        """
        if self.compute_loss_func is None and self.label_smoother is None:
            outputs = model(**self._for_model(inputs, num_items_in_batch))
            loss = outputs["loss"] if type(outputs) is dict and "loss" in outputs else None
            loss = loss_in(outputs, inputs) if loss is None else loss
        else:
            labels = inputs.get("labels") if decodes_from_labels(model, inputs) else inputs.pop("labels", None)
            outputs = model(**self._for_model(inputs))
            loss = self._loss_from(outputs, labels, num_items_in_batch)
        return (loss, outputs) if return_outputs else loss

    def _loss_from(self, outputs: Any, labels: Any, num_items_in_batch: Any) -> Any:
        if self.compute_loss_func is not None:
            return self._loss_function(outputs, labels, num_items_in_batch=num_items_in_batch)
        if labels is None:
            return loss_in(outputs, {})
        assert self.label_smoother is not None
        return self.label_smoother(
            outputs, labels, shift_labels=self.accounting.shifts, num_items_in_batch=num_items_in_batch
        )

    def _for_model(self, inputs: Mapping[str, Any], num_items_in_batch: Any = None) -> Mapping[str, Any]:
        """The inputs the forward takes: labels only if it names them, the item count only if it uses it."""
        takes = self._forward_takes
        if takes is not None and not self._forward_takes_any:
            for label in LABEL_COLUMNS:  # a plain loop: this runs for every micro-batch, and a comprehension is a call
                if label in inputs and label not in takes:
                    inputs = {name: value for name, value in inputs.items() if name != label}
        if num_items_in_batch is not None and self.model_accepts_loss_kwargs:
            return {**inputs, "num_items_in_batch": num_items_in_batch}
        return inputs

    def compute_loss_context_manager(self) -> AbstractContextManager[Any]:
        """Around forward and loss: autocast, and whatever a subclass adds."""
        return self.autocast_smart_context_manager() if self._autocast_is_theirs else self.strategy.forward_context()

    def autocast_smart_context_manager(self, cache_enabled: bool | None = True) -> AbstractContextManager[Any]:
        return self.strategy.forward_context()

    def _prepare_inputs(self, inputs: Any) -> Any:
        """The batch on the device, in a container of its own."""
        return self._prepare_input(inputs) if self._input_is_theirs else self.strategy.put(inputs)

    def _prepare_input(self, data: Any) -> Any:
        return self.strategy.put(data)

    def _bind_overrides(self) -> None:
        """Look at the user's methods once, so that calling them costs nothing per step."""
        self._training_step = adapt(self.training_step, "num_items_in_batch")
        self._compute_loss = self._bound_compute_loss()
        if self.compute_loss_func is not None:
            self._loss_function = adapt(self.compute_loss_func, "num_items_in_batch")
        self._input_is_theirs = is_overridden(self, "_prepare_input")
        self._autocast_is_theirs = is_overridden(self, "autocast_smart_context_manager")
        self._items_are_theirs = is_overridden(self, "_get_num_items_in_batch")

    def _follow_loss(self) -> None:
        """Go over to methods or a loss that were assigned: what is known about the loss is found out again."""
        self.accounting = self._make_accounting()
        self._bind_overrides()
        if self._speed is not None:
            self._speed.finish()
            self.notices.tell_once(
                f"a method of the trainer or its loss was replaced after step {self.state.global_step}: what is done "
                "about speed is decided again"
            )
            # Several processes would have to decide together, and only those where it was replaced come here.
            self._speed = self._start_speed() if self.is_alone else None

    def _bound_compute_loss(self) -> Callable[..., Any]:
        """compute_loss with the arguments it takes; an override runs with the device as torch's default."""
        function = adapt(self.compute_loss, "num_items_in_batch", "return_outputs")
        if self.device.type == "cpu" or not is_overridden(self, "compute_loss"):
            return function

        def on_device(*args: Any, **kwargs: Any) -> Any:
            with self.device:  # torch.tensor([...]) of class weights lands where the logits are
                return function(*args, **kwargs)

        return on_device

    # ---- accounting -------------------------------------------------------------------------------------------------

    def _make_accounting(self) -> LossAccounting:
        """Who is told how many items an update has, and what is known about the loss beforehand."""
        step_is_theirs = is_overridden(self, "training_step")
        loss_is_theirs = is_overridden(self, "compute_loss") or self.compute_loss_func is not None
        kind = None
        if self.loss_is_scaled_for_ga is not None:
            kind = LossKind.SCALED if self.loss_is_scaled_for_ga else LossKind.MEAN
        elif step_is_theirs and not reaches_ours(self, "training_step"):
            kind = LossKind.SCALED  # what they do with a loss is theirs, and so is dividing it
        elif self.label_smoother is not None and not loss_is_theirs:
            kind = LossKind.SCALED
        told = self.compute_loss if is_overridden(self, "compute_loss") else self.compute_loss_func
        is_of_transformers = not loss_is_theirs and _has_loss_of_transformers(innermost(self.model))
        # On a lazy device finding out is a graph more; the losses of transformers' own models are known.
        known = is_lazy(self.device) and not loss_is_theirs and hasattr(innermost(self.model), "loss_function")
        self._eval_accounting = None
        accounting = LossAccounting(
            self.label_names,
            guessed_shift=predicts_next_token(self.model),
            shift=predicts_next_token(self.model) if known else None,
            kind=kind,
            wants_items=step_is_theirs or (told is not None and accepts(told, "num_items_in_batch")),
            tells_items=self.model_accepts_loss_kwargs or (told is not None and accepts(told, "num_items_in_batch")),
            is_trusted=is_of_transformers or (self.label_smoother is not None and not loss_is_theirs),
            padding=self._padding_token(),
        )
        accounting.may_compare = not is_lazy(self.device)
        accounting.may_pad_labels = self.device.type == "cpu" or is_of_transformers
        return accounting

    def _make_splitter(self) -> BatchSplitter:
        config = getattr(innermost(self.model), "config", None)
        token = getattr(config, "image_token_id", getattr(config, "image_token_index", None))
        return BatchSplitter(self.label_names, image_token=token, one_sample=self._batch_of_one)

    def _batch_of_one(self) -> Any:
        """A batch of one training sample, to see what goes by samples; None where samples cannot be picked."""
        if self.train_dataset is None or not hasattr(self.train_dataset, "__getitem__"):
            return None
        try:
            with sandbox(self.model, self):
                return self._get_collator_with_removed_columns(self.data_collator)([self.train_dataset[0]])
        except Exception:  # a dataset may have no sample of that name, a collator may want more than one
            return None

    def make_update(self, batches: list[Any]) -> Update:
        """Count targets and samples on the host, before the batches travel."""
        update = Update(batches, samples=self._samples_in(batches), micro_batches=len(batches))
        if self.work.counts:
            self.work.measure(update)
        if self.label_smoother is not None and self.is_alone:
            self.accounting.learn_shift(batches[0], self._shift_probe())
        if len(self.accounting.rivals) > 1 and self.is_alone and self.accounting.disagrees(batches):
            self._learn_loss(batches)  # as they were made: laid out anew they tell less
        speed = None if self._speed is None or self._speed.is_idle else self._speed
        if speed is not None and speed.is_active and self.accounting.is_additive is False:
            self._leave_layouts()
            speed = None
        if speed is not None:
            speed.arrange(update)
        if self.micro_split > 1 and not (speed is not None and speed.is_laid):  # rows are made shorter, not cut
            update.batches = self._cut(update.batches, self.micro_split)
        needs_items = self.accounting.wants_items or self._items_are_theirs or (speed is not None and speed.is_active)
        if needs_items or len(update.batches) > 1 or not self.is_alone:
            self._count(update)
        return update

    def _leave_layouts(self) -> None:
        """The loss turned out to be one whose batches may not be laid out anew."""
        self.notices.tell_once(f"speed: from here on micro-batches stay as they are made: {self.accounting.reason}")
        assert self._speed is not None
        self._speed.finish()
        self._speed = None

    def _cut(self, batches: list[Any], parts: int) -> list[Any]:
        """Micro-batches in so many parts each; those that cannot be cut without a doubt stay whole."""
        pieces = []
        for batch in batches:
            try:
                pieces += self.splitter.split_all([batch], parts)
            except CannotSplit as reason:
                self.notices.tell_once(f"a micro-batch is not cut although memory is short: {reason}")
                pieces.append(batch)
        return pieces

    def _count(self, update: Update) -> None:
        # Batches that are laid out anew tell less than those they were made of: the one who lays them out asks those.
        as_made = self._speed is None or not self._speed.is_active
        has_parts = len(update.batches) > 1
        if self.is_alone and as_made and has_parts and self.accounting.wants_look(update.batches):
            self._learn_loss(update.batches)
        elif self.is_alone and as_made and self._must_know_shift():
            self.accounting.learn_shift(update.batches[0], self._probe())  # for whoever is told the items
        if self.is_alone and has_parts:
            self._look_at_empty(update.batches)
            self._tell_trouble()
        self._count_items(update)
        if self._items_are_theirs and self.accounting.kind is LossKind.SCALED:
            update.total_items = self._get_num_items_in_batch(update.batches, self.device)

    def _count_items(self, update: Update) -> None:
        """Count what the loss is divided by, and note what it has been divided by already."""
        self.accounting.count(update)
        if self.accounting.divides is not None:
            from_arguments = self.accounting.divides == ARGUMENTS
            update.factor = float(self.args.gradient_accumulation_steps if from_arguments else len(update.batches))

    def _must_know_shift(self) -> bool:
        accounting = self.accounting
        wanted = accounting.wants_items or self._items_are_theirs
        return wanted and accounting.undecided_shift and not accounting.is_claimed and self._why_not_tried() is None

    def _why_not_tried(self) -> str | None:
        """Why the loss may not be computed just to see what it is."""
        drawn = first_iterator(self) if self._loss_is_theirs() else None
        if drawn is None:
            return None
        return f"the trainer's {drawn!r} is an iterator, and what would be drawn from it is gone"

    def _look_at_empty(self, batches: list[Any]) -> bool:
        """Whether a micro-batch without items has a loss all the same: then items are not what it is the mean of."""
        empty = self.accounting.empty_in(batches)
        for batch in empty if empty and self._why_not_tried() is None else []:
            try:
                found = self._probe(with_gradients=False).measure(batch, 1)
            except Exception as error:
                if is_out_of_memory(error):
                    raise
                continue  # it has no loss
            if found.is_defined and found.value:
                self.accounting.sees_loss_without_items()
                self._tell_trouble()
                return True
        return False

    def _learn_loss(self, batches: Any) -> bool:
        """Find out what the loss is and whether it shifts; returns whether that is known, and the loss additive."""
        accounting = self.accounting
        reason = self._why_not_tried()
        if reason is not None:
            accounting.give_up(reason)
        elif accounting.is_open or len(accounting.rivals) > 1 or accounting.is_additive is None:
            accounting.learn(batches, self._probe(), self.splitter)
            if self.args.gradient_accumulation_steps > 1 and self._loss_is_theirs():
                first = batches[0] if type(batches) is list else batches
                accounting.learn_division(first, self._probe(), self._said_to_accumulate)
            # Only a model whose loss really changes with the item count is told it from now on.
            told = (LossKind.SCALED, LossKind.MIXED, None)
            self.model_accepts_loss_kwargs &= accounting.kind in told or self._loss_is_theirs()
        elif accounting.kind is LossKind.SCALED:
            accounting.learn_shift(batches[0] if type(batches) is list else batches, self._shift_probe())
        self._tell_trouble()
        return self._loss_is_additive()

    def _loss_is_additive(self) -> bool:
        return self.accounting.kind is not None and self.accounting.is_additive is True

    def _tell_trouble(self) -> None:
        trouble, self.accounting.trouble = self.accounting.trouble, None
        if trouble is not None:
            self.notices.tell_once(trouble)

    @contextmanager
    def _said_to_accumulate(self, *, arguments: int = 1, update: int = 1) -> Iterator[None]:
        """Around a loss that may divide by the accumulation itself: so many times what it is, where it may look."""
        args, steps, current = self.args, self.args.gradient_accumulation_steps, self._micro_batches
        object.__setattr__(args, "gradient_accumulation_steps", arguments * steps)
        self._micro_batches = update * steps
        try:
            yield
        finally:
            object.__setattr__(args, "gradient_accumulation_steps", steps)
            self._micro_batches = current

    def _loss_is_theirs(self) -> bool:
        return is_overridden(self, "compute_loss") or self.compute_loss_func is not None

    def _get_num_items_in_batch(self, batch_samples: list[Any], device: Any) -> Any:
        """The targets of an update's micro-batches; None when they have no labels."""
        return self.accounting.total(batch_samples)

    # ---- evaluation -------------------------------------------------------------------------------------------------

    _eval_accounting: LossAccounting | None = None

    def _eval_items(self, inputs: Any, learn: Callable[[Any], Any] | None = None) -> Any:
        unknown = learn is not None and self.accounting.undecided_shift and self.is_alone
        if unknown and self._labels_in(inputs) and self._why_not_tried() is None:
            self.accounting.learn_shift(inputs, self._shift_probe(learn if is_lazy(self.device) else None))
        return self.accounting.items_in(inputs)

    def _accounting_of_evaluation(self) -> LossAccounting:
        """What is known about the loss of training, where that is enough; otherwise evaluation finds out for itself."""
        if self.accounting.is_additive and self.accounting.kind is not None:
            return self.accounting
        if self._eval_accounting is None:
            own = self.accounting
            self._eval_accounting = LossAccounting(
                self.label_names,
                guessed_shift=own.shifts,
                shift=None if own.undecided_shift else own.shifts,
                tells_items=own.tells_items,
                is_trusted=own.is_trusted,
                padding=self._padding_token(),
            )
            self._eval_accounting.may_compare = own.may_compare
            self._eval_accounting.may_pad_labels = own.may_pad_labels
        return self._eval_accounting

    def _learn_eval_loss(self, batches: list[Any]) -> None:
        """Find out what the loss of evaluation is, where its batches have to be weighed."""
        accounting = self._accounting_of_evaluation()
        if not accounting.may_compare or not accounting.wants_look(batches):
            return
        if self._why_not_tried() is not None:
            return
        accounting.learn(batches, self._probe(with_gradients=False), self.splitter)
        accounting.trouble = None
        if accounting.kind is LossKind.OTHER or accounting.is_additive is False:
            self.notices.tell_once(
                "eval_loss depends on per_device_eval_batch_size: the loss of a batch is neither the mean nor the sum "
                f"of the losses of its parts. Batches are weighed by {accounting.denominator.described()}; return "
                "(sum, count) from compute_loss to be exact"
            )
        elif accounting.kind is LossKind.TOTAL:
            self.notices.tell_once("the loss is a sum over its batch: eval_loss is that of all, divided by samples")

    def _weighed(self, loss: Any, inputs: Any, samples: int) -> tuple[Any, Any]:
        """A batch's mean loss, and what it counts for."""
        accounting = self._accounting_of_evaluation()
        if accounting.kind is LossKind.TOTAL:
            return (None if loss is None else loss / samples), samples
        if accounting.kind is None or not accounting.rivals or accounting.denominator.is_usual:
            items = accounting.items_in(inputs)
            return loss, samples if items is None else items
        return loss, accounting.weight_in(inputs)

    def _probe(self, step: Callable[[Any], Any] | None = None, *, with_gradients: bool = True) -> LossProbe:
        """Computes the loss as training does; given a step of evaluation, in that, whose graph is needed anyway."""

        def compute(inputs: dict[str, Any], items: Any) -> Any:
            self.is_probing = True  # what an override logs here belongs to no update
            try:
                if step is not None:
                    outputs = step(inputs)  # all of them are kept until the graph is made, as in an evaluation
                    self.strategy.boundary()
                    return outputs[0].cpu()
                inputs = self._prepare_inputs(inputs)
                with self.compute_loss_context_manager(), self._in_full(probe), self._as_written():
                    model = self.strategy.unwrap(self.model_wrapped)
                    return self._compute_loss(model, inputs, num_items_in_batch=items)
            finally:
                self.is_probing = False

        # Gradients of shards are exchanged while they are computed, which only training does right.
        with_gradients = with_gradients and not self.strategy.is_sharded and not is_lazy(self.device)
        probe = LossProbe(compute, self.model, trainer=self, with_gradients=with_gradients)
        probe.may_leave_half = isinstance(self.strategy.precision, Autocast)
        return probe

    def _in_full(self, probe: LossProbe) -> AbstractContextManager[Any]:
        """Around what is compared: half precision would hide small differences. Weights in half stay as they are."""
        return torch.autocast(self.device.type, enabled=False) if probe.may_leave_half else nullcontext()

    def _shift_probe(self, step: Callable[[Any], Any] | None = None) -> LossProbe:
        """Smoothing shifts as the model's own loss does, so that one is asked; every other loss is asked itself."""
        if self.label_smoother is None or self._loss_is_theirs() or "labels" not in (self._forward_takes or ()):
            return self._probe(step)

        def compute(inputs: dict[str, Any], items: Any) -> Any:
            inputs = self._prepare_inputs(inputs)
            with self.compute_loss_context_manager(), self._as_written():
                loss = find_loss(self.strategy.unwrap(self.model_wrapped)(**self._for_model(inputs)))
            return torch.zeros(()) if loss is None else loss  # a model without a loss cannot tell

        return LossProbe(compute, self.model, trainer=self)

    def micro_step(self, update: Update, index: int) -> Any:
        if index and self.signals.wants_save:
            raise Interrupted
        items = self.accounting.begin(update, index)
        speed = self._speed
        batch = update.batches[index] if speed is None or not speed.is_active else speed.batch(update, index)
        loss = self._training_step(self.model_wrapped, batch, num_items_in_batch=items)
        if index + 1 < len(update.batches):
            self.callback_handler.fire("on_substep_end")
        return loss

    def run_micro_batches(self, update: Update) -> Any:
        self._micro_batches = len(update.batches)
        run = self.strategy.run_update
        if self._speed is not None and self._speed.is_active:
            run = self._speed.around(run)
        if self.args.auto_find_batch_size:
            loss = run_or_halve(lambda: run(self.micro_step, update), lambda: self._halve(update), self.strategy)
        else:
            loss = run(self.micro_step, update)
        return loss if self.accounting.summed is None else self.accounting.settle(loss, self.strategy)

    def _halve(self, update: Update) -> bool:
        """Cut the update's micro-batches in two; returns whether there was anything to cut."""
        rearranged = self._speed is not None and self._speed.rearrange(update)
        if not rearranged and self._speed is not None and self._speed.is_laid:
            return False
        if not rearranged and not any(self._can_be_cut(batch) for batch in update.batches):
            return False
        self.strategy.zero_grad()
        self.strategy.free_memory()
        if not rearranged:
            self.micro_split *= 2
            update.batches = self._cut(update.batches, 2)
        self._micro_batches = len(update.batches)
        self._count(update)
        if rearranged:
            return True
        self.notices.tell_once(
            f"out of memory: micro-batches are cut in {self.micro_split} from here on; updates stay what they are"
        )
        return True

    def _can_be_cut(self, batch: Any) -> bool:
        if count_samples(batch) == 1:
            return False
        reason = self.splitter.why_whole(batch)
        if reason is not None:
            self.notices.tell_once(f"out of memory, and the micro-batch cannot be cut: {reason}")
        return reason is None

    def write_incident(self, step: int) -> str:
        place = self._places.get(step)
        found = self.samples_at(place) if place is not None else None
        self.strategy.zero_grad()
        own = working_folder(self.args.output_dir)
        folder = write_incident(
            # All processes look into it, since a forward pass may need all of them; one writes it down.
            own if self.strategy.rank == 0 else tempfile.mkdtemp(),
            step=step,
            sample_ids=found[0] if found else None,
            batches=found[1] if found else None,
            model=self.model,
            run=self._run_again,
        )
        self.strategy.zero_grad()
        return str(folder)

    def _run_again(self, batch: Any) -> Tensor:
        with self.compute_loss_context_manager():
            model = self.strategy.unwrap(self.model_wrapped)
            loss = self._compute_loss(model, self._prepare_inputs(batch), num_items_in_batch=None)
        loss = self.accounting.weigh(loss)
        loss.backward()
        return loss.detach()

    def part_states(self) -> dict[str, Any]:
        speed = None if self._speed is None else self._speed.state_dict()
        loss = {"stamp": stamp_of(self), **self.accounting.state_dict()}
        return {**super().part_states(), "micro_split": self.micro_split, "speed": speed, "loss": loss}

    def load_part_states(self, states: dict[str, Any]) -> None:
        super().load_part_states(states)
        self.micro_split = states.get("micro_split", 1)
        loss = states.get("loss")
        if loss is not None and loss["stamp"] == stamp_of(self) and not self.accounting.is_claimed:
            self.accounting.load_state_dict(loss)
            told = (LossKind.SCALED, LossKind.MIXED, None)
            self.model_accepts_loss_kwargs &= self.accounting.kind in told or self._loss_is_theirs()
        if self._speed is not None and states.get("speed"):
            self._speed.load_state_dict(states["speed"])
            if self._speed.is_decided:
                self._announce_plan(self._speed.plan)  # the run may go on in another folder


def _has_loss_of_transformers(model: nn.Module) -> bool:
    """Whether a model's loss is computed by a function of transformers, not by one that somebody put in its place."""
    function = getattr(model, "loss_function", None)
    return (getattr(function, "__module__", None) or "").startswith("transformers.")
