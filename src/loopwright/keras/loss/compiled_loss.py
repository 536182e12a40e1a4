"""The loss a Keras model was compiled with, as a sum over its items and their number."""

from __future__ import annotations

from typing import Any

from keras import ops, tree
from keras.src import backend as keras_backend

from ...errors import ModelError
from ..data.host_batch import IGNORED, leaves
from ..models import is_legacy


class KerasLoss:
    """A compiled loss without its mean; the trainer divides by the items of the whole update."""

    def __init__(self, model: Any, family: Any) -> None:
        self._model, self._family = model, family
        self._weights = _loss_weights(model)
        self._loss: Any = None if _is_nested(model.loss) else as_loss(model.loss, family)

    def options_of_cross_entropy(self) -> dict[str, Any]:
        """The options and the weight of a sparse cross entropy of one output; an error for any other loss."""
        found, losses = list(leaves(self._model.loss)), self._family.losses
        loss = as_loss(found[0], self._family) if len(found) == 1 else None
        is_known = isinstance(loss, losses.SparseCategoricalCrossentropy)
        if not is_known and getattr(loss, "fn", None) is not losses.sparse_categorical_crossentropy:
            raise ModelError(
                "label_smoothing_factor replaces a sparse categorical cross entropy, but the model was compiled with "
                "another loss; set it to 0"
            )
        weight = next(leaves(self._weights), 1.0)
        return {**getattr(loss, "_fn_kwargs", {}), "loss_weight": weight}

    @property
    def reductions(self) -> set[str]:
        """The reductions of the losses that are not a mean over items."""
        losses = [as_loss(each, self._family) for each in leaves(self._model.loss)]
        return {str(loss.reduction) for loss in losses} & {"sum", "none", "None"}

    def __call__(self, model: Any, labels: Any, outputs: Any, weights: Any) -> tuple[Any, Any]:
        """Sum and items on this replica, regularisers included."""
        if self._loss is None or self._weights is not None or _is_nested(outputs):
            total, items = self._of_several_outputs(labels, outputs, weights)
        else:
            total, items = summed_loss(self._loss, labels, outputs, weights, family=self._family)
        extra = regularization(model)
        return (total if extra is None else total + extra * items), items

    def _of_several_outputs(self, labels: Any, outputs: Any, weights: Any) -> tuple[Any, Any]:
        """The weighted sum of the losses of all outputs: means over their items, so together a mean over rows."""
        rows = ops.cast(ops.shape(tree.flatten(outputs)[0])[0], "float32")
        items = rows if weights is None else ops.sum(weights)
        found = _named(outputs, getattr(self._model, "output_names", None), "outputs")
        names = list(found)
        losses = _named(self._loss or self._model.loss, names, "losses")
        targets = _named(labels, [name for name in names if losses.get(name) is not None], "labels", others=names)
        factors = {} if self._weights is None else _named(self._weights, names, "loss_weights")
        total: Any = 0.0
        for name, loss in losses.items():
            if loss is None:
                continue
            if name not in found or name not in targets:
                raise ModelError(f"the model was compiled with a loss for {name!r}, but that output has no labels")
            loss = as_loss(loss, self._family)
            part, count = summed_loss(loss, targets[name], found[name], weights, family=self._family)
            total = total + factors.get(name, 1.0) * part / ops.where(count > 0, count, 1.0)
        return total * items, items


def _named(value: Any, names: Any, what: str, others: Any = None) -> dict[Any, Any]:
    """One value per output, by its name: a dict, a list in the order of the outputs, or one value for all of them."""
    if isinstance(value, dict):
        named = dict(value)
    elif isinstance(value, (list, tuple)):
        wanted = next((each for each in (names, others) if each and len(each) == len(value)), None)
        if wanted is None and (names or others) and what != "outputs":
            raise ModelError(f"the model has {len(others or names)} outputs, but {len(value)} {what} were given")
        named = dict(zip(wanted or range(len(value)), value, strict=True))
    else:
        named = dict.fromkeys(names or ["output"], value)
    if any(_is_nested(each) for each in named.values()):
        raise ModelError(f"the model's {what} are nested more than once; pass compute_loss_func=")
    return named


def as_loss(loss: Any, family: Any) -> Any:
    """The loss object that Keras makes of a name or a function: it gives labels and outputs the same rank."""
    found = family.losses.get(loss)
    return found if isinstance(found, family.losses.Loss) else family.losses.MeanSquaredError.__base__(found)


def summed_loss(loss: Any, labels: Any, outputs: Any, weights: Any, *, family: Any) -> tuple[Any, Any]:
    """The sum of the loss of one output over its items, and their number."""
    mask = mask_of(outputs)
    outputs = ops.cast(outputs, "float32")
    labels = ops.convert_to_tensor(labels)
    labels = labels if is_integer(labels) else ops.cast(labels, "float32")
    values, counted = _values_and_counted(_called(loss, family), labels, outputs)
    masks = [mask, mask_of(values)]
    values = ops.cast(values, "float32")
    if len(values.shape) == 0:  # a mean over the rows
        rows = ops.cast(ops.shape(outputs)[0], "float32") if weights is None else ops.sum(weights)
        return values * rows, rows
    for each in masks:
        if each is not None and len(each.shape) == len(values.shape):
            counted *= ops.cast(each, "float32")
    if weights is not None:
        counted *= per_row(weights, values)
    # Ignored values may be NaN.
    return ops.sum(ops.where(counted > 0, values * counted, 0.0)), ops.sum(counted)


def _called(loss: Any, family: Any) -> Any:
    """The loss as a function of labels and outputs, without its reduction."""
    if type(loss).__call__ is not family.losses.Loss.__call__:  # has a reduction of its own
        return loss
    written = getattr(loss, "fn", type(loss).call)
    if is_legacy(family) or str(getattr(written, "__module__", "")).split(".")[0] == family.__name__:
        return loss.call
    # Keras 3 passes floating point labels to a user's function, also for integer data.
    return lambda labels, outputs: loss.call(ops.cast(labels, "float32"), outputs)


def _values_and_counted(function: Any, labels: Any, outputs: Any) -> tuple[Any, Any]:
    """The values of a loss, and 1 for those that count; integer labels of -100 never do."""
    if not is_integer(labels):
        values = function(labels, outputs)
        return values, ops.ones_like(ops.cast(values, "float32"))
    is_counted = counted_labels(labels)
    values = function(ops.where(is_counted, labels, ops.zeros_like(labels)), outputs)
    counted = ops.cast(is_counted, "float32")
    if len(counted.shape) == len(values.shape) + 1 and counted.shape[-1] == 1:
        counted = ops.squeeze(counted, axis=-1)
    if len(counted.shape) != len(values.shape):  # not a value per label
        values = function(labels, outputs)
        return values, ops.ones_like(ops.cast(values, "float32"))
    return values, counted * ops.ones_like(ops.cast(values, "float32"))


def regularization(model: Any) -> Any:
    """The sum of the model's regularizers and `add_loss`; None if it has none."""
    extra = list(getattr(model, "losses", ()) or ())
    return sum(ops.cast(each, "float32") for each in extra) if extra else None


def _is_nested(value: Any) -> bool:
    return isinstance(value, (list, tuple, dict))


def _loss_weights(model: Any) -> Any:
    compiled = getattr(model, "_compile_loss", None) or getattr(model, "compiled_loss", None)
    return getattr(model, "loss_weights", None) or getattr(compiled, "_user_loss_weights", None)


def is_integer(value: Any) -> bool:
    """Whether a tensor has an integer dtype."""
    return "int" in keras_dtype(value)


def keras_dtype(value: Any) -> str:
    """The name of a tensor's dtype."""
    return str(getattr(value.dtype, "name", value.dtype))


def per_row(weights: Any, values: Any) -> Any:
    """Row weights, reshaped to broadcast over values with more dimensions."""
    return ops.reshape(weights, [-1] + [1] * (len(values.shape) - 1))


def mask_of(tensor: Any) -> Any:
    """The mask that Keras keeps with a tensor: as an attribute, or beside traced arrays of JAX."""
    found = getattr(tensor, "_keras_mask", None)
    kept = getattr(keras_backend, "get_keras_mask", None)
    return found if found is not None or kept is None else kept(tensor)


def counted_labels(labels: Any) -> Any:
    """Which integer labels are not -100, a number that unsigned ones cannot have."""
    if keras_dtype(labels).startswith("uint"):
        return ops.ones_like(labels, dtype="bool")
    return labels != IGNORED


def find_keras_loss(model: Any, family: Any) -> KerasLoss | None:
    """The loss a model was compiled with, or None."""
    loss = getattr(model, "loss", None)
    if loss is None or callable(getattr(model, "hf_compute_loss", None)):
        return None
    if not _is_nested(loss) and not isinstance(loss, str) and not callable(loss):
        return None
    return KerasLoss(model, family)
