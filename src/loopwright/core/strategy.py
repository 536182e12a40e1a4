"""Strategies: the operations that differ between devices, frameworks and kinds of parallelism.

A strategy never receives the trainer, only models, batches and functions.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, Protocol

from .update import MicroBatch, Update


class Strategy(Protocol):
    """Placement of tensors, and execution of updates."""

    rank: int
    world_size: int
    data_rank: int
    """This rank's part of the data, of `data_world` parts; `copies` neighbouring ranks use the same part."""
    data_world: int
    copies: int
    is_sharded: bool
    """Whether ranks hold shards of tensors."""
    forward_is_collective: bool
    """Whether a forward pass waits for the other ranks, so that all must run the same number of them."""
    alarm: AbstractContextManager[Any]
    """A context while ranks depend on each other: an error on one rank stops all."""
    reads_are_free: bool
    """Whether the host can read a number without waiting for a device."""
    logs_later: bool
    """Whether logs are deferred to the end of the next step (`defer`), when the device has work again."""

    # setup: model, then optimizer, then the contents of a checkpoint
    def setup_model(self, model: Any) -> Any: ...
    def setup_optimizer(self, optimizer: Any) -> Any: ...

    # one update
    def put(self, batch: Any) -> Any: ...
    def clip_gradients(self, max_norm: float | None, *, want_norm: bool) -> Any: ...
    def nonfinite(self, loss: Any, norm: Any, *, sticky: bool) -> Any: ...
    def optimizer_step(self, veto: Any = None) -> bool: ...
    def zero_grad(self) -> None: ...
    def defer(self, function: Callable[[], None]) -> None: ...
    def free_memory(self) -> None: ...

    # modes
    def training(self) -> None: ...
    def evaluating(self) -> None: ...

    # undo an unfinished update: random states and buffers
    def snapshot(self) -> Any: ...
    def restore(self, snapshot: Any) -> None: ...

    # numbers and collectives; a rank's losses are weighted relative to the mean count over all parts of the data
    def mean_count(self, count: Any) -> Any: ...
    def read(self, scalars: list[Any]) -> list[float]: ...
    def reduce(self, values: list[float]) -> list[float]: ...
    def gather(self, values: Any) -> Any: ...
    def broadcast(self, value: Any) -> Any: ...
    def any_rank(self, flag: bool) -> bool: ...
    def numbers_of_ranks(self, numbers: list[float]) -> list[list[float]]: ...
    def barrier(self) -> None: ...

    # randomness
    def rng_state(self) -> dict[str, Any]: ...
    def load_rng_state(self, state: dict[str, Any]) -> None: ...


class StepwiseStrategy(Strategy, Protocol):
    """A strategy whose micro-batches the loop runs one at a time."""

    # the model as called in training, and as called in evaluation
    def wrap(self, model: Any) -> Any: ...
    def unwrap(self, model: Any) -> Any: ...
    def rewrap(self, model: Any) -> Any: ...

    # the micro-batches of an update
    def begin_update(self, update: Update) -> None: ...
    def micro_batch(self, micro: MicroBatch) -> AbstractContextManager[Any]: ...
    def add(self, total: Any, loss: Any, micro: MicroBatch) -> Any: ...
    def without_dummy(self, loss: Any, micro: MicroBatch) -> Any: ...
    def forward_context(self) -> AbstractContextManager[Any]: ...
    def backward(self, loss: Any) -> None: ...
    def scale_gradients(self, factor: Any) -> None: ...
    def boundary(self) -> None: ...

    # weights and optimizer state to save and load
    def model_state(self, module: Any) -> Any: ...
    def load_weights(self, module: Any, folder: Any) -> None: ...
    def optimizer_state(self, optimizer: Any, module: Any) -> Any: ...
    def load_optimizer(self, described: Any, tensors: Any, optimizer: Any, module: Any) -> None: ...


class CompiledStrategy(Strategy, Protocol):
    """A strategy that compiles whole updates, including the loop over micro-batches."""

    def run_update(self, update: Update) -> Any: ...


class OneProcess:
    """The operations between ranks, for a single process."""

    rank = data_rank = 0
    world_size = data_world = copies = 1
    is_sharded = forward_is_collective = False

    def add(self, total: Any, loss: Any, micro: MicroBatch) -> Any:
        """The loss of an update with one more micro-batch."""
        return loss if total is None else total + loss

    def without_dummy(self, loss: Any, micro: MicroBatch) -> Any:
        """The loss, zeroed if the micro-batch is a dummy."""
        return loss

    def mean_count(self, count: Any) -> Any:
        """The mean of a count over the ranks that hold a part of the data."""
        return count

    def reduce(self, values: list[float]) -> list[float]:
        """The mean of each number over those ranks."""
        return values

    def gather(self, values: Any) -> Any:
        """All-gather: nested values joined along their first dimension."""
        return values

    def broadcast(self, value: Any, source: int = 0) -> Any:
        """The value of one rank, on every rank."""
        return value

    def any_rank(self, flag: bool) -> bool:
        """Whether the flag is set on any rank."""
        return flag

    def numbers_of_ranks(self, numbers: list[float]) -> list[list[float]]:
        """The numbers of every rank, by rank, exchanged in host memory."""
        return [numbers]

    def barrier(self) -> None:
        """Wait for every rank."""
