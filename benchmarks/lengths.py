"""Seeded samples of realistic lengths: log-normal lengths, Zipf token ids, and the plain padding collator of every arm.

Nothing is stored but one pool of ids and the lengths: a sample is a slice of the pool, so that a large set is ready
at once too and the same in every process.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

FIRST_ID = 2
"""Ids below are left to padding and start marks, which some embeddings do not train."""
POOL = 1 << 21


@dataclass(frozen=True)
class Lengths:
    """clip(lognormal(mean of the logarithm, sigma), low, high)."""

    mean: float
    sigma: float
    low: int
    high: int

    def draw(self, n: int, seed: int) -> np.ndarray:
        drawn = np.random.default_rng(seed).lognormal(self.mean, self.sigma, n)
        return np.clip(drawn, self.low, self.high).astype(np.int64)


SFT = Lengths(5.5, 0.8, 16, 2048)
CLASSIFICATION = Lengths(math.log(75), 0.8, 8, 512)
SOURCE = Lengths(math.log(180), 0.8, 8, 1024)
TARGET = Lengths(math.log(45), 0.7, 4, 256)
MIXED = Lengths(math.log(330), 1.0, 16, 4096)
MIXED_EIGHTH = Lengths(math.log(330 / 8), 1.0, 2, 512)
"""The shape of MIXED, and so its share of padding, at an eighth of its size: seconds instead of minutes on a CPU."""


def exactly(length: int) -> Lengths:
    """Every sample this long."""
    return Lengths(math.log(length), 0.0, length, length)


def zipf_ids(vocabulary: int, n: int, seed: int) -> np.ndarray:
    """Token ids whose frequency falls as 1/rank; which id has which rank is drawn too."""
    rng = np.random.default_rng(seed)
    ranks = vocabulary - FIRST_ID
    share = np.cumsum(1.0 / np.arange(1, ranks + 1))
    drawn = np.searchsorted(share, rng.random(n) * share[-1])
    return (rng.permutation(ranks) + FIRST_ID)[np.minimum(drawn, ranks - 1)].astype(np.int64)


class Texts(torch.utils.data.Dataset):
    """Samples of one kind: `causal` (next token), `class` (one label of two) or `pair` (source and target)."""

    def __init__(
        self,
        kind: str,
        n: int,
        lengths: Lengths,
        vocabulary: int,
        *,
        targets: Lengths | None = None,
        prompt_masked: bool = False,
        seed: int = 0,
        pool: int = POOL,
    ) -> None:
        self.kind, self.seed = kind, seed
        self.lengths = lengths.draw(n, seed)
        self.target_lengths = None if targets is None else targets.draw(n, seed + 1)
        share = np.random.default_rng(seed + 2).beta(2, 3, n) if prompt_masked else np.zeros(n)
        self.prompts = (share * self.lengths).astype(np.int64)
        self.pool = zipf_ids(vocabulary, pool + lengths.high, seed + 3)
        self.starts = np.random.default_rng(seed + 4).integers(0, pool, n)
        self.middle = np.median(self.pool)

    def __len__(self) -> int:
        return len(self.lengths)

    def __getitem__(self, i: int) -> dict[str, Any]:
        start, length = self.starts[i], self.lengths[i]
        ids = self.pool[start : start + length]
        if self.kind == "class":
            return {"input_ids": ids, "labels": int(ids[0] > self.middle)}  # something that can be learnt
        if self.target_lengths is not None:
            other = self.starts[-1 - i]
            return {"input_ids": ids, "labels": self.pool[other : other + self.target_lengths[i]]}
        labels = ids.copy()
        labels[: self.prompts[i]] = -100
        return {"input_ids": ids, "labels": labels}

    def first(self, n: int) -> torch.utils.data.Subset:
        """The first samples only."""
        return torch.utils.data.Subset(self, range(n))

    def supervised(self, indices: np.ndarray) -> np.ndarray:
        """Targets per sample."""
        if self.kind == "class":
            return np.ones(len(indices), dtype=np.int64)
        if self.target_lengths is not None:
            return self.target_lengths[indices]
        return self.lengths[indices] - self.prompts[indices]

    def computed(self, indices: np.ndarray, micro: int) -> int:
        """The tokens that padding each run of `micro` samples computes, in sources and targets."""
        sides = [self.lengths, *([] if self.target_lengths is None else [self.target_lengths])]
        return sum(computed_tokens(side[indices], micro) for side in sides)


def _padded(rows: list[np.ndarray], fill: int) -> np.ndarray:
    out = np.full((len(rows), max(map(len, rows))), fill, dtype=np.int64)
    for row, values in zip(out, rows, strict=True):
        row[: len(values)] = values
    return out


def pad(samples: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
    """The plain padding collator: right to the longest of the micro-batch, labels with -100."""
    rows = [sample["input_ids"] for sample in samples]
    ids = _padded(rows, 0)
    mask = (np.arange(ids.shape[1]) < np.array([len(row) for row in rows])[:, None]).astype(np.int64)
    labels = [sample["labels"] for sample in samples]
    targets = np.array(labels) if isinstance(labels[0], int) else _padded(labels, -100)
    batch = {"input_ids": ids, "attention_mask": mask, "labels": targets}
    return {name: torch.from_numpy(values) for name, values in batch.items()}


def shuffled(n: int, epoch: int, seed: int) -> np.ndarray:
    """The order of an epoch, as both trainers shuffle on one process."""
    return torch.randperm(n, generator=torch.Generator().manual_seed(seed + epoch)).numpy()


def consumed(n: int, samples: int, seed: int) -> np.ndarray:
    """The first samples of a run over as many epochs as it takes, in order."""
    epochs = range(-(-samples // n))
    return np.concatenate([shuffled(n, epoch, seed) for epoch in epochs] or [np.zeros(0, dtype=np.int64)])[:samples]


def computed_tokens(lengths: np.ndarray, micro: int) -> int:
    """What padding each run of `micro` samples to its longest computes."""
    return int(sum(len(part) * part.max() for part in np.split(lengths, range(micro, len(lengths), micro))))
