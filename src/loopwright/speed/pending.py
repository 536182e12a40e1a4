"""Logits that are computed only if somebody asks for them: a loss takes the head's input and weight instead."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils._pytree import tree_leaves, tree_map_only

from ..errors import ModelError
from .linear_loss import matmul_dtype
from .recipe import RECORDERS, Recipe, loss_of


@dataclass
class _Family:
    """The logits of one call of the head, and everything derived from them."""

    members: list[weakref.ref[Any]] = field(default_factory=list)
    is_real: bool = False  # once real logits exist, everything goes on with them

    def settle(self) -> None:
        """Make all of it real before one is changed in place, so that each sees what it would have seen."""
        for reference in self.members:
            member = reference()
            if member is not None:
                member.real()


class PendingLogits(Tensor):
    """Stands for logits: shape, dtype and device are theirs, the numbers are computed when something needs them.

    What models do between head and loss (casts, reshapes, cuts of the leading dimensions, scaling, softcapping) is
    recorded, and `F.cross_entropy` of the result becomes a linear cross-entropy. Anything else gets the real logits,
    made by the very operations recorded, with autograd intact.
    """

    recipe: Recipe
    _make: Callable[[], Tensor]
    _real: Tensor | None
    _family: _Family

    @staticmethod
    def __new__(cls, recipe: Recipe, make: Callable[[], Tensor], family: _Family | None = None) -> PendingLogits:
        # The node of autograd keeps gradients flowing even to whoever goes past __torch_function__.
        logits = _Standing.apply(recipe.hidden, recipe.weight, recipe.bias, recipe)
        logits.recipe, logits._make, logits._real = recipe, make, None
        logits._family = _Family() if family is None else family
        logits._family.members.append(weakref.ref(logits))
        return logits

    @property
    def is_real(self) -> bool:
        """Whether somebody asked for the numbers."""
        return self._family.is_real

    def real(self) -> Tensor:
        """The logits themselves, computed once."""
        if self._real is None:
            self._family.is_real = True
            # Asked for under no_grad, they may still be differentiated by the next who asks.
            with torch.inference_mode(False), torch.enable_grad():
                self._real = self._make()
        return self._real

    def record(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor | None:
        """The result of an operation that was written down and not run; None where it has to run."""
        if func is F.cross_entropy:
            return loss_of(self.recipe, args, kwargs)
        recorder = RECORDERS.get(func)
        recipe = recorder(self.recipe, func, args, kwargs) if recorder is not None else None
        if recipe is None:
            return None
        # After a recorded cut the real logits may have no view where these have one.
        run = Tensor.reshape if func is Tensor.view else func
        return PendingLogits(recipe, lambda: run(self.real(), *args, **kwargs), self._family)

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in _ABOUT_THE_WRAPPER:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **kwargs)
        # Without gradients nothing is recorded: inside a user's autograd.Function the way back is not ours to know.
        if args and isinstance(args[0], PendingLogits) and not args[0].is_real and torch.is_grad_enabled():
            result = args[0].record(func, args[1:], kwargs)
            if result is not None:
                return result
        if _changes_in_place(func, kwargs):
            for each in tree_leaves((args, kwargs)):
                if isinstance(each, PendingLogits):
                    each._family.settle()
        args, kwargs = tree_map_only(PendingLogits, PendingLogits.real, (args, kwargs))
        return func(*args, **kwargs)

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Below autograd the numbers are all that matters: the gradient's way is the node made at creation."""
        args, kwargs = tree_map_only(PendingLogits, lambda each: each.real().detach(), (args, kwargs or {}))
        return func(*args, **kwargs)


class _Standing(torch.autograd.Function):
    """Makes the wrapper; its backward runs only if a gradient arrives at the wrapper itself."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, bias: Tensor | None, recipe: Recipe) -> Tensor:
        # Not save_for_backward: hooks on saved tensors would copy or move them for a backward that hardly ever runs.
        ctx.recipe = recipe
        return Tensor._make_wrapper_subclass(  # type: ignore[attr-defined]
            PendingLogits, recipe.shape, dtype=recipe.dtype, device=hidden.device
        )

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        given = (ctx.recipe.hidden, ctx.recipe.weight, ctx.recipe.bias)
        parts = [None if each is None else each.detach().requires_grad_() for each in given]
        needs = ctx.needs_input_grad[:3]
        with torch.enable_grad():
            logits = replace(ctx.recipe, hidden=parts[0], weight=parts[1], bias=parts[2]).compute()
        needed = [part for part, is_needed in zip(parts, needs, strict=True) if is_needed]
        found = iter(torch.autograd.grad(logits, needed, gradient))
        return (*(next(found) if is_needed else None for is_needed in needs), None)


def _changes_in_place(func: Any, kwargs: dict[str, Any]) -> bool:
    name = getattr(func, "__name__", "")
    if not name.startswith("__"):
        return name.endswith("_") or kwargs.get("out") is not None
    return name == "__setitem__" or (name.startswith("__i") and name not in ("__invert__", "__index__", "__int__"))


_PROPERTIES = ("shape", "dtype", "device", "ndim", "layout", "requires_grad", "is_leaf", "grad_fn", "itemsize")
_KINDS = ("is_cpu", "is_cuda", "is_xpu", "is_mps", "is_xla", "is_meta", "is_sparse", "is_nested", "is_quantized")
# Questions the wrapper itself can answer.
_ABOUT_THE_WRAPPER = {
    *(getattr(Tensor, name).__get__ for name in (*_PROPERTIES, *_KINDS) if hasattr(Tensor, name)),
    *(Tensor.size, Tensor.dim, Tensor.ndimension, Tensor.numel, Tensor.nelement, torch.numel, Tensor.__len__),
    *(Tensor.is_floating_point, torch.is_floating_point, Tensor.is_complex, torch.is_complex, Tensor.get_device),
    *(Tensor.element_size, Tensor.is_contiguous, Tensor.__hash__),
}


# ---- the head --------------------------------------------------------------------------------------------------------


class PendingHead:
    """Makes a head return `PendingLogits` while it trains.

    `count` is set before each micro-batch: the number of targets its loss counts, as the host knows it, or None.
    Nobody can check it on a GPU without waiting for the device: more than there are is only slower, fewer makes the
    loss NaN (on a CPU it is an error).
    """

    def __init__(self, head: nn.Module) -> None:
        self.head = head
        self.count: int | None = None
        self._always = False

    @property
    def is_installed(self) -> bool:
        return self.head.__dict__.get("forward") == self._forward

    def install(self, *, always: bool = False) -> None:
        """From here on the head's forward returns pending logits in training, or `always` when there are gradients."""
        self._always = always
        if self.is_installed:
            return
        reason = why_not(self.head)
        if reason is not None:
            raise ModelError(f"the head cannot be computed together with the loss: {reason}")
        self.head.forward = self._forward  # type: ignore[method-assign]

    def remove(self) -> None:
        """Leave the head as it was found."""
        if self.is_installed:
            del self.head.__dict__["forward"]

    def _forward(self, input: Tensor) -> Tensor:
        weight, bias = self.head.weight, self.head.bias
        if (
            not ((self.head.training or self._always) and torch.is_grad_enabled())
            or input.dim() < 2
            or _is_looked_through()
        ):
            return F.linear(input, weight, bias)
        return defer_linear(input, weight, bias, count=self.count)


def why_not(head: Any) -> str | None:
    """Why a head cannot be made pending, or None if it can."""
    if type(head) is not nn.Linear:
        return f"it is a {type(head).__name__}, not a plain nn.Linear"
    if "forward" in head.__dict__:
        return "its forward has been replaced"
    if any(getattr(head, name) for name in _HOOKS):
        return "it has hooks"
    if type(head.weight) is not nn.Parameter or not head.weight.is_floating_point():
        return f"its weight is a {type(head.weight).__name__} of {head.weight.dtype}"
    return None


_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


def defer_linear(hidden: Tensor, weight: Tensor, bias: Tensor | None, count: int | None = None) -> PendingLogits:
    """`F.linear(hidden, weight, bias)`, pending; autocast counts as it stands now."""
    dtype = matmul_dtype(hidden)
    recipe = Recipe(hidden.to(dtype), weight, bias, dtype, count=count)
    parts = [part for part in (recipe.hidden, weight, bias) if part is not None]
    versions = [part._version for part in parts]

    def make() -> Tensor:
        if [part._version for part in parts] != versions:
            raise ModelError(
                "these logits were never computed, and the head or its input has been changed since the forward, "
                "perhaps by the optimizer: read outputs.logits before the optimizer's step, or train with speed='off'"
            )
        return recipe.compute()

    return PendingLogits(recipe, make)


def _is_looked_through() -> bool:
    """Whether a compiler, tracer or transform looks on, to whom logits must be plain tensors."""
    if torch.compiler.is_compiling() or torch.jit.is_tracing():
        return True
    active = getattr(torch._C, "_are_functorch_transforms_active", None)
    return bool(active and active())
