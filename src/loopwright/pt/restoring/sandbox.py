"""Running code without side effects: random states, buffers, gradients, modes and plain Python state are restored."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn

from ...snapshot import Snapshot
from ..devices import is_lazy
from .kept_state import KeptState, is_writable
from .kept_weights import KeptWeights, parameters_of

HAS_CHANGED = (
    "computing the loss writes to weights that are too large to copy, so that each test of the loss changes them too; "
    "update them in a callback instead (on_step_end)"
)


@contextmanager
def sandbox(model: nn.Module, trainer: Any = None, *, spares_memory: bool = False) -> Iterator[Sandbox]:
    """Restore model, trainer and random states after the block; `spares_memory` keeps weights on the host."""
    box = Sandbox(model, trainer, spares_memory=spares_memory)
    try:
        yield box
    finally:
        box.restore()
        box.close()
    internals = getattr(trainer, "_loopwright", None)
    if internals is not None and box.has_changed_weights:
        internals.notices.warn_once(HAS_CHANGED)


class Sandbox:
    """The state of a model, a trainer and all random states at one moment, which can be restored repeatedly."""

    def __init__(self, model: nn.Module, trainer: Any = None, *, spares_memory: bool = False) -> None:
        state = self._state = KeptState()
        own = state.keep_modules(model)
        if trainer is not None:
            state.keep_trainer(trainer)
        others = state.keep_found_modules()
        self._modules = own + others
        self._tensors = Snapshot(self._modules, keeps=lambda b: not is_lazy(b.device) and is_writable(b))
        leaves = (*parameters_of(self._modules), *state.leaves)
        self._grads = [(leaf, leaf.grad, leaf.requires_grad) for leaf in leaves]
        self._weights = [KeptWeights(modules, on_host=spares_memory) for modules in (own, others)]
        self._lazy = self._stand_in_for_lazy_buffers()
        self._hide_gradients()

    @property
    def has_changed_weights(self) -> bool:
        """Whether weights too large to copy were written to, which is not undone."""
        return any(weights.has_changed for weights in self._weights)

    def restore(self) -> None:
        """Restore everything; the sandbox can be used again."""
        self._state.restore()
        self._tensors.restore()
        for place, name, clone in self._lazy_clones():
            place[name] = clone
        for weights in self._weights:
            weights.restore()
        self._hide_gradients()

    def close(self) -> None:
        """Restore the gradients and the buffers that were replaced meanwhile."""
        for leaf, grad, _ in self._grads:
            leaf.grad = grad
        for place, name, buffer in self._lazy:
            place[name] = buffer

    def _hide_gradients(self) -> None:
        # Gradients of an update in progress are set aside instead of copied.
        for leaf, _, requires_grad in self._grads:
            if leaf.grad is not None:
                leaf.grad = None
            if leaf.requires_grad is not requires_grad:
                leaf.requires_grad_(requires_grad)

    def _stand_in_for_lazy_buffers(self) -> list[tuple[dict[str, Any], str, Tensor]]:
        """Replace lazy buffers by copies, and keep the originals: on a lazy device even restoring a value is work."""
        lazy = [
            (module._buffers, name, buffer)
            for module in self._modules
            for name, buffer in module._buffers.items()
            if buffer is not None and is_lazy(buffer.device)
        ]
        for place, name, buffer in lazy:
            place[name] = buffer.clone()  # type: ignore[assignment]
        return lazy  # type: ignore[return-value]

    def _lazy_clones(self) -> list[tuple[dict[str, Any], str, Tensor]]:
        return [(place, name, buffer.clone()) for place, name, buffer in self._lazy]
