"""One process, one device: CPU, CUDA or ROCm GPU, MPS, XPU."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ...core.strategy import OneProcess
from ...core.update import MicroBatch, Update
from ...snapshot import Snapshot, restore_rng, snapshot_rng
from ...speed.device.clipping import FoldedClip, cannot_fold, clip_norm_, total_norm
from ...speed.device.prefetch import NoPrefetch, prefetch_for
from ..checkpoint.tensors import decode_optimizer, encode_optimizer
from ..checkpoint.weights import load_weights
from ..device_traits import RecompileGuard
from ..devices import can_pin_memory, empty_cache
from ..precision import Precision
from .contents import IS_TRAINING, Contents

FUSED = (torch.optim.Adam, torch.optim.AdamW, torch.optim.SGD, torch.optim.Adagrad)
"""Optimizers whose fused implementation can skip a step according to a device flag."""


NOTHING = nullcontext()


class SingleDevice(OneProcess):
    """Runs updates on one device."""

    alarm: AbstractContextManager[Any] = nullcontext()
    """A context while ranks depend on each other: an error on one rank stops all."""
    device: torch.device
    precision: Precision
    reads_are_free: bool
    forward_context: Callable[[], AbstractContextManager[Any]]
    """The context of forward and loss of a micro-batch."""
    backward: Callable[[Tensor], None]
    """The backward pass of a micro-batch."""
    guard: RecompileGuard | None = None
    """Counts compilations on a device that compiles for each shape."""
    saves_itself = False
    """Whether another engine writes the optimizer's state in its own files, on all ranks."""
    saves_whole = False
    """Whether checkpoints hold full tensors instead of one shard per rank."""
    makes_empty = False
    """Whether models are created without weights on this rank, because another rank has them."""
    logs_later = False
    """Whether logs are deferred to the end of the next step (`defer`), when the device has work again."""

    def __init__(
        self,
        device: torch.device,
        precision: Precision,
        *,
        non_blocking: bool = False,
    ) -> None:
        self.device, self.precision = device, precision
        # Prefetching copies from pinned memory, which not every device with streams supports.
        ahead = prefetch_for if device.type == "cpu" or can_pin_memory(device) else NoPrefetch
        self._ahead = ahead(device, non_blocking=non_blocking)
        self._may_fold: Callable[[], bool] | None = None
        self.contents = Contents(nn.Module())
        self.optimizer: Any = None
        self._clipped: list[Any] = []
        self._broken: Tensor | None = None
        self.reads_are_free = device.type == "cpu"
        # Bound once: these run for every micro-batch.
        self.forward_context = precision.context
        self.backward = precision.backward
        self._step = precision.step
        self._clip: Callable[..., Any] = clip_norm_
        self._put_into_training: Callable[[], Any] | None = None

    # ---- setting up -------------------------------------------------------------------------------------------------

    def setup_model(self, model: nn.Module, *, place: bool = True) -> nn.Module:
        """Move the model to the device if `place` is set, and make it the current one."""
        if place and self.device.type != "meta":
            model.to(self.device)
        self.contents.take(model, None)
        return model

    @property
    def model(self) -> nn.Module:
        """The model without training wrappers."""
        return self.contents.model

    def wrap(self, model: nn.Module) -> nn.Module:
        """The model as training calls it: here the model itself."""
        return model

    def unwrap(self, model: nn.Module) -> nn.Module:
        """The model as evaluation and probes call it."""
        return model

    def rewrap(self, model: nn.Module) -> nn.Module:
        """The model as training calls it, once the optimizer is set."""
        return model

    def setup_optimizer(self, optimizer: Any) -> Any:
        """Set the optimizer."""
        model, self.optimizer = self.precision.prepare(self.model, optimizer)
        self._broken = None
        self.contents.take(model, self.optimizer)
        has_modes = callable(getattr(self.optimizer, "train", None))
        self._put_into_training = self.optimizer.train if has_modes else None
        self.follow()
        return self.optimizer

    def change_optimizer(self, optimizer: Any) -> Any:
        """Replace the optimizer during a run."""
        return self.setup_optimizer(optimizer)

    @property
    def changes(self) -> int:
        """A counter that increases when something that updates depend on has changed.

        That is a module, parameter, optimizer or parameter group, `requires_grad`, the training mode of a submodule, or
        a change reported by `note_change`: of the loss, the accumulation or an override. Objects prepared for an update
        (a graph, a plan) are valid while `changes` is unchanged. It is up to date once an update has begun (`look`).
        """
        return self.contents.changes

    def note_change(self) -> None:
        """Increase `changes` for a change that only the caller can detect."""
        self.contents.changes += 1

    def detect_changes(self) -> bool:
        """Apply changes since the last update; called when an update begins. Returns whether there were any."""
        if not self.contents.detect_changes():
            return False
        self.follow()
        return True

    def follow(self) -> None:
        """Switch to the current parameters."""
        self._clipped = self.precision.parameters(self.contents.parameters, self.optimizer)
        self._choose_clipping()

    def fold_clipping(self, allowed: Callable[[], bool]) -> None:
        """Let the optimizer's kernel clip if possible, while `allowed()` is true: no callback runs in between."""
        self._may_fold = allowed
        self._choose_clipping()

    def _choose_clipping(self) -> None:
        self._clip, self._step = partial(clip_norm_, reads=self.reads_are_free), self.precision.step
        masters = self._clipped is not self.contents.parameters
        if self._may_fold is None or self.device.type != "cuda" or self.precision.scales or masters:
            return
        if cannot_fold(self.optimizer, self._clipped) is None:
            fold = FoldedClip(self.optimizer, self._step, self._may_fold)
            self._clip, self._step = fold.clip, fold.step

    # ---- one update -------------------------------------------------------------------------------------------------

    def put(self, batch: Any) -> Any:
        """The batch on the device, in new containers."""
        if type(batch) is dict:  # the usual case: tensors that are already on the device
            device = self.device
            moved = {}
            for name in batch:
                value = batch[name]
                moved[name] = value if type(value) is Tensor and value.device == device else self.put(value)
            return moved
        if isinstance(batch, Tensor):
            return batch if batch.device == self.device else self._ahead.take(batch)
        if isinstance(batch, Mapping):
            return {name: self.put(value) for name, value in batch.items()}
        if isinstance(batch, tuple) and hasattr(batch, "_fields"):
            return type(batch)(*(self.put(value) for value in batch))
        if isinstance(batch, (list, tuple)):
            return type(batch)(self.put(value) for value in batch)
        return batch

    def begin_update(self, update: Update) -> None:
        """Start copying the batches of an update to the device."""
        if self._ahead.runs:
            self._ahead.begin(update.batches)

    def micro_batch(self, micro: MicroBatch) -> AbstractContextManager[Any]:
        """The context of forward and backward of one micro-batch."""
        return NOTHING

    def boundary(self) -> None:
        """The end of a step, where a lazy device executes the recorded operations."""

    def defer(self, function: Callable[[], None]) -> None:
        """Call a function at the end of the step; here, immediately."""
        function()

    def scale_gradients(self, factor: Any) -> None:
        """Multiply all gradients, including those of a loss with its own parameters."""
        self.detect_changes_inside()
        gradients = [p.grad for p in self.contents.everything if p.grad is not None]
        if gradients:
            torch._foreach_mul_(gradients, factor)

    def clip_gradients(self, max_norm: float | None, *, want_norm: bool) -> Any:
        """Clip to the norm and return the norm before clipping; without a limit, compute it only for `want_norm`.

        The norm is that of all gradients in the model, like `clip_grad_norm_(model.parameters())`.
        """
        self.detect_changes_inside()
        if self.precision.scales:
            self.precision.unscale(self.optimizer)
        if max_norm:
            return self._clip(self._clipped, max_norm)
        if want_norm:
            return total_norm([p.grad for p in self._clipped if p.grad is not None])
        return None

    def detect_changes_inside(self) -> None:
        """Apply changes within an update: a forward pass may have created parameters."""
        if not self.contents.is_same():
            self.detect_changes()

    def nonfinite(self, loss: Tensor, norm: Tensor | None, *, sticky: bool) -> Tensor:
        """A device flag: loss or norm is NaN or infinite; with `sticky`, also set after an earlier such update."""
        if self.precision.scales:
            norm = None  # the scaler handles gradients that overflow
        flag = ~torch.isfinite(loss if norm is None else loss + norm)
        return self._with_earlier(flag) if sticky else flag

    def _with_earlier(self, flag: Tensor) -> Tensor:
        self._broken = flag if self._broken is None else self._broken | flag
        return self._broken

    def optimizer_step(self, veto: Tensor | None = None) -> bool:
        """Step, unless the veto (a device flag) is set; returns whether the schedule may advance."""
        if veto is None:
            return self._step(self.optimizer)
        if self._can_skip_on_device():
            self.optimizer.found_inf = veto.to(torch.float32)
            self._step(self.optimizer)
            self.optimizer.found_inf = None
        elif not bool(veto):
            return self._step(self.optimizer)
        else:
            self.precision.skip()
        return True

    def _can_skip_on_device(self) -> bool:
        if self.device.type == "cpu" or self.precision.scales or not isinstance(self.optimizer, FUSED):
            return False
        return all(group.get("fused") for group in self.optimizer.param_groups)

    def zero_grad(self) -> None:
        """Drop all gradients: of trainable and frozen parameters, and of parameters that only the optimizer has."""
        for parameter in self.contents.everything:
            parameter.grad = None

    def free_memory(self) -> None:
        """Release cached device memory."""
        self._ahead.begin([])
        empty_cache(self.device)

    # ---- modes ------------------------------------------------------------------------------------------------------

    def training(self) -> None:
        """Set the model (and an optimizer with modes) to training mode; cheap if it already is."""
        contents = self.contents
        if contents.calls_train or contents.modes != list(map(IS_TRAINING, contents.modules)):
            contents.train()
        if self._put_into_training is not None:
            self._put_into_training()

    def evaluating(self) -> None:
        """Set the model (and an optimizer with modes) to evaluation mode, also for saving."""
        self.model.eval()
        if callable(getattr(self.optimizer, "eval", None)):
            self.optimizer.eval()

    def generating(self, model: nn.Module) -> AbstractContextManager[Any]:
        """The context of text generation."""
        return nullcontext()

    # ---- undoing ----------------------------------------------------------------------------------------------------

    def snapshot(self) -> Any:
        """The current RNG states and buffers."""
        return Snapshot(self.contents.modules)

    def restore(self, snapshot: Any) -> None:
        """Restore a snapshot; drops gradients of the unfinished update."""
        snapshot.restore()
        self.zero_grad()

    # ---- numbers and collectives -------------------------------------------------------------------------------------

    def read(self, scalars: list[Any]) -> list[float]:
        """Device scalars as Python floats, in one synchronization."""
        if not scalars:
            return []
        try:
            return list(torch.stack(scalars).tolist())
        except (TypeError, RuntimeError):  # plain numbers, or tensors of different devices or shapes
            alike = [torch.as_tensor(each).detach().to(self.device, torch.float32).reshape(()) for each in scalars]
            return list(torch.stack(alike).tolist())

    # ---- state to save and load -------------------------------------------------------------------------------------

    def model_state(self, module: nn.Module) -> Mapping[str, Tensor]:
        """Weights and buffers by name, or this rank's shards of them."""
        state: Mapping[str, Tensor] = module.state_dict()
        return state

    def load_weights(self, module: nn.Module, folder: str | Path) -> None:
        """Load the weights of a checkpoint into the model."""
        load_weights(module, folder)

    def optimizer_state(self, optimizer: Any, module: nn.Module) -> tuple[dict[str, Any], dict[str, Tensor]]:
        """The optimizer's state by parameter name: a description, and the tensors it refers to."""
        return encode_optimizer(optimizer, module)

    def load_optimizer(self, described: dict[str, Any], tensors: Any, optimizer: Any, module: nn.Module) -> None:
        """The counterpart of `optimizer_state`."""
        decode_optimizer(described, tensors, optimizer, module)

    def write_state(self, folder: Path) -> None:
        """Write the optimizer's state in files of the engine, if the strategy `saves_itself`."""
        raise NotImplementedError

    def read_state(self, folder: Path) -> None:
        """The counterpart of `write_state`."""
        raise NotImplementedError

    # ---- randomness -------------------------------------------------------------------------------------------------

    def rng_state(self) -> dict[str, Any]:
        return snapshot_rng()

    def load_rng_state(self, state: dict[str, Any]) -> None:
        restore_rng(state)
