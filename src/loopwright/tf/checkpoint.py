"""Variables to and from checkpoint files: safetensors and JSON, and the checkpoints of TensorFlow's own kind."""

from __future__ import annotations

import errno
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import tensorflow as tf
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from ..core.checkpoint.folder import MODEL, OPTIMIZER
from ..core.checkpoint.json_files import write_json
from ..errors import CheckpointError
from ..notices import logger
from .models import named_variables, raw

VALUE = ".ATTRIBUTES/VARIABLE_VALUE"
"""How TensorFlow's own checkpoints end the name of a variable."""
VARIABLES = "variables.json"
"""The order of the variables in a file: names that Keras counts up differ from process to process."""


def values_of(variables: list[Any]) -> dict[str, Any]:
    """Copies of the variables' values in host memory, by name."""
    return {name: _value(variable) for name, variable in named_variables(variables).items()}


def _value(variable: Any) -> Any:
    array = variable.numpy()
    return array.view(np.uint16) if array.dtype.name == "bfloat16" else array


def write_values(path: Path, values: Mapping[str, Any]) -> None:
    """Write arrays to a safetensors file, with their order beside them."""
    try:
        save_file({name: np.array(value, order="C", copy=None) for name, value in values.items()}, str(path))
    except SafetensorError as error:
        for number in (errno.ENOSPC, errno.EDQUOT):
            if f"(os error {number})" in str(error):
                raise OSError(number, os.strerror(number)) from error
        raise
    write_json(path.with_suffix(f".{VARIABLES}"), list(values))


def read_values(path: Path) -> dict[str, Any]:
    """Every array of a safetensors file, in the order it was saved in."""
    try:
        with safe_open(str(path), framework="numpy") as file:
            values = {name: file.get_tensor(name) for name in file.keys()}
    except Exception as error:  # a damaged file fails in many ways
        raise CheckpointError(f"{path} cannot be read as safetensors: {error}") from error
    order = path.with_suffix(f".{VARIABLES}")
    names = json.loads(order.read_text(encoding="utf-8")) if order.is_file() else list(values)
    return {name: values[name] for name in names}


def load_values(variables: list[Any], values: Mapping[str, Any], *, source: str) -> None:
    """Assign saved values: by name, or by order where Keras has numbered the layers anew."""
    named = named_variables(variables)
    if set(named) == set(values):
        pairs = [(variable, values[name], name) for name, variable in named.items()]
    elif len(named) == len(values):
        pairs = [
            (variable, value, name)
            for (name, variable), value in zip(named.items(), values.values(), strict=True)
        ]
    else:
        missing = [name for name in named if name not in values][:5]
        raise CheckpointError(
            f"the values in {source} do not fit: {len(values)} saved, {len(named)} wanted; missing: "
            f"{', '.join(missing) or 'none'}"
        )
    wrong = [
        f"{name}: {value.shape} saved, {tuple(variable.shape)} wanted"
        for variable, value, name in pairs
        if tuple(value.shape) != tuple(variable.shape)
    ]
    if wrong:
        raise CheckpointError(f"the values in {source} do not fit. Of another shape: {'; '.join(wrong[:5])}")
    for variable, value, _ in pairs:
        dtype = tf.as_dtype(variable.dtype)
        variable.assign(tf.bitcast(tf.constant(value), dtype) if dtype == tf.bfloat16 else value)


def load_model_values(model: Any, folder: str | os.PathLike[str]) -> None:
    """Load the weights of a checkpoint, or of `save_model`, into the model."""
    path = Path(folder) / MODEL
    if not path.is_file():
        raise CheckpointError(f"{folder} holds no {MODEL}: there are no weights to load")
    load_values(list(model.variables), read_values(path), source=str(folder))


def load_optimizer_values(optimizer: Any, folder: Path) -> None:
    load_values(optimizer_variables(optimizer), read_values(folder / f"{OPTIMIZER}.safetensors"), source=str(folder))


def optimizer_variables(optimizer: Any) -> list[Any]:
    """Everything an optimizer remembers: its count of updates, its slots, its loss scale."""
    variables = optimizer.variables
    return list(variables() if callable(variables) else variables)


# ---- the folders of the old trainer ----------------------------------------------------------------------------------


def old_checkpoint(place: Any) -> str | None:
    """The newest checkpoint of TensorFlow's own kind at a path: a CheckpointManager's folder, or a prefix in it."""
    if not isinstance(place, (str, os.PathLike)):
        return None
    text = os.fspath(place)
    if os.path.isfile(f"{text}.index"):
        return text
    if os.path.isfile(os.path.join(text, "trainer_state.json")) or not os.path.isdir(text):
        return None
    return tf.train.latest_checkpoint(text)


def restore_old(prefix: str, model: Any, optimizer: Any) -> int:
    """Load what the old trainer saved (`optimizer` and `model`); returns the updates it had done."""
    saved = {name for name, _ in tf.train.list_variables(prefix)}
    try:
        tf.train.Checkpoint(model=model).restore(prefix).assert_existing_objects_matched()
    except (AssertionError, ValueError) as error:
        raise CheckpointError(
            f"{prefix} does not fit the model ({str(error).splitlines()[0]}). Weights of tf_keras models load into "
            "tf_keras models (TF_USE_LEGACY_KERAS=1)"
        ) from error
    if any(".OPTIMIZER_SLOT/optimizer/" in name for name in saved):
        _restore_slots(prefix, saved, model, optimizer)
    else:
        tf.train.Checkpoint(model=model, optimizer=optimizer).restore(prefix).expect_partial()
    for name in ("optimizer/iter", "optimizer/_iterations"):
        key = f"{name}/{VALUE}"
        if key in saved:
            step = int(tf.train.load_variable(prefix, key))
            optimizer.iterations.assign(step)
            return step
    logger.warning(f"{prefix} does not say how many updates it had done: the run counts from 0")
    return 0


def _restore_slots(prefix: str, saved: set[str], model: Any, optimizer: Any) -> None:
    """Adam's moments as the optimizers before Keras 2.11 wrote them: beside the variables they belong to."""
    moments = {"m": getattr(optimizer, "_momentums", None), "v": getattr(optimizer, "_velocities", None)}
    keys = _checkpoint_keys(model)
    for index, variable in enumerate(model.trainable_variables):
        for slot, values in moments.items():
            key = f"{keys.get(id(raw(variable)))}/.OPTIMIZER_SLOT/optimizer/{slot}/{VALUE}"
            if values is not None and key in saved:
                values[index].assign(tf.train.load_variable(prefix, key))


def _checkpoint_keys(model: Any) -> dict[int, str]:
    """Where a checkpoint of TensorFlow's own kind keeps each variable of a model, by the variable's id."""
    from tensorflow.python.checkpoint.graph_view import ObjectGraphView

    root = tf.train.Checkpoint(model=model)  # the view holds it weakly
    objects, paths = ObjectGraphView(root).breadth_first_traversal()
    return {id(each): "/".join(reference.name for reference in paths[each]) for each in objects}
