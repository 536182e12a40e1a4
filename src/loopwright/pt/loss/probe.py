"""Computing a loss to infer its properties: with gradients, without dropout, and without side effects."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from ...speed.proof.dropout import without_dropout
from ..data.static_shapes import IGNORED
from ..restoring.sandbox import Sandbox, sandbox
from .targets import LossKind, check_loss, count_targets, find_targets

ComputeLoss = Callable[[dict[str, Any], Any], Any]
"""The trainer's complete loss computation: from inputs and num_items_in_batch to a loss."""

ARGUMENTS, UPDATE = "arguments", "update"
"""Where a loss that divides by the accumulation may read it."""
ANOTHER_SEED = 20_231
MOST_ENTRIES = 1 << 20
"""Number of gradient entries compared: a strided sample of every parameter."""
TOLERANCE = {torch.float64: 1e-9, torch.float32: 1e-5}
"""Largest relative difference between two computations of a loss; half precision rounds at each step."""
IN_HALF = 2e-2
GRADIENT_TOLERANCE = 200
"""Factor on the tolerance for gradients, which are sums of many rounded numbers."""
OF_ONE, SMALL = 10, 1e-3
"""Further factor for the gradient of one parameter, and the smallest relative size it is compared with."""


@dataclass
class Measured:
    """A loss, its count if it is a (sum, count) pair, and a sample of the gradient of every parameter."""

    value: float
    count: float | None = None
    gradient: Tensor | None = None

    @property
    def is_defined(self) -> bool:
        return abs(self.value) < float("inf")


class LossProbe:
    """Computes a loss repeatedly; model, trainer and random states are unchanged."""

    def __init__(
        self,
        compute: ComputeLoss,
        model: nn.Module,
        *,
        trainer: Any = None,
        with_gradients: bool = True,
    ) -> None:
        self._compute, self._model, self._trainer = compute, model, trainer
        self._with_gradients = with_gradients
        self.may_leave_half = False
        """Whether autocast is disabled, until an operation turns out to need it."""
        self._in_half = False
        self.measured: Callable[[], AbstractContextManager[None]] = nullcontext
        """The context in which losses are computed, which measures the time."""
        self._box: Sandbox | None = None
        self._sizes: list[int] = []
        self.tolerance = TOLERANCE[torch.float32]
        self.is_exact = True
        """Whether losses are computed precisely enough to detect small differences."""

    # ---- computing ---------------------------------------------------------------------------------------------------

    @contextmanager
    def trying(self, *, training: bool | None = None) -> Iterator[None]:
        """A context for several losses, which all start from one recorded state; `training` overrides the mode."""
        if self._box is not None and training is None:
            yield
            return
        outer = self._box
        with self.measured(), sandbox(self._model, self._trainer) as box:
            self._box = box
            self._mode = training
            try:
                yield
            finally:
                self._box, self._mode = outer, None

    _mode: bool | None = None

    @contextmanager
    def in_less_memory(self, *, in_half: bool, keeps_graph: bool) -> Iterator[None]:
        """A context in which losses take less memory: in the precision of training, without what gradients need."""
        before = self.may_leave_half, self._in_half, self.tolerance, self.is_exact, self._with_gradients
        if in_half:
            self.may_leave_half, self._in_half = False, before[0] or before[1]
        self._with_gradients = self._with_gradients and keeps_graph
        try:
            yield
        finally:
            self.may_leave_half, self._in_half, self.tolerance, self.is_exact, self._with_gradients = before

    def loss(self, inputs: dict[str, Any], items: Any, *, seed: int | None = None) -> Any:
        """The loss of a batch, from the same state each time; another seed shows whether it uses random numbers."""
        with self.trying():
            assert self._box is not None
            self._prepare(seed)
            with torch.enable_grad() if self._with_gradients else torch.no_grad(), without_dropout(channels=True):
                try:
                    return self._computed(inputs, items)
                finally:
                    self._box.restore()

    def _computed(self, inputs: dict[str, Any], items: Any) -> Any:
        try:
            return self._compute(dict(inputs), items)
        except RuntimeError:  # a kernel may support only half precision
            if not self.may_leave_half:
                raise
        self.may_leave_half, self._in_half = False, True
        assert self._box is not None
        self._box.restore()
        return self._compute(dict(inputs), items)

    def measure(
        self, inputs: dict[str, Any], items: Any, *, seed: int | None = None, with_gradient: bool = True
    ) -> Measured:
        """The loss as a number, with a sample of its gradient if it has one."""
        with self.trying():
            assert self._box is not None
            self._prepare(seed)
            try:
                with torch.enable_grad() if self._with_gradients else torch.no_grad(), without_dropout(channels=True):
                    loss = self._computed(inputs, items)
                count = None
                if isinstance(loss, (tuple, list)):
                    count, loss = float(loss[1]), loss[0]
                loss = check_loss(loss)
                self._set_tolerance(loss)
                value = loss.detach().double().item()
                wanted = with_gradient and abs(value) < float("inf")
                return Measured(value, count, self._gradient(loss) if wanted else None)
            finally:
                self._box.restore()

    def _prepare(self, seed: int | None) -> None:
        if self._mode is not None:
            self._model.train(self._mode)
        if seed is not None:
            torch.manual_seed(seed)
            random.seed(seed)
            np.random.seed(seed)

    def _set_tolerance(self, loss: Tensor) -> None:
        kinds = {loss.dtype, *(p.dtype for p in self._model.parameters() if p.is_floating_point())}
        self.is_exact = kinds <= TOLERANCE.keys() and not self._in_half
        self.tolerance = max(TOLERANCE[kind] for kind in kinds) if self.is_exact else IN_HALF

    def _gradient(self, loss: Tensor) -> Tensor | None:
        """A sample of the gradient; None if there is none, or it cannot be computed this way."""
        if not self._with_gradients or not loss.requires_grad:
            return None
        chosen = [p for p in self._model.parameters() if p.requires_grad]
        try:
            found = torch.autograd.grad(loss, chosen, allow_unused=True)
        except RuntimeError:  # reentrant checkpoints require .backward()
            self._with_gradients = False
            return None
        each = max(1, MOST_ENTRIES // max(len(chosen), 1))
        parts = [_some_of(p if g is None else g, each) * (g is not None) for p, g in zip(chosen, found, strict=True)]
        self._sizes = [len(part) for part in parts]
        return torch.cat([part.to(parts[0].device) for part in parts]).to("cpu", torch.float64) if parts else None

    # ---- inferring ---------------------------------------------------------------------------------------------------

    def kind(self, inputs: dict[str, Any], items: int) -> LossKind | None:
        """How the loss uses num_items_in_batch, computed with k and with 2k; None if this batch is not informative."""
        once = self.measure(inputs, items, with_gradient=False)
        if once.count is not None:
            return LossKind.SUM
        twice = self.measure(inputs, 2 * items, with_gradient=False)
        if not abs(once.value) > 0 or not once.is_defined or not twice.is_defined:
            return None
        if self.close(once.value, twice.value):
            return LossKind.MEAN
        return LossKind.SCALED if self.close(once.value, 2 * twice.value) else LossKind.MIXED

    def divided_by(
        self, inputs: dict[str, Any], items: Any, said: Callable[..., AbstractContextManager[Any]]
    ) -> str | None:
        """Where the loss reads the accumulation that it divides by; None if it does not divide."""
        with self.trying():
            with said():
                once = self.measure(inputs, items, with_gradient=False)
            for what in (ARGUMENTS, UPDATE) if once.value and once.is_defined else ():
                with said(**{what: 2}):
                    twice = self.measure(inputs, items, with_gradient=False)
                if self.close(once.value, 2 * twice.value):
                    return what
        return None

    def shifted(self, inputs: dict[str, Any], label_names: list[str]) -> bool | None:
        """Whether the loss ignores the first target of each row, computed with other targets there.

        None if this batch is not informative.
        """
        targets = find_targets(inputs, label_names)
        if targets is None or "shift_labels" in inputs or targets.dim() < 2 or targets.shape[-1] < 2:
            return False
        if targets.is_floating_point() or targets.dtype is torch.bool:
            return False
        first = torch.zeros_like(targets, dtype=torch.bool)
        first[..., 0] = True
        others = _other_classes(targets)
        if others is None or bool((targets[first] == IGNORED).all()):
            return None
        name = next(name for name, value in inputs.items() if value is targets)
        # The same count, that of the batch, each time, for losses that require one.
        items = count_targets(inputs, label_names, shifted=False)

        def value(labels: Tensor) -> float:
            return _number(self.loss({**inputs, name: labels}, items))

        with self.trying():
            plain = value(targets)
            if plain == 0 or plain != plain:
                return None
            without = value(torch.where(first, others, targets))
            if without != without:
                return None
            # A loss that ignores every target, not just the first ones, is not shifted.
            return plain == without and plain != value(torch.where(first, targets, others))

    def close(self, a: float, b: float, scale: float = 0.0) -> bool:
        """Whether two numbers are equal up to rounding; `scale` is the magnitude of their terms."""
        return abs(a - b) <= self.tolerance * max(abs(a), abs(b), scale)

    def alike(self, a: Tensor | None, b: Tensor | None, *of: Tensor | None) -> bool:
        """Whether two gradients are equal up to rounding, in total and per parameter; `of` are their terms."""
        if a is None or b is None:
            return True
        size = max(float(each.norm()) for each in (a, b, *of) if each is not None)
        allowed = min(GRADIENT_TOLERANCE * self.tolerance, 0.2)
        if not float((a - b).norm()) <= allowed * size:
            return False
        if not self.is_exact:
            return True
        sizes = torch.stack([self._norms(each) for each in (a, b, *of) if each is not None]).amax(0)
        return bool((self._norms(a - b) <= OF_ONE * allowed * sizes.clamp(min=SMALL * size)).all())

    def _norms(self, gradient: Tensor) -> Tensor:
        """The norm of each parameter's part of a gradient."""
        return torch.stack([part.norm() for part in gradient.split(self._sizes)])


def _some_of(values: Tensor, count: int) -> Tensor:
    """About `count` entries of a tensor, evenly spaced."""
    flat = (values.to_dense() if values.is_sparse else values).detach().reshape(-1)
    return flat[:: max(1, -(-flat.numel() // count))]


def _number(loss: Any) -> float:
    """A loss, or the sum of a (sum, count) pair, as a Python float."""
    return check_loss(loss[0] if isinstance(loss, (tuple, list)) else loss).detach().double().item()


def _other_classes(targets: Tensor) -> Tensor | None:
    """Another class for every counted target; None if no target is counted.

    Not every loss accepts class indices out of range or ignored targets: the classes are those of the batch or, if it
    has only one, 0 and 1, which exist in every loss that is not 0.
    """
    counted = targets[targets != IGNORED]
    if counted.numel() == 0:
        return None
    low, high = counted.min(), counted.max()
    if bool(low == high):
        low = (high == 0).to(high.dtype)
    return torch.where(targets == IGNORED, targets, torch.where(targets == high, low, high))
