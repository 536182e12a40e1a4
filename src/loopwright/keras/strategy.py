"""What every strategy under Keras is: an update is one compiled call, which leaves behind what the loop asks for."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import numpy as np

from ..core.strategy import OneProcess
from ..core.update import Update
from ..errors import LoopwrightError
from .host_batch import HostBatch
from .rng import RandomStreams


@dataclass(frozen=True)
class UpdateRules:
    """What is done with the gradients of an update; fixed when it is compiled."""

    max_norm: float = 0.0
    veto: str = "continue"
    """on_nonfinite: an update that is not finite is applied (continue), left out (skip), or the last one (raise)."""


class KerasStrategy(OneProcess):
    """The part of carrying out updates that needs no backend."""

    logs_later = False
    # Every process goes through all batches and takes its rows of each: to the core all data is on one rank.
    alarm: AbstractContextManager[Any] = nullcontext()

    def __init__(
        self, streams: RandomStreams, *, replicas: int, reads_are_free: bool, rank: int = 0, world_size: int = 1
    ) -> None:
        self.streams, self.replicas, self.reads_are_free = streams, replicas, reads_are_free
        self.rank, self.world_size = rank, world_size
        self.model: Any = None
        self.optimizer: Any = None
        self.learning_rate: float | None = None
        """Told to the optimizer in the next update; None if its own schedule decides."""
        self.rules = UpdateRules()
        self.full_rows = 0
        """Rows of a micro-batch that is not the last of its epoch."""
        self.trained: list[Any] = []
        """What the compiled updates train."""
        self._norm: Any = None
        self._moved: Any = None

    # ---- what a backend brings --------------------------------------------------------------------------------------

    def setup_optimizer(self, optimizer: Any) -> Any:
        """Take the optimizer, with its variables made now: a checkpoint is about to be loaded into them."""
        raise NotImplementedError

    def prepare(self, micro_gradients: Callable[..., Any], rules: UpdateRules) -> None:
        """Compile updates of this kind from here on."""
        raise NotImplementedError

    def run_update(self, update: Update) -> Any:
        """The whole update in one compiled call; returns its loss. What it computes was given to `prepare`."""
        raise NotImplementedError

    def padded(self, batch: HostBatch, full: int) -> HostBatch:
        """The batch with as many rows as the compiled step takes; `full` is how many most batches have."""
        raise NotImplementedError

    def placed(self, batches: list[HostBatch]) -> Any:
        """Features, labels and row weights of each micro-batch, where they are computed with."""
        raise NotImplementedError

    def rows(self, outputs: Any, rows: int) -> Any:
        """The outputs of one batch in the order of its rows, without padding, on the host."""
        raise NotImplementedError

    def scope(self) -> Any:
        """Where variables have to be made."""
        return nullcontext()

    def set_tf32(self, enabled: bool) -> None:
        """Let float32 products be computed in TF32, or forbid it."""
        raise NotImplementedError

    def reset_peak_memory(self) -> None:
        """Count the peak of the devices' memory from here on."""

    def memory_figures(self) -> dict[str, int]:
        """Bytes `allocated` on the devices, and their `peak`; nothing where there are none."""
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
        """The batch as it is: an array is copied to the device by the call itself."""
        return batch

    # ---- what the loop asks for after the update -----------------------------------------------------------------

    def backward(self, loss: Any) -> None:
        raise NotImplementedError("gradients are taken inside the compiled update")

    def scale_gradients(self, factor: Any) -> None:
        raise NotImplementedError("gradients are divided inside the compiled update")

    def clip_gradients(self, max_norm: float | None, *, want_norm: bool) -> Any:
        """The norm before clipping, which has happened."""
        return self._norm if max_norm or want_norm else None

    def nonfinite(self, loss: Any, norm: Any, *, sticky: bool) -> Any:
        """The compiled update has looked itself."""
        return None

    def optimizer_step(self, veto: Any = None) -> bool:
        """Whether the schedule may advance; the step is done. Only loss scaling makes the host wait for the answer."""
        return True if self._moved is None else bool(self._moved)

    def zero_grad(self) -> None:
        """Gradients live inside the compiled update only."""

    def defer(self, function: Callable[[], None]) -> None:
        """Between two calls every update is at its end."""
        function()

    def free_memory(self) -> None:
        """What computes keeps its memory."""

    def training(self) -> None:
        """Keras models take `training=` with every call."""

    def evaluating(self) -> None:
        """Keras models take `training=` with every call."""

    def snapshot(self) -> Any:
        """An update is one call: nothing can find it half done."""
        return None

    def restore(self, held: Any) -> None:
        """Nothing was held."""

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
    """What loopwright raises while a backend traces is raised as it is, not as the backend wraps it."""
    try:
        yield
    except Exception as error:  # searched for one of ours; all others are raised as they are
        original: BaseException | None = error
        while original is not None and not isinstance(original, LoopwrightError):
            original = original.__cause__ or original.__context__
        if original is None or original is error:
            raise
        raise original from None


def as_host(leaf: Any) -> Any:
    """A tensor as a numpy array; number formats numpy does not know become float32."""
    array = leaf.numpy() if hasattr(leaf, "numpy") else np.asarray(leaf)
    return array.astype(np.float32) if array.dtype.kind == "V" or array.dtype.name == "bfloat16" else array
