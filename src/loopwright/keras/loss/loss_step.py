"""Methods that compute the loss and count its items."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import contextmanager
from typing import Any

from keras import ops, tree

from ...core.part import LossPart
from ...core.update import Update
from ...core.user_code.overrides import accepts, adapt, names_parameter
from ...errors import ModelError
from ..data.host_batch import count_targets
from ..models import call_model, loss_and_outputs
from ..part import KerasPart
from .compiled_loss import counted_labels, is_integer, per_row, regularization
from .smoothing import smoothed


class LossNote:
    """`train_loss` and `eval_loss` of transformers' TFTrainer: collect a loss while a step is traced.

    The trainer reads the value in the same trace, so it is that of one step on one replica.
    """

    def __init__(self) -> None:
        self.loss: Any = None
        self.items: Any = None

    def update_state(self, loss: Any, items: Any = None) -> None:
        """Add a loss that is already divided by the items of the update; `items` is its number of items."""
        total = ops.sum(ops.cast(loss, "float32"))
        self.loss = total if self.loss is None else self.loss + total
        if items is not None:
            items = ops.cast(items, "float32")
            self.items = items if self.items is None else self.items + items

    @contextmanager
    def collecting(self) -> Any:
        self.loss = self.items = None
        yield self


class LossStep(KerasPart, LossPart):
    """Forward and loss on one replica; every public method may be overridden, and is traced."""

    row_weights: Any = None
    """Row weights of the traced micro-batch: 1 for samples, 0 for padding. None without padding."""
    _noted_items: Any = None
    """Number of items of the mean that was just computed, if known."""

    # ---- overridable ------------------------------------------------------------------------------------------------

    def run_model(self, features: Any, labels: Any, training: bool) -> tuple[Any, Any]:
        """The loss and the outputs of a batch; the loss is None if the model has none or there are no labels.

        An override may return the mean over the batch, or a loss per example.
        """
        outputs = call_model(self.model, self.internals.info, features, labels, training)
        if self.internals.info.takes_labels:
            return loss_and_outputs(outputs, has_loss=labels is not None)
        if self.internals.keras_loss is None or labels is None:
            return None, outputs
        total, self._noted_items = self.internals.keras_loss(self.model, labels, outputs, self.row_weights)
        return total / ops.maximum(self._noted_items, 1.0), outputs

    def compute_loss(
        self,
        features: Any,
        labels: Any,
        num_items_in_batch: Any = None,
        return_outputs: bool = False,
        training: bool = True,
    ) -> Any:
        """The loss of a batch: the model's own, or that of `compute_loss_func` or label smoothing.

        An override may return the mean over its items, a loss per example, or `(sum, count)` to be exact in every case.
        """
        self._noted_items = None
        if self.trainer.compute_loss_func is None and not self.args.label_smoothing_factor:
            loss, outputs = self.trainer.run_model(features, labels, training)
        else:
            _, outputs = self.trainer.run_model(features, None, training)
            loss = None if labels is None else self._loss_from(outputs, labels, num_items_in_batch)
        return (loss, outputs) if return_outputs else loss

    # ---- overrides --------------------------------------------------------------------------------------------------

    def bind_overrides(self) -> None:
        """Inspect the user's overrides once.

        They get the items of their own micro-batch as `num_items_in_batch`: a sum divided by it is a mean over items,
        as any other scalar loss.
        """
        if names_parameter(self.trainer.compute_loss, "inputs"):  # the signature of the PyTorch trainer
            self.called_compute_loss = self._torch_style_compute_loss
        else:
            optional = ("num_items_in_batch", "training", "return_outputs")
            adapted = adapt(self.trainer.compute_loss, *optional)

            def call(features: Any, labels: Any, **more: Any) -> Any:
                return adapted(features, labels, num_items_in_batch=self._items_in(labels), **more)

            self.called_compute_loss = call

    def _torch_style_compute_loss(self, features: Any, labels: Any, **more: Any) -> Any:
        """`compute_loss(model, inputs, return_outputs, num_items_in_batch)` with features and labels in one dict."""
        inputs = dict(features) if isinstance(features, Mapping) else {"features": features}
        inputs.update(labels if isinstance(labels, Mapping) else {} if labels is None else {"labels": labels})
        call = adapt(self.trainer.compute_loss, "num_items_in_batch", "return_outputs", "training")
        return call(self.model, inputs, num_items_in_batch=self._items_in(labels), **more)

    # ---- sums and items ---------------------------------------------------------------------------------------------

    def summed(self, loss: Any, labels: Any) -> tuple[Any, Any]:
        """The sum of the loss over its items, and the number of items on this replica."""
        if loss is None:
            raise ModelError(
                "there is no loss: compile the model with one (model.compile(loss=...)), pass compute_loss_func=, or "
                "override compute_loss or run_model"
            )
        is_pair = isinstance(loss, (tuple, list))
        if isinstance(loss, Mapping) or (is_pair and any(isinstance(each, Mapping) for each in loss)):
            raise ModelError(
                "compute_loss returned named values, which only PyTorch trainers log; return the loss, or (sum, count)"
            )
        if is_pair:
            return ops.cast(loss[0], "float32"), ops.cast(loss[1], "float32")
        loss = ops.cast(loss, "float32")
        if len(loss.shape) == 0 or tuple(loss.shape) == (1,):
            if self._noted_items is None and self.row_weights is not None:
                self.internals.notices.warn_once(
                    "a batch was padded for the replicas, and the loss is one mean that includes the padding; return a "
                    "loss per example"
                )
            items = self._items_in(labels) if self._noted_items is None else self._noted_items
            return ops.sum(loss) * items, items
        counted = ops.ones_like(loss)
        if hasattr(labels, "shape") and is_integer(labels) and _same_shape(labels, loss):  # a loss per label
            counted = ops.cast(counted_labels(labels), "float32")
        weights = self.row_weights
        if weights is not None and loss.shape[0] in (None, weights.shape[0]):
            counted *= per_row(weights, loss)
        # Ignored values may be NaN.
        return ops.sum(ops.where(counted > 0, loss * counted, 0.0)), ops.sum(counted)

    def _items_in(self, labels: Any) -> Any:
        """Number of items of a mean over this replica's rows: labels that are not -100, else samples."""
        if labels is None:
            return ops.cast(1, "float32") if self.row_weights is None else ops.sum(self.row_weights)
        rows = ops.cast(ops.shape(tree.flatten(labels)[0])[0], "float32")
        samples = rows if self.row_weights is None else ops.sum(self.row_weights)
        if isinstance(labels, (Mapping, tuple, list)) or not is_integer(labels):
            return samples
        counted = labels[:, 1:] if self.internals.info.shifts and len(labels.shape) > 1 else labels
        wanted = ops.cast(counted_labels(counted), "float32")
        if self.row_weights is not None:
            wanted *= per_row(self.row_weights, wanted)
        return ops.sum(wanted)

    def _loss_from(self, outputs: Any, labels: Any, items: Any) -> Any:
        if self.trainer.compute_loss_func is not None:
            function = self.trainer.compute_loss_func
            if regularization(self.model) is not None:
                self.internals.notices.warn_once(
                    "compute_loss_func replaces the model's loss, so its regularizers and add_loss are not added; add "
                    "sum(model.losses) in the function if you want them"
                )
            options = {"num_items_in_batch": items} if accepts(function, "num_items_in_batch") else {}
            return function(outputs, labels, **options)
        factor, compiled = self.args.label_smoothing_factor, self.internals.keras_loss
        total, items = smoothed(outputs, labels, factor, self.row_weights, loss=compiled)
        extra = regularization(self.model)
        return (total if extra is None else total + extra * items), items

    def micro_gradients(self, *args: Any) -> Any:
        """Gradients, loss and items of one micro-batch, as the strategy takes them."""
        raise NotImplementedError

    # ---- on the host ------------------------------------------------------------------------------------------------

    def make_update(self, batches: list[Any]) -> Update:
        """Count targets and samples before the batches are copied to devices."""
        update = Update(batches, samples=sum(batch.rows for batch in batches), micro_batches=len(batches))
        update.items = [self.trainer._compute_nb_instances((batch.features, batch.labels)) for batch in batches]
        update.total_items = sum(update.items)
        update.flos, update.tokens = self.run.work.measure(batches) if self.run.work.counts else (0.0, 0)  # type: ignore[attr-defined]
        return update

    def _compute_nb_instances(self, batch: Any) -> int:
        """The targets of a micro-batch over all replicas: labels that are not -100."""
        features, labels = batch
        rows = tree.flatten(features)[0].shape[0]
        return count_targets(labels, int(rows), shifted=self.internals.info.shifts)


def _same_shape(labels: Any, loss: Any) -> bool:
    pairs = zip(labels.shape, loss.shape, strict=False)
    return len(labels.shape) == len(loss.shape) and all(a == b or None in (a, b) for a, b in pairs)
