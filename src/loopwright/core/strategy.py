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

    # ---- setup: model, then optimizer, then the contents of a checkpoint ---------------------------------------------

    def setup_model(self, model: Any) -> Any:
        """Place the model, and make it the one that is trained."""

    def setup_optimizer(self, optimizer: Any) -> Any:
        """The optimizer as the run uses it."""

    # ---- one update -------------------------------------------------------------------------------------------------

    def put(self, batch: Any) -> Any:
        """The batch on the device."""

    def clip_gradients(self, max_norm: float | None, *, want_norm: bool) -> Any:
        """Clip to the norm and return the norm before clipping; without a limit, compute it only for `want_norm`."""

    def nonfinite(self, loss: Any, norm: Any, *, sticky: bool) -> Any:
        """A flag on the device: loss or norm is not finite; with `sticky`, also set after an earlier such update."""

    def optimizer_step(self, veto: Any = None) -> bool:
        """Step, unless the veto (such a flag) is set; returns whether the schedule may advance."""

    def zero_grad(self) -> None:
        """Drop all gradients."""

    def defer(self, function: Callable[[], None]) -> None:
        """Call a function at the end of the step, or now if `logs_later` is not set."""

    def free_memory(self) -> None:
        """Release cached device memory."""

    # ---- modes of the model, and of an optimizer that has modes ------------------------------------------------------

    def training(self) -> None: ...
    def evaluating(self) -> None: ...

    # ---- undoing an unfinished update --------------------------------------------------------------------------------

    def snapshot(self) -> Any:
        """The current random states and buffers."""

    def restore(self, snapshot: Any) -> None:
        """Restore a snapshot, and drop the gradients of the unfinished update."""

    # ---- numbers and collectives -------------------------------------------------------------------------------------

    def mean_count(self, count: Any) -> Any:
        """The mean of a count over the parts of the data, to which each rank's losses are relative."""

    def read(self, scalars: list[Any]) -> list[float]:
        """Device scalars as Python floats, in one synchronization."""

    def reduce(self, values: list[float]) -> list[float]:
        """The mean of each number over the parts of the data."""

    def gather(self, values: Any) -> Any:
        """All-gather: nested values joined along their first dimension."""

    def broadcast(self, value: Any, source: int = 0) -> Any:
        """The value of one rank, on every rank."""

    def any_rank(self, flag: bool) -> bool:
        """Whether the flag is set on any rank."""

    def numbers_of_ranks(self, numbers: list[float]) -> list[list[float]]:
        """The numbers of every rank, by rank, exchanged in host memory."""

    def barrier(self) -> None:
        """Wait for every rank."""

    # ---- states of the random generators, for checkpoints ------------------------------------------------------------

    def rng_state(self) -> dict[str, Any]: ...
    def load_rng_state(self, state: dict[str, Any]) -> None: ...


class StepwiseStrategy(Strategy, Protocol):
    """A strategy whose micro-batches the loop runs one at a time."""

    # ---- wrappers of the model, such as DDP --------------------------------------------------------------------------

    def wrap(self, model: Any) -> Any:
        """The model as training calls it."""

    def unwrap(self, model: Any) -> Any:
        """The model as evaluation calls it."""

    def rewrap(self, model: Any) -> Any:
        """The model as training calls it, once the optimizer is set."""

    # ---- the micro-batches of an update ------------------------------------------------------------------------------

    def begin_update(self, update: Update) -> None:
        """Start copying the batches of an update to the device."""

    def micro_batch(self, micro: MicroBatch) -> AbstractContextManager[Any]:
        """The context of forward and backward of one micro-batch."""

    def add(self, total: Any, loss: Any, micro: MicroBatch) -> Any:
        """The loss of an update with one more micro-batch; `total` is None before the first."""

    def without_dummy(self, loss: Any, micro: MicroBatch) -> Any:
        """The loss, zeroed if the micro-batch is a dummy."""

    def forward_context(self) -> AbstractContextManager[Any]:
        """The context of a forward pass: autocast."""

    def backward(self, loss: Any) -> None:
        """Add the gradients of a loss to those of the update."""

    def scale_gradients(self, factor: Any) -> None:
        """Multiply all gradients."""

    def boundary(self) -> None:
        """The end of a step, where a lazy device executes the recorded operations."""

    # ---- weights and optimizer state to save and load ----------------------------------------------------------------

    def model_state(self, module: Any) -> Any:
        """Weights and buffers by name, or this rank's shards of them."""

    def load_weights(self, module: Any, folder: Any) -> None:
        """Load the weights of a checkpoint into the model."""

    def optimizer_state(self, optimizer: Any, module: Any) -> Any:
        """The optimizer's state by parameter name: a description, and the tensors it refers to."""

    def load_optimizer(self, described: Any, tensors: Any, optimizer: Any, module: Any) -> None:
        """The counterpart of `optimizer_state`."""


class CompiledStrategy(Strategy, Protocol):
    """A strategy that compiles whole updates, including the loop over micro-batches."""

    def run_update(self, update: Update) -> Any:
        """Forward and backward of all micro-batches; returns the loss of the update."""


class OneProcess:
    """The operations between ranks, for a single process."""

    rank = data_rank = 0
    world_size = data_world = copies = 1
    is_sharded = forward_is_collective = False

    def add(self, total: Any, loss: Any, micro: MicroBatch) -> Any:
        return loss if total is None else total + loss

    def without_dummy(self, loss: Any, micro: MicroBatch) -> Any:
        return loss

    def mean_count(self, count: Any) -> Any:
        return count

    def reduce(self, values: list[float]) -> list[float]:
        return values

    def gather(self, values: Any) -> Any:
        return values

    def broadcast(self, value: Any, source: int = 0) -> Any:
        return value

    def any_rank(self, flag: bool) -> bool:
        return flag

    def numbers_of_ranks(self, numbers: list[float]) -> list[list[float]]:
        return [numbers]

    def barrier(self) -> None:
        """Nothing to wait for."""
