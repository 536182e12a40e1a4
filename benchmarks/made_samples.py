"""Seeded samples that are not text: images, features of speech, vectors. A sample is a slice of one pool of noise."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from lengths import Texts, exactly, zipf_ids

CLASSES = 10
SPREAD = 4099
"""Slices begin at multiples of this, so that no two samples are alike and nothing is drawn when one is read."""


class Arrays(torch.utils.data.Dataset):
    """Samples of one shape. `read` makes the sample at an index from its slice of noise."""

    kind = "array"

    def __init__(self, n: int, shape: tuple[int, ...], read: Callable[[int, np.ndarray], dict[str, Any]]) -> None:
        self.shape, self.read = shape, read
        self.size = int(np.prod(shape))
        noise = np.random.default_rng(0).standard_normal(4 * self.size + SPREAD, dtype=np.float32)
        self.noise, self.starts = noise, (np.arange(n) * SPREAD) % (3 * self.size)
        self.lengths = np.ones(n, dtype=np.int64)

    def __len__(self) -> int:
        return len(self.starts)

    def __getitem__(self, i: int) -> dict[str, Any]:
        start = self.starts[i]
        return self.read(i, self.noise[start : start + self.size].reshape(self.shape))

    def supervised(self, indices: np.ndarray) -> np.ndarray:
        return np.ones(len(indices), dtype=np.int64)


def images(n: int, size: int) -> Arrays:
    """Images whose brightness says their class, so that the loss falls."""

    def read(i: int, noise: np.ndarray) -> dict[str, Any]:
        label = i % CLASSES
        return {"pixel_values": noise + np.float32(label / CLASSES - 0.5), "labels": label}

    return Arrays(n, (3, size, size), read)


def sequences(n: int, steps: int, features: int) -> Arrays:
    """Sequences of measurements of several kinds, and a number to predict at each step."""

    def read(i: int, noise: np.ndarray) -> dict[str, Any]:
        return {"values": noise, "kind": i % CLASSES, "labels": noise.mean(-1) * (1 + i % CLASSES)}

    return Arrays(n, (steps, features), read)


def vectors(n: int, width: int) -> Arrays:
    return Arrays(n, (width,), lambda i, noise: {"x": noise, "labels": noise[::-1].copy()})


class Speech(Arrays):
    """Features of half-minute recordings, and transcripts of different lengths."""

    kind = "speech"

    def __init__(self, n: int, bins: int, frames: int, transcripts: Any, vocabulary: int) -> None:
        super().__init__(n, (bins, frames), self._read)
        self.targets = transcripts.draw(n, 1)
        self.pool = zipf_ids(vocabulary, 1 << 16, 3)

    def _read(self, i: int, noise: np.ndarray) -> dict[str, Any]:
        start = (i * SPREAD) % (len(self.pool) - 512)
        return {"input_features": noise, "labels": self.pool[start : start + self.targets[i]]}

    def supervised(self, indices: np.ndarray) -> np.ndarray:
        return self.targets[indices]


def blocks(n: int, length: int, vocabulary: int, pool: int) -> Texts:
    """Documents joined and divided into blocks of one length, as for pretraining."""
    return Texts("causal", n, exactly(length), vocabulary, pool=pool)


def stack(samples: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
    """Samples of one shape as a batch."""
    return {name: torch.from_numpy(np.stack([sample[name] for sample in samples])) for name in samples[0]}


def stack_speech(samples: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
    """Features as they are, transcripts padded with -100."""
    longest = max(len(sample["labels"]) for sample in samples)
    labels = np.full((len(samples), longest), -100, dtype=np.int64)
    for row, sample in zip(labels, samples, strict=True):
        row[: len(sample["labels"])] = sample["labels"]
    features = np.stack([sample["input_features"] for sample in samples])
    return {"input_features": torch.from_numpy(features), "labels": torch.from_numpy(labels)}
