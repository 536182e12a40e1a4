"""Training by hand: what a person would write down for each update, in double precision, with nothing of the library.

loop = Loop(model, rows, collate, loss, size=4, accumulation=2)
loop.run(5)
loop.gradients[2]["head.weight"]
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

Batch = dict[str, Any]
Collate = Callable[[list[Any]], Batch]
Gradients = dict[str, Tensor]
UpdateLoss = Callable[["Loop", list[Batch]], Tensor]
"""The loss of a whole update by its definition, given its micro-batches as the collator made them."""
BatchLoss = Callable[[Any, Any, Batch], Any]
"""A user's loss of one micro-batch: who asks (a trainer, or this loop), the model, the inputs."""
Act = Callable[[Any, int], None]
"""What a user does before an update: who trains (has model, optimizer and args), the number of the update."""


class Loop:
    """Forward, backward, clip, step; keeps the gradient of every update."""

    def __init__(
        self,
        model: nn.Module,
        rows: Sequence[Any],
        collate: Collate,
        loss: UpdateLoss,
        *,
        size: int,
        accumulation: int,
        learning_rate: float = 0.05,
        clip: float = 0.0,
        act: Act | None = None,
        after: Act | None = None,
        optimizer: Callable[[nn.Module], torch.optim.Optimizer] | None = None,
    ) -> None:
        self.model, self.loss = model, loss
        self.args = SimpleNamespace(gradient_accumulation_steps=accumulation)
        trained = [p for p in model.parameters() if p.requires_grad]
        self.optimizer = torch.optim.SGD(trained, lr=learning_rate) if optimizer is None else optimizer(model)
        self.clip, self.act, self.after = clip, act, after
        self.gradients: list[Gradients] = []
        self.losses: list[float] = []
        self._batches = _batches(rows, collate, size)

    def run(self, updates: int) -> Loop:
        for number in range(len(self.gradients), len(self.gradients) + updates):
            self._update(number)
        return self

    def _update(self, number: int) -> None:
        batches = [next(self._batches) for _ in range(self.args.gradient_accumulation_steps)]
        if self.act is not None:
            self.act(self, number)
        self.model.train()
        for parameter in self.model.parameters():
            parameter.grad = None
        loss = self.loss(self, batches)
        loss.backward()
        self.losses.append(float(loss.detach()))
        if self.clip:
            nn.utils.clip_grad_norm_([p for p in self.model.parameters() if p.grad is not None], self.clip)
        self.gradients.append(gradients_of(self.model))
        self.optimizer.step()
        if self.after is not None:
            self.after(self, number)


def _batches(rows: Sequence[Any], collate: Collate, size: int) -> Iterator[Batch]:
    """Micro-batches in the order of the data, epoch after epoch."""
    while True:
        for start in range(0, len(rows), size):
            yield collate(list(rows[start : start + size]))


def gradients_of(model: nn.Module) -> Gradients:
    return {name: p.grad.detach().clone() for name, p in model.named_parameters() if p.grad is not None}


# ---- losses of updates ----------------------------------------------------------------------------------------------


def pooled(parts: Callable[[Any, Any, Batch], tuple[Tensor, Any]]) -> UpdateLoss:
    """A sum over all items of the update, divided by all of them."""

    def loss(loop: Loop, batches: list[Batch]) -> Tensor:
        found = [parts(loop, loop.model, dict(batch)) for batch in batches]
        count = sum(int(each[1]) for each in found)
        return sum((each[0] for each in found[1:]), found[0][0]) / max(count, 1)

    return loss


def as_written(one: BatchLoss) -> UpdateLoss:
    """The mean of the micro-batches' losses, each as the user wrote it."""

    def loss(loop: Loop, batches: list[Batch]) -> Tensor:
        found = [one(loop, loop.model, dict(batch)) for batch in batches]
        return sum(found[1:], found[0]) / len(found)

    return loss


def added_up(one: BatchLoss) -> UpdateLoss:
    """The sum of the micro-batches' losses."""

    def loss(loop: Loop, batches: list[Batch]) -> Tensor:
        found = [one(loop, loop.model, dict(batch)) for batch in batches]
        return sum(found[1:], found[0])

    return loss


def by_samples(one: BatchLoss) -> UpdateLoss:
    """The mean over the samples of the update of a loss that is a mean over samples."""

    def loss(loop: Loop, batches: list[Batch]) -> Tensor:
        sizes = [len(batch["input_ids"]) for batch in batches]
        found = [one(loop, loop.model, dict(batch)) * size for batch, size in zip(batches, sizes, strict=True)]
        return sum(found[1:], found[0]) / sum(sizes)

    return loss


# ---- comparing ------------------------------------------------------------------------------------------------------

EXACT = 1e-10


def distances(expected: Gradients, found: Gradients) -> dict[str, float]:
    """Relative L2 distance of each parameter's gradient; one that is nearly zero is measured by all of them."""
    whole = sum(float(value.square().sum()) for value in expected.values()) ** 0.5
    result = {}
    for name in sorted({*expected, *found}):
        there = expected[name] if name in expected else torch.zeros_like(found[name])
        here = found[name] if name in found else torch.zeros_like(there)
        size = max(float(there.norm()), 1e-4 * whole, 1e-12)
        result[name] = float((there - here).norm()) / size
    return result


def difference(expected: Sequence[Gradients], found: Sequence[Gradients], tolerance: float = EXACT) -> str | None:
    """What is the first thing that differs between two runs, in words."""
    if len(expected) != len(found):
        return f"{len(found)} updates, not {len(expected)}"
    for number, (there, here) in enumerate(zip(expected, found, strict=True)):
        apart = distances(there, here)
        worst = max(apart, key=lambda name: apart[name] if apart[name] == apart[name] else float("inf"), default=None)
        if worst is None:
            return f"update {number} has no gradients"
        if not apart[worst] <= tolerance:
            return f"update {number}: {worst} is off by {apart[worst]:.1e}"
    return None
