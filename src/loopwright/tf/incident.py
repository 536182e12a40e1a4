"""Report on an update with a non-finite loss or gradients, made by running it again."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import tensorflow as tf

from ..core.logs.incident import as_json_number
from ..keras.checkpoint import write_values
from ..keras.data.host_batch import HostBatch, leaves
from ..keras.models import named_variables

Run = Callable[[HostBatch], tuple[list[Any], Any]]
"""Gradients and loss of a micro-batch, computed once more."""


def examine(folder: Path, model: Any, batches: list[HostBatch], run: Run) -> dict[str, Any]:
    """Save the micro-batches and run them again; returns losses, gradient norms and non-finite gradients."""
    arrays = {
        f"{number}/{index}": np.asarray(leaf)
        for number, batch in enumerate(batches)
        for index, leaf in enumerate(leaves((batch.features, batch.labels)))
    }
    write_values(folder / "batch.safetensors", arrays)
    names = list(named_variables(list(model.trainable_variables)))
    losses, norms = [], dict.fromkeys(names, 0.0)
    for batch in batches:
        gradients, loss = run(batch)
        losses.append(as_json_number(loss))
        for name, gradient in zip(names, gradients, strict=True):
            norms[name] += float(tf.norm(tf.cast(gradient, tf.float32)))
    bad = [name for name, norm in norms.items() if not math.isfinite(norm)]
    shown = {name: as_json_number(norm) for name, norm in norms.items()}
    return {"losses": losses, "gradient_norms": shown, "bad_gradients": bad}


def bad_weights(model: Any) -> list[str]:
    """Variables with non-finite values."""
    return [name for name, variable in named_variables(list(model.variables)).items() if not _finite(variable)]


def _finite(value: Any) -> bool:
    array = tf.convert_to_tensor(value)
    return not array.dtype.is_floating or bool(tf.reduce_all(tf.math.is_finite(array)))
