"""How much a run has computed, and how much memory it took."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import tensorflow as tf

from ..core.host_memory import host_memory, host_peak
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


class MemoryMeter:
    """How much host and device memory a phase added, and how far beyond that it went on the way."""

    def __init__(self) -> None:
        self._host = self._host_peak = 0
        self._device = {"current": 0, "peak": 0}

    def start(self) -> None:
        for name in _gpus():
            tf.config.experimental.reset_memory_stats(name)
        self._host, self._host_peak, self._device = host_memory(), host_peak(), _device_memory()

    def figures(self, phase: str) -> dict[str, int]:
        """Bytes added since `start`, and the peak beyond what is in use now."""
        now, peak, device = host_memory(), host_peak(), _device_memory()
        result = {
            f"{phase}_mem_cpu_alloc_delta": now - self._host,
            f"{phase}_mem_cpu_peaked_delta": max(0, peak - now if peak > self._host_peak else 0),
        }
        if _gpus():
            result[f"{phase}_mem_gpu_alloc_delta"] = device["current"] - self._device["current"]
            result[f"{phase}_mem_gpu_peaked_delta"] = max(0, device["peak"] - device["current"])
        return result


def _gpus() -> list[str]:
    return [device.name.split("device:")[-1] for device in tf.config.list_logical_devices("GPU")]


def _device_memory() -> dict[str, int]:
    found = [tf.config.experimental.get_memory_info(name) for name in _gpus()]
    return {key: sum(each[key] for each in found) for key in ("current", "peak")}
