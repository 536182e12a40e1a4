"""Random states with Keras: seeding, saving and restoring them."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np

from ..core.checkpoint.schema import record
from ..core.randomness import NUMPY_RNG, PYTHON_RNG, decode_numpy, decode_python, encode_numpy, encode_python

SAVED_RNG = record({"python": PYTHON_RNG, "numpy": NUMPY_RNG})
"""rng.json; a backend adds the variables of its generators."""


class RandomStreams:
    """The random streams of Python, numpy and Keras; a backend adds its own."""

    name = "keras"
    """The name of the variables in a checkpoint."""

    def seed(self, seed: int, *, deterministic: bool = False) -> None:
        """Seed all streams (Keras draws seeds from Python's); `deterministic` forbids nondeterministic operations."""
        random.seed(seed)
        np.random.seed(seed)

    def variables(self) -> list[Any]:
        """Variables of random generators outside models: Keras's global generator, if it was used."""
        from keras.src.backend.common import global_state
        from keras.src.random.seed_generator import GLOBAL_SEED_GENERATOR

        generator = global_state.get_global_attribute(GLOBAL_SEED_GENERATOR)
        return [] if generator is None else [generator.state]

    def snapshot(self) -> dict[str, Any]:
        """The current state of every stream."""
        return {
            "python": random.getstate(),
            "numpy": np.random.get_state(legacy=True),
            "variables": [self.value(variable) for variable in self.variables()],
        }

    def value(self, variable: Any) -> Any:
        """A variable's value in host memory."""
        return np.array(variable.value)

    def restore(self, states: dict[str, Any]) -> None:
        """Restore every stream from a snapshot."""
        random.setstate(states["python"])
        np.random.set_state(states["numpy"])
        for variable, value in zip(self.variables(), states["variables"], strict=False):
            variable.assign(value)

    @contextmanager
    def untouched(self) -> Iterator[None]:
        """Context manager that restores every random stream at exit."""
        states = self.snapshot()
        try:
            yield
        finally:
            self.restore(states)

    def to_json(self, states: dict[str, Any]) -> dict[str, Any]:
        """A snapshot as JSON values that contain only integers."""
        return {
            "python": encode_python(states["python"]),
            "numpy": encode_numpy(states["numpy"]),
            self.name: [[str(value.dtype), value.tolist()] for value in states["variables"]],
        }

    def from_json(self, encoded: dict[str, Any]) -> dict[str, Any]:
        """The snapshot that `to_json` wrote."""
        return {
            "python": decode_python(encoded["python"]),
            "numpy": decode_numpy(encoded["numpy"]),
            "variables": [np.array(value, dtype=dtype) for dtype, value in self._saved(encoded)],
        }

    def _saved(self, encoded: dict[str, Any]) -> list[Any]:
        # Older JAX checkpoints also contain TensorFlow's generator, before Keras's.
        return list(encoded.get(self.name) or encoded.get("tensorflow", ())[1:])
