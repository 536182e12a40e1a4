"""Clipping without what its general form costs, and clipping folded into the optimizer step.

torch's fused Adam and AdamW divide every gradient by `optimizer.grad_scale` when that attribute is set, and write the
scaled gradients back. Clipping through it saves the pass over all gradients that a separate multiplication costs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor, nn

OPTIMIZERS = (torch.optim.Adam, torch.optim.AdamW)
"""Optimizers whose fused kernel takes a scale; a subclass may do anything with its gradients, so it does not count."""

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
"""The scale is a float32: with float64 gradients it would be the least exact number of the update."""


PLAIN = {Tensor, nn.Parameter}
FOREACH = ("cpu", "cuda", "xpu")
"""Devices where torch takes all gradients in one call."""
PLACE_AND_FORMAT = attrgetter("device", "dtype")


def clip_norm_(parameters: Iterable[nn.Parameter], max_norm: float) -> Tensor:
    """What `clip_grad_norm_` does and returns, to the bit, with a fifth of its calls.

    Gradients of several devices or number formats, and others than plain tensors, are left to torch.
    """
    gradients = [p.grad for p in parameters if p.grad is not None]
    is_simple = PLAIN.issuperset(map(type, gradients)) and len(set(map(PLACE_AND_FORMAT, gradients))) == 1
    if not is_simple or gradients[0].device.type not in FOREACH:
        return nn.utils.clip_grad_norm_(parameters, max_norm)
    with torch.no_grad():
        norm = torch.linalg.vector_norm(torch.stack(torch._foreach_norm(gradients, 2.0)), 2.0)
        torch._foreach_mul_(gradients, torch.clamp((norm + 1e-6).reciprocal() * float(max_norm), max=1.0))
    return norm


class FoldedClip:
    """Clips when the optimizer steps: until then gradients keep their full size.

    `clip` returns the norm as `clip_grad_norm_` does; `step` steps and takes the scale away again. While `allowed()` is
    false, clipping is done at once, since something reads the gradients before the step.
    """

    def __init__(self, optimizer: Any, step: Callable[[Any], bool], allowed: Callable[[], bool] = lambda: True) -> None:
        self.optimizer, self._step, self._allowed = optimizer, step, allowed

    def clip(self, parameters: Iterable[nn.Parameter], max_norm: float) -> Tensor:
        """The norm of all gradients; the next step uses them scaled down to `max_norm`."""
        if _has_step_hooks(self.optimizer) or not self._allowed():  # a hook may read clipped gradients
            return clip_norm_(parameters, max_norm)
        norm = nn.utils.get_total_norm([p.grad for p in parameters if p.grad is not None])
        self.optimizer.grad_scale = ((norm.float() + 1e-6) / max_norm).clamp_(min=1.0)
        return norm

    def step(self, optimizer: Any) -> bool:
        """Step with the scale that `clip` left, then without it again; returns what the step returned."""
        try:
            return self._step(optimizer)
        finally:
            self.after_step()

    def after_step(self) -> None:
        """Take the scale away, so that a step without clipping is one."""
        self.optimizer.grad_scale = None


def cannot_fold(optimizer: Any, parameters: Iterable[nn.Parameter]) -> str | None:
    """Why clipping these parameters cannot be part of this optimizer's step; None when it can.

    What the optimizer cannot know is the caller's to ask: a loss scaler, and callbacks that read gradients between
    clipping and step.
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
    """Whether a hook of the user's runs between clipping and step; ours reads learning rates only."""
    from torch.optim import optimizer as home

    hooks = [*optimizer._optimizer_step_pre_hooks.values(), *home._global_optimizer_pre_hooks.values()]
    return any(not (getattr(hook, "__module__", None) or "").startswith("loopwright.") for hook in hooks)
