"""How the loss of a batch is called: the trainer's methods and functions, with the arguments they accept."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from typing import Any

from torch import Tensor, nn

from ...core.user_code.overrides import accepts, adapt, is_overridden
from ..data.columns import LABEL_COLUMNS
from .find import decodes_from_labels, loss_in
from .learning import LossLearning
from .named import NamedLosses, split_named


class LossCalls(LossLearning):
    """Calls of the loss; users may override every public method on the trainer."""

    forward_takes: list[str] | None
    forward_takes_any: bool
    _probed: dict[str, Any]
    """The named values of the last loss that was computed to infer its properties."""
    named: NamedLosses
    """The named values of the losses of the current update."""

    def compute_loss(
        self, model: nn.Module, inputs: dict[str, Any], return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        """The loss of a batch: the model's, or that of `compute_loss_func` or label smoothing.

        An override may return the mean over its targets, or `(sum, count)` to be exact in every case.
        """
        if self.trainer.compute_loss_func is None and self.trainer.label_smoother is None:
            outputs = model(**self.for_model(inputs, num_items_in_batch))
            loss = outputs["loss"] if type(outputs) is dict and "loss" in outputs else None
            loss = loss_in(outputs, inputs) if loss is None else loss
        else:
            labels = inputs.get("labels") if decodes_from_labels(model, inputs) else inputs.pop("labels", None)
            outputs = model(**self.for_model(inputs))
            loss = self._loss_from(outputs, labels, num_items_in_batch)
        return (loss, outputs) if return_outputs else loss

    def _loss_from(self, outputs: Any, labels: Any, num_items_in_batch: Any) -> Any:
        if self.trainer.compute_loss_func is not None:
            function = adapt(self.trainer.compute_loss_func, "num_items_in_batch")
            return function(outputs, labels, num_items_in_batch=num_items_in_batch)
        if labels is None:
            return loss_in(outputs, {})
        assert self.trainer.label_smoother is not None
        return self.trainer.label_smoother(
            outputs, labels, shift_labels=self.run.accounting.shifts, num_items_in_batch=num_items_in_batch
        )

    def for_model(self, inputs: Mapping[str, Any], num_items_in_batch: Any = None) -> Mapping[str, Any]:
        """The inputs for the forward: labels only if it has a parameter for them, the item count only if it uses it."""
        takes = self.forward_takes
        if takes is not None and not self.forward_takes_any:
            for label in LABEL_COLUMNS:  # a plain loop: this runs for every micro-batch, and a comprehension is a call
                if label in inputs and label not in takes:
                    inputs = {name: value for name, value in inputs.items() if name != label}
        if num_items_in_batch is not None and self.trainer.model_accepts_loss_kwargs:
            return {**inputs, "num_items_in_batch": num_items_in_batch}
        return inputs

    def compute_loss_context_manager(self) -> AbstractContextManager[Any]:
        """The context of forward and loss: autocast, and additions of a subclass."""
        return (
            self.trainer.autocast_smart_context_manager()
            if self._autocast_overridden
            else self.strategy.forward_context()
        )

    def autocast_smart_context_manager(self, cache_enabled: bool | None = True) -> AbstractContextManager[Any]:
        return self.strategy.forward_context()

    def _prepare_inputs(self, inputs: Any) -> Any:
        """The batch on the device, in a new container."""
        return self.trainer._prepare_input(inputs) if self._input_overridden else self.strategy.put(inputs)

    def _prepare_input(self, data: Any) -> Any:
        return self.strategy.put(data)

    def bind_overrides(self) -> None:
        """Inspect the user's methods once, so that calls have no overhead per step."""
        self.named = NamedLosses(is_shared=not self.is_alone)
        self.run.step = adapt(self.trainer.training_step, "num_items_in_batch")
        self.called_compute_loss = self._bound_compute_loss()
        self._input_overridden = is_overridden(self.trainer, "_prepare_input")
        self._autocast_overridden = is_overridden(self.trainer, "autocast_smart_context_manager")
        self._items_overridden = is_overridden(self.trainer, "_get_num_items_in_batch")
        self.internals.overrides_actions = is_overridden(self.trainer, "_maybe_log_save_evaluate")

    def follow_loss(self) -> None:
        """Switch to newly assigned methods or losses, and infer the properties of the loss again."""
        self.run.accounting = self.make_accounting()
        self.bind_overrides()
        if self.run.speed is not None:
            self.run.speed.finish()
            self.notices.warn_once(
                f"a method of the trainer or its loss was replaced after step {self.state.global_step}; "
                "accelerations are chosen again"
            )
            # Several ranks would have to decide together, but only those with the replacement reach this.
            self.run.speed = self.internals.acceleration.start() if self.is_alone else None

    def _bound_compute_loss(self) -> Callable[..., Any]:
        """compute_loss with the arguments it accepts; an override runs with the device as torch's default."""
        if not is_overridden(self.trainer, "compute_loss"):
            return self.compute_loss if self.trainer.compute_loss_func is None else self._with_names(self.compute_loss)
        returns_outputs = accepts(self.trainer.compute_loss, "return_outputs")
        function = adapt(self.trainer.compute_loss, "num_items_in_batch", "return_outputs")
        function = self._with_names(function, returns_outputs=returns_outputs)
        if self.device.type == "cpu":
            return function

        def on_device(*args: Any, **kwargs: Any) -> Any:
            with self.device:  # torch.tensor([...]) of class weights is created on the device of the logits
                return function(*args, **kwargs)

        return on_device

    def _with_names(self, function: Callable[..., Any], *, returns_outputs: bool = True) -> Callable[..., Any]:
        """The function without the named values of its loss, which are collected for the log."""

        def without_names(*args: Any, **kwargs: Any) -> Any:
            result = function(*args, **kwargs)
            if type(result) is Tensor:
                return result
            if kwargs.get("return_outputs"):
                if returns_outputs and isinstance(result, (tuple, list)) and len(result) == 2:
                    return split_named(result[0])[0], result[1]
                return split_named(result)[0]
            loss, named = split_named(result)
            if named and self.internals.is_probing:
                self._probed = named
            elif named:
                self.named.add(named, self.run.micro_batch, kwargs.get("num_items_in_batch"))
            return loss

        return without_names

    def _named_again(self, inputs: Any, items: Any) -> dict[str, Any]:
        """The named values of a batch, computed again; empty if all ranks would have to do so together."""
        self._probed = {}
        if not self.strategy.forward_is_collective:
            self.probe(with_gradients=False).loss(inputs, items)
        return self._probed
