"""One update of a trainer, with its internals for tests."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor, nn
from torch.utils.data import SequentialSampler

from loopwright import Trainer, TrainerCallback, TrainingArguments
from loopwright.speed.planner.decision import SpeedPlan
from loopwright.speed.proof.distance import gradient_distance
from tests.speed.architectures import collate


@dataclass
class Run:
    """What came of a run."""

    trainer: Any
    loss: float
    losses: list[float]
    gradients: dict[str, Tensor]
    """Of the last update."""
    shapes: list[list[tuple[int, ...]]]
    """The input_ids of every micro-batch, by update."""

    @property
    def plan(self) -> SpeedPlan:
        return SpeedPlan() if self.trainer._loopwright.run.speed is None else self.trainer._loopwright.run.speed.plan


class InOrder(Trainer):
    """Samples in the order of the data."""

    def _get_train_sampler(self, *args: Any) -> Any:
        return SequentialSampler(self.train_dataset)


class _Watch(TrainerCallback):
    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.gradients: dict[str, Tensor] = {}

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.gradients = {n: p.grad.clone() for n, p in self.model.named_parameters() if p.grad is not None}


def train(
    model: nn.Module,
    data: Any,
    folder: Path,
    *,
    kind: type[Trainer] = Trainer,
    data_collator: Callable[[Any], Any] = collate,
    resume: Any = None,
    given: dict[str, Any] | None = None,
    **arguments: Any,
) -> Run:
    """Train and keep what can be compared."""
    watch = _Watch(model)
    options: dict[str, Any] = {
        "per_device_train_batch_size": 6, "gradient_accumulation_steps": 2, "max_steps": 1, "optim": "sgd",
        "max_grad_norm": 0.0, "logging_steps": 1, "report_to": "none", "save_strategy": "no", "use_cpu": True,
        "disable_tqdm": True, **arguments,
    }  # fmt: skip
    given = dict(given or {})
    callbacks = [watch, *given.pop("callbacks", [])]
    trainer = kind(
        model, TrainingArguments(str(folder), **options), train_dataset=data, data_collator=data_collator,
        callbacks=callbacks, **given,
    )  # fmt: skip
    shapes: list[list[tuple[int, ...]]] = []
    make_update = trainer._loopwright.loss.make_update

    def seen(batches: list[Any]) -> Any:
        update = make_update(batches)
        shapes.append([tuple(batch["input_ids"].shape) for batch in update.batches])
        return update

    trainer._loopwright.loss.make_update = seen  # type: ignore[method-assign]
    result = trainer.train(resume_from_checkpoint=resume)
    losses = [row["loss"] for row in trainer.state.log_history if "loss" in row]
    return Run(trainer, result.training_loss, losses, watch.gradients, shapes)


def gradients_of(model: nn.Module, data: Any, folder: Path, **arguments: Any) -> Run:
    """One update that leaves the weights where they are."""
    return train(model, data, folder, learning_rate=0.0, **arguments)


def off_and_max(make: Any, data: Any, folder: Path, **arguments: Any) -> Run:
    """The run with all that is proved, whose losses and last gradient are those of a plain run."""
    plain = train(make(), data, folder / "off", speed="off", learning_rate=0.05, max_steps=3, **arguments)
    fast = train(make(), data, folder / "max", speed="max", learning_rate=0.05, max_steps=3, **arguments)
    assert fast.losses == pytest.approx(plain.losses, rel=1e-5)
    assert gradient_distance([*plain.gradients.values()], [*fast.gradients.values()]) < 1e-5
    return fast
