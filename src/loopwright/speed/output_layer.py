"""The output layer of a model: replaced during updates only, with the fused loss or with a padded number of classes."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ..errors import ModelError
from .fused_loss.cross_entropy import ALIGNED, matmul_dtype

PADDED = "padded output layer"
ALIGNED_CLASSES = 8
"""Number of classes of which a half-precision matrix needs a multiple for the fast kernels: 16 bytes."""


# ---- finding it -----------------------------------------------------------------------------------------------------


def named_head(model: nn.Module) -> Any:
    """The layer that computes logits from hidden states, if the model names it."""
    find = getattr(model, "get_output_embeddings", None)
    return find() if callable(find) else None


def output_head(model: nn.Module) -> nn.Linear | None:
    """The output layer if it is a plain `nn.Linear`, else None."""
    head = named_head(model)
    return head if type(head) is nn.Linear else None


def why_not(head: Any) -> str | None:
    """Why the forward of an output layer cannot be replaced, or None if it can."""
    if type(head) is not nn.Linear:
        return f"it is a {type(head).__name__}, not a plain nn.Linear"
    if "forward" in head.__dict__:
        return "its forward was replaced"
    if has_hooks(head):
        return "it has hooks"
    if type(head.weight) is not nn.Parameter or not head.weight.is_floating_point():
        return f"its weight is a {type(head.weight).__name__} of {head.weight.dtype}"
    return None


_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


def has_hooks(head: nn.Module) -> bool:
    return any(getattr(head, name) for name in _HOOKS)


def is_looked_through() -> bool:
    """Whether a compiler, tracer or transform is active, which needs the layer as written."""
    if torch.compiler.is_compiling() or torch.jit.is_tracing():
        return True
    active = getattr(torch._C, "_are_functorch_transforms_active", None)
    return bool(active and active())


# ---- replacing it ---------------------------------------------------------------------------------------------------


class ReplacedHead:
    """Replaces the forward of an output layer, from `install` to `remove`."""

    name: str

    def __init__(self, head: nn.Module) -> None:
        self.head = head
        self.count: int | None = None
        """Number of targets that the loss of the next micro-batch counts, if it is known."""
        self.logits_were_used = False
        """Whether the values of logits were computed that a loss does without."""
        self._always = False

    @property
    def is_installed(self) -> bool:
        found: bool = self.head.__dict__.get("forward") == self._forward
        return found

    def install(self, *, always: bool = False) -> None:
        """Replace the forward in training, with `always` whenever gradients are enabled."""
        reason = self.try_install(always=always)
        if reason is not None:
            raise ModelError(f"the output layer cannot be replaced ({self.name}): {reason}")

    def try_install(self, *, always: bool = False) -> str | None:
        """Like `install`, but returns the reason if this layer cannot be used."""
        self._always = always
        if self.is_installed:
            return None
        reason = why_not(self.head)
        if reason is None:
            self.head.forward = self._forward
        return reason

    def remove(self) -> None:
        """Restore the forward."""
        if self.is_installed:
            del self.head.__dict__["forward"]

    def _is_training(self) -> bool:
        return (self.head.training or self._always) and torch.is_grad_enabled()

    def _forward(self, input: Tensor) -> Tensor:
        raise NotImplementedError


class PaddedHead(ReplacedHead):
    """Computes logits with a number of classes for which the device has fast matrix products.

    Logits have the shape of the model's, as a view of a wider tensor. Gradients have the shapes they always have.
    """

    name = PADDED

    def _forward(self, input: Tensor) -> Tensor:
        weight, bias = self.head.weight, self.head.bias
        classes = padded_classes(weight)
        if classes == weight.shape[0] or not self._is_training() or is_looked_through():
            return F.linear(input, weight, bias)
        return padded_linear(input, weight, bias, classes)


def padded_classes(weight: Tensor) -> int:
    """The number of classes with which products of this weight are fast; its own if they are."""
    classes, step = int(weight.shape[0]), ALIGNED.get(weight.device.type, 1)
    if step == 1 or classes % min(ALIGNED_CLASSES, step) == 0:
        return classes
    return classes + -classes % step


def padded_linear(input: Tensor, weight: Tensor, bias: Tensor | None, classes: int) -> Tensor:
    """`F.linear(input, weight, bias)`, computed with this many classes, of which the model's are returned as a view.

    The backward pass copies the gradient of the logits into a tensor with zeros for the added classes, so that all
    three products have rows that are aligned in memory.
    """
    dtype = matmul_dtype(input)
    if dtype == input.dtype != weight.dtype:
        return F.linear(input, weight, bias)  # torch's own error
    extra = classes - weight.shape[0]
    wide = F.pad(weight.to(dtype), (0, 0, 0, extra))
    shift = None if bias is None else F.pad(bias.to(dtype), (0, extra))
    return F.linear(input, wide, shift)[..., : weight.shape[0]]
