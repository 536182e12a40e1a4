"""What the library uses of a TFTrainer."""

from __future__ import annotations

from typing import Any, Protocol

from ..keras.hooks import KerasHooks


class TFHooks(KerasHooks, Protocol):
    """Of a trainer of Keras models with TensorFlow."""

    def training_step(self, *args: Any, **kwargs: Any) -> Any: ...
    def apply_gradients(self, *args: Any, **kwargs: Any) -> Any: ...
