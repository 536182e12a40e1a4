"""What a loss is divided by is found out on a part of a very long batch: its logits may take more than training it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_pre_hook

from loopwright.pt.loss import comparison as looking
from loopwright.pt.loss.targets import LossKind
from tests.models import ShiftedTokens, Tokens, assert_close, made, pad, samples, trained_gradients, trainer_of

ENOUGH = 8


@pytest.fixture(autouse=True)
def _few_are_enough(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(looking, "ENOUGH_TOKENS", ENOUGH)


def learned(model: Any, data: Any, folder: Path, **options: Any) -> Any:
    trainer = trainer_of(model, data, folder, **options)
    trainer._loopwright.loss.learn_loss(pad(data))
    return trainer


@pytest.mark.parametrize("lengths", [(40,), (9, 3, 12, 7)])
@pytest.mark.parametrize("kind", [Tokens, ShiftedTokens])
def test_a_part_tells_as_much(kind: type, lengths: tuple[int, ...], tmp_path: Path) -> None:
    trainer = learned(made(kind), samples(lengths), tmp_path)
    accounting = trainer._loopwright.run.accounting
    assert accounting.kind is LossKind.MEAN
    assert accounting.shifts is kind.shift and not accounting.undecided_shift


@pytest.mark.parametrize("lengths", [(40,), (9, 3, 12, 7)])
def test_no_more_tokens_are_computed_than_are_enough(lengths: tuple[int, ...], tmp_path: Path) -> None:
    sizes: list[int] = []

    def note(module: nn.Module, inputs: Any) -> None:  # a hook of torch: what the model refers to is restored
        if isinstance(module, nn.Embedding):
            sizes.append(inputs[0].numel())

    hook = register_module_forward_pre_hook(note)
    learned(made(ShiftedTokens), samples(lengths), tmp_path)
    hook.remove()
    # What the loss counts and how it is scaled takes four; a comparison with its parts takes whole rows.
    assert sizes and max(sizes[:4]) <= max(ENOUGH, min(lengths) + ENOUGH)
    assert max(sizes) <= len(lengths) * max(lengths)


def test_the_part_of_a_row_has_its_targets(tmp_path: Path) -> None:
    """The prompt of a long sample has none."""
    row = samples((60,), ignored=50)[0]
    row["labels"][55:] = -100
    part = looking.part_of(pad([row]), [])
    assert {tuple(value.shape) for value in part.values()} == {(1, ENOUGH)}
    assert torch.equal(part["labels"][0, -5:], row["labels"][50:55])
    assert learned(made(Tokens), [row], tmp_path)._loopwright.run.accounting.kind is LossKind.MEAN


def test_masks_of_tokens_by_tokens_are_left_whole() -> None:
    batch = {**pad(samples((40,))), "attention_mask": torch.ones(1, 1, 40, 40)}
    assert looking.part_of(batch, []) is batch


class Whole(ShiftedTokens):
    """Takes whole samples only."""

    def forward(self, input_ids: Tensor, attention_mask: Any = None, labels: Tensor | None = None) -> dict[str, Tensor]:
        if input_ids.shape[1] < 40:
            raise ValueError("samples have 40 tokens")
        return super().forward(input_ids, attention_mask, labels)


def test_a_model_that_refuses_a_part_is_asked_with_the_whole(tmp_path: Path) -> None:
    assert learned(made(Whole), samples((40,)), tmp_path)._loopwright.run.accounting.kind is LossKind.MEAN


def test_gradients_are_those_of_one_large_batch(tmp_path: Path) -> None:
    model, data = made(ShiftedTokens).double(), samples((40, 12, 25, 7))
    options = {"gradient_accumulation_steps": 4, "per_device_train_batch_size": 1}
    parts = trained_gradients(model, data, tmp_path / "parts", **options)[0]
    whole = trained_gradients(model, data, tmp_path / "whole", per_device_train_batch_size=4)[0]
    assert_close(parts, whole)


def test_an_entry_that_is_no_samples_stays_whole_beside_those_that_are() -> None:
    batch = {"scale": torch.ones(1), **pad(samples((40, 40)))}
    part = looking.part_of(batch, [])
    assert part["scale"] is batch["scale"] and part["input_ids"].shape == (1, ENOUGH)


def test_a_row_whose_documents_are_told_by_borders_is_left_whole() -> None:
    """A kernel that is told of more tokens than there are reads what is not its own."""
    batch = {**pad(samples((40,))), "cu_seq_lens_q": torch.tensor([0, 15, 40], dtype=torch.int32)}
    assert looking.part_of(batch, []) is batch
