"""The attributes and methods of a TFTrainer that the library uses."""

from __future__ import annotations

from typing import Any, Protocol

from ..keras.hooks import KerasHooks


class TFHooks(KerasHooks, Protocol):
    """Protocol of a TFTrainer."""

    def training_step(self, *args: Any, **kwargs: Any) -> Any: ...
    def apply_gradients(self, *args: Any, **kwargs: Any) -> Any: ...
