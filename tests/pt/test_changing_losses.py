"""A loss that becomes another one by itself is noticed, reported, and weighted right from then on."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

import loopwright
from tests.models import Tokens, Watch, assert_close, gradients_from, made, pad, samples, summed, trainer_of

pytestmark = pytest.mark.usefixtures("doubles_stay")


def over_tokens(model: Any, batch: dict[str, Tensor]) -> Tensor:
    total, count = summed(model(**batch)["logits"], batch["labels"])
    return total / count


def over_sequences(model: Any, batch: dict[str, Tensor]) -> Tensor:
    labels = batch["labels"]
    losses = F.cross_entropy(model(**batch)["logits"].transpose(1, 2), labels, ignore_index=-100, reduction="none")
    return (losses.sum(1) / (labels != -100).sum(1)).mean()


class Turns(loopwright.Trainer):
    """Two tasks in turn."""

    def task(self) -> Any:
        return (over_tokens, over_sequences)[self.state.global_step % 2]

    def compute_loss(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        return self.task()(model, inputs)


class Switches(Turns):
    """Another task from the third update on."""

    def task(self) -> Any:
        return over_sequences if self.state.global_step > 1 else over_tokens


def trained(cls: type[Turns], data: list[Any], folder: Any, resume: Any = None, **options: Any) -> tuple[Any, Any]:
    watch = Watch()
    trainer = trainer_of(
        made(Tokens), data, folder, cls=cls, callbacks=[watch], per_device_train_batch_size=2,
        gradient_accumulation_steps=2, learning_rate=0.0, **options,
    )  # fmt: skip
    trainer.train(resume_from_checkpoint=resume)
    return trainer, watch.gradients


def test_tasks_in_turn_have_a_denominator_each(tmp_path: Any) -> None:
    """The second update shows that the loss changes by itself: it is tested in each update from then on."""
    data = samples((11, 31, 5, 17) * 6)
    trainer, gradients = trained(Turns, data, tmp_path, max_steps=6)
    for number, found in enumerate(gradients):
        task, part = (over_tokens, over_sequences)[number % 2], pad(data[4 * number : 4 * number + 4])
        assert_close(found, gradients_from(made(Tokens), lambda model, task=task, part=part: task(model, part)))
    assert [text for text in trainer._loopwright.notices.told if "when it was last tested" in text]


def test_a_test_that_falls_on_one_micro_batch_is_postponed(tmp_path: Any) -> None:
    """The second, the fourth and the eighth update are the last ones of an epoch, with one micro-batch each."""
    data = samples((11, 31, 5, 17, 9, 4))
    trainer, gradients = trained(Switches, data, tmp_path, num_train_epochs=4)
    expected = gradients_from(made(Tokens), lambda model: over_sequences(model, pad(data[:4])))
    for found in gradients[2::2]:
        assert_close(found, expected)
    assert [text for text in trainer._loopwright.notices.told if "when it was last tested" in text]


def test_a_resumed_run_tests_where_the_run_would_have_tested(tmp_path: Any) -> None:
    data, options = samples((11, 31, 5, 17) * 3), {"save_strategy": "steps", "save_steps": 1, "max_steps": 6}
    _, through = trained(Turns, data, tmp_path, **options)
    trainer, again = trained(Turns, data, tmp_path, str(tmp_path / "checkpoint-3"), **options)
    assert trainer._loopwright.run.accounting.watched_until > 6
    for mine, other in zip(again, through[3:], strict=True):
        assert all(torch.equal(mine[name], other[name]) for name in mine)
