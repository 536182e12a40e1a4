"""bf16 weights with stochastic rounding: updates are computed in float32 and rounded at random, without bias."""

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
"""The bits of a float32 that bf16 lacks."""


def round_stochastically(values: Tensor) -> Tensor:
    """Round float32 to bf16 stochastically: the expected value of the result is the number itself."""
    bits = values.contiguous().view(torch.int32)
    noise = torch.randint(0, LOWER_HALF + 1, bits.shape, dtype=torch.int32, device=bits.device)
    rounded = ((bits + noise) & ~LOWER_HALF).view(torch.float32)
    # Not rounded at random: infinity, NaN, and numbers that the noise would move beyond the largest one.
    rounded = torch.where(torch.isfinite(values) & torch.isfinite(rounded), rounded, values)
    return rounded.to(torch.bfloat16)


class Bf16Weights(Precision):
    """bf16 weights: the optimizer updates them in float32, and the result is rounded."""

    def __init__(self, *, stochastic: bool) -> None:
        super().__init__()
        self.stochastic = stochastic

    def prepare(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> tuple[nn.Module, torch.optim.Optimizer]:
        """Keep weights in float32 while a state is loaded: torch casts the state to their dtype."""
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
    """The rounding of bf16 weights: by the hardware if it supports that, else in software."""
    wanted = bool(args.stochastic_rounding_enabled)
    on_neuron = device.type == "neuron" or (device.type == "xla" and os.environ.get("PJRT_DEVICE") == "NEURON")
    if on_neuron:
        os.environ[ENVIRONMENT] = "1" if wanted else "0"
    return Bf16Weights(stochastic=wanted and not _rounds_itself(device))


def _rounds_itself(device: torch.device) -> bool:
    """Whether casts to bf16 on the device are stochastic, tested by casting a number between two bf16 values."""
    between = torch.full((256,), 1.0 + 2.0**-9, dtype=torch.float32).to(device)
    found = between.to(torch.bfloat16).float().cpu()
    return bool(found.min() != found.max())
