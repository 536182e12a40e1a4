"""Gradients of an update, added up as the backward pass computes them: in no more memory than training takes."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn


class GradientSum:
    """The sum of the gradients of micro-batches, beside the parameters' own `.grad`."""

    def __init__(self, parameters: Sequence[nn.Parameter]) -> None:
        self._parameters = parameters
        self.values: list[Tensor | None] = [None] * len(parameters)
        """One for each parameter; None for those that the loss does not depend on."""

    def add(self, loss: Tensor) -> None:
        """Add the gradients of a loss, and free its graph."""
        # Not `backward`: that would call what optimizers and wrappers have registered for training.
        with self._taken_at_once(loss) as taken:
            found = list(torch.autograd.grad(loss, self._parameters, allow_unused=True))
        for place in range(len(found)):  # one by one: all sums at once would be a third copy of the gradients
            if place not in taken:
                self._add(place, found[place])
            found[place] = None

    def scale(self, factor: Any) -> None:
        """Multiply all gradients."""
        for place in range(len(self.values)):
            value = self.values[place]
            self.values[place] = None if value is None else value * factor

    def _add(self, place: int, gradient: Tensor | None) -> None:
        before = self.values[place]
        # A new tensor: gradients may share their memory with each other.
        self.values[place] = before if gradient is None else gradient if before is None else before + gradient

    @contextmanager
    def _taken_at_once(self, loss: Tensor) -> Iterator[set[int]]:
        """Add each gradient when it is computed; yields the places of those for which that was possible.

        Otherwise the sum and the gradients of a whole micro-batch would be in memory at the end of its backward pass.
        """
        taken: set[int] = set()
        passes: list[int] = []
        unhooked = [p for p in self._parameters if p._backward_hooks is None]
        handles = [p.register_hook(self._take(place, taken, passes)) for place, p in enumerate(self._parameters)]
        if loss.grad_fn is not None:
            handles.append(loss.grad_fn.register_prehook(lambda _: passes.append(_current_pass())))
        try:
            yield taken
        finally:
            for handle in handles:
                handle.remove()
            for parameter in unhooked:
                parameter._backward_hooks = None  # not an empty dict: a change of hooks is noticed

    def _take(self, place: int, taken: set[int], passes: list[int]) -> Callable[[Tensor], Tensor | None]:
        def hook(gradient: Tensor) -> Tensor | None:
            # A backward pass inside another one, of a function of the user, needs its result.
            is_own = passes[:1] == [_current_pass()]
            if not is_own or type(gradient) is not Tensor or gradient.layout is not torch.strided:
                return None
            taken.add(place)
            with torch.no_grad():
                self._add(place, gradient)
                return gradient.new_zeros(()).expand(gradient.shape)  # instead of it in the result

        return hook


def _current_pass() -> int:
    """Identifies the backward pass that calls."""
    return int(torch._C._current_graph_task_id())


def share_equal(values: list[Tensor | None], known: Sequence[Tensor | None]) -> None:
    """Keep equal gradients in memory once; most are equal in eval mode and in train mode without dropout."""
    for place, (value, other) in enumerate(zip(values, known, strict=True)):
        if value is not None and other is not None and value.dtype == other.dtype and torch.equal(value, other):
            values[place] = other
