"""Counting of tokens and floating point operations."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from .host_batch import HostBatch


class WorkCounter:
    """Counts tokens and operations of batches in host memory, from the main input's shape."""

    def __init__(self, model: Any, *, tokens: str) -> None:
        self._name = getattr(model, "main_input_name", "input_ids")
        self._tokens = tokens
        self._per_token = 6 * sum(
            int(np.prod(variable.shape)) for variable in model.trainable_variables if len(variable.shape) > 1
            and "embed" not in str(getattr(variable, "path", variable.name)).lower()
        )  # fmt: skip
        self.counts = True

    def measure(self, batches: list[HostBatch]) -> tuple[float, int]:
        """Floating point operations and tokens of the batches."""
        inputs = [self._main(batch) for batch in batches]
        elements = sum(0 if each is None else int(np.prod(each.shape)) for each in inputs)
        return float(self._per_token * elements), 0 if self._tokens == "no" else sum(map(self._seen, batches))

    def _main(self, batch: HostBatch) -> Any:
        features = batch.features
        if isinstance(features, Mapping):
            return features.get(self._name)
        kind = getattr(getattr(features, "dtype", None), "kind", "f")
        return features if kind in "iu" else None  # one integer input is a row of tokens

    def _seen(self, batch: HostBatch) -> int:
        mask = batch.features.get("attention_mask") if isinstance(batch.features, Mapping) else None
        if self._tokens == "non_padding" and mask is not None:
            return int(np.sum(mask))
        main = self._main(batch)
        return 0 if main is None else int(np.prod(main.shape))
