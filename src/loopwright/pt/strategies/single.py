"""One process, one device: CPU, CUDA or ROCm GPU, MPS, XPU."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ...core.strategy import OneProcess
from ...core.update import MicroBatch, Update
from ...snapshot import Snapshot, restore_rng, snapshot_rng
from ...speed.device.clipping import FoldedClip, cannot_fold, clip_norm_
from ...speed.device.prefetch import NoPrefetch, prefetch_for
from ..checkpoint.tensors import decode_optimizer, encode_optimizer
from ..checkpoint.weights import load_weights
from ..device_traits import RecompileGuard
from ..devices import can_pin_memory, empty_cache
from ..precision import Precision
from .contents import IS_TRAINING, Contents

FUSED = (torch.optim.Adam, torch.optim.AdamW, torch.optim.SGD, torch.optim.Adagrad)
"""Optimizers whose fused form can leave out a step when a device flag says so."""


NOTHING = nullcontext()


class SingleDevice(OneProcess):
    """Carries out an update on one device."""

    alarm: AbstractContextManager[Any] = nullcontext()
    """Entered while processes depend on each other: an error of one stops all."""
    device: torch.device
    precision: Precision
    reads_are_free: bool
    forward_context: Callable[[], AbstractContextManager[Any]]
    """Around forward and loss of a micro-batch."""
    backward: Callable[[Tensor], None]
    """The backward pass of a micro-batch."""
    guard: RecompileGuard | None = None
    """What watches compilations, on a device that compiles for each shape."""
    saves_itself = False
    """Whether the optimizer's state is written in files of another engine, by all processes."""
    saves_whole = False
    """Whether checkpoints hold whole tensors instead of one shard per process."""
    makes_empty = False
    """Whether models are made without weights here, because another process has them."""
    logs_later = False
    """Whether logs are better written at the end of the next step (`defer`), when the device has work again."""

    def __init__(
        self,
        device: torch.device,
        precision: Precision,
        *,
        non_blocking: bool = False,
    ) -> None:
        self.device, self.precision = device, precision
        # Copies run ahead from pinned memory, which not every device with streams knows.
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
        """Move the model to the device, unless it is already spread over several."""
        if place and self.device.type != "meta":
            model.to(self.device)
        self.contents.take(model, None)
        return model

    @property
    def model(self) -> nn.Module:
        """The model, without what training wraps it in."""
        return self.contents.model

    def wrap(self, model: nn.Module) -> nn.Module:
        """The model as training calls it: here the model itself."""
        return model

    def unwrap(self, model: nn.Module) -> nn.Module:
        """The model as evaluation and probes call it."""
        return model

    def rewrap(self, model: nn.Module) -> nn.Module:
        """The model as training calls it, once the optimizer is known."""
        return model

    def setup_optimizer(self, optimizer: Any) -> Any:
        """Take the optimizer."""
        model, self.optimizer = self.precision.prepare(self.model, optimizer)
        self._broken = None
        self.contents.take(model, self.optimizer)
        has_modes = callable(getattr(self.optimizer, "train", None))
        self._put_into_training = self.optimizer.train if has_modes else None
        self.follow()
        return self.optimizer

    def change_optimizer(self, optimizer: Any) -> Any:
        """Take another optimizer in the middle of a run."""
        return self.setup_optimizer(optimizer)

    @property
    def changes(self) -> int:
        """A number that rises when something that updates depend on is no longer the same.

        That is another module, parameter, optimizer or parameter group, another `requires_grad`, another training mode
        of a submodule, and what the trainer tells by `note_change`: another loss, accumulation or override. What was
        prepared for an update (a graph, a plan) and its number are valid as long as `changes` is. It is up to date
        once an update has begun (`look`).
        """
        return self.contents.changes

    def note_change(self) -> None:
        """Let `changes` rise for something that only the caller knows."""
        self.contents.changes += 1

    def look(self) -> bool:
        """At the beginning of an update: follow what was changed since the last one; returns whether anything was."""
        if not self.contents.look():
            return False
        self.follow()
        return True

    def follow(self) -> None:
        """Go over to the parameters as they are now."""
        self._clipped = self.precision.parameters(self.contents.parameters, self.optimizer)
        self._choose_clipping()

    def fold_clipping(self, allowed: Callable[[], bool]) -> None:
        """Let the optimizer's kernel clip where it can, while `allowed` says that no callback runs in between."""
        self._may_fold = allowed
        self._choose_clipping()

    def _choose_clipping(self) -> None:
        self._clip, self._step = clip_norm_, self.precision.step
        masters = self._clipped is not self.contents.parameters
        if self._may_fold is None or self.device.type != "cuda" or self.precision.scales or masters:
            return
        if cannot_fold(self.optimizer, self._clipped) is None:
            fold = FoldedClip(self.optimizer, self._step, self._may_fold)
            self._clip, self._step = fold.clip, fold.step

    # ---- one update -------------------------------------------------------------------------------------------------

    def put(self, batch: Any) -> Any:
        """The batch on the device, in containers of its own."""
        if type(batch) is dict:  # the usual case: tensors that only need a look
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
        """Begin to copy the batches of an update to the device."""
        if self._ahead.runs:
            self._ahead.begin(update.batches)

    def micro_batch(self, micro: MicroBatch) -> AbstractContextManager[Any]:
        """The context of forward and backward of one micro-batch."""
        return NOTHING

    def boundary(self) -> None:
        """The end of a step: a device that only notes what is to be computed computes it here."""

    def defer(self, function: Callable[[], None]) -> None:
        """Call a function at the end of the step: here every step is at its end."""
        function()

    def scale_gradients(self, factor: Any) -> None:
        """Multiply all gradients, those of a loss with parameters of its own too."""
        self.look_inside()
        gradients = [p.grad for p in self.contents.everything if p.grad is not None]
        if gradients:
            torch._foreach_mul_(gradients, factor)

    def clip_gradients(self, max_norm: float | None, *, want_norm: bool) -> Any:
        """Clip to the norm and return the norm before clipping; without a limit only when it is wanted.

        The norm is that of all gradients in the model, as `clip_grad_norm_(model.parameters())` has it.
        """
        self.look_inside()
        if self.precision.scales:
            self.precision.unscale(self.optimizer)
        if max_norm:
            return self._clip(self._clipped, max_norm)
        if want_norm:
            return nn.utils.get_total_norm([p.grad for p in self._clipped if p.grad is not None])
        return None

    def look_inside(self) -> None:
        """Inside an update: a forward pass may have made parameters that were not there before."""
        if not self.contents.is_same():
            self.look()

    def nonfinite(self, loss: Tensor, norm: Tensor | None, *, sticky: bool) -> Tensor:
        """A device flag: loss or norm is NaN or infinite; a sticky one stays set for the updates that follow."""
        if self.precision.scales:
            norm = None  # gradients that overflow are the scaler's business
        flag = ~torch.isfinite(loss if norm is None else loss + norm)
        if not sticky:
            return flag
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
        """Drop all gradients: of trained and frozen parameters, and of what only the optimizer has."""
        for parameter in self.contents.everything:
            parameter.grad = None

    def free_memory(self) -> None:
        """Give cached device memory back."""
        self._ahead.begin([])
        empty_cache(self.device)

    # ---- modes ------------------------------------------------------------------------------------------------------

    def training(self) -> None:
        """Model (and an optimizer that has modes) ready to train; costs next to nothing when they are."""
        contents = self.contents
        if contents.calls_train or contents.modes != list(map(IS_TRAINING, contents.modules)):
            contents.train()
        if self._put_into_training is not None:
            self._put_into_training()

    def evaluating(self) -> None:
        """Model (and an optimizer that has modes) ready to be evaluated or saved."""
        self.model.eval()
        if callable(getattr(self.optimizer, "eval", None)):
            self.optimizer.eval()

    def generating(self, model: nn.Module) -> AbstractContextManager[Any]:
        """Around the generation of text."""
        return nullcontext()

    # ---- undoing ----------------------------------------------------------------------------------------------------

    def snapshot(self) -> Any:
        """RNG states and buffers as they are now."""
        return Snapshot(self.contents.modules)

    def restore(self, snapshot: Any) -> None:
        """Back to a snapshot; gradients of the unfinished update are dropped."""
        snapshot.restore()
        self.zero_grad()

    # ---- numbers and agreement --------------------------------------------------------------------------------------

    def read(self, scalars: list[Any]) -> list[float]:
        """Device scalars as host numbers, in one wait."""
        if not scalars:
            return []
        try:
            return list(torch.stack(scalars).tolist())
        except (TypeError, RuntimeError):  # plain numbers among them, or tensors of another device or shape
            alike = [torch.as_tensor(each).detach().to(self.device, torch.float32).reshape(()) for each in scalars]
            return list(torch.stack(alike).tolist())

    # ---- state to save and load -------------------------------------------------------------------------------------

    def model_state(self, module: nn.Module) -> Mapping[str, Tensor]:
        """Weights and buffers by name, or what this process holds of them."""
        state: Mapping[str, Tensor] = module.state_dict()
        return state

    def load_weights(self, module: nn.Module, folder: str | Path) -> None:
        """The weights of a checkpoint, into the model."""
        load_weights(module, folder)

    def optimizer_state(self, optimizer: Any, module: nn.Module) -> tuple[dict[str, Any], dict[str, Tensor]]:
        """The optimizer's state by parameter name: a description, and the tensors it mentions."""
        return encode_optimizer(optimizer, module)

    def load_optimizer(self, described: dict[str, Any], tensors: Any, optimizer: Any, module: nn.Module) -> None:
        """The counterpart of `optimizer_state`."""
        decode_optimizer(described, tensors, optimizer, module)

    def write_state(self, folder: Path) -> None:
        """Write the optimizer's state in files of the engine, where the strategy `saves_itself`."""
        raise NotImplementedError

    def read_state(self, folder: Path) -> None:
        """The counterpart of `write_state`."""
        raise NotImplementedError

    # ---- randomness -------------------------------------------------------------------------------------------------

    def rng_state(self) -> dict[str, Any]:
        return snapshot_rng()

    def load_rng_state(self, state: dict[str, Any]) -> None:
        restore_rng(state)
