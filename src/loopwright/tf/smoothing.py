"""Label smoothing: a share of the target's weight spread over all classes."""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from ..errors import ModelError
from .batches import IGNORED


def smoothed(outputs: Any, labels: Any, factor: float, weights: Any, *, from_logits: bool) -> tuple[Any, Any]:
    """The smoothed cross entropy of integer labels, as the sum over labels that are not -100 and their number."""
    scores = outputs[0] if isinstance(outputs, (tuple, list)) else outputs
    if isinstance(labels, (dict, tuple, list)) or not tf.as_dtype(labels.dtype).is_integer:
        raise ModelError("label_smoothing_factor needs one tensor of integer labels: smooth other losses yourself")
    scores = tf.cast(scores, tf.float32)
    logs = tf.nn.log_softmax(scores) if from_logits else tf.math.log(tf.maximum(scores, 1e-7))
    counted = labels != tf.cast(IGNORED, labels.dtype)
    index = tf.where(counted, labels, tf.zeros_like(labels))
    target = -tf.gather(logs, tf.cast(index, tf.int32), axis=-1, batch_dims=labels.shape.rank)
    spread = -tf.reduce_mean(logs, axis=-1)
    kept = tf.cast(counted, tf.float32)
    if weights is not None:
        kept *= tf.reshape(weights, [-1] + [1] * (kept.shape.rank - 1))
    return tf.reduce_sum(((1 - factor) * target + factor * spread) * kept), tf.reduce_sum(kept)
