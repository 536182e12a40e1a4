"""Number formats: autocast, loss scaling for fp16, tf32, and NVIDIA Apex."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from ..args.groups.precision import PrecisionArgs
from ..errors import ArgumentsError, MissingPackage
from ..speed.device.fp8 import refuse_without_fp8
from ..speed.device.fused_step import step_
from .devices import supports_bf16


class Precision:
    """The dtype of the weights, usually fp32: no casts and no loss scaling."""

    scales = False
    """Whether gradients are scaled until `unscale` is called."""

    def __init__(self) -> None:
        self._nothing: AbstractContextManager[Any] = nullcontext()

    def context(self) -> AbstractContextManager[Any]:
        """The context of forward and loss."""
        return self._nothing

    def prepare(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> tuple[nn.Module, torch.optim.Optimizer]:
        return model, optimizer

    def backward(self, loss: Tensor) -> None:
        loss.backward()

    def unscale(self, optimizer: torch.optim.Optimizer) -> None:
        """Unscale gradients before they are read."""

    def step(self, optimizer: torch.optim.Optimizer) -> bool:
        """Step the optimizer; returns whether the weights changed."""
        step_(optimizer)
        return True

    def skip(self) -> None:
        """End an update without a step."""

    def parameters(self, parameters: list[nn.Parameter], optimizer: torch.optim.Optimizer) -> list[Any]:
        """The tensors whose gradients are clipped."""
        return parameters

    def state_dict(self) -> dict[str, Any] | None:
        return None

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Load the scale of a checkpoint."""


class Autocast(Precision):
    """bf16: matrix products in half precision, weights and the rest in fp32."""

    def __init__(self, device: torch.device, dtype: torch.dtype) -> None:
        super().__init__()
        self._device, self._dtype = device, dtype

    def context(self) -> AbstractContextManager[Any]:
        return torch.autocast(self._device.type, dtype=self._dtype)


class ScaledAutocast(Autocast):
    """fp16: autocast plus loss scaling; a step whose gradients overflow is skipped."""

    scales = True

    def __init__(self, device: torch.device) -> None:
        super().__init__(device, torch.float16)
        self.scaler = torch.amp.GradScaler(device.type)

    def backward(self, loss: Tensor) -> None:
        self.scaler.scale(loss).backward()

    def unscale(self, optimizer: torch.optim.Optimizer) -> None:
        self.scaler.unscale_(optimizer)

    def step(self, optimizer: torch.optim.Optimizer) -> bool:
        before = self.scaler.get_scale()
        self.scaler.step(optimizer)
        self.scaler.update()
        # The scale decreases exactly when a step was skipped; reading it is the only synchronization of fp16 per
        # update.
        return self.scaler.get_scale() >= before

    def skip(self) -> None:
        self.scaler.update()

    def state_dict(self) -> dict[str, Any]:
        return dict(self.scaler.state_dict())

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.scaler.load_state_dict(state)


class Apex(Precision):
    """NVIDIA Apex's amp, for older scripts with half_precision_backend="apex"."""

    def __init__(self, opt_level: str) -> None:
        super().__init__()
        try:
            from apex import amp
        except ImportError as error:
            raise MissingPackage(
                "apex", needed_for='half_precision_backend="apex"', install="NVIDIA Apex from its own source repository"
            ) from error
        self._amp, self._level = amp, opt_level
        self._optimizer: torch.optim.Optimizer | None = None

    def prepare(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> tuple[nn.Module, torch.optim.Optimizer]:
        model, self._optimizer = self._amp.initialize(model, optimizer, opt_level=self._level)
        assert self._optimizer is not None
        return model, self._optimizer

    def backward(self, loss: Tensor) -> None:
        with self._amp.scale_loss(loss, self._optimizer) as scaled:
            scaled.backward()

    def parameters(self, parameters: list[nn.Parameter], optimizer: torch.optim.Optimizer) -> list[Any]:
        return list(self._amp.master_params(optimizer))

    def state_dict(self) -> dict[str, Any]:
        return dict(self._amp.state_dict())

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._amp.load_state_dict(state)


def choose_precision(args: PrecisionArgs, device: torch.device) -> Precision:
    """The precision set in the arguments, checked against the device."""
    if args.fp8:
        refuse_without_fp8(device)
    own: Callable[[torch.device], Precision] | None = getattr(args, "own_precision", None)
    if own is not None and getattr(args, "bf16_weights", False):  # these arguments provide a rounding for bf16 weights
        return own(device)
    if args.bf16:
        if not supports_bf16(device):
            raise ArgumentsError(
                f"bf16=True, but {device} does not support bfloat16; use fp16=True or no mixed precision"
            )
        return Autocast(device, torch.bfloat16)
    if not args.fp16:
        return Precision()
    if args.half_precision_backend == "apex":
        return Apex(args.fp16_opt_level)
    return ScaledAutocast(device)


def set_tf32(enabled: bool | None) -> None:
    """Switch tf32 matrix products on or off; None keeps torch's setting."""
    if enabled is not None:
        torch.backends.cuda.matmul.allow_tf32 = enabled
        torch.backends.cudnn.allow_tf32 = enabled


def check_fp16_weights(model: nn.Module, precision: Precision) -> None:
    """Raise if loss scaling is used with fp16 weights: fp16 gradients cannot be unscaled."""
    if not isinstance(precision, ScaledAutocast):
        return
    half = [name for name, p in model.named_parameters() if p.requires_grad and p.dtype is torch.float16]
    if half:
        raise ArgumentsError(
            f"fp16=True needs trainable weights in fp32, but {half[0]!r} (and {len(half) - 1} more) are fp16; "
            "load the model in fp32, or train it without fp16=True"
        )


@contextmanager
def full_eval_dtype(model: nn.Module, args: PrecisionArgs) -> Iterator[None]:
    """The whole model in half precision during an evaluation."""
    dtype = torch.bfloat16 if args.bf16_full_eval else torch.float16 if args.fp16_full_eval else None
    if dtype is None:
        yield
        return
    # Rounding cannot be undone, so the original tensors are kept and restored.
    kept = {name: tensor.data for name, tensor in [*model.named_parameters(), *model.named_buffers()]}
    model.to(dtype)
    try:
        yield
    finally:
        for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
            tensor.data = kept[name]
