"""The loss a Keras model was compiled with, as a sum over its items and their number."""

from __future__ import annotations

from typing import Any

from keras import ops, tree

from ..models import is_legacy


class KerasLoss:
    """A compiled loss without its mean; the trainer divides by the items of the whole update."""

    def __init__(self, family: Any, loss: Any, whole: Any = None) -> None:
        self._family, self._whole = family, whole
        self._loss: Any = family.losses.get(loss) if whole is None else None

    @property
    def from_logits(self) -> bool:
        """Whether the loss expects logits instead of probabilities."""
        return bool(getattr(self._loss, "_fn_kwargs", getattr(self._loss, "__dict__", {})).get("from_logits", False))

    def __call__(self, model: Any, labels: Any, outputs: Any, weights: Any) -> tuple[Any, Any]:
        """Sum and items on this replica, regularisers included."""
        if self._whole is not None:
            total, items = self._of_several_outputs(labels, outputs, weights)
        else:
            total, items = self._of_one_output(labels, outputs, weights)
        extra = list(getattr(model, "losses", ()) or ())
        if extra:  # times the items, so that the division does not change it
            total = total + sum(ops.cast(each, "float32") for each in extra) * items
        return total, items

    def _of_one_output(self, labels: Any, outputs: Any, weights: Any) -> tuple[Any, Any]:
        mask = _mask_of(outputs)
        outputs = ops.cast(outputs, "float32")
        labels = ops.convert_to_tensor(labels)
        labels = labels if is_integer(labels) else ops.cast(labels, "float32")
        function = getattr(self._loss, "call", self._loss)
        values = function(labels, outputs)
        masks = [mask, _mask_of(values)]
        values = ops.cast(values, "float32")
        counted = ops.ones_like(values)
        for each in masks:
            if each is not None and len(each.shape) == len(values.shape):
                counted *= ops.cast(each, "float32")
        if weights is not None:
            counted *= per_row(weights, values)
        # Ignored values may be NaN.
        return ops.sum(ops.where(counted > 0, values * counted, 0.0)), ops.sum(counted)

    def _of_several_outputs(self, labels: Any, outputs: Any, weights: Any) -> tuple[Any, Any]:
        """The losses of several outputs, weighted and added by Keras: a mean over rows."""
        rows = ops.cast(ops.shape(tree.flatten(outputs)[0])[0], "float32")
        weighed = None if weights is None else tree.map_structure(lambda _: weights, labels)
        mean = self._whole(labels, outputs, weighed)
        items = rows if weights is None else ops.sum(weights)
        return ops.cast(mean, "float32") * rows, items


def is_integer(value: Any) -> bool:
    """Whether a tensor has an integer dtype."""
    return "int" in keras_dtype(value)


def keras_dtype(value: Any) -> str:
    """The name of a tensor's dtype."""
    return str(getattr(value.dtype, "name", value.dtype))


def per_row(weights: Any, values: Any) -> Any:
    """Row weights, reshaped to broadcast over values with more dimensions."""
    return ops.reshape(weights, [-1] + [1] * (len(values.shape) - 1))


def _mask_of(tensor: Any) -> Any:
    return getattr(tensor, "_keras_mask", None)


def find_keras_loss(model: Any, family: Any) -> KerasLoss | None:
    """The loss a model was compiled with, or None."""
    loss = getattr(model, "loss", None)
    if loss is None or callable(getattr(model, "hf_compute_loss", None)):
        return None
    several = isinstance(loss, (list, tuple, dict)) or getattr(model, "loss_weights", None)
    if not several and not isinstance(loss, (str,)) and not callable(loss):
        return None
    if not several:
        return KerasLoss(family, loss)
    if is_legacy(family):
        return KerasLoss(family, loss, whole=lambda y, p, w: model.compiled_loss(y, p, sample_weight=w))
    return KerasLoss(family, loss, whole=_compile_loss(model, family))


def _compile_loss(model: Any, family: Any) -> Any:
    compiled = getattr(model, "_compile_loss", None)
    weights = getattr(model, "loss_weights", None) or getattr(compiled, "_user_loss_weights", None)
    from keras.src.trainers.compile_utils import CompileLoss

    whole = CompileLoss(model.loss, weights, output_names=getattr(model, "output_names", None))
    return lambda y, p, w: whole(y, p, w)
