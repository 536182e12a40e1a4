"""TensorFlow, split into two logical devices before anything computes with it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest


@pytest.fixture(autouse=True)
def _keras_as_found() -> Iterator[None]:
    """Whatever a test makes the global number format, the next one finds float32."""
    pytest.importorskip("tensorflow", reason="TensorFlow is not installed")
    import keras

    yield
    if keras.mixed_precision.dtype_policy().name != "float32":
        keras.mixed_precision.set_global_policy("float32")
