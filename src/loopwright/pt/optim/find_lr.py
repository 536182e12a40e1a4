"""A learning rate range test: a few steps at growing rates, after which everything is as it was."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import islice
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.utils.data import IterableDataset

from ...core.update import whole_batch
from ...errors import ArgumentsError, BusyError, DataError, NotAvailable
from ..data.loaders import announce_epoch
from ..restoring.sandbox import sandbox
from .learning_rates import initial_lr, set_lr

if TYPE_CHECKING:
    from ..internals import TorchInternals

DIVERGED = 4.0
"""Factor above the lowest loss at which the test ends."""
SMOOTHING = 0.8


@dataclass
class LearningRateTest:
    """The rates that were tried, with the smoothed loss at each, and a suggestion."""

    rates: list[float] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)

    @property
    def suggestion(self) -> float | None:
        """The rate at which the loss fell fastest; None if it never fell."""
        slopes = [
            (after - before) / math.log(self.rates[index + 1] / self.rates[index])
            for index, (before, after) in enumerate(zip(self.losses, self.losses[1:], strict=False))
        ]
        if not slopes or min(slopes) >= 0:
            return None
        return self.rates[slopes.index(min(slopes))]


def find_lr(internals: TorchInternals, min_lr: float, max_lr: float, num_steps: int) -> LearningRateTest:
    """Train at rates that grow from one to the other, on the first batches of the data, and undo all of it."""
    _check(internals, min_lr, max_lr, num_steps)
    loader = internals.trainer.get_train_dataloader()
    if isinstance(getattr(loader, "dataset", None), IterableDataset):
        raise DataError("find_lr() would use up samples of a stream; call it with a dataset that has a length")
    with internals.data.ended_with_errors(), _undone(internals) as optimizer:
        internals.loss.bind_overrides()
        announce_epoch(loader, 0)
        return _tested(internals, optimizer, loader, [min_lr * (max_lr / min_lr) ** (step / max(num_steps - 1, 1))
                                                      for step in range(num_steps)])  # fmt: skip


def _check(internals: TorchInternals, min_lr: float, max_lr: float, num_steps: int) -> None:
    if not 0 < min_lr < max_lr or num_steps < 2:
        raise ArgumentsError(
            f"find_lr(min_lr={min_lr}, max_lr={max_lr}, num_steps={num_steps}): min_lr must be above 0 and below "
            "max_lr, and there must be at least 2 steps"
        )
    if not internals.args.learning_rate:
        raise ArgumentsError(
            "find_lr() needs a learning_rate above 0: the rates of groups of parameters are relative to it"
        )
    if internals.is_training:
        raise BusyError("find_lr() was called while this trainer is training; call it before train()")
    if not internals.is_alone or internals.strategy.is_sharded:
        raise NotAvailable("find_lr() runs in a single process; call it in one, on one device")


@contextmanager
def _undone(internals: TorchInternals) -> Iterator[Any]:
    """A context with a new optimizer; model, random states and trainer are restored afterwards."""
    model: nn.Module = internals.model
    kept = {name: tensor.detach().clone() for name, tensor in model.state_dict().items()}
    with sandbox(model, internals.trainer):
        try:
            with internals.optim.another() as optimizer:
                yield optimizer
        finally:
            with torch.no_grad():
                for name, tensor in model.state_dict().items():
                    tensor.copy_(kept[name])


def _tested(internals: TorchInternals, optimizer: Any, loader: Any, rates: list[float]) -> LearningRateTest:
    scales = [initial_lr(group) / internals.args.learning_rate for group in optimizer.param_groups]
    found, batches, smoothed, lowest = LearningRateTest(), iter(loader), 0.0, math.inf
    for step, rate in enumerate(rates, 1):
        chosen = list(islice(batches, internals.args.gradient_accumulation_steps))
        if not chosen:
            batches = iter(loader)
            chosen = list(islice(batches, internals.args.gradient_accumulation_steps))
        for group, scale in zip(optimizer.param_groups, scales, strict=True):
            set_lr(group, rate * scale)
        loss = _step(internals, optimizer, chosen)
        smoothed = SMOOTHING * smoothed + (1 - SMOOTHING) * loss
        value = smoothed / (1 - SMOOTHING**step)
        if not math.isfinite(value) or value > DIVERGED * lowest:
            break
        lowest = min(lowest, value)
        found.rates.append(rate)
        found.losses.append(value)
    return found


def _step(internals: TorchInternals, optimizer: Any, batches: list[Any]) -> float:
    """One step of the optimizer; returns the mean loss of the batches."""
    total = 0.0
    internals.loss.enter_training(internals.trainer.model_wrapped)
    for batch in batches:
        inputs = internals.trainer._prepare_inputs(batch)
        with internals.trainer.compute_loss_context_manager():
            model = internals.trainer.model_wrapped
            loss = internals.loss.called_compute_loss(model, inputs, num_items_in_batch=None)
        count = loss[1] if isinstance(loss, (tuple, list)) else 1
        loss = internals.run.accounting.weigh(loss, whole_batch()) / count / len(batches)
        loss.backward()
        total += float(loss.detach())
    if internals.args.max_grad_norm:
        nn.utils.clip_grad_norm_(internals.model.parameters(), internals.args.max_grad_norm)
    optimizer.step()
    optimizer.zero_grad()
    return total
