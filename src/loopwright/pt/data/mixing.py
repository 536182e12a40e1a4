"""Several datasets as one: `train_dataset={name: dataset}` with `train_dataset_weights`."""

from __future__ import annotations

import bisect
from collections.abc import Mapping
from itertools import accumulate, pairwise
from typing import Any

import numpy as np
from torch import Tensor
from torch.utils.data import Dataset, IterableDataset

from ...args.field import nearest
from ...core.sampling.mixing import MixedOrder
from ...errors import ArgumentsError, DataError
from .columns import LABEL_COLUMNS
from .loaders import OrderedSampler, check_not_empty


class MixedDataset(Dataset[Any]):
    """The samples of several datasets, one dataset after another."""

    def __init__(self, datasets: Mapping[str, Any], weights: Mapping[str, Any] | None = None) -> None:
        self.names = list(datasets)
        self.datasets = list(datasets.values())
        for name, each in datasets.items():
            if isinstance(each, IterableDataset):
                raise DataError(
                    f"train_dataset[{name!r}] is a stream; only datasets with a length can be mixed. Mix streams "
                    "before, for example by datasets.interleave_datasets"
                )
            check_not_empty(each, f"training ({name})")
        self.sizes = [len(each) for each in self.datasets]
        self._ends = list(accumulate(self.sizes))
        self.weights = dict(zip(self.names, self.sizes, strict=True)) if weights is None else self._checked(weights)

    def _checked(self, weights: Mapping[str, Any]) -> dict[str, Any]:
        for name in [*(each for each in weights if each not in self.names), *self.names]:
            if name not in self.names or name not in weights:
                known = self.names if name not in self.names else weights
                raise ArgumentsError(
                    f"train_dataset_weights has {', '.join(weights)}, but train_dataset has {', '.join(self.names)}: "
                    f"{name!r} is in one of them only{nearest(name, list(known))}; give each dataset a weight"
                )
        return {name: weights[name] for name in self.names}

    def __len__(self) -> int:
        return self._ends[-1]

    def place(self, index: int) -> tuple[int, int]:
        """The number of a sample's dataset, and its index there."""
        number = bisect.bisect_right(self._ends, index)
        return number, index - (self._ends[number - 1] if number else 0)

    def __getitem__(self, index: int) -> Any:
        number, own = self.place(range(len(self))[index])
        return self.datasets[number][own]

    def set_epoch(self, epoch: int) -> None:
        for each in self.datasets:
            if callable(getattr(each, "set_epoch", None)):
                each.set_epoch(epoch)


def check_mapping(datasets: Mapping[str, Any]) -> None:
    """Refuse mappings that are not sources to be mixed, such as the splits of a dataset."""
    if type(datasets).__name__ in ("DatasetDict", "IterableDatasetDict"):
        raise DataError(
            f"train_dataset is a {type(datasets).__name__} with the splits {', '.join(datasets)}; pass one of them, "
            "or a dict of those that are to be mixed"
        )
    if not datasets or not all(isinstance(name, str) and name for name in datasets):
        raise DataError(f"train_dataset is a dict with the keys {list(datasets)!r}; name each dataset by a text")

    columns = [name for name, each in datasets.items() if name in LABEL_COLUMNS or _is_column(each)]
    if columns:
        raise DataError(
            f"the training dataset is a dict with the keys {', '.join(datasets)}, and {columns[0]!r} holds values, not "
            "samples; pass a list of dicts, or datasets.Dataset.from_dict(...)"
        )


def _is_column(values: Any) -> bool:
    """Whether a list or an array holds numbers or texts."""
    if not isinstance(values, (list, tuple, np.ndarray, Tensor)) or not len(values):
        return False
    return isinstance(values[0], (int, float, str, bytes, np.generic)) or (
        isinstance(values[0], Tensor) and not values[0].dim()
    )


def mixed_sampler(sampler: OrderedSampler, dataset: MixedDataset, dropped: int = 0) -> OrderedSampler:
    """The sampler, with the order of a mixture; `dropped` samples of an epoch are not trained on."""
    order = sampler.order
    sampler.order = MixedOrder(
        n=order.n,
        seed=order.seed,
        strategy=order.strategy,
        lengths=order.lengths,
        group_size=order.group_size,
        permute=order.permute,
        sizes=tuple(dataset.sizes),
        weights=tuple(dataset.weights.values()),
        dropped=dropped,
    )
    return sampler


def check_packing(dataset: MixedDataset) -> None:
    """Refuse weights by step for packed batches: which step a sample is in depends on the samples before it."""
    for name, weight in dataset.weights.items():
        if not isinstance(weight, (int, float)):
            raise ArgumentsError(
                f"train_dataset_weights: {name} has a schedule, but batch_packing fills steps with any number of "
                "samples; use constant weights, or train without packing"
            )


def runs(sources: Any) -> list[tuple[int, int]]:
    """Numbers that follow each other in an array, and how often each does."""
    starts = [0, *(np.flatnonzero(np.diff(sources)) + 1).tolist(), len(sources)]
    return [(int(sources[first]), last - first) for first, last in pairwise(starts) if last > first]
