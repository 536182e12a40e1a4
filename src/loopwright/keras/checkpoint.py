"""Saving and loading variables: safetensors and JSON files."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
from safetensors import safe_open
from safetensors.numpy import save_file

from ..core.checkpoint.folder import MODEL, OPTIMIZER
from ..core.checkpoint.json_files import read_json, write_json
from ..core.checkpoint.schema import list_of, text
from ..errors import CheckpointError
from .loss.compiled_loss import keras_dtype
from .models import named_variables

VARIABLES = "variables.json"
"""Suffix of the file with the variables' order: names numbered by Keras differ between processes."""


def values_of(variables: list[Any]) -> dict[str, Any]:
    """Copies of the variables' values in host memory, by name."""
    return {name: _value(variable) for name, variable in named_variables(variables).items()}


def _value(variable: Any) -> Any:
    array = variable.numpy()
    return array.view(np.uint16) if array.dtype.name == "bfloat16" else array


def write_values(path: Path, values: Mapping[str, Any]) -> None:
    """Write arrays to a safetensors file, and their order to a second file."""
    save_file({name: np.array(value, order="C", copy=None) for name, value in values.items()}, str(path))
    write_json(path.with_suffix(f".{VARIABLES}"), list(values))


def read_values(path: Path) -> dict[str, Any]:
    """Every array of a safetensors file, in the order of saving."""
    try:
        with safe_open(str(path), framework="numpy") as file:
            values = {name: file.get_tensor(name) for name in file.keys()}
    except Exception as error:  # a damaged file raises many kinds of errors
        raise CheckpointError(f"{path} cannot be read as safetensors: {error}") from error
    order = path.with_suffix(f".{VARIABLES}")
    names = read_json(order, list_of(text)) if order.is_file() else list(values)
    if sorted(names) != sorted(values):
        raise CheckpointError(f"{order} does not list the variables in {path.name}; it was damaged or changed")
    return {name: values[name] for name in names}


def load_values(variables: list[Any], values: Mapping[str, Any], *, source: str) -> None:
    """Assign saved values: by name, or by order if Keras has numbered the layers differently."""
    named = named_variables(variables)
    if set(named) == set(values):
        pairs = [(variable, values[name], name) for name, variable in named.items()]
    elif len(named) == len(values):
        pairs = [
            (variable, value, name) for (name, variable), value in zip(named.items(), values.values(), strict=True)
        ]
    else:
        missing = [name for name in named if name not in values][:5]
        raise CheckpointError(
            f"the variables in {source} do not match: {len(values)} saved, {len(named)} expected; missing: "
            f"{', '.join(missing) or 'none'}"
        )
    wrong = [
        f"{name}: {value.shape} saved, {tuple(variable.shape)} expected"
        for variable, value, name in pairs
        if tuple(value.shape) != tuple(variable.shape)
    ]
    if wrong:
        raise CheckpointError(f"the variables in {source} have different shapes: {'; '.join(wrong[:5])}")
    for variable, value, _ in pairs:
        variable.assign(value.view(ml_dtypes.bfloat16) if keras_dtype(variable) == "bfloat16" else value)


def load_model_values(model: Any, folder: str | os.PathLike[str]) -> None:
    """Load the weights of a checkpoint, or of `save_model`, into the model."""
    path = Path(folder) / MODEL
    if not path.is_file():
        raise CheckpointError(f"{folder} has no {MODEL}, so there are no weights to load")
    load_values(list(model.variables), read_values(path), source=str(folder))


def load_optimizer_values(optimizer: Any, folder: Path) -> None:
    load_values(optimizer_variables(optimizer), read_values(folder / f"{OPTIMIZER}.safetensors"), source=str(folder))


def optimizer_variables(optimizer: Any) -> list[Any]:
    """All variables of an optimizer: its update count, its slots, its loss scale."""
    variables = optimizer.variables
    return list(variables() if callable(variables) else variables)


def bytes_of(variable: Any) -> int:
    """The size of a variable in a file."""
    return int(np.prod(variable.shape)) * np.dtype(keras_dtype(variable)).itemsize
