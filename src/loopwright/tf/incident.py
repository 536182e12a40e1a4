"""What went wrong in an update whose loss or gradients were not finite, found by running it once more."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import tensorflow as tf

from ..core.checkpoint.json_files import write_json
from .checkpoint import write_values
from .host_batch import HostBatch, leaves
from .models import named_variables

FOLDER = "incident-step-{step}"

Run = Callable[[HostBatch], tuple[list[Any], Any]]
"""Gradients and loss of a micro-batch, computed once more."""


def write_incident(
    output_dir: str, *, step: int, sample_ids: list[int] | None, batches: list[HostBatch] | None, model: Any, run: Run
) -> Path:
    """Write a folder with the step, its samples and batch, losses and the variables whose gradients went bad."""
    folder = Path(output_dir) / FOLDER.format(step=step)
    folder.mkdir(parents=True, exist_ok=True)
    named = named_variables(list(model.variables))
    weights = [name for name, variable in named.items() if not _finite(variable)]
    report: dict[str, Any] = {"step": step, "sample_ids": sample_ids, "bad_weights": weights}
    if batches is None:
        report["note"] = "the data owns its order, so the batch could not be loaded again"
    else:
        arrays = {
            f"{number}/{index}": np.asarray(leaf)
            for number, batch in enumerate(batches)
            for index, leaf in enumerate(leaves((batch.features, batch.labels)))
        }
        write_values(folder / "batch.safetensors", arrays)
        report |= _examine(model, batches, run)
    write_json(folder / "incident.json", report)
    return folder


def _examine(model: Any, batches: list[HostBatch], run: Run) -> dict[str, Any]:
    names = list(named_variables(list(model.trainable_variables)))
    losses, norms = [], dict.fromkeys(names, 0.0)
    for batch in batches:
        gradients, loss = run(batch)
        losses.append(_number(loss))
        for name, gradient in zip(names, gradients, strict=True):
            norms[name] += float(tf.norm(tf.cast(gradient, tf.float32)))
    bad = [name for name, norm in norms.items() if not math.isfinite(norm)]
    return {"losses": losses, "gradient_norms": {k: _number(v) for k, v in norms.items()}, "bad_gradients": bad}


def _finite(value: Any) -> bool:
    array = tf.convert_to_tensor(value)
    return not array.dtype.is_floating or bool(tf.reduce_all(tf.math.is_finite(array)))


def _number(value: Any) -> float | str:
    """A number as JSON can hold it: what is not finite becomes its name."""
    number = float(value)
    return number if math.isfinite(number) else str(number)
