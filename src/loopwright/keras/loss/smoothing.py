"""Label smoothing: a fraction of the target's weight is distributed evenly among all classes."""

from __future__ import annotations

from typing import Any

from keras import ops

from ...errors import ModelError
from .compiled_loss import KerasLoss, counted_labels, is_integer, mask_of, per_row


def smoothed(outputs: Any, labels: Any, factor: float, weights: Any, *, loss: KerasLoss | None) -> tuple[Any, Any]:
    """The smoothed cross entropy of integer labels, as the sum over labels that count and their number.

    It replaces the compiled loss, if there is one, and counts the same labels.
    """
    scores = outputs[0] if isinstance(outputs, (tuple, list)) else outputs
    if isinstance(labels, (dict, tuple, list)) or not is_integer(labels):
        raise ModelError("label_smoothing_factor needs one tensor of integer labels; set it to 0 for other losses")
    options = {"from_logits": True} if loss is None else loss.options_of_cross_entropy()
    mask, scores = mask_of(scores), ops.cast(scores, "float32")
    if len(labels.shape) == len(scores.shape) and labels.shape[-1] == 1:
        labels = ops.squeeze(labels, axis=-1)
    logs = ops.log_softmax(scores) if options.get("from_logits") else ops.log(ops.maximum(scores, 1e-7))
    counted = counted_labels(labels)
    if options.get("ignore_class") is not None:
        counted = ops.logical_and(counted, ops.cast(labels, "int32") != options["ignore_class"])
    index = ops.cast(ops.where(counted, labels, ops.zeros_like(labels)), "int32")
    target = -ops.squeeze(ops.take_along_axis(logs, ops.expand_dims(index, -1), axis=-1), -1)
    spread = -ops.mean(logs, axis=-1)
    kept = ops.cast(counted, "float32")
    if mask is not None and len(mask.shape) == len(kept.shape):
        kept *= ops.cast(mask, "float32")
    if weights is not None:
        kept *= per_row(weights, kept)
    # Ignored values may be NaN.
    values = ops.where(kept > 0, ((1 - factor) * target + factor * spread) * kept, 0.0)
    return ops.sum(values) * options.get("loss_weight", 1.0), ops.sum(kept)
