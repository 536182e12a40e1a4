"""Loaders that code written for accelerate prepares, and iterates itself.

A shuffled one has an order by seed and epoch. With several ranks each iterates its own batches, as many as every other
rank, so that collectives in the loop do not wait forever. The trainer shares the given loader in its own way, without
repeating samples.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, ClassVar

import torch
from torch.utils.data import DataLoader, IterableDataset, RandomSampler

from ...errors import NotAvailable
from .loaders import announce_epoch, has_length
from .shard import Broadcast, Share, order_is_alike, rebuilt


class EpochSampler(RandomSampler):
    """torch's random order of a sampler, started from the sum of seed and epoch; continues with the next epoch."""

    def __init__(self, given: RandomSampler, seed: int) -> None:
        count = None if given._num_samples is None else given.num_samples
        super().__init__(given.data_source, given.replacement, count, generator=torch.Generator())
        self.seed, self.epoch = seed, 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[int]:
        generator = self.generator
        assert isinstance(generator, torch.Generator)
        generator.manual_seed(self.seed + self.epoch)
        yield from super().__iter__()
        self.epoch += 1


def order_by_epoch(loader: Any, seed: int) -> None:
    """Replace torch's random sampler in a loader, also one inside a batch sampler of the user."""
    batches = getattr(loader, "batch_sampler", None)
    for holder in (loader, batches):
        given = getattr(holder, "sampler", None)
        if isinstance(given, RandomSampler) and not isinstance(given, EpochSampler):
            made = EpochSampler(given, seed)
            for each in (loader, batches):
                if getattr(each, "sampler", None) is given:
                    object.__setattr__(each, "sampler", made)  # a DataLoader refuses an assignment


class PreparedLoader(DataLoader[Any]):
    """This rank's batches of a loader, on its device. Everything else is an attribute of the given loader."""

    OWN: ClassVar = ("given", "own", "world", "active", "place", "is_at_end")

    def __init__(
        self, given: Any, own: Any, world: int, active: list[PreparedLoader], place: Callable[[Any], Any] | None
    ) -> None:
        # torch's __init__ is omitted on purpose: the given loader has its attributes.
        self.given, self.own, self.world = given, own, world
        self.active, self.place = active, place
        self.is_at_end = False
        """Whether the last batch is in use."""

    def __getattr__(self, name: str) -> Any:
        if name in PreparedLoader.OWN:  # of a copy that is being made
            raise AttributeError(name)
        return getattr(self.own if name == "batch_sampler" else self.given, name)

    def __setattr__(self, name: str, value: Any) -> None:
        if name in PreparedLoader.OWN:
            object.__setattr__(self, name, value)
            return
        for each in {id(loader): loader for loader in (self.given, self.own)}.values():
            setattr(each, name, value)

    def __len__(self) -> int:
        return len(self.own)

    @property
    def total_batch_size(self) -> int | None:
        """Samples of one batch on all ranks."""
        return total_size(self.own, self.given, self.world)

    @property
    def total_dataset_length(self) -> int:
        return len(self.given.dataset)

    @property
    def remainder(self) -> int:
        """Samples of the last batch on all ranks, without those that are repeated to fill it; -1 if none are."""
        shared = _sharing(self.own)
        return -1 if shared is None or shared.remainder is None else shared.remainder

    def set_epoch(self, epoch: int) -> None:
        announce_epoch(self.given, epoch)

    def __iter__(self) -> Iterator[Any]:
        self.is_at_end = False
        self.active.append(self)
        try:
            batches = iter(self.own)
            batch = next(batches, self)
            while batch is not self:
                following = next(batches, self)
                self.is_at_end = following is self
                yield batch if self.place is None else self.place(batch)
                batch = following
        finally:
            self.is_at_end = False
            self.active.remove(self)


def whole_loader(loader: Any) -> Any:
    """The loader that was given to `prepare`, with the batches of all ranks; any other loader is returned unchanged."""
    return loader.given if isinstance(loader, PreparedLoader) else loader


def share_evenly(loader: Any, share: Share, broadcast: Broadcast, *, even: bool, dispatch: bool) -> Any:
    """A loader of this rank's batches, as many as other ranks have if `even`."""
    if isinstance(loader.dataset, IterableDataset):
        if loader.num_workers or loader.batch_size is None:
            raise NotAvailable(
                f"accelerator.prepare cannot share a stream with num_workers={loader.num_workers} and batch_size="
                f"{loader.batch_size} between {share.world} processes; use num_workers=0 and a batch size, or return "
                "the loader from get_train_dataloader or get_eval_dataloader without preparing it"
            )
        stream = EvenStream(loader.dataset, share, loader.batch_size, even, loader.drop_last, dispatch)
        return rebuilt(loader, None, stream, loader.batch_size)
    if loader.batch_sampler is None:
        raise NotAvailable(
            f"accelerator.prepare cannot share a loader with batch_size=None between {share.world} processes; give it "
            "a batch size or a batch sampler"
        )
    return rebuilt(loader, EvenBatches(loader.batch_sampler, share, broadcast, even=even))


def total_size(own: Any, given: Any, world: int) -> int | None:
    shared = _sharing(own)
    if shared is not None:
        return shared.total_batch_size
    size: int | None = getattr(given.batch_sampler, "batch_size", None) or given.batch_size
    return None if size is None else size * world


def _sharing(loader: Any) -> EvenBatches | EvenStream | None:
    parts = (getattr(loader, "batch_sampler", None), getattr(loader, "dataset", None))
    return next((each for each in parts if isinstance(each, (EvenBatches, EvenStream))), None)


class EvenBatches:
    """This rank's batches of a batch sampler: one of every `world` of them.

    An incomplete last round is filled with the first samples of the epoch if ranks are to have the same number.
    """

    def __init__(self, batches: Any, share: Share, broadcast: Broadcast, *, even: bool) -> None:
        self.batches, self.share, self._broadcast = batches, share, broadcast
        self.even = even
        self.num_processes, self.process_index = share.world, share.rank
        self.batch_size: int | None = getattr(batches, "batch_size", None)
        self.drop_last = getattr(batches, "drop_last", False)
        self.sampler = getattr(batches, "sampler", None)
        self.remainder: int | None = None
        """Samples of the last round, if it was filled."""

    @property
    def total_batch_size(self) -> int | None:
        return None if self.batch_size is None else self.batch_size * self.share.world

    def __len__(self) -> int:
        whole = len(self.batches)
        if self.drop_last or whole % self.share.world == 0:
            return whole // self.share.world
        return -(-whole // self.share.world) if self.even else self.share.batches_of(whole)

    def __iter__(self) -> Iterator[list[Any]]:
        self.remainder = None
        batches = iter(self.batches)
        if not order_is_alike(self.batches):
            batches = iter(self._broadcast(list(batches) if self.share.rank == 0 else None))
        first: list[list[Any]] = []
        for turn in self._rounds(batches):
            first = first or turn
            if not self._is_whole(turn):
                if self.drop_last:
                    return
                if self.even:
                    self.remainder = sum(map(len, turn))
                    turn = self._filled(turn, first)
            if len(turn) > self.share.rank and turn[self.share.rank]:
                yield turn[self.share.rank]

    def _rounds(self, batches: Iterator[Any]) -> Iterator[list[list[Any]]]:
        """`world` batches at a time."""
        turn: list[list[Any]] = []
        for batch in batches:
            turn.append(list(batch))
            if len(turn) == self.share.world:
                yield turn
                turn = []
        if turn:
            yield turn

    def _is_whole(self, turn: list[list[Any]]) -> bool:
        return len(turn) == self.share.world and self.batch_size in (None, len(turn[-1]))

    def _filled(self, turn: list[list[Any]], first: list[list[Any]]) -> list[list[Any]]:
        """The round with as many batches as there are ranks, each of the full size."""
        samples, size = [each for batch in first for each in batch], self.batch_size or len(first[0])
        turn, at = [list(batch) for batch in turn], 0
        turn += [[] for _ in range(self.share.world - len(turn))]
        for batch in turn:
            while len(batch) < size:
                batch.append(samples[at % len(samples)])
                at += 1
        return turn


class EvenStream(IterableDataset[Any]):
    """This rank's samples of a stream; every rank reads all of it.

    The samples of an incomplete last round are divided between the ranks, as if one rank dispatched them, or else fill
    the batches of the first ranks; the first samples of the stream fill the others.
    """

    def __init__(self, dataset: Any, share: Share, size: int, even: bool, drop_last: bool, dispatch: bool) -> None:
        self.dataset, self.share, self.size = dataset, share, size
        self.even, self.drop_last, self.dispatch = even, drop_last, dispatch
        self.num_processes, self.process_index = share.world, share.rank
        self.total_batch_size = size * share.world
        self.remainder: int | None = None

    def set_epoch(self, epoch: int) -> None:
        if callable(getattr(self.dataset, "set_epoch", None)):
            self.dataset.set_epoch(epoch)

    def __len__(self) -> int:
        if not has_length(self.dataset):
            raise TypeError(f"{type(self.dataset).__name__} has no length")
        rounds, rest = divmod(len(self.dataset), self.total_batch_size)
        return rounds * self.size + (0 if self.drop_last else self._size_of_last(rest))

    def _size_of_last(self, rest: int) -> int:
        if rest and self.dispatch:
            return -(-rest // self.share.world)
        own = min(max(rest - self.share.rank * self.size, 0), self.size)
        return self.size if rest and self.even else own

    def __iter__(self) -> Iterator[Any]:
        self.remainder = None
        first: list[Any] = []
        turn: list[Any] = []
        for sample in self.dataset:
            turn.append(sample)
            if len(turn) == self.total_batch_size:
                yield from turn[self.share.rank * self.size :][: self.size]
                first, turn = first or turn, []
        if turn and not self.drop_last:
            size, first = self._size_of_last(len(turn)), first or turn
            if self.even or self.dispatch:
                self.remainder = len(turn)
                whole = size * self.share.world
                turn += [first[at % len(first)] for at in range(whole - len(turn))]
            else:
                size = self.size
            yield from turn[self.share.rank * size :][:size]
