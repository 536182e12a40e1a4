"""DataLoaders whose order and randomness depend only on seed, epoch and position."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import chain
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset, Sampler, SequentialSampler, get_worker_info

from ...args.base import BaseArguments
from ...args.groups.data import DataArgs
from ...args.groups.hardware import HardwareArgs
from ...args.problems import short
from ...core.order import Order
from ...core.sampling.packing import Packing
from ...core.user_code.error_notes import add_note, describe_items
from ...errors import ArgumentsError, DataError
from ...snapshot import restore_rng
from .loading_errors import NotedInWorker, NotedSamples, raise_for_main
from .streams import Start, StreamLoader, become_worker, has_exact_state
from .workers import begin_worker, kill_workers_at_exit


def torch_permutation(n: int, seed: int) -> Any:
    """torch's permutation: a fast implementation of the order defined in core/order.py."""
    return torch.randperm(n, generator=torch.Generator().manual_seed(seed)).numpy()


def has_length(data: Any) -> bool:
    """Whether len() works on the data."""
    try:
        len(data)
        return True
    except (TypeError, NotImplementedError, AttributeError):
        return False
    except Exception as error:  # the length is the user's method, and may be negative or too large
        raise DataError(
            f"len() of {type(data).__name__} raised {type(error).__name__}: {error}; return the number of samples as "
            "an int, or use an IterableDataset without a length"
        ) from error


class OrderedSampler(Sampler[Any]):
    """Indices in the order of core/order.py, starting at any epoch and position."""

    packing: Packing | None = None
    """How the sampler fills micro-batches up to a number of tokens, if it does."""
    makes_batches: bool = False
    """Whether it returns lists of indices, one for each micro-batch."""
    batch_size: int | None = None
    """The mean number of samples of the micro-batches that it makes."""

    def __init__(self, order: Order, *, with_position: bool = False) -> None:
        self.order = order
        self.epoch = self.start = 0
        self.with_position = with_position
        self.part: tuple[int, int, int] | None = None
        """The rank, the number of ranks and their batch size; None for a single process."""

    def set_epoch(self, epoch: int) -> None:
        self.epoch, self.start = epoch, 0

    def go_to(self, epoch: int, start: int) -> None:
        """Start the next iteration at this sample of this epoch."""
        self.epoch, self.start = epoch, start

    def __len__(self) -> int:
        if self.part is None:
            return self.order.n
        rank, world, size = self.part
        rounds, rest = divmod(self.order.n, world * size)
        return rounds * size + min(max(rest - rank * size, 0), size)

    def __iter__(self) -> Iterator[Any]:
        return chain.from_iterable(self._lists(self.epoch, self.start, with_position=self.with_position))

    def _lists(self, epoch: int, start: int, *, with_position: bool) -> Iterator[list[Any]]:
        """The indices of this rank, a few thousand in a list; for workers with epoch and position."""
        for indices, positions in self.order.places(epoch, start):
            own = self._is_own(positions - start)
            chosen = indices[own].tolist()
            if with_position:
                places = positions[own].tolist()
                yield [(index, epoch, place) for index, place in zip(chosen, places, strict=True)]
            else:
                yield chosen

    def _is_own(self, rows: Any) -> Any:
        """Which rows, counted from the start, belong to this rank: every world-th block of a batch's size."""
        if self.part is None:
            return slice(None)
        rank, world, size = self.part
        return rows // size % world == rank

    def samples_ahead(self, batches: int, done: int) -> int:
        """Samples in this rank's next batches, after `done` samples over all ranks."""
        rank, world, size = self.part or (0, 1, 1)
        left = self.order.n - done
        return sum(min(max(left - (k * world + rank) * size, 0), size) for k in range(batches))


class SeededSamples(Dataset[Any]):
    """A dataset whose random draws depend on the sample's position in the run, not on the worker that loads it."""

    def __init__(self, dataset: Any, seed: int) -> None:
        self.dataset, self.seed = dataset, seed
        self._epoch: int | None = None
        self._places: list[tuple[int, int, int]] = []

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitems__(self, places: list[tuple[int, int, int]]) -> list[Any]:
        self._places = places
        if not hasattr(self.dataset, "__getitems__"):
            return [self[place] for place in places]
        self._begin(*places[0][1:])
        try:
            return self.dataset.__getitems__(self.latest())
        except Exception as error:  # the dataset is the user's; re-raised with a note
            add_note(error, f"items {describe_items(self.latest())} of the dataset in a worker")
            raise_for_main(error)

    def latest(self) -> list[int]:
        """The indices that were loaded last."""
        return [index for index, _, _ in self._places]

    def __getitem__(self, place: tuple[int, int, int]) -> Any:
        index, epoch, position = place
        self._begin(epoch, position)
        try:
            return self.dataset[index]
        except Exception as error:  # the dataset is the user's; re-raised with a note
            add_note(error, f"item {index} of the dataset in a worker", advice=f"try dataset[{index}] alone")
            raise_for_main(error)

    def _begin(self, epoch: int, position: int) -> None:
        """Seed for the sample; calls set_epoch here, because each worker has a copy of the dataset."""
        if epoch != self._epoch:
            self._epoch = epoch
            if callable(getattr(self.dataset, "set_epoch", None)):
                self.dataset.set_epoch(epoch)
        seed_all(self.seed, epoch, position)


class SeededStream(IterableDataset[Any]):
    """A stream whose random draws in a worker depend only on epoch and worker, not on earlier draws of the run."""

    def __init__(self, dataset: Any, seed: int) -> None:
        self.dataset, self.seed = dataset, seed
        # Persistent workers have a copy of this object; shared memory passes them the current epoch.
        self._epoch = torch.zeros((), dtype=torch.int64).share_memory_()
        self.start: Start | None = None
        """Start position of the workers, used once: set by a loader that resumes within an epoch."""
        self._own_id: int | None = None
        self.has_ended = False
        """Whether this worker has reached the end of the stream, where the stream may start over."""

    def __len__(self) -> int:
        return len(self.dataset)

    def set_epoch(self, epoch: int) -> None:
        self._epoch.fill_(epoch)
        if callable(getattr(self.dataset, "set_epoch", None)):
            self.dataset.set_epoch(epoch)

    def __iter__(self) -> Iterator[Any]:
        worker, epoch = get_worker_info(), int(self._epoch)
        if worker is not None:
            self._own_id = worker.id if self._own_id is None else self._own_id
            start, self.start = self.start, None
            role = self._own_id if start is None else (self._own_id + start.last + 1) % worker.num_workers
            become_worker(role)
            self.set_epoch(epoch)
            seed_all(self.seed, epoch, role)
            if start is not None and role in start.workers:
                if start.workers[role].get("ended"):
                    return iter(())
                self.dataset.load_state_dict(start.workers[role]["stream"])
                restore_rng(start.workers[role]["rng"])
            return self._until_end(NotedSamples(iter(self.dataset)))
        return iter(self.dataset)

    def _until_end(self, samples: Iterator[Any]) -> Iterator[Any]:
        self.has_ended = False
        yield from samples
        self.has_ended = True


def seed_all(seed: int, epoch: int, position: int) -> None:
    """Seed Python, numpy and torch for one sample."""
    mixed = int(np.random.SeedSequence((seed, epoch, position)).generate_state(1)[0])
    random.seed(mixed)
    np.random.seed(mixed)
    torch.default_generator.manual_seed(mixed)


def sample_lengths(
    dataset: Any, column: str, input_names: Sequence[str], what: str = "grouping by length"
) -> list[int]:
    """The length of every sample: from the length column if there is one, else the sum over all inputs."""
    names = getattr(dataset, "column_names", None) or []
    if column in names:
        return list(dataset[column])
    if set(input_names) <= set(names):
        return [sum(map(len, each)) for each in zip(*(dataset[name] for name in input_names), strict=True)]
    first = dataset[0]
    if not isinstance(first, Mapping) or not (column in first or set(input_names) <= set(first)):
        raise DataError(
            f"{what} needs a column {column!r} or {' and '.join(map(repr, input_names))}, but the samples have "
            f"{', '.join(first) if isinstance(first, Mapping) else type(first).__name__}"
        )
    return [
        int(sample[column]) if column in sample else sum(len(sample[name]) for name in input_names)
        for sample in _each(dataset)
    ]


def _each(dataset: Any) -> Iterator[Any]:
    return (dataset[i] for i in range(len(dataset)))


def check_stream_order(args: DataArgs) -> None:
    """Refuse options that need the length of the data, which a stream lacks."""
    strategy = sampling_strategy(args)
    if strategy in BY_LENGTH:
        raise ArgumentsError(
            f"train_sampling_strategy='{strategy}' needs a map-style dataset with a length, not a stream; use "
            "'random', or sort the stream itself"
        )
    if args.batch_packing:
        raise ArgumentsError(
            f"batch_packing={args.batch_packing!r} needs a map-style dataset with a length, since the lengths of a "
            "stream's samples are unknown; remove packing, or pack in the stream itself"
        )


def data_seed(args: HardwareArgs) -> int:
    """The seed of all randomness in the data."""
    return args.seed if args.data_seed is None else args.data_seed


BY_LENGTH = ("group_by_length", "batch_rebalance")
"""Sampling strategies that read the lengths of all samples."""


def sampling_strategy(args: DataArgs) -> str:
    """The order of samples that the arguments name."""
    if getattr(args, "sortish_sampler", False):  # the name in Seq2SeqTrainingArguments
        return "group_by_length"
    return str(getattr(args.train_sampling_strategy, "value", args.train_sampling_strategy))


def training_sampler(dataset: Any, args: BaseArguments, *, group_size: int, input_name: str) -> OrderedSampler | None:
    """The sampler of the training data, or None for data with its own order."""
    strategy = sampling_strategy(args)
    if isinstance(dataset, IterableDataset) or not has_length(dataset):
        check_stream_order(args)
        return None
    lengths = sample_lengths(dataset, args.length_column_name, [input_name]) if strategy == "group_by_length" else None
    order = Order(
        n=len(dataset),
        seed=data_seed(args),
        strategy=strategy,
        lengths=lengths,
        group_size=group_size,
        permute=torch_permutation,
    )
    return OrderedSampler(order)


def build_loader(
    dataset: Any,
    *,
    args: BaseArguments,
    batch_size: int,
    collate_fn: Callable[[Any], Any],
    sampler: Any = None,
    drop_last: bool = False,
    pin_memory: bool = False,
    persistent_workers: bool = False,
    keep_order: bool = False,
) -> DataLoader[Any]:
    """A DataLoader with the arguments' workers, and seeded samples if workers load an order of loopwright.

    With `keep_order`, batches come in the order of the data and each sample once: a stream then has one worker, because
    several would each read all of it, or divide it in their own order.
    """
    workers = args.dataloader_num_workers
    if keep_order and isinstance(dataset, IterableDataset):
        workers = min(workers, 1)
    options: dict[str, Any] = {
        "batch_size": batch_size,
        "collate_fn": collate_fn,
        "num_workers": workers,
        "pin_memory": pin_memory,
        "persistent_workers": persistent_workers,
    }
    if workers:
        kill_workers_at_exit()
        options["worker_init_fn"] = begin_worker
        options["prefetch_factor"] = args.dataloader_prefetch_factor
        options["multiprocessing_context"] = args.dataloader_multiprocessing_context
        options["in_order"] = keep_order or args.dataloader_in_order
    if isinstance(dataset, IterableDataset):
        if not workers:
            return DataLoader(dataset, drop_last=drop_last, **options)
        options["collate_fn"] = NotedInWorker(collate_fn, None)
        stream = SeededStream(dataset, data_seed(args))
        if keep_order or not has_exact_state(dataset):
            return DataLoader(stream, drop_last=drop_last, **options)
        return StreamLoader(stream, drop_last=drop_last, **options)
    if workers and isinstance(sampler, OrderedSampler):
        sampler.with_position = True
        dataset = SeededSamples(dataset, sampler.order.seed)
    if workers:
        loaded = dataset.latest if isinstance(dataset, SeededSamples) else None
        options["collate_fn"] = NotedInWorker(collate_fn, loaded)
    if isinstance(sampler, OrderedSampler) and sampler.makes_batches:
        del options["batch_size"]
        return DataLoader(dataset, batch_sampler=sampler, **options)
    return DataLoader(dataset, sampler=sampler or SequentialSampler(dataset), drop_last=drop_last, **options)


def announce_epoch(loader: Any, epoch: int) -> None:
    """Call `set_epoch` of the loader, its samplers and its dataset."""
    seen: set[int] = set()
    batch_sampler = getattr(loader, "batch_sampler", None)
    for part in (
        loader,
        getattr(loader, "sampler", None),
        batch_sampler,
        getattr(batch_sampler, "sampler", None),
        getattr(loader, "dataset", None),
    ):
        if part is not None and id(part) not in seen and callable(getattr(part, "set_epoch", None)):
            seen.add(id(part))
            part.set_epoch(epoch)


def ordered_sampler(loader: Any) -> OrderedSampler | None:
    """loopwright's sampler inside a loader, if it determines the order."""
    samplers = (getattr(loader, "sampler", None), getattr(loader, "batch_sampler", None))
    return next((each for each in samplers if isinstance(each, OrderedSampler)), None)


def check_not_empty(dataset: Any, what: str) -> None:
    """Refuse an empty dataset, and objects that are not datasets."""
    if isinstance(dataset, Mapping):
        raise DataError(
            f"the {what} dataset is a {type(dataset).__name__} with the keys {', '.join(map(str, dataset))}; pass "
            "one of them, or a list of samples"
        )
    if isinstance(dataset, str | bytes):
        raise DataError(
            f"the {what} dataset is the text {short(dataset)}; load the data first, for example with "
            "datasets.load_dataset, and pass the samples"
        )
    if not hasattr(dataset, "__getitem__") and not isinstance(dataset, IterableDataset):
        raise DataError(
            f"the {what} dataset is a {type(dataset).__name__}; pass a list of samples, a Dataset or an IterableDataset"
        )
    if not has_length(dataset):
        if not isinstance(dataset, IterableDataset):
            raise DataError(
                f"the {what} dataset {type(dataset).__name__} has no length; define __len__ to return the number of "
                "samples as an int, or use an IterableDataset"
            )
    elif len(dataset) == 0:
        raise DataError(f"the {what} dataset is empty")
