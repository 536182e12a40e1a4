"""Finding out what a loss is divided by takes few and short samples where it is computed in single precision."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from loopwright import Trainer, TrainingArguments
from loopwright.pt.loss.probe import LossProbe
from loopwright.pt.loss.splitter import BatchSplitter, without_common_padding

LENGTHS = (40, 9, 7, 5, 8, 40, 33, 21)
IGNORED = -100


def batch_of(lengths: tuple[int, ...], *, on_left: bool = False) -> dict[str, Tensor]:
    width = max(lengths)
    places = torch.arange(width)
    mask = torch.stack([places >= width - n if on_left else places < n for n in lengths]).long()
    ids = torch.arange(len(lengths) * width).reshape(len(lengths), width) % 50 + 1
    return {"input_ids": ids * mask, "attention_mask": mask, "labels": torch.where(mask == 1, ids, IGNORED)}


@pytest.mark.parametrize("on_left", [False, True])
def test_the_shortest_samples_are_used_without_their_common_padding(on_left: bool) -> None:
    batch = batch_of(LENGTHS, on_left=on_left)
    half = BatchSplitter().half_of(batch)
    assert {name: value.shape for name, value in half.items()} == dict.fromkeys(batch, (4, 9))
    place = slice(-9, None) if on_left else slice(0, 9)
    assert all(torch.equal(half[name], batch[name][1:5, place]) for name in batch)


def test_samples_of_one_length_are_left_if_others_differ() -> None:
    half = BatchSplitter().half_of(batch_of((3, 3, 3, 3, 20, 9, 9, 9)))
    assert half["attention_mask"].sum(1).tolist() == [3, 3, 3, 20]


def test_large_batches_are_halved_more_than_once() -> None:
    half = BatchSplitter().half_of(batch_of(tuple(1000 + n for n in range(32))))
    assert half["input_ids"].shape == (4, 1003)


@pytest.mark.parametrize("name", ["targets outside of the mask", "a wide entry", "a square mask", "no mask"])
def test_columns_stay_where_it_is_not_clear_that_they_are_padding(name: str) -> None:
    batch = batch_of((3, 4))
    wide = {key: F.pad(value, (0, 2), value=IGNORED if key == "labels" else 0) for key, value in batch.items()}
    if name == "targets outside of the mask":
        wide["labels"][0, 5] = 7
    elif name == "a wide entry":
        wide["prices"] = torch.zeros(2, 6)
    elif name == "a square mask":
        wide["inputs_embeds"] = torch.zeros(2, 6, 6)
    else:
        del wide["attention_mask"]
    assert without_common_padding(wide, set(batch) | {"inputs_embeds"})["input_ids"].shape == (2, 6)


class Words(nn.Module):
    """A model of tokens, with the mean of its targets as loss."""

    def __init__(self, width: int | None = None) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.head = nn.Embedding(64, 8), nn.Linear(8, 64)
        self.width = width

    def forward(self, input_ids: Tensor, attention_mask: Tensor, labels: Tensor) -> dict[str, Tensor]:
        if self.width is not None and input_ids.shape[1] != self.width:
            raise ValueError("this model needs rows of one width")
        logits = self.head(self.embed(input_ids)).float()
        loss = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=IGNORED)
        return {"loss": loss, "logits": logits}


def trained(folder: Path, model: Words) -> Any:
    rows = batch_of(LENGTHS * 2)
    data = [{name: value[n] for name, value in rows.items()} for n in range(16)]
    args = TrainingArguments(
        str(folder), per_device_train_batch_size=8, gradient_accumulation_steps=2, max_steps=1, bf16=True, use_cpu=True,
        report_to="none", save_strategy="no", disable_tqdm=True,
        train_sampling_strategy="sequential",
    )  # fmt: skip
    trainer = Trainer(model, args, train_dataset=data)
    trainer.train()
    return trainer._loopwright.run.accounting


def test_gradients_in_single_precision_are_those_of_short_rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    measure, with_gradients = LossProbe.measure, []

    def noted(probe: LossProbe, inputs: dict[str, Any], items: Any, **how: Any) -> Any:
        if probe.may_leave_half and how.get("with_gradient", True):
            with_gradients.append(inputs["input_ids"].numel())
        return measure(probe, inputs, items, **how)

    monkeypatch.setattr(LossProbe, "measure", noted)
    found = trained(tmp_path, Words())
    assert found.is_additive, found.reason
    assert with_gradients and max(with_gradients) == 8 * 9  # the short halves of two micro-batches, joined


def test_a_model_that_needs_rows_of_one_width_gets_them(tmp_path: Path) -> None:
    found = trained(tmp_path, Words(width=40))
    assert found.is_additive, found.reason
