"""The shard of the data this rank reads: batch k x world + rank of the global order is its k-th."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import chain, islice
from typing import Any, NamedTuple

from torch.utils.data import BatchSampler, DataLoader, IterableDataset, SequentialSampler, get_worker_info
from torch.utils.data._utils import worker as worker_module

from ...snapshot import restore_rng, snapshot_rng
from .balancing import BalancedSampler
from .loaders import SeededStream, announce_epoch, ordered_sampler
from .loading_errors import take
from .streams import has_exact_state

Broadcast = Callable[[Any], Any]
"""Broadcast from rank 0."""


class Share(NamedTuple):
    """One part of the data out of several."""

    rank: int
    world: int

    def batches_of(self, whole: int) -> int:
        """How many of this many batches belong to this part."""
        return max(0, -(-(whole - self.rank) // self.world))


# ---- loaders ---------------------------------------------------------------------------------------------------------


def share_loader(loader: Any, share: Share, broadcast: Broadcast, tell: Callable[[str], None]) -> Any:
    """A loader of this rank's shard; one that is already sharded is returned unchanged."""
    sampler = ordered_sampler(loader)
    if sampler is not None:
        sampler.part = (share.rank, share.world, sampler.batch_size or loader.batch_size)
        return loader
    if is_shared(loader):
        return loader
    if type(loader) is DataLoader and not isinstance(loader.dataset, IterableDataset) and loader.batch_sampler:
        return rebuilt(loader, SharedBatches(loader.batch_sampler, share, broadcast))
    tell(
        f"{type(loader).__name__} returns the same batches on every rank, so each rank reads all of them and keeps "
        "its shard. Use a DistributedSampler, or a loader made by get_train_dataloader, to avoid this"
    )
    return EveryNth(loader, share, broadcast)


def is_shared(loader: Any) -> bool:
    """Whether the loader is already sharded."""
    batch_sampler = getattr(loader, "batch_sampler", None)
    parts = (loader, getattr(loader, "sampler", None), batch_sampler, getattr(batch_sampler, "sampler", None))
    # A class of the user may hold a prepared loader.
    inside = [part for part in getattr(loader, "__dict__", {}).values() if isinstance(part, DataLoader)]
    if any(_knows_ranks(part) for part in (*parts, *inside) if part is not None):
        return True
    dataset = getattr(loader, "dataset", None)
    return _is_shared_stream(dataset)


def _knows_ranks(part: Any) -> bool:
    """Whether a sampler or dataset has a rank: DistributedSampler (num_replicas), accelerate (num_processes)."""
    if isinstance(part, (EveryNth, SharedBatches)) or type(part).__name__ in (
        "DataLoaderShard",
        "DataLoaderDispatcher",
        "PreparedLoader",
    ):
        return True
    return (hasattr(part, "num_replicas") and hasattr(part, "rank")) or (
        hasattr(part, "num_processes") and hasattr(part, "process_index")
    )


def _is_shared_stream(dataset: Any) -> bool:
    dataset = dataset.dataset if isinstance(dataset, SeededStream) else dataset
    return (
        isinstance(dataset, RankStream)
        or getattr(dataset, "_distributed", None) is not None
        or (isinstance(dataset, IterableDataset) and _knows_ranks(dataset))
    )


def rebuilt(loader: DataLoader[Any], batch_sampler: Any, dataset: Any = None, batch_size: int = 1) -> DataLoader[Any]:
    """A loader with the same options, of another batch sampler or of another stream."""
    names = ("num_workers", "collate_fn", "pin_memory", "timeout", "worker_init_fn", "multiprocessing_context",
             "generator", "prefetch_factor", "persistent_workers", "pin_memory_device", "in_order")  # fmt: skip
    options = {name: getattr(loader, name) for name in names if hasattr(loader, name)}
    if dataset is not None:
        return DataLoader(dataset, batch_size=batch_size, **options)
    return DataLoader(loader.dataset, batch_sampler=batch_sampler, **options)


def order_is_alike(batches: Any) -> bool:
    """Whether a batch sampler draws the same batches on every rank: data in its own order."""
    return type(batches) is BatchSampler and type(batches.sampler) is SequentialSampler


class SharedBatches:
    """Every world-th batch of a batch sampler, in the order drawn on rank 0."""

    def __init__(self, batches: Any, share: Share, broadcast: Broadcast) -> None:
        self.batches, self.share, self._broadcast = batches, share, broadcast
        self.batch_size = getattr(batches, "batch_size", None)
        self.drop_last = getattr(batches, "drop_last", False)
        self.sampler = getattr(batches, "sampler", None)
        self._same_everywhere = order_is_alike(batches)
        self._order: list[Any] | None = None
        """The batches of all ranks in this epoch."""

    def set_epoch(self, epoch: int) -> None:
        parts: tuple[Any, ...] = (self.batches, self.sampler)
        for part in parts:
            if callable(getattr(part, "set_epoch", None)):
                part.set_epoch(epoch)

    def __len__(self) -> int:
        return self.share.batches_of(len(self.batches))

    def __iter__(self) -> Iterator[Any]:
        if self._same_everywhere:
            return islice(iter(self.batches), self.share.rank, None, self.share.world)
        self._order = None
        return self._own_batches()

    def _own_batches(self) -> Iterator[Any]:
        # Not in __iter__: on one process a loader draws its seed before the first batch.
        self.draw()
        yield from (self._order or [])[self.share.rank :: self.share.world]

    def draw(self) -> None:
        """Draw the order of an epoch, unless its first batch has been taken; a collective.

        A sampler may draw from the random state of its process, so the order of rank 0 is broadcast.
        """
        if self._order is None and not self._same_everywhere:
            self._order = self._broadcast(list(self.batches) if self.share.rank == 0 else None)


class EveryNth:
    """Every world-th batch of any iterable of batches.

    One that shuffles draws its order when it is iterated, or for its first batch: with the random states of rank 0.
    """

    def __init__(self, loader: Any, share: Share, broadcast: Broadcast) -> None:
        self.loader, self.share, self._broadcast = loader, share, broadcast
        self.dataset = getattr(loader, "dataset", None)

    def set_epoch(self, epoch: int) -> None:
        announce_epoch(self.loader, epoch)

    def __len__(self) -> int:
        return self.share.batches_of(len(self.loader))

    def __iter__(self) -> Iterator[Any]:
        own = snapshot_rng()
        states = self._broadcast(own)
        if self.share.rank:
            restore_rng(states)
        try:
            batches = iter(self.loader)
            first = take(batches, 1)
        finally:
            if self.share.rank:
                restore_rng(own)
        return islice(chain(first, batches), self.share.rank, None, self.share.world)


def batches_of_all(loader: Any, total: Callable[[float], float]) -> int:
    """Batches over all ranks in an epoch; `total` sums a number over the ranks where only each rank can count."""
    sampler = ordered_sampler(loader)
    if sampler is not None:
        if isinstance(sampler, BalancedSampler):
            return sampler.balancing.batches(sampler.order.n)
        size = loader.batch_size
        return sampler.order.n // size if loader.drop_last else -(-sampler.order.n // size)
    if isinstance(loader, EveryNth):
        return len(loader.loader)
    if isinstance(getattr(loader, "batch_sampler", None), SharedBatches):
        return len(loader.batch_sampler.batches)
    stream = rank_stream(loader)
    if stream is not None:
        whole, size = len(stream.dataset), loader.batch_size
        return whole // size if loader.drop_last else -(-whole // size)
    return int(total(len(loader)))


def draw_order(loader: Any) -> None:
    """Draw the order of a loader that was just iterated, on all ranks at once: some may skip batches, others none."""
    batches = getattr(loader, "batch_sampler", None)
    if isinstance(batches, SharedBatches):
        batches.draw()


def rank_stream(loader: Any) -> RankStream | None:
    """loopwright's stream of this rank's shard inside a loader, if there is one."""
    dataset = getattr(loader, "dataset", None)
    dataset = dataset.dataset if isinstance(dataset, SeededStream) else dataset
    return dataset if isinstance(dataset, RankStream) else None


def whole_dataset(loader: Any) -> Any:
    """The dataset of a loader, with all shards."""
    stream = rank_stream(loader)
    return getattr(loader, "dataset", None) if stream is None else stream.dataset


def whole_length(loader: Any, world: int) -> int:
    """Batches of all ranks in a loader without a dataset; an estimate if the user has divided it."""
    if isinstance(loader, EveryNth):
        return len(loader.loader)
    return len(loader) * world if is_shared(loader) else len(loader)


# ---- streams ---------------------------------------------------------------------------------------------------------


def share_stream(dataset: Any, share: Share, batch_size: int) -> Any:
    """This rank's shard of a stream; a stream that is already sharded is returned unchanged."""
    if _is_shared_stream(dataset):
        return dataset
    kind = StatefulRankStream if has_exact_state(dataset) else RankStream
    return kind(dataset, share, batch_size)


class RankStream(IterableDataset[Any]):
    """The samples of every world-th batch of a stream.

    Each rank reads the stream from its start, so the order is that of one process. A stream that divides itself among
    loader workers keeps its division; otherwise the workers take turns.
    """

    def __init__(self, dataset: Any, share: Share, batch_size: int) -> None:
        self.dataset, self.share, self.batch_size = dataset, share, batch_size
        self._at = 0

    def __len__(self) -> int:
        whole, turn = len(self.dataset), self.batch_size * self.share.world
        rounds, rest = divmod(whole, turn)
        left = min(max(rest - self.share.rank * self.batch_size, 0), self.batch_size)
        return rounds * self.batch_size + left

    def set_epoch(self, epoch: int) -> None:
        if callable(getattr(self.dataset, "set_epoch", None)):
            self.dataset.set_epoch(epoch)

    def __iter__(self) -> Iterator[Any]:
        first, self._at = self._at, 0
        size, (rank, world) = self.batch_size, self.share
        info = WorkerLook() if get_worker_info() is not None else None
        for at, sample in enumerate(iter(self.dataset), first):
            if info is not None:
                # Once there is a sample, it is known whether the stream divides itself among workers.
                rank, world = info.turn(rank, world)
                info = None
            self._at = at + 1
            if at // size % world == rank:
                yield sample
        self._at = 0


class StatefulRankStream(RankStream):
    """A stream whose state can be saved and loaded."""

    def state_dict(self) -> dict[str, Any]:
        return {"at": self._at, "stream": self.dataset.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._at = state["at"]
        self.dataset.load_state_dict(state["stream"])


class WorkerLook:
    """Detects whether a stream reads the id of its loader worker."""

    def __init__(self) -> None:
        real = get_worker_info()
        assert real is not None
        self._real, self._asked = real, False
        worker_module._worker_info = self  # type: ignore[assignment]

    @property
    def id(self) -> int:
        self._asked = True
        return self._real.id

    @property
    def num_workers(self) -> int:
        return self._real.num_workers

    @property
    def seed(self) -> int:
        return self._real.seed

    @property
    def dataset(self) -> Any:
        return self._real.dataset

    def turn(self, rank: int, world: int) -> tuple[int, int]:
        """The turn of this worker of this rank, and the number of turns."""
        worker_module._worker_info = self._real
        if self._asked:
            return rank, world
        return self._real.id * world + rank, self._real.num_workers * world
