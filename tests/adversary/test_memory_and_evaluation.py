"""Micro-batches that are halved for want of memory, and losses of evaluation."""

from __future__ import annotations

import inspect
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from loopwright import Trainer, TrainingArguments

from .cases import Case
from .means import Speech, collate_speech, own_index, sequence_mean, spoken, summed_loss, trainer_with
from .models import Around, changing, classes, collate, llama, made, own_loss, ragged, tokens
from .outside import ManyImages, Prototypes, Weighted, uneven_images, weighted_truth, weights_later, with_table
from .reference import by_samples, pooled
from .running import OPTIONS, Split, judge, observe

pytest.importorskip("transformers")


# ---- memory ---------------------------------------------------------------------------------------------------------


def short_of_memory(kind: type) -> type:
    """The same model, with room for two samples."""

    class Short(kind):  # type: ignore[misc, valid-type]
        def forward(self, input_ids: Tensor, *given: Any, **named: Any) -> Any:
            if len(input_ids) > 2:
                raise torch.OutOfMemoryError("out of memory")
            return super().forward(input_ids, *given, **named)

    Short.forward.__signature__ = inspect.signature(kind.forward)  # type: ignore[attr-defined]
    return Short


HALVED = {
    "tokens": (Case("tokens", "besides", lambda: made(Around), pooled(tokens)), Around),
    "weights of samples": (
        Case("weights", "besides", lambda: made(Weighted), pooled(weighted_truth), collator=changing(weights_later)),
        Weighted,
    ),
    "a table of as many rows": (
        Case("table", "besides", lambda: made(Prototypes), by_samples(own_loss), rows=classes,
             collator=with_table(lambda size: size)),
        Prototypes,
    ),
    "as many images": (
        Case("images", "besides", lambda: made(ManyImages), by_samples(own_loss), rows=classes,
             collator=changing(uneven_images)),
        ManyImages,
    ),
}  # fmt: skip


@pytest.mark.parametrize("split", [Split(1, 8), Split(2, 4)], ids=str)
@pytest.mark.parametrize("speed", ["off", "max"])
@pytest.mark.parametrize("name", HALVED)
def test_what_is_halved_is_samples_and_nothing_else(name: str, speed: str, split: Split, tmp_path: Path) -> None:
    """Or nothing is, and the run ends for want of memory."""
    case, kind = HALVED[name]
    short = replace(case, make=lambda: made(short_of_memory(kind)), options={"auto_find_batch_size": True})
    try:
        found = observe(short, tmp_path, speed=speed, split=split)
    except Exception as error:
        assert name not in ("tokens", "weights of samples"), error
        assert "memory" in str(error) or "samples" in str(error), error
        return
    assert judge(case, found, split) is None


# ---- evaluation -----------------------------------------------------------------------------------------------------


def evaluated(model: Any, rows: list[Any], folder: Path, size: int, *, kind: Any = Trainer, **more: Any) -> Any:
    options = {**OPTIONS, "per_device_eval_batch_size": size, **more}
    collator = options.pop("data_collator", collate)
    arguments = TrainingArguments(str(folder), **options)
    trainer = kind(model=model, args=arguments, eval_dataset=rows, data_collator=collator)
    return trainer.evaluate()["eval_loss"], " ".join(trainer._loopwright.notices.told)


MEANS = {
    "mean over sequences": (trainer_with(sequence_mean), lambda: ragged(12)),
    "own index": (trainer_with(own_index), lambda: ragged(12, lengths=(9, 13, 24, 17))),
    "a sum": (trainer_with(summed_loss), lambda: ragged(12)),
}


@pytest.mark.parametrize("name", MEANS)
def test_a_loss_of_evaluation_does_not_depend_on_the_batch(name: str, tmp_path: Path) -> None:
    """Or it is said that it does."""
    kind, rows = MEANS[name]
    found = [evaluated(llama(), rows(), tmp_path, size, kind=kind) for size in (1, 4, 12)]
    same = all(loss == pytest.approx(found[0][0], rel=1e-6) for loss, _ in found)
    assert same or all("loss" in told for _, told in found[1:]), found


@pytest.mark.parametrize("reduction", ["sum", "mean"])
def test_a_loss_of_letters_does_not_depend_on_the_batch(reduction: str, tmp_path: Path) -> None:
    found = [
        evaluated(made(Speech, reduction), spoken(24), tmp_path, size, data_collator=collate_speech)
        for size in (1, 4, 24)
    ]
    same = all(loss == pytest.approx(found[0][0], rel=1e-6) for loss, _ in found)
    assert same or all("loss" in told for _, told in found[1:]), found


def test_evaluation_drops_the_last_batch_if_asked(tmp_path: Path) -> None:
    rows = ragged(10)
    whole, _ = evaluated(llama(), rows, tmp_path, 4)
    dropped, _ = evaluated(llama(), rows, tmp_path, 4, dataloader_drop_last=True)
    expected, _ = evaluated(llama(), rows[:8], tmp_path, 4)
    assert dropped == pytest.approx(expected, rel=1e-9) and dropped != pytest.approx(whole, rel=1e-6)
