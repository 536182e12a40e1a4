"""Autograd nodes of logits that are not computed: how they pass a gradient on."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ...errors import ModelError
from .cross_entropy import without_autocast
from .recipe import Recipe

NEED_NUMBERS = frozenset({"tanh"})
"""Recorded operations whose gradient depends on the logits."""
SAMPLED = 64
"""Number of the head's weights that are compared to detect changes."""


class Parts:
    """The tensors from which logits are computed, as they were when the head was called."""

    def __init__(self, recipe: Recipe) -> None:
        self._given = [each for each in (recipe.hidden, recipe.weight, recipe.bias) if each is not None]
        self._versions = [each._version for each in self._given]
        # These keep the old tensor when `weight.data` is assigned.
        self.hidden, self.weight = recipe.hidden.detach(), recipe.weight.detach()
        self.bias = None if recipe.bias is None else recipe.bias.detach()
        self._sample = self._sampled().clone()

    def _sampled(self) -> Tensor:
        """Some weights from all over the head: changes through `.data` do not increase the version."""
        flat = self.weight.reshape(-1)
        return flat[:: max(1, flat.numel() // SAMPLED)]

    def are_changed(self) -> bool:
        """Whether a tensor was changed in place since; waits for the device."""
        if [each._version for each in self._given] != self._versions:
            return True
        if self.weight.is_cuda and torch.cuda.is_current_stream_capturing():
            return False
        return not torch.equal(self._sampled().nan_to_num(), self._sample.nan_to_num())

    def logits(self) -> Tensor:
        """The head's product; raises `ModelError` if its inputs have changed."""
        if self.are_changed():
            raise ModelError(
                "these logits were never computed, and the head or its input has changed since the forward pass. "
                "Read outputs.logits before the optimizer step, or train with speed='off'"
            )
        found = Recipe(self.hidden, self.weight, self.bias, self.hidden.dtype).compute()
        # The same memory, but not as a view, so that the result of an autograd function may be changed in place.
        place = (found.storage_offset(), found.shape, found.stride())
        return found.new_empty(0).set_(found.untyped_storage(), *place)


class Root(torch.autograd.Function):
    """The head's own product."""

    @staticmethod
    def forward(
        ctx: Any, kind: type[Tensor], parts: Parts, recipe: Recipe, hidden: Tensor, weight: Tensor, bias: Tensor | None
    ) -> Tensor:
        # Not save_for_backward: hooks on saved tensors would copy or move them for a backward that rarely runs.
        ctx.recipe, ctx.parts = recipe, parts
        ctx.set_materialize_grads(False)
        return _wrapper(kind, recipe)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor | None) -> tuple[Tensor | None, ...]:
        if gradient is None:
            return (None,) * 6
        source = ctx.recipe if torch.is_grad_enabled() else ctx.parts
        hidden, weight = source.hidden, source.weight
        to_logits = gradient.reshape(-1, gradient.shape[-1]).to(hidden.dtype)
        rows, needs = hidden.reshape(-1, hidden.shape[-1]), ctx.needs_input_grad[3:]
        with without_autocast(hidden.device.type):
            return (
                *(None, None, None),
                (to_logits @ weight.to(hidden.dtype)).reshape(hidden.shape) if needs[0] else None,
                (to_logits.t() @ rows).to(weight.dtype) if needs[1] else None,
                to_logits.sum(0).to(source.bias.dtype) if needs[2] else None,
            )


class Derived(torch.autograd.Function):
    """An operation on logits that was recorded instead of run."""

    @staticmethod
    def forward(
        ctx: Any, kind: type[Tensor], recipe: Recipe, before: Recipe, run: Callable[..., Tensor], parent: Tensor,
        *learned: Tensor,
    ) -> Tensor:  # fmt: skip
        ctx.before, ctx.run, ctx.learned = before, run, learned
        ctx.set_materialize_grads(False)
        return _wrapper(kind, recipe)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor | None) -> tuple[Tensor | None, ...]:
        if gradient is None:
            return (None,) * (5 + len(ctx.learned))
        tracked = torch.is_grad_enabled()
        with torch.enable_grad():
            # Views: tensors from which the logits were also computed get that part of their gradient elsewhere.
            learned = [each.view_as(each) if tracked else each.detach().requires_grad_() for each in ctx.learned]
            logits = _logits_before(ctx, tracked)
            of, result = [logits, *learned], ctx.run(logits, learned)
            found = torch.autograd.grad(result, of, gradient, create_graph=tracked, allow_unused=True)
        return (*(None,) * 4, *found)


def _logits_before(ctx: Any, tracked: bool) -> Tensor:
    """Logits at which to differentiate an operation; any values will do if it is linear."""
    before: Recipe = ctx.before
    if not ctx.learned and ctx.run.name not in NEED_NUMBERS:
        return torch.empty(before.shape, dtype=before.dtype, device=before.hidden.device).requires_grad_()
    if tracked:
        return before.compute()
    with torch.no_grad():
        return before.compute().requires_grad_()


class Numbers(torch.autograd.Function):
    """The values of logits; their gradient is passed to the tensor that represents the logits."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, make: Callable[[], Tensor]) -> Tensor:
        return make()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient, None


def _wrapper(kind: type[Tensor], recipe: Recipe) -> Any:
    return Tensor._make_wrapper_subclass(kind, recipe.shape, dtype=recipe.dtype, device=recipe.hidden.device)
