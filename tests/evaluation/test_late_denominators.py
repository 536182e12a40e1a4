"""eval_loss is exact if only a late batch shows what the loss is divided by."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from loopwright import Trainer, TrainingArguments

EQUAL = [4] * 4
LATE = {
    "other lengths": [*EQUAL, 2, 7, 3, 9, 5],
    "other lengths with the same mean": [*EQUAL, 3, 5, 3, 5, 6, 2],
    "one last row": [*EQUAL, 9],
}


class Tokens(nn.Module):
    """Cross-entropy of each token, with a mean over items, samples or the mask."""

    def __init__(self, over: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.over, self.embed, self.out = over, nn.Embedding(11, 6), nn.Linear(6, 11)
        self.double()

    def forward(self, input_ids: Tensor, attention_mask: Tensor, labels: Tensor) -> dict[str, Tensor]:
        logits = self.out(self.embed(input_ids))
        losses, counted = F.cross_entropy(logits.transpose(1, 2), labels, reduction="none"), labels != -100
        if self.over == "samples":
            loss = (losses.sum(1) / counted.sum(1).clamp(min=1)).mean()
        elif self.over == "sums of samples":
            loss = losses.sum(1).mean()
        else:
            loss = losses.sum() / (attention_mask if self.over == "mask" else counted).sum()
        return {"loss": loss, "logits": logits}


def rows(lengths: list[int]) -> list[dict[str, Tensor]]:
    """Rows whose targets all count: with equal lengths they do not distinguish denominators."""
    generator = torch.Generator().manual_seed(len(lengths))
    made = [torch.randint(1, 11, (length,), generator=generator) for length in lengths]
    return [{"input_ids": ids, "labels": ids} for ids in made]


def collate(samples: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    def padded(values: list[Tensor], fill: int) -> Tensor:
        return nn.utils.rnn.pad_sequence(values, batch_first=True, padding_value=fill)

    ids = [sample["input_ids"] for sample in samples]
    return {
        "input_ids": padded(ids, 0),
        "attention_mask": padded([torch.ones_like(each) for each in ids], 0),
        "labels": padded([sample["labels"] for sample in samples], -100),
    }


def by_hand(model: Tokens, data: list[Any]) -> float:
    """The loss of all samples in one batch."""
    with torch.no_grad():
        return float(model(**collate(data))["loss"])


def trainer_of(model: nn.Module, data: Any, folder: Any, **options: Any) -> Trainer:
    options = {"per_device_eval_batch_size": 2, "report_to": [], "use_cpu": True, "disable_tqdm": True, **options}
    args = TrainingArguments(str(folder), **options)
    train = rows([4] * 8)
    return Trainer(model, args, train_dataset=train, eval_dataset=data, data_collator=collate)


@pytest.mark.parametrize("speed", ["off", "max"])
@pytest.mark.parametrize("batch", [1, 2])
@pytest.mark.parametrize("over", ["items", "samples", "mask", "sums of samples"])
@pytest.mark.parametrize("case", LATE)
def test_a_late_batch_shows_the_denominator(case: str, over: str, batch: int, speed: str, tmp_path: Any) -> None:
    model, data = Tokens(over), rows(LATE[case])
    trainer = trainer_of(model, data, tmp_path, per_device_eval_batch_size=batch, speed=speed)
    for _ in range(2):
        assert trainer.evaluate()["eval_loss"] == pytest.approx(by_hand(model, data), abs=1e-12)


def test_several_sets_and_one_before_training(tmp_path: Any) -> None:
    model = Tokens("samples")
    data = {"equal": rows(EQUAL), "late": rows(LATE["other lengths"])}
    expected = {name: by_hand(model, each) for name, each in data.items()}
    options: dict[str, Any] = {"eval_on_start": True, "max_steps": 1, "learning_rate": 0.0}
    trainer = trainer_of(model, data, tmp_path, eval_strategy="steps", eval_steps=1, **options)
    trainer.train()
    for name, loss in expected.items():
        found = [row[f"eval_{name}_loss"] for row in trainer.state.log_history if f"eval_{name}_loss" in row]
        assert found == pytest.approx([loss, loss], abs=1e-12)


def test_what_evaluations_have_shown_is_resumed(tmp_path: Any) -> None:
    data = {"a": rows([3] * 7), "b": rows(LATE["other lengths"])}
    options: dict[str, Any] = {"eval_strategy": "steps", "eval_steps": 1, "save_steps": 1, "max_steps": 4}

    def losses(trainer: Trainer) -> list[Any]:
        return [row for row in trainer.state.log_history if "eval_a_loss" in row or "eval_b_loss" in row]

    def numbers(trainer: Trainer) -> list[float]:
        return [value for row in losses(trainer) for name, value in row.items() if name.endswith("_loss")]

    whole = trainer_of(Tokens("samples"), data, tmp_path / "run", **options)
    whole.train()
    resumed = trainer_of(Tokens("samples"), data, tmp_path / "other", **options)
    resumed.train(resume_from_checkpoint=str(tmp_path / "run" / "checkpoint-2"))
    assert numbers(resumed) == numbers(whole)
