"""Logits that are computed only when they are read: a loss takes the head's input and weight instead."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils._pytree import tree_leaves, tree_map_only

from ...errors import ModelError
from .autograd_nodes import Derived, Numbers, Parts, Root
from .cross_entropy import StandIn, matmul_dtype
from .recipe import RECORDERS, Recipe, loss_of


@dataclass
class Family:
    """The logits of one call of the head, and everything derived from them."""

    members: list[weakref.ref[Any]] = field(default_factory=list)
    is_real: bool = False  # once real logits exist, everything goes on with them
    is_settled: bool = False  # changed in place: the tensors that hold the numbers are all there is
    wants_gradient: bool = False  # the gradient of the logits themselves is needed
    has_loss: bool = False
    saving: Any = field(default_factory=lambda: _way_of_saving())
    note_use: Callable[[], None] = lambda: None

    def alive(self) -> list[Any]:
        """The members that are still referenced, parents first."""
        return [member for member in (reference() for reference in self.members) if member is not None]

    def settle(self) -> None:
        """Make all of it real before one is changed in place, so that each sees what it would have seen."""
        if self.is_settled:
            return
        members = self.alive()
        for member in members:
            member.real()
        self.is_settled = True
        for member in members:
            member.become_plain()

    def is_wanted(self, of_everything: bool) -> bool:
        """Whether the loss has to send its gradient through the logits; asked in the backward."""
        # In a backward of a few tensors, logits that are still referenced may be one of them.
        return self.wants_gradient or (not of_everything and bool(self.alive()))

    def may_record(self) -> bool:
        """Whether operations may be written down; what is run twice must do the same twice."""
        return not self.is_real and torch.is_grad_enabled() and self.saving is _way_of_saving()


class PendingLogits(Tensor):
    """A tensor subclass with the shape, dtype and device of the logits, computed only when something reads it.

    What models do between head and loss (casts, reshapes, slices of the leading dimensions, scaling, softcapping) is
    recorded, and `F.cross_entropy` of the result becomes a linear cross-entropy. Anything else gets the real logits,
    made by the very operations recorded. In the graph of autograd this tensor is the logits: whatever is computed from
    them hangs on its node, so that their gradient can be asked for and hooks on them run.
    """

    recipe: Recipe
    _make: Callable[[], Tensor]
    _remake: Callable[[], Tensor] | None
    _real: Tensor | None
    _family: Family

    @staticmethod
    def made(
        node: PendingLogits,
        recipe: Recipe,
        family: Family,
        make: Callable[[], Tensor],
        remake: Callable[[], Tensor] | None,
    ) -> PendingLogits:
        """The wrapper of a node; `make` gives its numbers, `remake` those of what was derived, with torch's graph."""
        node.recipe, node._make, node._remake, node._real, node._family = recipe, make, remake, None, family
        family.members.append(weakref.ref(node))
        return node

    @property
    def is_real(self) -> bool:
        """Whether the values were computed."""
        return self._family.is_real

    def real(self) -> Tensor:
        """The logits themselves, computed once."""
        if self._real is None:
            self._family.is_real = True
            self._family.note_use()
            # Asked for under no_grad, they may still be differentiated by the next who asks.
            with torch.inference_mode(False), torch.enable_grad():
                self._real = Numbers.apply(self, self._make)
        return self._real

    def become_plain(self) -> None:
        """Go on as the tensor torch would have made: a view of its parent's numbers where that would be one."""
        if self._remake is not None:
            with torch.inference_mode(False), torch.enable_grad():
                self._real = self._remake()

    def record(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor | None:
        """The result of an operation that was written down and not run; None where it has to run."""
        family = self._family
        if func is F.cross_entropy:
            # How many targets there are is known of those the model is given; a second loss may have others.
            recipe = replace(self.recipe, count=None) if family.has_loss else self.recipe
            loss = loss_of(recipe, StandIn(self, family.is_wanted), args, kwargs)
            family.has_loss |= loss is not None
            return loss
        recorder = RECORDERS.get(func)
        recipe_after = recorder(self.recipe, func, args, kwargs) if recorder is not None else None
        if recipe_after is None:
            return None
        run = _Recorded(func, args, kwargs)
        learned = [args[place] for place in run.learned]
        node = Derived.apply(PendingLogits, recipe_after, self.recipe, run, self, *learned)
        make, remake = (lambda: run(self.real().detach())), (lambda: run(self.real()))
        return PendingLogits.made(node, recipe_after, family, make, remake)

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        given = [each for each in tree_leaves((args, kwargs)) if isinstance(each, PendingLogits)]
        if _is_for_the_wrapper(func, given):
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **kwargs)
        # Without gradients nothing is recorded: inside a user's autograd.Function the way back is not ours to know.
        if args and isinstance(args[0], PendingLogits) and args[0]._family.may_record():
            result = args[0].record(func, args[1:], kwargs)
            if result is not None:
                return result
        if _changes_in_place(func, kwargs):
            for each in given:
                each._family.settle()
        args, kwargs = tree_map_only(PendingLogits, PendingLogits.real, (args, kwargs))
        return func(*args, **kwargs)

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        """Below autograd the numbers are all that matters: the gradient's way is the node made at creation."""
        args, kwargs = tree_map_only(PendingLogits, lambda each: each.real().detach(), (args, kwargs or {}))
        return func(*args, **kwargs)


def _way_of_saving() -> Any:
    """What packs tensors saved for the backward now: inside a checkpointed part another than outside of it."""
    hooks = torch._C._autograd._top_saved_tensors_default_hooks(True)
    return None if hooks is None else hooks[0]


class _Recorded:
    """An operation with its arguments."""

    def __init__(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        # After a recorded cut the real logits may have no view where these have one.
        self._func = Tensor.reshape if func is Tensor.view else func
        self._args, self._kwargs = args, kwargs
        self.name = getattr(func, "__name__", "")
        self.learned = [place for place, each in enumerate(args) if isinstance(each, Tensor) and each.requires_grad]

    def __call__(self, logits: Tensor, learned: Sequence[Tensor] = ()) -> Tensor:
        """The result, with other tensors in place of those that learn, if given."""
        instead = dict(zip(self.learned, learned, strict=False))
        args = [instead.get(place, each) for place, each in enumerate(self._args)]
        return self._func(logits, *args, **self._kwargs)


def _changes_in_place(func: Any, kwargs: dict[str, Any]) -> bool:
    name = getattr(func, "__name__", "")
    if not name.startswith("__"):
        return name.endswith("_") or kwargs.get("out") is not None
    if name in ("__setitem__", "__set__"):
        return True
    return name.startswith("__i") and name not in ("__invert__", "__index__", "__int__")


def _is_for_the_wrapper(func: Any, given: list[PendingLogits]) -> bool:
    """Whether the wrapper itself answers: until it is changed in place, shape and node of the logits are its own."""
    if func is Tensor.__hash__:
        return True
    if any(each._family.is_settled for each in given):
        return False
    if func in _ABOUT_THE_NODE:
        for each in given:
            each._family.wants_gradient = True
        return True
    if func is Tensor.is_contiguous:
        return given[0]._remake is None  # cuts are not
    return func in _ABOUT_THE_WRAPPER


_PROPERTIES = ("shape", "dtype", "device", "ndim", "layout", "requires_grad", "is_leaf", "itemsize")
_KINDS = ("is_cpu", "is_cuda", "is_xpu", "is_mps", "is_xla", "is_meta", "is_sparse", "is_nested", "is_quantized")
_GRADIENT = ("grad", "retains_grad", "_backward_hooks", "output_nr")
# Questions the wrapper itself can answer.
_ABOUT_THE_WRAPPER = {
    *(getattr(Tensor, name).__get__ for name in (*_PROPERTIES, *_KINDS, *_GRADIENT) if hasattr(Tensor, name)),
    *(Tensor.size, Tensor.dim, Tensor.ndimension, Tensor.numel, Tensor.nelement, torch.numel, Tensor.__len__),
    *(Tensor.is_floating_point, torch.is_floating_point, Tensor.is_complex, torch.is_complex, Tensor.get_device),
    *(Tensor.element_size,),
}
# Who asks for these wants the gradient of the logits: the loss may no longer go past them.
_ABOUT_THE_NODE = {
    *(Tensor.grad_fn.__get__, Tensor.register_hook, Tensor.retain_grad),
    *(torch.autograd.grad, torch.autograd.backward),
}


# ---- the head --------------------------------------------------------------------------------------------------------


class PendingHead:
    """Makes a head return `PendingLogits` while it trains.

    `count` is set before each micro-batch: the number of targets its loss counts, as the host knows it, or None.
    It cannot be checked on a GPU without a synchronization: more than there are is only slower, fewer makes the
    loss NaN. It is used for the first loss of each forward and on GPUs only.
    """

    def __init__(self, head: nn.Module) -> None:
        self.head = head
        self.count: int | None = None
        self._always = False
        self.logits_were_used = False
        """Whether the values were ever computed."""
        self._made: list[weakref.ref[Family]] = []

    @property
    def is_installed(self) -> bool:
        found: bool = self.head.__dict__.get("forward") == self._forward
        return found

    def install(self, *, always: bool = False) -> None:
        """From here on the head's forward returns pending logits in training, or `always` when there are gradients."""
        reason = self.try_install(always=always)
        if reason is not None:
            raise ModelError(f"the head cannot be fused with the loss: {reason}")

    def try_install(self, *, always: bool = False) -> str | None:
        """The same, or the reason why this head is left as it is."""
        self._always = always
        if self.is_installed:
            return None
        reason = why_not(self.head)
        if reason is None:
            self.head.forward = self._forward
        return reason

    def remove(self) -> None:
        """Leave the head as it was found; logits still referenced are computed, before the weights change."""
        if self.is_installed:
            del self.head.__dict__["forward"]
        made, self._made = self._made, []
        for family in (reference() for reference in made):
            for member in [] if family is None else family.alive():
                with suppress(Exception):  # out of memory, perhaps: reading them raises then
                    member.real()

    def _forward(self, input: Tensor) -> Tensor:
        weight, bias = self.head.weight, self.head.bias
        waits = (self.head.training or self._always) and torch.is_grad_enabled() and input.dim() >= 2
        if not waits or _has_hooks(self.head) or _is_looked_through():
            return F.linear(input, weight, bias)
        logits = defer_linear(input, weight, bias, count=self.count)
        logits._family.note_use = self._note_use
        self._made = [made for made in self._made if made() is not None]
        self._made.append(weakref.ref(logits._family))
        return logits

    def _note_use(self) -> None:
        self.logits_were_used = True


def why_not(head: Any) -> str | None:
    """Why a head cannot be made pending, or None if it can."""
    if type(head) is not nn.Linear:
        return f"it is a {type(head).__name__}, not a plain nn.Linear"
    if "forward" in head.__dict__:
        return "its forward was replaced"
    if _has_hooks(head):
        return "it has hooks"
    if type(head.weight) is not nn.Parameter or not head.weight.is_floating_point():
        return f"its weight is a {type(head.weight).__name__} of {head.weight.dtype}"
    return None


_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


def _has_hooks(head: nn.Module) -> bool:
    return any(getattr(head, name) for name in _HOOKS)


def defer_linear(hidden: Tensor, weight: Tensor, bias: Tensor | None, count: int | None = None) -> PendingLogits:
    """`F.linear(hidden, weight, bias)`, pending; autocast counts as it stands now."""
    dtype = matmul_dtype(hidden)
    recipe = Recipe(hidden.to(dtype), weight, bias, dtype, count=count)
    parts = Parts(recipe)
    node = Root.apply(PendingLogits, parts, recipe, recipe.hidden, weight, bias)
    return PendingLogits.made(node, recipe, Family(), parts.logits, None)


def _is_looked_through() -> bool:
    """Whether a compiler, tracer or transform looks on, to whom logits must be plain tensors."""
    if torch.compiler.is_compiling() or torch.jit.is_tracing():
        return True
    active = getattr(torch._C, "_are_functorch_transforms_active", None)
    return bool(active and active())
