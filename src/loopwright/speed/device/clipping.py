"""Gradient clipping with fewer calls, and clipping as part of the optimizer step.

torch's fused Adam and AdamW divide every gradient by `optimizer.grad_scale` if that attribute is set, and write the
scaled gradients back. Using it for clipping saves the separate multiplication of all gradients.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor, nn

OPTIMIZERS = (torch.optim.Adam, torch.optim.AdamW)
"""Optimizers whose fused kernel supports a scale; subclasses are excluded, since they may use gradients otherwise."""

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
"""Supported dtypes: the scale is float32 and would reduce the precision of float64 gradients."""


PLAIN = {Tensor, nn.Parameter}
FOREACH = ("cpu", "cuda", "xpu")
"""Devices on which torch processes all gradients in one call."""
PLACE_AND_FORMAT = attrgetter("device", "dtype", "layout")
CLEARLY_BELOW = 0.9
"""Share of the largest norm below which the factor is exactly 1, however the format rounds."""


def clip_norm_(parameters: Iterable[nn.Parameter], max_norm: float, *, reads: bool = False) -> Tensor:
    """Clip gradients like `clip_grad_norm_` and return the same norm, bit for bit, with a fifth of its calls.

    Gradients on several devices, of several dtypes, or other than plain dense tensors are passed to torch's function.
    With `reads`, the norm is read, and nothing is multiplied by 1.
    """
    parameters = list(parameters)
    gradients = [p.grad for p in parameters if p.grad is not None]
    is_simple = PLAIN.issuperset(map(type, gradients)) and len(set(map(PLACE_AND_FORMAT, gradients))) == 1
    if not is_simple or gradients[0].device.type not in FOREACH or gradients[0].is_sparse:
        norm = total_norm(gradients)
        nn.utils.clip_grads_with_norm_(parameters, max_norm, norm)
        return norm
    with torch.no_grad():
        norm = torch.linalg.vector_norm(torch.stack(torch._foreach_norm(gradients, 2.0)), 2.0)
        if reads and norm.item() + 1e-6 < CLEARLY_BELOW * max_norm:
            return norm
        torch._foreach_mul_(gradients, torch.clamp((norm + 1e-6).reciprocal() * float(max_norm), max=1.0))
    return norm


def total_norm(gradients: Iterable[Tensor]) -> Tensor:
    """The norm of all gradients; torch has none for sparse ones."""
    return nn.utils.get_total_norm([each.coalesce().values() if each.is_sparse else each for each in gradients])


class FoldedClip:
    """Clips in the optimizer step: until then gradients keep their full size.

    `clip` returns the norm like `clip_grad_norm_`; `step` runs the step and removes the scale. While `allowed()` is
    false, gradients are clipped immediately, since something reads them before the step.
    """

    def __init__(self, optimizer: Any, step: Callable[[Any], bool], allowed: Callable[[], bool] = lambda: True) -> None:
        self.optimizer, self._step, self._allowed = optimizer, step, allowed

    def clip(self, parameters: Iterable[nn.Parameter], max_norm: float) -> Tensor:
        """The norm of all gradients; the next step uses them scaled down to `max_norm`."""
        if _has_step_hooks(self.optimizer) or not self._allowed():  # a hook may read clipped gradients
            return clip_norm_(parameters, max_norm)
        norm = total_norm(p.grad for p in parameters if p.grad is not None)
        self.optimizer.grad_scale = ((norm.float() + 1e-6) / max_norm).clamp_(min=1.0)
        return norm

    def step(self, optimizer: Any) -> bool:
        """Step with the scale set by `clip`, then remove the scale; returns the result of the step."""
        try:
            return self._step(optimizer)
        finally:
            self.after_step()

    def after_step(self) -> None:
        """Remove the scale, so that a step without clipping is not scaled."""
        self.optimizer.grad_scale = None


def cannot_fold(optimizer: Any, parameters: Iterable[nn.Parameter]) -> str | None:
    """Why clipping these parameters cannot be part of this optimizer's step; None if it can.

    The caller must check the rest: a loss scaler, and callbacks that read gradients between clipping and step.
    """
    if type(optimizer) not in OPTIMIZERS or not all(group.get("fused") for group in optimizer.param_groups):
        return "the optimizer is not torch's fused Adam or AdamW"
    held = [p for group in optimizer.param_groups for p in group["params"]]
    clipped = {id(p) for p in parameters}
    if any(id(p) not in clipped for p in held):
        return "the optimizer also updates parameters that are not clipped"
    if any(type(p) is not nn.Parameter for p in held):
        return "parameters are on several devices"
    if any(p.dtype not in DTYPES for p in held):
        return "there are parameters in " + ", ".join(sorted({str(p.dtype) for p in held if p.dtype not in DTYPES}))
    if _has_step_hooks(optimizer):
        return "a hook reads the gradients before the optimizer step"
    return None


def _has_step_hooks(optimizer: Any) -> bool:
    """Whether a user's hook runs between clipping and step; loopwright's own hook reads learning rates only."""
    from torch.optim import optimizer as home

    hooks = [*optimizer._optimizer_step_pre_hooks.values(), *home._global_optimizer_pre_hooks.values()]
    return any(not (getattr(hook, "__module__", None) or "").startswith("loopwright.") for hook in hooks)
