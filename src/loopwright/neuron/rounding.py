"""Weights in bf16 that lose nothing on average: updates are computed in 32 bits and rounded up or down at random."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from ..pt.precision import Precision

if TYPE_CHECKING:
    from .arguments import NeuronArgs

ENVIRONMENT = "NEURON_RT_STOCHASTIC_ROUNDING_EN"
LOWER_HALF = 0xFFFF
"""The bits of a 32-bit number that bf16 does not have."""


def round_stochastically(values: Tensor, generator: torch.Generator | None = None) -> Tensor:
    """32-bit numbers as bf16: up or down with odds such that the expected result is the number itself."""
    bits = values.contiguous().view(torch.int32)
    noise = torch.randint(0, LOWER_HALF + 1, bits.shape, dtype=torch.int32, device=bits.device, generator=generator)
    rounded = ((bits + noise) & ~LOWER_HALF).view(torch.float32)
    # What has no neighbours to round to stays: infinity, NaN, and what the noise would carry beyond the largest number.
    rounded = torch.where(torch.isfinite(values) & torch.isfinite(rounded), rounded, values)
    return rounded.to(torch.bfloat16)


class Bf16Weights(Precision):
    """Weights in bf16; the optimizer sees them in 32 bits, and what it made of them is rounded."""

    def __init__(self, *, stochastic: bool) -> None:
        super().__init__()
        self.stochastic = stochastic

    def prepare(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> tuple[nn.Module, torch.optim.Optimizer]:
        """Loading a state, torch casts it to the format of the weights: they are in 32 bits meanwhile."""
        if isinstance(optimizer, torch.optim.Optimizer):
            halves = _in_bf16(optimizer)
            optimizer.register_load_state_dict_pre_hook(lambda *_: _cast(halves, torch.float32))
            optimizer.register_load_state_dict_post_hook(lambda *_: _cast(halves, torch.bfloat16))
        return model, optimizer

    def step(self, optimizer: torch.optim.Optimizer) -> bool:
        halves = _in_bf16(optimizer)
        with torch.no_grad():
            for parameter in halves:
                gradient, parameter.grad = parameter.grad, None
                parameter.data = parameter.data.float()
                parameter.grad = None if gradient is None else gradient.float()
            optimizer.step()
            for parameter in halves:
                moved, parameter.grad = parameter.grad is not None, None
                parameter.data = self._round(parameter.data) if moved else parameter.data.to(torch.bfloat16)
        return True

    def _round(self, values: Tensor) -> Tensor:
        return round_stochastically(values) if self.stochastic else values.to(torch.bfloat16)


def _in_bf16(optimizer: torch.optim.Optimizer) -> list[nn.Parameter]:
    return [p for group in optimizer.param_groups for p in group["params"] if p.dtype is torch.bfloat16]


def _cast(parameters: list[nn.Parameter], dtype: torch.dtype) -> None:
    for parameter in parameters:
        parameter.grad = None
        parameter.data = parameter.data.to(dtype)


def bf16_weights(args: NeuronArgs, device: torch.device) -> Bf16Weights:
    """How bf16 weights are rounded here: by the hardware where it does that, in software elsewhere."""
    wanted = bool(args.stochastic_rounding_enabled)
    on_neuron = device.type == "neuron" or (device.type == "xla" and os.environ.get("PJRT_DEVICE") == "NEURON")
    if on_neuron:
        os.environ[ENVIRONMENT] = "1" if wanted else "0"
    return Bf16Weights(stochastic=wanted and not _rounds_itself(device))


def _rounds_itself(device: torch.device) -> bool:
    """Whether casting to bf16 on the device is stochastic already, found out by casting a number between two."""
    between = torch.full((256,), 1.0 + 2.0**-9, dtype=torch.float32).to(device)
    found = between.to(torch.bfloat16).float().cpu()
    return bool(found.min() != found.max())
