"""Base of the strategies for Keras: an update is one compiled call; the other methods return its results."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import numpy as np

from ..core.strategy import OneProcess
from ..core.update import Update
from ..errors import LoopwrightError
from .data.host_batch import HostBatch
from .rng import RandomStreams


@dataclass(frozen=True)
class UpdateRules:
    """Clipping and the handling of non-finite updates; fixed when an update is compiled."""

    max_norm: float = 0.0
    veto: str = "continue"
    """on_nonfinite: a non-finite update is applied (continue), skipped (skip), or ends the run (raise)."""


class KerasStrategy(OneProcess):
    """The part of a strategy that needs no backend."""

    logs_later = False
    # Every process reads all batches and uses its rows of each, so for the core all data is on one rank.
    alarm: AbstractContextManager[Any] = nullcontext()

    def __init__(
        self, streams: RandomStreams, *, replicas: int, reads_are_free: bool, rank: int = 0, world_size: int = 1
    ) -> None:
        self.streams, self.replicas, self.reads_are_free = streams, replicas, reads_are_free
        self.rank, self.world_size = rank, world_size
        self.model: Any = None
        self.optimizer: Any = None
        self.learning_rate: float | None = None
        """Learning rate of the next update; None if the optimizer has its own schedule."""
        self.rules = UpdateRules()
        self.trained: list[Any] = []
        """Variables trained by the compiled updates."""
        self._norm: Any = None
        self._moved: Any = None

    # ---- what a backend brings --------------------------------------------------------------------------------------

    def setup_optimizer(self, optimizer: Any) -> Any:
        """Set the optimizer and create its variables, into which a checkpoint may be loaded."""
        raise NotImplementedError

    def prepare(self, micro_gradients: Callable[..., Any], rules: UpdateRules) -> None:
        """Compile the updates that follow with these rules."""
        raise NotImplementedError

    @property
    def compilations(self) -> int:
        """How many updates of different shapes have been compiled."""
        raise NotImplementedError

    def run_update(self, update: Update) -> Any:
        """Run the update that `prepare` defined in one compiled call; returns its loss."""
        raise NotImplementedError

    def padded(self, batch: HostBatch) -> HostBatch:
        """The batch with as many rows as replicas need; more padding would count in BatchNormalization and in means."""
        raise NotImplementedError

    def placed(self, batches: list[HostBatch]) -> Any:
        """Features, labels and row weights of each micro-batch, on the devices."""
        raise NotImplementedError

    def rows(self, outputs: Any, rows: int) -> Any:
        """The outputs of one batch in row order, without padding, in host memory."""
        raise NotImplementedError

    def scope(self) -> Any:
        """The scope in which variables must be created."""
        return nullcontext()

    def set_tf32(self, enabled: bool) -> None:
        """Allow or forbid TF32 in float32 matmuls."""
        raise NotImplementedError

    def place(self) -> str:
        """The devices of this process, for the user."""
        raise NotImplementedError

    def reset_peak_memory(self) -> None:
        """Reset the devices' peak memory statistics."""

    def memory_figures(self) -> dict[str, int]:
        """Bytes `allocated` on the devices and their `peak`; empty without such statistics."""
        return {}

    @property
    def scales(self) -> bool:
        """Whether the loss is scaled for float16."""
        return False

    # ---- one update -------------------------------------------------------------------------------------------------

    def setup_model(self, model: Any) -> Any:
        self.model = model
        return model

    def put(self, batch: Any) -> Any:
        """The batch unchanged: the compiled call copies arrays to the device."""
        return batch

    # ---- what the loop reads after the update --------------------------------------------------------------------

    def backward(self, loss: Any) -> None:
        raise NotImplementedError("gradients are taken inside the compiled step")

    def scale_gradients(self, factor: Any) -> None:
        raise NotImplementedError("gradients are divided inside the compiled step")

    def clip_gradients(self, max_norm: float | None, *, want_norm: bool) -> Any:
        """The gradient norm before clipping; the update has clipped already."""
        return self._norm if max_norm or want_norm else None

    def nonfinite(self, loss: Any, norm: Any, *, sticky: bool) -> Any:
        """No-op: the compiled update checks this itself."""
        return None

    def optimizer_step(self, veto: Any = None) -> bool:
        """Whether the schedule advances; the step is already done. Waits for the device only with loss scaling."""
        return True if self._moved is None else bool(self._moved)

    def zero_grad(self) -> None:
        """No-op: gradients exist only inside the compiled update."""

    def defer(self, function: Callable[[], None]) -> None:
        """Between two calls every update is at its end."""
        function()

    def free_memory(self) -> None:
        """No-op: the backends do not release memory."""

    def training(self) -> None:
        """Keras models take `training=` with every call."""

    def evaluating(self) -> None:
        """Keras models take `training=` with every call."""

    def snapshot(self) -> Any:
        """No-op: an update is one call and cannot be interrupted halfway."""
        return None

    def restore(self, held: Any) -> None:
        """No-op: there is no snapshot."""

    # ---- numbers and agreement --------------------------------------------------------------------------------------

    def read(self, scalars: list[Any]) -> list[float]:
        """Device scalars as host numbers."""
        return [float(each) for each in scalars]

    # ---- randomness -------------------------------------------------------------------------------------------------

    def rng_state(self) -> dict[str, Any]:
        return self.streams.snapshot()

    def load_rng_state(self, state: dict[str, Any]) -> None:
        self.streams.restore(state)


@contextmanager
def plain_errors() -> Iterator[None]:
    """Context manager: re-raises loopwright's errors that the backend wrapped while tracing."""
    try:
        yield
    except Exception as error:  # its causes are searched for a loopwright error; others are raised unchanged
        original: BaseException | None = error
        while original is not None and not isinstance(original, LoopwrightError):
            original = original.__cause__ or original.__context__
        if original is None or original is error:
            raise
        raise original from None


def as_host(leaf: Any) -> Any:
    """A tensor as a numpy array; dtypes that numpy lacks become float32."""
    array = leaf.numpy() if hasattr(leaf, "numpy") else np.asarray(leaf)
    return array.astype(np.float32) if array.dtype.kind == "V" or array.dtype.name == "bfloat16" else array
