"""Named values of a loss: means over targets, micro-batches, ranks and log intervals, with any denominator."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import loopwright
from loopwright import ModelError
from tests.models import Tokens, made, samples, summed, trainer_of

LENGTHS = (11, 31, 5, 17, 3, 29, 8, 2)


def parts(model: Any, inputs: Any, items: Any = None) -> dict[str, Any]:
    """The loss of a batch, and values with several denominators."""
    outputs = model(**{name: value for name, value in inputs.items() if name != "labels"})
    total, count = summed(outputs["logits"], inputs["labels"])
    found = outputs["logits"].argmax(-1) == inputs["labels"]
    return {"total": total, "count": count, "outputs": outputs, "hits": (found.sum(), count), "scaled": items,
            "square": outputs["logits"].square().mean(-1)[inputs["labels"] != -100].mean()}  # fmt: skip


class Pair(loopwright.Trainer):
    """(loss, {name: value}): means over targets, and a (sum, count) pair."""

    def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False) -> Any:
        p = parts(model, inputs)
        loss = p["total"] / p["count"], {"ce": p["total"] / p["count"], "hits": p["hits"], "square": p["square"]}
        return (loss, p["outputs"]) if return_outputs else loss


class Parts(loopwright.Trainer):
    """{name: value} whose sum is the loss."""

    def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False) -> Any:
        p = parts(model, inputs)
        loss = {"ce": p["total"] / p["count"], "penalty": 0.1 * p["square"]}
        return (loss, p["outputs"]) if return_outputs else loss


class Scaled(loopwright.Trainer):
    """A loss divided by num_items_in_batch, a value divided by it, and a mean."""

    def compute_loss(self, model: Any, inputs: Any, return_outputs=False, num_items_in_batch=None) -> Any:
        p = parts(model, inputs)
        loss = p["total"] / (p["count"] if num_items_in_batch is None else num_items_in_batch)
        loss = {"loss": loss, "ce": loss.detach(), "square": p["square"], "hits": p["hits"]}
        return (loss, p["outputs"]) if return_outputs else loss


class OnlyLoss(loopwright.Trainer):
    """Without return_outputs: its dict is never taken for the model's outputs."""

    def compute_loss(self, model: Any, inputs: Any) -> Any:
        p = parts(model, inputs)
        return p["total"] / p["count"], {"ce": p["total"] / p["count"]}


def logs(trainer: Any) -> list[dict[str, float]]:
    trainer.train()
    return [row for row in trainer.state.log_history if "loss" in row]


def options(size: int, **more: Any) -> dict[str, Any]:
    return {"per_device_train_batch_size": size, "gradient_accumulation_steps": 8 // size, "num_train_epochs": 3,
            "learning_rate": 0.05, **more}  # fmt: skip




@pytest.mark.parametrize("cls", [Pair, Parts, Scaled, OnlyLoss])
def test_values_do_not_depend_on_how_an_update_is_split(tmp_path: Any, cls: type) -> None:
    found = [
        logs(trainer_of(made(Tokens), samples(LENGTHS, ignored=1), tmp_path / str(size), cls=cls, **options(size)))
        for size in (8, 4, 1)
    ]
    names = {Pair: {"ce", "hits", "square"}, Parts: {"ce", "penalty"}, Scaled: {"ce", "hits", "square"}}
    for whole, *split in zip(*found, strict=True):
        assert names.get(cls, {"ce"}) <= whole.keys()
        for each in split:
            for name in names.get(cls, {"ce"}) | {"loss"}:
                assert each[name] == pytest.approx(whole[name], rel=1e-6), name
        if cls is Parts:
            assert whole["loss"] == pytest.approx(whole["ce"] + whole["penalty"], rel=1e-6)
        else:
            assert whole["ce"] == pytest.approx(whole["loss"], rel=1e-6)


def test_values_are_those_by_hand(tmp_path: Any) -> None:
    model, data = made(Tokens), samples(LENGTHS, ignored=1)
    row = logs(trainer_of(model, data, tmp_path, cls=Pair, **options(2, learning_rate=0.0, num_train_epochs=1)))[0]
    hits = counted = 0
    for each in data:
        logits = model.logits(each["input_ids"][None])
        wanted = each["labels"] != -100
        hits += int((logits.argmax(-1)[0] == each["labels"])[wanted].sum())
        counted += int(wanted.sum())
    assert row["hits"] == pytest.approx(hits / counted)


def test_a_log_interval_is_the_mean_of_its_updates(tmp_path: Any) -> None:
    runs = {}
    for steps in (1, 2):
        given = options(4, logging_steps=steps, num_train_epochs=4)
        runs[steps] = logs(trainer_of(made(Tokens), samples(LENGTHS), tmp_path / str(steps), cls=Pair, **given))
    for index, row in enumerate(runs[2]):
        both = runs[1][2 * index : 2 * index + 2]
        for name in ("loss", "ce", "square", "hits"):
            assert row[name] == pytest.approx(sum(each[name] for each in both) / 2, rel=1e-9)


def test_a_value_that_is_sometimes_absent_is_the_mean_of_where_it_is(tmp_path: Any) -> None:
    class Sometimes(loopwright.Trainer):
        calls = 0

        def compute_loss(self, model: Any, inputs: Any) -> Any:
            loss = model(**inputs)["loss"]
            step = self.state.global_step
            return (loss, {"even": float(step)}) if step % 2 == 0 else loss

    given = options(8, logging_steps=4, num_train_epochs=4)
    assert logs(trainer_of(made(Tokens), samples(LENGTHS), tmp_path, cls=Sometimes, **given))[0]["even"] == 1.0


def test_a_run_resumed_inside_an_interval_logs_the_same_values(tmp_path: Any) -> None:
    given = options(4, logging_steps=4, num_train_epochs=8, save_strategy="steps", save_steps=3)
    whole = logs(trainer_of(made(Tokens), samples(LENGTHS), tmp_path / "a", cls=Pair, **given))
    again = trainer_of(made(Tokens), samples(LENGTHS), tmp_path / "a", cls=Pair, **given)
    again.train(resume_from_checkpoint=str(tmp_path / "a" / "checkpoint-3"))
    rows = [row for row in again.state.log_history if "loss" in row]
    assert [{name: row[name] for name in ("ce", "hits", "square")} for row in rows] == [
        {name: row[name] for name in ("ce", "hits", "square")} for row in whole
    ]


@pytest.mark.parametrize("cls", [Pair, Parts, Scaled, OnlyLoss])
def test_evaluation_has_the_loss_and_the_outputs(tmp_path: Any, cls: type) -> None:
    seen: list[Any] = []
    trainer = trainer_of(made(Tokens), samples(LENGTHS), tmp_path, cls=cls, eval_dataset=samples((4, 4)),
                         compute_metrics=lambda each: seen.append(each.predictions.shape) or {})  # fmt: skip
    metrics = trainer.evaluate()
    assert metrics["eval_loss"] > 0 and seen == [(2, 4, 13)]


def test_a_loss_function_may_have_named_values(tmp_path: Any) -> None:
    def loss(outputs: Any, labels: Tensor, num_items_in_batch: Any = None) -> Any:
        total, count = summed(outputs["logits"], labels)
        return (total, count), {"again": (total, count)}

    for size in (8, 2):
        trainer = trainer_of(made(Tokens), samples(LENGTHS), tmp_path, compute_loss_func=loss, **options(size))
        assert all(row["again"] == pytest.approx(row["loss"], rel=1e-9) for row in logs(trainer))


@pytest.mark.parametrize(
    ("result", "words"),
    [
        ({}, "an empty dict"),
        ((1, {"learning_rate": 1.0}), "'learning_rate', which cannot be logged"),
        ((1, {3: 1.0}), "a value named 3"),
        ((1, {"eval_kl": 1.0}), "'eval_kl', which cannot be logged beside the loss"),
        ((1, {"logits": torch.zeros(2, 3)}), r"'logits' that is a Tensor of shape \(2, 3\)"),
        ((1, {"text": "many"}), "'text' that is a str: many"),
        ({"ce": (1.0, 2), "penalty": 0.5}, r"'ce' is \(sum, count\).*return it as 'loss' as well"),
    ],
    ids=["empty", "taken", "number", "evaluation", "tensor", "text", "pair"],
)
def test_what_cannot_be_logged_is_named(tmp_path: Any, result: Any, words: str) -> None:
    class Odd(loopwright.Trainer):
        def compute_loss(self, model: Any, inputs: Any) -> Any:
            loss = model(**inputs)["loss"]
            return (loss, result[1]) if isinstance(result, tuple) else result

    with pytest.raises(ModelError, match=words):
        trainer_of(made(Tokens), samples(LENGTHS), tmp_path, cls=Odd, max_steps=1).train()
