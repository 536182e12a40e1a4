"""Calling a traced function without TensorFlow's dispatch, which costs more time than a small update.

The tensors of an update are passed as a flat list. There is one concrete function for each structure and shape; if
shapes of one structure differ, the differing dimensions become unknown, so that few functions are traced.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import tensorflow as tf

from ..keras.data.host_batch import leaves, mapped

Signature = Any
"""A hashable description of nested containers."""


class FlatFunction:
    """A function of nested arrays and one vector of numbers, traced once per structure and shape."""

    def __init__(self, function: Callable[[Any, Any, bool], Any]) -> None:
        self._function = function
        self._exact: dict[Any, Any] = {}
        self._general: dict[Signature, tuple[list[tf.TensorSpec], Any]] = {}

    @property
    def traced(self) -> int:
        """Number of traced functions."""
        return len({id(each) for each in self._exact.values()})

    def __call__(self, value: Any, numbers: Any, flag: bool) -> Any:
        arrays = list(leaves(value))
        structure = (signature(value), flag)
        key = (structure, tuple([(array.dtype, array.shape) for array in arrays]))
        concrete = self._exact.get(key)
        if concrete is None:
            concrete = self._exact[key] = self._traced(structure, value, arrays, flag)
        return concrete(*map(tf.constant, arrays), tf.constant(numbers))

    def _traced(self, structure: Signature, value: Any, arrays: list[Any], flag: bool) -> Any:
        specs = [tf.TensorSpec(array.shape, array.dtype) for array in arrays]
        if structure in self._general:
            known, concrete = self._general[structure]
            specs = [_common(mine, known_spec) for mine, known_spec in zip(specs, known, strict=True)]
            if specs == known:
                return concrete
        template = mapped(lambda leaf: 0, value)

        def flat(*tensors: Any) -> Any:
            given = iter(tensors[:-1])
            return self._function(mapped(lambda leaf: next(given), template), tensors[-1], flag)

        concrete = tf.function(flat).get_concrete_function(*specs, tf.TensorSpec((None,), tf.float32))
        self._general[structure] = (specs, concrete)
        return concrete


def _common(one: tf.TensorSpec, other: tf.TensorSpec) -> tf.TensorSpec:
    """The spec of both tensors: dimensions in which they differ are unknown."""
    if one.dtype != other.dtype or one.shape.rank != other.shape.rank:
        return one
    sizes = [a if a == b else None for a, b in zip(one.shape, other.shape, strict=True)]
    return tf.TensorSpec(sizes, one.dtype)


def signature(value: Any) -> Signature:
    """The containers of a nested value; equal for values of the same structure."""
    if isinstance(value, Mapping):
        return ("dict", *((name, signature(each)) for name, each in value.items()))
    if isinstance(value, (tuple, list)):
        return (type(value).__name__, *map(signature, value))
    return value is None
