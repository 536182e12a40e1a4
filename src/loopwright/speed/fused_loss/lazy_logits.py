"""Logits that are computed only when they are read: the loss uses the head's input and weight instead."""

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

from ..output_layer import ReplacedHead, has_hooks, is_looked_through
from .autograd_nodes import Derived, Numbers, Parts, Root
from .cross_entropy import StandIn, matmul_dtype
from .recipe import RECORDERS, Recipe, loss_of

HEAD = "fused loss"


@dataclass
class Family:
    """The logits of one call of the head, and everything derived from them."""

    members: list[weakref.ref[Any]] = field(default_factory=list)
    is_real: bool = False  # once real logits exist, all operations use them
    is_settled: bool = False  # changed in place: only the tensors with values are valid
    wants_gradient: bool = False  # the gradient of the logits themselves is needed
    has_loss: bool = False
    is_evaluated: bool = False  # computed without gradients, so no backward needs the graph
    saving: Any = field(default_factory=lambda: _way_of_saving())
    note_use: Callable[[], None] = lambda: None

    def alive(self) -> list[Any]:
        """The members that are still referenced, parents first."""
        return [member for member in (reference() for reference in self.members) if member is not None]

    def settle(self) -> None:
        """Compute all members before one is changed in place, so that each has the values it would have had."""
        if self.is_settled:
            return
        members = self.alive()
        for member in members:
            member.real()
        self.is_settled = True
        for member in members:
            member.become_plain()

    def is_wanted(self, of_everything: bool) -> bool:
        """Whether the loss must pass its gradient through the logits; called in the backward."""
        # In a backward for a few tensors, logits that are still referenced may be one of them.
        return self.wants_gradient or (not of_everything and bool(self.alive()))

    def may_record(self) -> bool:
        """Whether operations may be recorded: not across a checkpointed part, whose recomputation must be identical."""
        if self.is_evaluated:
            return not self.is_real and not torch.is_grad_enabled()
        return not self.is_real and torch.is_grad_enabled() and self.saving is _way_of_saving()


class PendingLogits(Tensor):
    """A tensor subclass with the shape, dtype and device of the logits, computed only when something reads it.

    Operations that models apply between head and loss (casts, reshapes, slices of the leading dimensions, scaling,
    softcapping) are recorded, and `F.cross_entropy` of the result becomes a linear cross-entropy. Other operations get
    the real logits, made by exactly the recorded operations. In the autograd graph this tensor is the logits: results
    computed from them are connected to its node, so that their gradient can be requested and hooks on them run.
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
        """Initialize the wrapper of a node; `make` computes its values, `remake` a derived one with torch's graph."""
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
            # Also with gradients if called under no_grad, since a later caller may differentiate them.
            with torch.inference_mode(False), torch.enable_grad():
                self._real = Numbers.apply(self, self._make)
        return self._real

    def become_plain(self) -> None:
        """Replace the values by the tensor torch would have made, which may be a view of its parent's values."""
        if self._remake is not None:
            with torch.inference_mode(False), torch.enable_grad():
                self._real = self._remake()

    def record(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor | None:
        """The result of an operation that is recorded instead of run; None if it has to run."""
        family = self._family
        if func is F.cross_entropy:
            # `count` is for the targets given to the model; a second loss may have others.
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
        # Nothing is recorded without gradients: inside a user's autograd.Function, its backward is unknown.
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
        """Below autograd only the values are needed: the gradient flows through the node made at creation."""
        args, kwargs = tree_map_only(PendingLogits, lambda each: each.real().detach(), (args, kwargs or {}))
        return func(*args, **kwargs)


def _way_of_saving() -> Any:
    """The current hook that packs tensors saved for the backward; it differs inside a checkpointed part."""
    hooks = torch._C._autograd._top_saved_tensors_default_hooks(True)
    return None if hooks is None else hooks[0]


class _Recorded:
    """An operation with its arguments."""

    def __init__(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        # After a recorded slice, the real logits may not support a view where these do.
        self._func = Tensor.reshape if func is Tensor.view else func
        self._args, self._kwargs = args, kwargs
        self.name = getattr(func, "__name__", "")
        self.learned = [place for place, each in enumerate(args) if isinstance(each, Tensor) and each.requires_grad]

    def __call__(self, logits: Tensor, learned: Sequence[Tensor] = ()) -> Tensor:
        """The result, with other tensors in place of those that require a gradient, if given."""
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
    """Whether the wrapper handles a function: it has the shape and node of the logits until they change in place."""
    if func is Tensor.__hash__:
        return True
    if any(each._family.is_settled for each in given):
        return False
    if func in _ABOUT_THE_NODE:
        for each in given:
            each._family.wants_gradient = True
        return True
    if func is Tensor.is_contiguous:
        return given[0]._remake is None  # slices are not contiguous
    return func in _ABOUT_THE_WRAPPER


_PROPERTIES = ("shape", "dtype", "device", "ndim", "layout", "requires_grad", "is_leaf", "itemsize")
_KINDS = ("is_cpu", "is_cuda", "is_xpu", "is_mps", "is_xla", "is_meta", "is_sparse", "is_nested", "is_quantized")
_GRADIENT = ("grad", "retains_grad", "_backward_hooks", "output_nr")
# Properties that the wrapper has itself.
_ABOUT_THE_WRAPPER = {
    *(getattr(Tensor, name).__get__ for name in (*_PROPERTIES, *_KINDS, *_GRADIENT) if hasattr(Tensor, name)),
    *(Tensor.size, Tensor.dim, Tensor.ndimension, Tensor.numel, Tensor.nelement, torch.numel, Tensor.__len__),
    *(Tensor.is_floating_point, torch.is_floating_point, Tensor.is_complex, torch.is_complex, Tensor.get_device),
    *(Tensor.element_size,),
}
# Callers of these need the gradient of the logits: the loss may no longer bypass them.
_ABOUT_THE_NODE = {
    *(Tensor.grad_fn.__get__, Tensor.register_hook, Tensor.retain_grad),
    *(torch.autograd.grad, torch.autograd.backward),
}


# ---- the head --------------------------------------------------------------------------------------------------------


class PendingHead(ReplacedHead):
    """Makes a head return `PendingLogits` in training, or with `evaluates` in evaluation, without gradients.

    `count` is set before each micro-batch: the number of targets its loss counts, computed on the host, or None. It
    cannot be checked on a GPU without a synchronization: a count that is too large only costs time, one that is too
    small makes the loss NaN. It is used for the first loss of each forward and on GPUs only.
    """

    name = HEAD

    def __init__(self, head: nn.Module, *, evaluates: bool = False) -> None:
        super().__init__(head)
        self._evaluates = evaluates
        self._made: list[weakref.ref[Family]] = []

    def remove(self) -> None:
        """Restore the head's forward; logits still referenced are computed now, before the weights change."""
        super().remove()
        made, self._made = self._made, []
        for family in (reference() for reference in made):
            for member in [] if family is None else family.alive():
                with suppress(Exception):  # e.g. out of memory: reading them raises the error later
                    member.real()

    def _forward(self, input: Tensor) -> Tensor:
        weight, bias = self.head.weight, self.head.bias
        waits = not self.head.training and not torch.is_grad_enabled() if self._evaluates else self._is_training()
        if not waits or input.dim() < 2 or has_hooks(self.head) or is_looked_through():
            return F.linear(input, weight, bias)
        logits = defer_linear(input, weight, bias, count=self.count)
        logits._family.note_use, logits._family.is_evaluated = self._note_use, self._evaluates
        self._made = [made for made in self._made if made() is not None]
        self._made.append(weakref.ref(logits._family))
        return logits

    def _note_use(self) -> None:
        self.logits_were_used = True


def defer_linear(hidden: Tensor, weight: Tensor, bias: Tensor | None, count: int | None = None) -> PendingLogits:
    """`F.linear(hidden, weight, bias)` as pending logits, with the current autocast dtype."""
    dtype = matmul_dtype(hidden)
    recipe = Recipe(hidden.to(dtype), weight, bias, dtype, count=count)
    parts = Parts(recipe)
    node = Root.apply(PendingLogits, parts, recipe, recipe.hidden, weight, bias)
    return PendingLogits.made(node, recipe, Family(), parts.logits, None)
