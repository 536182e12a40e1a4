"""Inspection of a model: its Keras version, how it is called, where its loss is."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import keras

from ..core.user_code.overrides import accepts
from ..errors import ModelError
from .data.host_batch import leaves

NEXT_TOKEN = ("CausalLM", "LMHeadModel")
"""Parts of class names whose loss excludes the first target of each row."""


def set_policy(name: str) -> None:
    """Set the global mixed precision policy of every imported Keras."""
    for family in _families():
        family.mixed_precision.set_global_policy(name)


def _families() -> list[Any]:
    """Keras 3, and tf_keras if it is imported."""
    legacy = sys.modules.get("tf_keras")
    return [keras] if legacy is None else [keras, legacy]


def family_of(model: Any) -> Any:
    """The Keras package of a model (keras or tf_keras), whose optimizers and losses fit its variables."""
    for family in reversed(_families()):
        if isinstance(model, family.Model):
            return family
    return _families()[0]


def is_legacy(family: Any) -> bool:
    return not str(family.__version__).startswith("3")


@dataclass(frozen=True)
class ModelInfo:
    """How a model is called."""

    family: Any
    takes_labels: bool
    """`labels` is an argument of its call: it computes its own loss, as transformers' TensorFlow models do."""
    takes_training: bool
    inputs: tuple[str, ...] | None
    """Names of its inputs, if known."""
    shifts: bool

    @property
    def legacy(self) -> bool:
        return is_legacy(self.family)


def look_at(model: Any) -> ModelInfo:
    """Inspect the signature of the model's call."""
    if not callable(model):
        raise ModelError(f"model must be a Keras model or another callable, not {type(model).__name__}")
    call = getattr(model, "call", model)
    return ModelInfo(
        family=family_of(model),
        takes_labels="labels" in _names(call),
        takes_training=accepts(call, "training"),
        inputs=_inputs(model, call),
        shifts=any(part in type(model).__name__ for part in NEXT_TOKEN),
    )


def _names(call: Any) -> list[str]:
    try:
        return list(inspect.signature(call).parameters)
    except (TypeError, ValueError):
        return []


def _inputs(model: Any, call: Any) -> tuple[str, ...] | None:
    """Accepted keys of a dict of features: a functional model's inputs, or the parameters of `call`."""
    found = getattr(model, "inputs", None) if getattr(model, "built", True) else None
    if found:
        names = getattr(model, "input_names", None) or [each.name for each in leaves(found)]
        return tuple(names)
    names = _names(call)
    if "labels" in names and "input_ids" in names:
        return tuple(name for name in names if name not in ("self", "training", "kwargs"))
    return None


def call_model(model: Any, info: ModelInfo, features: Any, labels: Any, training: bool) -> Any:
    """The model's outputs; labels are passed if the model accepts them."""
    options: dict[str, Any] = {"training": training} if info.takes_training else {}
    if info.takes_labels and isinstance(labels, Mapping):
        options.update(labels)
    elif info.takes_labels and labels is not None:
        options["labels"] = labels
    return model(features, **options)


def loss_and_outputs(outputs: Any, *, has_loss: bool) -> tuple[Any, Any]:
    """The loss and the other outputs of a model that computes its own loss; a single output is not wrapped."""
    if isinstance(outputs, Mapping):
        loss = outputs.get("loss")
        return loss, _single({name: each for name, each in outputs.items() if name != "loss" and each is not None})
    if hasattr(outputs, "loss"):
        values = {name: each for name, each in vars(outputs).items() if name != "loss" and each is not None}
        return outputs.loss, _single(values)
    if isinstance(outputs, (tuple, list)) and has_loss:
        return outputs[0], _single(tuple(outputs[1:]))
    return None, _single(tuple(outputs)) if isinstance(outputs, (tuple, list)) else outputs


def _single(outputs: Any) -> Any:
    values = tuple(outputs.values()) if isinstance(outputs, Mapping) else outputs
    return values[0] if len(values) == 1 else values


# ---- variables and formats -------------------------------------------------------------------------------------------


def trainable(model: Any) -> list[Any]:
    """The trainable variables; an error if there are none."""
    found = list(model.trainable_variables)
    if not found:
        raise ModelError(f"{type(model).__name__} has no trainable variables, so there is nothing to train")
    return found


def is_built(model: Any) -> bool:
    """Whether the model's variables exist."""
    return bool(getattr(model, "built", True)) and bool(getattr(model, "variables", ()) or not hasattr(model, "built"))


def check_policy(model: Any, policy: str | None) -> None:
    """Raise if half precision is requested but the model was built in float32: its layers would not change."""
    half = {"mixed_bfloat16": "bfloat16", "mixed_float16": "float16"}.get(policy or "")
    if half is not None and half not in compute_dtypes(model):
        raise ModelError(
            f"{half} was requested, but the model was built for float32. Build it inside the scope "
            "(with args.strategy.scope(): model = ...), or pass model_init="
        )


def compute_dtypes(model: Any) -> set[str | None]:
    """The dtypes in which a model and its layers compute."""
    return {getattr(each, "compute_dtype", None) for each in (model, *getattr(model, "layers", ()))}


def methods_of_fit(model: Any, family: Any) -> list[str]:
    """The methods by which a model changes how `fit` trains it; only `fit` calls them."""
    if not isinstance(model, family.Model) or callable(getattr(model, "hf_compute_loss", None)):
        return []
    names = ("train_step", "compute_loss")
    packages = tuple(each.__name__ for each in _families())
    return [name for name in names if _definer(type(model), name).split(".")[0] not in packages]


def _definer(cls: type, name: str) -> str:
    """The module of the class that defines a method."""
    return next((base.__module__ for base in cls.__mro__ if name in vars(base)), "keras")


def variable_name(variable: Any) -> str:
    """The full name of a variable: its path in Keras 3, its name elsewhere."""
    return str(getattr(variable, "path", None) or variable.name)


def named_variables(variables: list[Any]) -> dict[str, Any]:
    """Variables by full name; duplicate names get a number."""
    named: dict[str, Any] = {}
    for variable in variables:
        name, number = variable_name(variable), 1
        while (key := name if number == 1 else f"{name}#{number}") in named:
            number += 1
        named[key] = variable
    return named
