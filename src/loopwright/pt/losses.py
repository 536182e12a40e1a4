"""The trainer's methods around the loss: forward, backward, and who divides by what."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor, nn

from ..args.places import working_folder
from ..core.batches import Update
from ..core.overrides import accepts, adapt, is_overridden, reaches_ours
from ..core.signals import Interrupted
from .accounting import LossAccounting
from .columns import LABEL_COLUMNS, innermost
from .data import DataMethods
from .devices import is_lazy
from .evaluating import EvaluationMethods
from .incident import write_incident
from .loss import LabelSmoother, LossKind, LossProbe, check_has_gradient, count_samples, predicts_next_token
from .oom import run_or_halve, split_all
from .outputs import decodes_from_labels, find_loss, loss_in
from .speeding import SpeedMethods


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
    work: Any
    _known: Any
    has_new_overrides: Callable[[Any], bool]
    _forward_takes: list[str] | None

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
            function = adapt(self.compute_loss_func, "num_items_in_batch")
            return function(outputs, labels, num_items_in_batch=num_items_in_batch)
        if labels is None:
            return loss_in(outputs, {})
        assert self.label_smoother is not None
        return self.label_smoother(
            outputs, labels, shift_labels=self.accounting.shifts, num_items_in_batch=num_items_in_batch
        )

    def _for_model(self, inputs: Mapping[str, Any], num_items_in_batch: Any = None) -> Mapping[str, Any]:
        """The inputs the forward takes: labels only if it names them, the item count only if it uses it."""
        takes = self._forward_takes
        if takes is not None:
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
        # On a lazy device finding out is a graph more; the losses of transformers' own models are known.
        known = is_lazy(self.device) and not loss_is_theirs and hasattr(innermost(self.model), "loss_function")
        return LossAccounting(
            self.label_names,
            guessed_shift=predicts_next_token(self.model),
            shift=predicts_next_token(self.model) if known else None,
            kind=kind,
            wants_items=step_is_theirs or (told is not None and accepts(told, "num_items_in_batch")),
        )

    def make_update(self, batches: list[Any]) -> Update:
        """Count targets and samples on the host, before the batches travel."""
        update = Update(batches, samples=self._samples_in(batches), micro_batches=len(batches))
        if self.work.counts:
            self.work.measure(update)
        if self.label_smoother is not None and self.is_alone:
            self.accounting.learn_shift(batches[0], self._shift_probe())
        speed = None if self._speed is None or self._speed.is_idle else self._speed
        if speed is not None:
            speed.arrange(update)
        if self.micro_split > 1 and not (speed is not None and speed.is_laid):  # rows are made shorter, not cut
            update.batches = split_all(update.batches, self.micro_split)
        needs_items = self.accounting.wants_items or self._items_are_theirs or (speed is not None and speed.is_active)
        if needs_items or len(update.batches) > 1 or not self.is_alone:
            self._count(update)
        return update

    def _count(self, update: Update) -> None:
        # Batches that are laid out anew tell less than those they were made of: the one who lays them out asks those.
        if self.is_alone and self.accounting.is_open and (self._speed is None or not self._speed.is_active):
            self._learn_loss(update.batches[0])
        self.accounting.count(update)
        if self._items_are_theirs and self.accounting.kind is LossKind.SCALED:
            update.total_items = self._get_num_items_in_batch(update.batches, self.device)

    def _learn_loss(self, batch: Any) -> bool:
        """Find out what the loss is divided by and whether it shifts; returns whether that is known."""
        if self.accounting.is_open:
            self.accounting.learn(batch, self._probe())
            # Only a model whose loss really changes with the item count is told it from now on.
            self.model_accepts_loss_kwargs &= self.accounting.kind is not LossKind.MEAN or self._loss_is_theirs()
        elif self.accounting.kind is LossKind.SCALED:
            self.accounting.learn_shift(batch, self._shift_probe())
        return self.accounting.kind is not None

    def _loss_is_theirs(self) -> bool:
        return is_overridden(self, "compute_loss") or self.compute_loss_func is not None

    def _get_num_items_in_batch(self, batch_samples: list[Any], device: Any) -> Any:
        """The targets of an update's micro-batches; None when they have no labels."""
        return self.accounting.total(batch_samples)

    def _eval_items(self, inputs: Any, learn: Callable[[Any], Any] | None = None) -> Any:
        if learn is not None and self.accounting.undecided_shift and self.is_alone and self._labels_in(inputs):
            self.accounting.learn_shift(inputs, self._shift_probe(learn if is_lazy(self.device) else None))
        return self.accounting.items_in(inputs)

    def _probe(self, step: Callable[[Any], Any] | None = None) -> LossProbe:
        """Computes the loss as training does; given a step of evaluation, in that, whose graph is needed anyway."""

        def compute(inputs: dict[str, Any], items: Any) -> Any:
            self.is_probing = True  # what an override logs here belongs to no update
            try:
                if step is not None:
                    outputs = step(inputs)  # all of them are kept until the graph is made, as in an evaluation
                    self.strategy.boundary()
                    return outputs[0].cpu()
                inputs = self._prepare_inputs(inputs)
                with self.compute_loss_context_manager(), self._as_written():
                    model = self.strategy.unwrap(self.model_wrapped)
                    return self._compute_loss(model, inputs, num_items_in_batch=items)
            finally:
                self.is_probing = False

        return LossProbe(compute, self.model)

    def _shift_probe(self, step: Callable[[Any], Any] | None = None) -> LossProbe:
        """Smoothing shifts as the model's own loss does, so that one is asked; every other loss is asked itself."""
        if self.label_smoother is None or self._loss_is_theirs() or "labels" not in (self._forward_takes or ()):
            return self._probe(step)

        def compute(inputs: dict[str, Any], items: Any) -> Any:
            inputs = self._prepare_inputs(inputs)
            with self.compute_loss_context_manager(), self._as_written():
                loss = find_loss(self.strategy.unwrap(self.model_wrapped)(**self._for_model(inputs)))
            return torch.zeros(()) if loss is None else loss  # a model without a loss cannot tell

        return LossProbe(compute, self.model)

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
        if self._known is not None and self.is_alone and self.has_new_overrides(self._known):
            self._make_again(update)
        self._micro_batches = len(update.batches)
        run = self.strategy.run_update
        if self._speed is not None and self._speed.is_active:
            run = self._speed.around(run)
        if self.args.auto_find_batch_size:
            loss = run_or_halve(lambda: run(self.micro_step, update), lambda: self._halve(update), self.strategy)
        else:
            loss = run(self.micro_step, update)
        return loss if self.accounting.summed is None else self.accounting.settle(loss, self.strategy)

    def _make_again(self, update: Update) -> None:
        """Count, and lay out, an update for methods or a loss that were assigned after it was made."""
        made = self._speed.as_made(update) if self._speed is not None else update.batches
        self.follow_overrides()
        vars(update).update(vars(self.make_update(made)))

    def _halve(self, update: Update) -> bool:
        """Cut the update's micro-batches in two; returns whether there was anything to cut."""
        rearranged = self._speed is not None and self._speed.rearrange(update)
        if not rearranged and self._speed is not None and self._speed.is_laid:
            return False
        if not rearranged and max(map(count_samples, update.batches)) == 1:
            return False
        self.strategy.zero_grad()
        self.strategy.free_memory()
        if not rearranged:
            self.micro_split *= 2
            update.batches = split_all(update.batches, 2)
        self._micro_batches = len(update.batches)
        self._count(update)
        if rearranged:
            return True
        self.notices.tell_once(
            f"out of memory: micro-batches are cut in {self.micro_split} from here on; updates stay what they are"
        )
        return True

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
        return {**super().part_states(), "micro_split": self.micro_split, "speed": speed}

    def load_part_states(self, states: dict[str, Any]) -> None:
        super().load_part_states(states)
        self.micro_split = states.get("micro_split", 1)
        if self._speed is not None and states.get("speed"):
            self._speed.load_state_dict(states["speed"])
            if self._speed.is_decided:
                self._announce_plan(self._speed.plan)  # the run may go on in another folder
