"""Label smoothing: a fraction of the target's weight is distributed evenly among all classes."""

from __future__ import annotations

from typing import Any

from keras import ops

from ...errors import ModelError
from ..data.host_batch import IGNORED
from .compiled_loss import is_integer, per_row


def smoothed(outputs: Any, labels: Any, factor: float, weights: Any, *, from_logits: bool) -> tuple[Any, Any]:
    """The smoothed cross entropy of integer labels, as the sum over labels that are not -100 and their number."""
    scores = outputs[0] if isinstance(outputs, (tuple, list)) else outputs
    if isinstance(labels, (dict, tuple, list)) or not is_integer(labels):
        raise ModelError("label_smoothing_factor needs one tensor of integer labels; set it to 0 for other losses")
    scores = ops.cast(scores, "float32")
    logs = ops.log_softmax(scores) if from_logits else ops.log(ops.maximum(scores, 1e-7))
    counted = labels != IGNORED
    index = ops.cast(ops.where(counted, labels, ops.zeros_like(labels)), "int32")
    target = -ops.squeeze(ops.take_along_axis(logs, ops.expand_dims(index, -1), axis=-1), -1)
    spread = -ops.mean(logs, axis=-1)
    kept = ops.cast(counted, "float32")
    if weights is not None:
        kept *= per_row(weights, kept)
    return ops.sum(((1 - factor) * target + factor * spread) * kept), ops.sum(kept)
