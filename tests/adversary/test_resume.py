"""A resumed run continues as a hand-written loop would, also when something else was changed in between."""

from __future__ import annotations

from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from .between_samples import DYNAMIC, LongestScale, OwnWindow, RowTemperature, rope
from .cases import Case
from .changed import Divergent, Mixing, divergent_truth, hook_at_begin
from .later import llama_over_sequences, sequence_means, to_the_left
from .means import sequence_mean, sequences_of, summed_loss, trainer_with
from .models import Around, collate, llama, logits_of, made, own_loss, ragged, summed, tokens
from .outside import learns_its_end
from .reference import Loop, added_up, as_written, by_samples, difference, pooled
from .running import Split, by_hand, loop_of, observe
from .training_mode import LengthNoise, MixedEmbeddings, WidthGradient
from .zoo import CASES

pytest.importorskip("transformers")
SAVED = {"save_strategy": "steps", "save_steps": 2}
HALF, WHOLE = 2, 4
PLAIN = Case("plain", "R3", llama, pooled(tokens), written=as_written(own_loss))
AROUND = replace(PLAIN, make=lambda: made(Around))


# ---- nothing is changed ---------------------------------------------------------------------------------------------

UNCHANGED = (
    "r-drop of classes", "mixup over the batch", "embeddings mixed over the batch", "noise scaled by length",
    "supervised contrastive", "hard-example mining", "llama4 chunks", "phimoe window", "position by row", "longrope",
    "pairs of rows of unequal length", "loss_function as a mean over sequences", "mean over sequences", "a sum",
    "class weights", "bert for pretraining", "ctc, its mean", "segmentation that ignores 255",
    "micro-batches without labels that teach something", "a gradient penalty on embeddings", "fgm in compute_loss",
)  # fmt: skip
ALWAYS = ("mixup over the batch", "longrope", "loss_function as a mean over sequences", "a sum")


@pytest.mark.parametrize("split", [Split(2, 4), pytest.param(Split(1, 8), marks=pytest.mark.grid)], ids=str)
@pytest.mark.parametrize(
    "name", [name if name in ALWAYS else pytest.param(name, marks=pytest.mark.grid) for name in UNCHANGED]
)
def test_a_resumed_run_goes_on_as_by_hand(name: str, split: Split, tmp_path: Path) -> None:
    case = CASES[name]
    observe(case, tmp_path, speed="max", split=split, updates=WHOLE, **SAVED)
    found = observe(case, tmp_path, speed="max", split=split, updates=WHOLE, resume=checkpoint(tmp_path), **SAVED)
    assert same_as_one_of(case, found.gradients, split) is None


def same_as_one_of(case: Case, gradients: list[Any], split: Split) -> str | None:
    """What differs from the last updates by hand, by definition or as written."""
    wrong = None
    for written, loss in ((False, case.loss), (True, case.written)):
        if loss is not None:
            wrong = difference(by_hand(case, split, written=written).gradients[HALF:], gradients)
            if wrong is None:
                return None
    return wrong


def checkpoint(folder: Path) -> str:
    return str(folder / f"checkpoint-{HALF}")


GROWN = replace(
    PLAIN, make=lambda: rope(DYNAMIC, 8), rows=lambda: ragged(32, lengths=(4, 17, 9, 3, 11, 5, 6, 12) * 2 + (9,) * 16)
)
"""Positions that have grown with a long sample, and stay so for shorter ones."""


@pytest.mark.parametrize("speed", ["max", pytest.param("off", marks=pytest.mark.grid)])
def test_dynamic_rope_resumes_to_the_bit(speed: str, tmp_path: Path) -> None:
    whole = observe(GROWN, tmp_path, speed=speed, split=Split(2, 4), **SAVED)
    rest = observe(GROWN, tmp_path, speed=speed, split=Split(2, 4), resume=checkpoint(tmp_path), **SAVED)
    assert difference(by_hand(GROWN, Split(2, 4)).gradients, whole.gradients) is None
    assert difference(whole.gradients[HALF:], rest.gradients) is None
    assert all(torch.equal(value, rest.weights[name]) for name, value in whole.weights.items())


# ---- something is changed -------------------------------------------------------------------------------------------


def weighed(weight: float) -> Any:
    """Functions of one name, which differ in what they close over."""

    def loss(outputs: Any, labels: Tensor) -> Tensor:
        total, count = summed(logits_of(outputs), labels)
        return total / count + weight * logits_of(outputs).square().mean()

    return loss


def sum_of_them(outputs: Any, labels: Tensor) -> Tensor:
    return summed(logits_of(outputs), labels)[0] / 10


def mean_of_them(outputs: Any, labels: Tensor) -> Tensor:
    total, count = summed(logits_of(outputs), labels)
    return total / count


def whole_loss(function: Any) -> Any:
    def one(owner: Any, model: Any, batch: Any) -> Tensor:
        labels = batch.pop("labels")
        return function(model(**batch), labels)

    return one


def with_function(function: Any, truth: Any = None) -> Case:
    return replace(
        PLAIN, given=lambda: {"compute_loss_func": function}, loss=truth, written=as_written(whole_loss(function))
    )


def with_loss(loss: Any, truth: Any) -> Case:
    return replace(PLAIN, trainer=trainer_with(loss), loss=truth, written=as_written(loss))


def on_the_left(rows: list[Any]) -> Any:
    return to_the_left(collate(rows))


def with_ends(rows: list[Any]) -> Any:
    return learns_its_end(collate(rows), 0)


def far_padding(rows: list[Any]) -> Any:
    return collate(rows, width=20)


def mixing(mix: float) -> Any:
    model: Any = made(Mixing)
    model.mix = mix
    return model


def divergent_by(beta: float) -> Any:
    model: Any = made(Divergent)
    model.beta = beta
    return model


def windowed() -> Any:
    """The same weights, and an attention that sees six tokens only."""
    from transformers import MistralConfig, MistralForCausalLM

    from .models import SIZES

    return made(MistralForCausalLM, MistralConfig(**SIZES, sliding_window=6))


class Smoothed(Around):
    def result(self, logits: Tensor, labels: Any) -> Any:
        found = super().result(logits, labels)
        if labels is not None:
            total, count = smoothed(logits, labels)
            found["loss"] = total / count
        return found


def smoothed(logits: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    targets = labels[:, 1:].reshape(-1)
    total = F.cross_entropy(logits[:, :-1].reshape(-1, 40), targets, label_smoothing=0.2, reduction="sum")
    return total, (targets != -100).sum()


def smoothed_parts(owner: Any, model: Any, batch: Any) -> tuple[Tensor, Tensor]:
    labels = batch.pop("labels")
    return smoothed(logits_of(model(**batch)), labels)


IGNORED_FIRST = lambda: ragged(32, ignored=1)  # noqa: E731
CHANGES: dict[str, tuple[Case, Case]] = {
    "loss_function": (PLAIN, replace(PLAIN, make=llama_over_sequences, loss=by_samples(sequence_means),
                                     written=as_written(sequence_means))),
    "compute_loss": (PLAIN, with_loss(sequence_mean, by_samples(sequence_mean))),
    "from one compute_loss to another": (with_loss(sequence_mean, by_samples(sequence_mean)),
                                         with_loss(summed_loss, added_up(summed_loss))),
    "compute_loss_func": (with_function(mean_of_them, pooled(tokens)), with_function(sum_of_them,
                                                                                    added_up(summed_loss))),
    "a function to one over sequences": (with_function(mean_of_them, pooled(tokens)),
                                         with_function(sequences_of, by_samples(sequence_mean))),
    "what a function closes over": (with_function(weighed(0.0), pooled(tokens)), with_function(weighed(0.1))),
    "model class": (AROUND, replace(PLAIN, make=lambda: made(RowTemperature))),
    "model class that mixes in training": (AROUND, replace(PLAIN, make=lambda: made(MixedEmbeddings))),
    "model class with noise in training": (AROUND, replace(PLAIN, make=lambda: made(LengthNoise))),
    "model class with another gradient": (AROUND, replace(PLAIN, make=lambda: made(WidthGradient))),
    "model class by the longest": (AROUND, replace(PLAIN, make=lambda: made(LongestScale))),
    "model class with another loss": (AROUND, replace(PLAIN, make=lambda: made(Smoothed), loss=pooled(smoothed_parts))),
    "collator": (PLAIN, replace(PLAIN, collator=lambda: with_ends)),
    "collator's side": (replace(PLAIN, rows=IGNORED_FIRST), replace(PLAIN, collator=lambda: on_the_left)),
    "collator's width": (AROUND, replace(PLAIN, make=lambda: made(RowTemperature), collator=lambda: far_padding)),
    "attention": (AROUND, replace(PLAIN, make=lambda: made(OwnWindow))),
    "attention of another family": (PLAIN, replace(PLAIN, make=windowed)),
    "attention implementation": (PLAIN, replace(PLAIN, make=lambda: llama(attn_implementation="eager"))),
    "a number on the model": (replace(PLAIN, make=lambda: mixing(0.0)), replace(PLAIN, make=lambda: mixing(0.2))),
    "a weight of the loss": (replace(PLAIN, make=lambda: divergent_by(0.0), loss=pooled(divergent_truth)),
                             replace(PLAIN, make=lambda: divergent_by(0.3), loss=pooled(divergent_truth))),
    "a hook": (PLAIN, replace(PLAIN, begin=hook_at_begin)),
}  # fmt: skip


def by_hand_in_two(before: Case, after: Case, split: Split, *, written: bool) -> Loop:
    """Two updates of one and two of the other, with the weights of the first."""
    first = loop_of(before, split, written=before.loss is None).run(HALF)
    then = loop_of(after, split, written=written)
    then.model.load_state_dict(first.model.state_dict())
    for _ in range(HALF * split.accumulation):
        next(then._batches)
    then.gradients = list(first.gradients)
    return then.run(WHOLE - HALF)


def wrong_with(before: Case, after: Case, found: Any, split: Split) -> str | None:
    wrong = "it has no definition"
    for written, loss in ((False, after.loss), (True, after.written)):
        if loss is None:
            continue
        expected = by_hand_in_two(before, after, split, written=written).gradients[HALF:]
        apart = difference(expected, found.gradients)
        told = not written or split.accumulation == 1 or found.says("loss")
        if apart is None and told:
            return None
        wrong = apart or "as written, but nobody is told"
    return f"{wrong}; layout: {found.layout}; told: {found.told}"


def ways() -> list[Any]:
    splits, speeds = (Split(2, 4), Split(1, 8)), ("max", "auto")
    found = []
    for number, change in enumerate(CHANGES):
        always = {0: ("max", splits[0]), 2: ("max", splits[1])}.get(number % 4)
        for way in product(speeds, splits):
            found.append(pytest.param(change, *way, marks=() if way == always else pytest.mark.grid))
    return found


@pytest.mark.parametrize(("change", "speed", "split"), ways(), ids=str)
def test_what_was_changed_before_resuming_is_learned_again(
    change: str, speed: str, split: Split, tmp_path: Path
) -> None:
    before, after = CHANGES[change]
    observe(before, tmp_path, speed=speed, split=split, **SAVED)
    found = observe(after, tmp_path, speed=speed, split=split, resume=checkpoint(tmp_path), **SAVED)
    wrong = wrong_with(before, after, found, split)
    assert wrong is None, wrong
