"""TensorFlow variables, and rebuilding models in the scope of a tf.distribute strategy."""

from __future__ import annotations

from typing import Any

import keras
import tensorflow as tf

from ..errors import ModelError


def raw(variable: Any) -> Any:
    """The tf.Variable inside a Keras variable."""
    return variable.value if isinstance(variable, keras.Variable) else variable


def in_scope(model: Any, distribution: tf.distribute.Strategy) -> bool:
    """Whether the model's variables belong to the strategy."""
    extended = distribution.extended
    return all(extended.variable_created_in_scope(raw(variable)) for variable in model.variables)


def rebuilt(model: Any, distribution: tf.distribute.Strategy, family: Any) -> Any:
    """A copy of the model with the same weights, built inside the strategy's scope."""
    try:
        values = [tf.convert_to_tensor(variable).numpy() for variable in model.variables]
        with distribution.scope():
            if isinstance(model, family.Sequential) or getattr(model, "_is_graph_network", False) or _functional(model):
                fresh = family.models.clone_model(model)
            else:
                fresh = type(model).from_config(model.get_config())
                fresh.build_from_config(model.get_build_config())
            for variable, value in zip(fresh.variables, values, strict=True):
                variable.assign(value)
    except Exception as error:  # a model's get_config and build may raise any exception
        raise ModelError(
            f"the model was built outside args.strategy.scope() and cannot be rebuilt inside it ({error}). Build it "
            "inside (with args.strategy.scope(): model = ...), or pass model_init="
        ) from error
    return fresh


def _functional(model: Any) -> bool:
    return type(model).__name__ == "Functional"
