"""Batches of few shapes: what is added counts for nothing, in training, in evaluation and in predictions."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, strategies as st
from torch import Tensor, nn
from torch.nn import functional as F

import loopwright
from loopwright.pt.data.static_shapes import IGNORED, SHORTEST, Static, StaticShapes
from tests.models import (
    Tokens,
    assert_close,
    bert_classes,
    bert_tokens,
    llama,
    made,
    pad,
    samples,
    t5,
    trainer_of,
    weights,
)

RAGGED = (11, 3, 29, 8, 17, 5, 20)


class Shapes(loopwright.TrainerCallback):
    """Notes the shapes the model is called with."""

    def __init__(self) -> None:
        self.seen: set[tuple[int, ...]] = set()

    def on_train_begin(self, args: Any, state: Any, control: Any, model: Any, **kwargs: Any) -> None:
        model.register_forward_pre_hook(self.note, with_kwargs=True)

    def note(self, module: Any, args: Any, kwargs: Any) -> None:
        self.seen.add(tuple(kwargs["input_ids"].shape))


CASES = {
    "llama": (llama, False), "bert tokens": (bert_tokens, False), "bert classes": (bert_classes, True),
    "t5": (t5, False), "own": (lambda: made(Tokens), False),
}  # fmt: skip


def run(name: str, folder: Any, **options: Any) -> Any:
    build, classes = CASES[name]
    data = samples(RAGGED, classes=classes)
    base = {"per_device_train_batch_size": 4, "per_device_eval_batch_size": 4, "num_train_epochs": 2}
    return trainer_of(build(), data, folder, eval_dataset=data, **{**base, **options})


@pytest.mark.parametrize("accumulation", [1, 2])
@pytest.mark.parametrize("name", CASES)
def test_results_are_those_of_batches_without_padding(name: str, accumulation: int, tmp_path: Any) -> None:
    plain, static = (
        run(name, tmp_path / str(lengths), static_lengths=lengths, gradient_accumulation_steps=accumulation)
        for lengths in (None, [32])
    )
    for trainer in (plain, static):
        trainer.train()
    assert_close(weights(static.model), weights(plain.model), tolerance=1e-7)
    ours, theirs = static.predict(static.eval_dataset), plain.predict(plain.eval_dataset)
    assert ours.metrics["test_loss"] == pytest.approx(theirs.metrics["test_loss"], abs=1e-6)
    assert np.array_equal(ours.label_ids, theirs.label_ids)
    both = [each.predictions for each in (ours, theirs)]
    firsts = [each[0] if isinstance(each, tuple) else each for each in both]
    assert firsts[0].shape == firsts[1].shape
    assert np.allclose(*firsts, atol=1e-6)
    logs = [[log["loss"] for log in each.state.log_history if "loss" in log] for each in (static, plain)]
    assert logs[0] == pytest.approx(logs[1], abs=1e-6)


def test_one_length_makes_all_batches_alike(tmp_path: Any) -> None:
    """static_lengths: one number is one shape, several are as many as are needed."""
    found = {}
    for lengths in ([32], [8, 16, 32], None):
        shapes = Shapes()
        trainer = run("llama", tmp_path, static_lengths=lengths, callbacks=[shapes], eval_strategy="epoch")
        trainer.train()
        found[str(lengths)] = shapes.seen
    assert found["[32]"] == {(4, 32)}
    assert {rows for rows, _ in found["[8, 16, 32]"]} == {4}
    assert {length for _, length in found["None"]} == {29, 20}
    assert {rows for rows, _ in found["None"]} == {4, 3}


def test_a_batch_longer_than_allowed_is_an_error(tmp_path: Any) -> None:
    with pytest.raises(loopwright.DataError, match="29 tokens long, but static_lengths allows at most 16"):
        run("llama", tmp_path, static_lengths=[16]).train()


def test_layouts_of_many_shapes_do_not_go_with_it(tmp_path: Any) -> None:
    with pytest.raises(loopwright.ArgumentsError, match="per_device_train_batch_tokens makes micro-batches of many"):
        run("llama", tmp_path, static_lengths=[32], per_device_train_batch_tokens=64, speed="auto").train()


class OwnLoss(loopwright.Trainer):
    counts_rows = False

    def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False, **more: Any) -> Any:
        labels = inputs.pop("labels")
        outputs = model(**inputs)
        logits = outputs["logits"].reshape(-1, outputs["logits"].shape[-1])
        rows = F.cross_entropy(logits, labels.reshape(-1), reduction="none")
        loss = rows.mean() if self.counts_rows else rows.sum() / (labels != IGNORED).sum()
        return (loss, outputs) if return_outputs else loss


class CountsRows(OwnLoss):
    counts_rows = True


class CannotIgnore(OwnLoss):
    def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False, **more: Any) -> Any:
        labels = inputs.pop("labels")
        outputs = model(**inputs)
        wanted = F.one_hot(labels, 3).to(outputs["logits"].dtype)
        loss = ((outputs["logits"] - wanted) ** 2).mean()
        return (loss, outputs) if return_outputs else loss


@pytest.mark.parametrize(
    ("cls", "reason"),
    [
        (OwnLoss, None),
        (CountsRows, "includes rows whose labels are -100"),
        (CannotIgnore, "does not accept labels of -100"),
    ],
)
def test_a_loss_that_minds_added_rows_is_found_out_and_stays_right(cls: Any, reason: str | None, tmp_path: Any) -> None:
    data = samples(RAGGED, classes=True)
    made_of = []
    for lengths in (None, [32]):
        trainer = trainer_of(bert_classes(), data, tmp_path, cls=cls, static_lengths=lengths, num_train_epochs=1,
                             per_device_train_batch_size=4)  # fmt: skip
        trainer.train()
        made_of.append(weights(trainer.model))
    assert_close(made_of[1], made_of[0])
    told = [text for text in trainer._loopwright.notices.told if "not padded with rows" in text]
    assert bool(told) is (reason is not None)
    assert reason is None or reason in told[0]


class Regressor(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 1)

    def forward(self, x: Tensor, labels: Tensor) -> dict[str, Tensor]:
        found = self.linear(x).squeeze(-1)
        return {"loss": F.mse_loss(found, labels), "logits": found}


def test_targets_that_are_numbers_keep_their_short_batch(tmp_path: Any) -> None:
    data = [{"x": torch.randn(3), "labels": torch.randn(())} for _ in range(6)]
    options = {"collator": None, "per_device_train_batch_size": 4, "num_train_epochs": 1}
    plain, static = (
        trainer_of(Regressor(), data, tmp_path, static_lengths=lengths, **options) for lengths in (None, [8])
    )
    static.model.load_state_dict(plain.model.state_dict())
    for trainer in (plain, static):
        trainer.train()
    assert_close(weights(static.model), weights(plain.model), tolerance=0.0)
    assert any("'labels' are not class labels" in text for text in static._loopwright.notices.told)


@given(st.lists(st.integers(1, 40), min_size=1, max_size=6), st.integers(0, 4), st.sampled_from([None, [40], [8, 64]]))
def test_padding_can_be_taken_off_again(lengths: list[int], missing: int, allowed: list[int] | None) -> None:
    batch = pad(samples(lengths))
    shapes = StaticShapes(allowed, label_names=["labels"], takes_mask=True, tell=lambda text: None)
    padded = shapes.pad(batch, len(lengths) + missing)
    assert isinstance(padded, Static) and padded.rows == len(lengths)
    length = padded["input_ids"].shape[1]
    assert len(padded["input_ids"]) == len(lengths) + missing
    assert length in (allowed or [SHORTEST, 2 * SHORTEST])
    assert all(torch.equal(padded.real()[name], batch[name]) for name in batch)
    assert int((padded["labels"] != IGNORED).sum()) == int((batch["labels"] != IGNORED).sum())
    logits = torch.randn(len(padded["input_ids"]), length, 5)
    assert torch.equal(padded.trimmed(logits), logits[: len(lengths), : max(lengths)])
