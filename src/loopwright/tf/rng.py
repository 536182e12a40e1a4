"""Random numbers under TensorFlow: seeding them, and keeping and putting back where every stream stands."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import tensorflow as tf

from ..core.randomness import decode_numpy, decode_python, encode_numpy, encode_python


def set_seed(seed: int, *, deterministic: bool = False) -> None:
    """Seed Python, numpy and TensorFlow (and with it Keras); `deterministic` also refuses what cannot be repeated."""
    random.seed(seed)
    np.random.seed(seed)
    tf.random.set_seed(seed)
    tf.random.set_global_generator(tf.random.Generator.from_seed(seed))  # else it starts anywhere
    if deterministic:
        tf.config.experimental.enable_op_determinism()


def _global_seeds() -> list[Any]:
    """Variables behind random operations that belong to no model: Keras's own generator and TensorFlow's."""
    from keras.src.backend.common import global_state
    from keras.src.random.seed_generator import GLOBAL_SEED_GENERATOR

    generator = global_state.get_global_attribute(GLOBAL_SEED_GENERATOR)
    return [tf.random.get_global_generator().state, *([generator.state] if generator is not None else [])]


def snapshot_rng() -> dict[str, Any]:
    """Where the streams of Python, numpy, TensorFlow and Keras stand now."""
    return {
        "python": random.getstate(),
        "numpy": np.random.get_state(legacy=True),
        "tensorflow": [tf.convert_to_tensor(variable).numpy() for variable in _global_seeds()],
    }


def restore_rng(states: dict[str, Any]) -> None:
    """Put every stream back to where `snapshot_rng` found it."""
    random.setstate(states["python"])
    np.random.set_state(states["numpy"])
    for variable, value in zip(_global_seeds(), states.get("tensorflow", ()), strict=False):
        variable.assign(value)


@contextmanager
def untouched_rng() -> Iterator[None]:
    """Whatever happens inside draws no number from anybody's stream."""
    states = snapshot_rng()
    try:
        yield
    finally:
        restore_rng(states)


def rng_to_json(states: dict[str, Any]) -> dict[str, Any]:
    """A snapshot as JSON values that hold only integers."""
    return {
        "python": encode_python(states["python"]),
        "numpy": encode_numpy(states["numpy"]),
        "tensorflow": [[str(value.dtype), value.tolist()] for value in states["tensorflow"]],
    }


def rng_from_json(encoded: dict[str, Any]) -> dict[str, Any]:
    """The snapshot that `rng_to_json` wrote."""
    return {
        "python": decode_python(encoded["python"]),
        "numpy": decode_numpy(encoded["numpy"]),
        "tensorflow": [np.array(value, dtype=dtype) for dtype, value in encoded.get("tensorflow", ())],
    }
