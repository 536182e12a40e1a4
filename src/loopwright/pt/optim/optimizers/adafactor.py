"""Adafactor: Adam with a second moment kept as one row and one column per matrix.

After Shazeer and Stern, "Adafactor: Adaptive Learning Rates with Sublinear Memory Cost" (arXiv:1804.04235). Options,
defaults and the names in the state are those of `transformers.Adafactor`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from ....errors import ArgumentsError, ModelError

HALF_PRECISION = (torch.float16, torch.bfloat16)


class Adafactor(Optimizer):
    """Adafactor with an external learning rate (`relative_step=False`) or its own (`lr=None`)."""

    def __init__(
        self,
        params: Iterable[Any],
        lr: float | Tensor | None = None,
        eps: tuple[float, float] = (1e-30, 1e-3),
        clip_threshold: float = 1.0,
        decay_rate: float = -0.8,
        beta1: float | None = None,
        weight_decay: float = 0.0,
        scale_parameter: bool = True,
        relative_step: bool = True,
        warmup_init: bool = False,
    ) -> None:
        if lr is not None and relative_step:
            raise ArgumentsError(f"Adafactor: lr={lr} and relative_step=True are mutually exclusive; set one of them.")
        if warmup_init and not relative_step:
            raise ArgumentsError("Adafactor: warmup_init=True needs relative_step=True.")
        defaults = {
            "lr": lr,
            "eps": eps,
            "clip_threshold": clip_threshold,
            "decay_rate": decay_rate,
            "beta1": beta1,
            "weight_decay": weight_decay,
            "scale_parameter": scale_parameter,
            "relative_step": relative_step,
            "warmup_init": warmup_init,
        }
        super().__init__(params, defaults)

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """One update of every parameter that has a gradient."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self._update(parameter, group)
        return loss

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a saved state in the precision it was saved in."""
        super().load_state_dict(state_dict)
        # torch casts loaded state to the parameter's dtype; moments of half-precision weights are float32.
        saved_ids = [index for group in state_dict["param_groups"] for index in group["params"]]
        parameters = [parameter for group in self.param_groups for parameter in group["params"]]
        for index, parameter in zip(saved_ids, parameters, strict=True):
            for key, value in state_dict["state"].get(index, {}).items():
                if isinstance(value, Tensor) and value.dtype != parameter.dtype:
                    self.state[parameter][key] = value.to(parameter.device, copy=True)

    def _update(self, parameter: Tensor, group: Mapping[str, Any]) -> None:
        grad = _wide(parameter.grad)
        if grad.is_sparse:
            raise ModelError("Adafactor does not support sparse gradients; build the embedding with sparse=False.")
        state = self.state[parameter]
        if not state:
            state.update(_fresh_state(grad, group))
        state["step"] += 1
        weight = _wide(parameter)
        lr = _learning_rate(weight, group, int(state["step"]))
        update = _normalised(grad, state, group)
        update.div_((_rms(update) / group["clip_threshold"]).clamp_(min=1.0)).mul_(lr)
        if group["beta1"] is not None:
            update = state["exp_avg"].mul_(group["beta1"]).add_(update, alpha=1 - group["beta1"])
        if group["weight_decay"]:
            weight.mul_(1 - group["weight_decay"] * lr)
        weight.sub_(update)
        if weight is not parameter:
            parameter.copy_(weight)


def _wide(tensor: Tensor) -> Tensor:
    return tensor.float() if tensor.dtype in HALF_PRECISION else tensor


def _rms(tensor: Tensor) -> Tensor:
    return tensor.norm(2) / math.sqrt(tensor.numel())


def _fresh_state(grad: Tensor, group: Mapping[str, Any]) -> dict[str, Any]:
    state: dict[str, Any] = {"step": 0}
    if group["beta1"] is not None:
        state["exp_avg"] = torch.zeros_like(grad)
    if grad.ndim >= 2:
        state["exp_avg_sq_row"] = grad.new_zeros(grad.shape[:-1])
        state["exp_avg_sq_col"] = grad.new_zeros(grad.shape[:-2] + grad.shape[-1:])
    else:
        state["exp_avg_sq"] = torch.zeros_like(grad)
    return state


def _learning_rate(weight: Tensor, group: Mapping[str, Any], step: int) -> Any:
    """The external learning rate, or Adafactor's own; with scale_parameter, relative to the size of the weights."""
    lr = group["lr"]
    if group["relative_step"]:
        lr = min(1e-6 * step if group["warmup_init"] else 1e-2, 1.0 / math.sqrt(step))
    return _rms(weight).clamp_(min=group["eps"][1]) * lr if group["scale_parameter"] else lr


def _normalised(grad: Tensor, state: dict[str, Any], group: Mapping[str, Any]) -> Tensor:
    """Add the gradient to the second moment; returns the gradient divided by the root of that moment."""
    keep = 1.0 - float(state["step"]) ** group["decay_rate"]
    square = grad.square().add_(group["eps"][0])
    if grad.ndim < 2:
        moment = state["exp_avg_sq"].lerp_(square, 1.0 - keep)
        return moment.rsqrt().mul_(grad)
    row = state["exp_avg_sq_row"].lerp_(square.mean(dim=-1), 1.0 - keep)
    column = state["exp_avg_sq_col"].lerp_(square.mean(dim=-2), 1.0 - keep)
    row_share = (row / row.mean(dim=-1, keepdim=True)).rsqrt_().unsqueeze(-1)
    return row_share * column.rsqrt().unsqueeze(-2) * grad
