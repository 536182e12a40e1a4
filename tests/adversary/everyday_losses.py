"""Losses and models people write every day: distillation, penalties, weights, recurrent and convolutional models."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from loopwright import Trainer

from .cases import case
from .models import (
    CLASSES,
    IGNORED,
    VOCAB,
    WIDTH,
    Row,
    bert,
    classes,
    collate,
    llama,
    logits_of,
    made,
    own_loss,
    ragged,
    summed,
    tokens,
)
from .reference import BatchLoss, as_written, by_samples, pooled

CAUSE = "R5"


def trainer_with(loss: BatchLoss) -> type[Trainer]:
    class Theirs(Trainer):
        def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False, **kwargs: Any) -> Any:
            return loss(self, model, dict(inputs))

    return Theirs


def by_targets(loss: BatchLoss, *, shift: bool = True) -> Any:
    """Micro-batches weighed by their targets."""

    def parts(owner: Any, model: Any, batch: dict[str, Any]) -> tuple[Tensor, Tensor]:
        labels = batch["labels"][:, 1:] if shift else batch["labels"]
        count = (labels != IGNORED).sum()
        return loss(owner, model, batch) * count, count

    return pooled(parts)


def add(name: str, make: Any, by_definition: Any, loss: BatchLoss, **more: Any) -> None:
    case(name, CAUSE, make, by_definition, written=as_written(loss), trainer=trainer_with(loss), **more)


# ---- penalties that begin at zero, or never fit ----------------------------------------------------------------------

TEACHER: list[nn.Module] = []


def distillation(owner: Any, model: Any, batch: dict[str, Any]) -> Tensor:
    """The distance to the initial model is zero at the first update, and a mean over padded places afterwards."""
    if not TEACHER:
        TEACHER.append(llama())
    labels = batch.pop("labels")
    mine, its = logits_of(model(**batch)), logits_of(TEACHER[0](**batch)).detach()
    apart = F.kl_div(mine.log_softmax(-1).flatten(0, 1), its.softmax(-1).flatten(0, 1), reduction="batchmean")
    total, count = summed(mine, labels)
    return total / count + 0.5 * apart


def z_loss(owner: Any, model: Any, batch: dict[str, Any]) -> Tensor:
    labels, mask = batch.pop("labels"), batch["attention_mask"].bool()
    logits = logits_of(model(**batch))
    total, count = summed(logits, labels)
    return total / count + 0.1 * logits.logsumexp(-1)[mask].square().mean()


def marginal_entropy(owner: Any, model: Any, batch: dict[str, Any]) -> Tensor:
    labels = batch.pop("labels")
    logits = logits_of(model(**batch))
    marginal = logits.softmax(-1).mean(0)
    return F.cross_entropy(logits, labels) + 0.5 * (marginal * marginal.log()).sum()


def over_a_root(owner: Any, model: Any, batch: dict[str, Any]) -> Tensor:
    total, count = tokens(owner, model, batch)
    return total / count.sqrt()


def is_reported(found: Any, split: Any) -> None:
    """A penalty that begins at zero is noticed when it is there."""
    assert split.accumulation == 1 or found.says("neither the mean nor the sum"), found.told


def late_penalty(owner: Any, model: Any, batch: dict[str, Any]) -> Tensor:
    """A penalty over the padded batch from the fourth update on, which is one that is checked again (2, 4, 8 ...)."""
    labels = batch.pop("labels")
    logits = logits_of(model(**batch))
    total, count = summed(logits, labels)
    step = owner.state.global_step if hasattr(owner, "state") else len(owner.gradients)
    return total / count + (0.1 * logits.square().mean() if step >= 3 else 0.0)


add("distillation from the initial model", llama, by_targets(distillation), distillation, also=is_reported)
add("a penalty from the fourth update on", llama, by_targets(late_penalty), late_penalty, also=is_reported)
add("a z-loss over real tokens", llama, None, z_loss)
add("entropy of the batch's marginal", bert, None, marginal_entropy, rows=classes)
add("divided by a root", llama, None, over_a_root)


# ---- means of other things -------------------------------------------------------------------------------------------


def two_passes(owner: Any, model: Any, batch: dict[str, Any]) -> Tensor:
    labels, ids = batch.pop("labels"), batch["input_ids"]
    changed = {**batch, "input_ids": torch.where(ids > 2, (ids + 5) % 37 + 3, ids)}
    (first, count), (second, _) = (summed(logits_of(model(**each)), labels) for each in (batch, changed))
    return (first + second) / count


def annealed(owner: Any, model: Any, batch: dict[str, Any]) -> Tensor:
    total, count = tokens(owner, model, batch)
    step = owner.state.global_step if hasattr(owner, "state") else len(owner.gradients)
    return total / count * (1 + 0.5 * step)


def worst_token(owner: Any, model: Any, batch: dict[str, Any]) -> Tensor:
    labels = batch.pop("labels")
    logits = logits_of(model(**batch))
    return F.cross_entropy(logits[:, :-1].transpose(1, 2), labels[:, 1:], reduction="none").max(1).values.mean()


def positives(owner: Any, model: Any, batch: dict[str, Any]) -> Tensor:
    labels = batch.pop("labels")
    found, counted = logits_of(model(**batch))[:, 0], labels > 0
    return F.smooth_l1_loss(found[counted], labels[counted].double()) if counted.any() else found.sum() * 0


def weighed_rows(count: int = 32) -> list[Row]:
    draws = torch.Generator().manual_seed(2)
    return [{**row, "weights": torch.rand((), generator=draws, dtype=torch.float64) + 0.1} for row in ragged(count)]


def per_sequence(model: Any, batch: dict[str, Any]) -> tuple[Tensor, Tensor]:
    """The mean of each sequence, and its weight."""
    labels, weights = batch.pop("labels")[:, 1:], batch.pop("weights")
    logits = logits_of(model(**batch))[:, :-1].transpose(1, 2)
    losses, counted = F.cross_entropy(logits, labels, reduction="none", ignore_index=IGNORED), labels != IGNORED
    return (losses * counted).sum(1) / counted.sum(1).clamp(min=1), weights


def weighed(owner: Any, model: Any, batch: dict[str, Any]) -> Tensor:
    means, weights = per_sequence(model, batch)
    return (means * weights).mean()


def weighed_mean(owner: Any, model: Any, batch: dict[str, Any]) -> Tensor:
    means, weights = per_sequence(model, batch)
    return (means * weights).sum() / weights.sum()


KEPT = {"remove_unused_columns": False}
add("two passes through the model", llama, by_targets(two_passes), two_passes)
add("a loss annealed by the step", llama, by_targets(annealed), annealed)
add("the worst token of each sequence", llama, by_samples(worst_token), worst_token)
add("regression of the positives", bert, None, positives, rows=classes)
add("sequences times weights", llama, by_samples(weighed), weighed, rows=weighed_rows, options=KEPT)
add("a weighted mean of sequences", llama, None, weighed_mean, rows=weighed_rows, options=KEPT)


def several_labels(count: int = 32) -> list[Row]:
    draws = torch.Generator().manual_seed(1)
    labels = [torch.randint(0, 2, (CLASSES,), generator=draws).double() for _ in range(count)]
    return [{**row, "labels": each} for row, each in zip(ragged(count), labels, strict=True)]


def stacked_labels(rows: list[Row]) -> dict[str, Tensor]:
    inputs = collate([{name: value for name, value in row.items() if name != "labels"} for row in rows])
    return {**inputs, "labels": torch.stack([row["labels"] for row in rows])}


def weighed_classes(owner: Any, model: Any, batch: dict[str, Any]) -> Tensor:
    labels = batch.pop("labels")
    weight = torch.tensor([1.0, 5.0, 9.0], dtype=torch.float64)
    return F.binary_cross_entropy_with_logits(logits_of(model(**batch)), labels, pos_weight=weight)


add(
    "several labels with weights", bert, by_samples(weighed_classes), weighed_classes, rows=several_labels,
    collator=lambda: stacked_labels,
)  # fmt: skip


# ---- models that see more than their tokens --------------------------------------------------------------------------


class Recurrent(nn.Module):
    """Reads every row to its padded end, and back."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB, WIDTH)
        self.cell = nn.GRU(WIDTH, WIDTH, batch_first=True, bidirectional=True)
        self.head = nn.Linear(2 * WIDTH, CLASSES)

    def forward(self, input_ids: Tensor, attention_mask: Any = None, labels: Any = None) -> Any:
        logits = self.head(self.cell(self.embed(input_ids))[0][:, -1])
        return {"loss": F.cross_entropy(logits, labels), "logits": logits}


class Convolved(nn.Module):
    """Every place sees its neighbours, padding or not."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB, WIDTH)
        self.mix = nn.Conv1d(WIDTH, WIDTH, 3, padding=1)
        self.head = nn.Linear(WIDTH, VOCAB)

    def forward(
        self, input_ids: Tensor, attention_mask: Any = None, labels: Any = None, position_ids: Any = None
    ) -> Any:
        logits = self.head(self.mix(self.embed(input_ids).transpose(1, 2)).transpose(1, 2))
        total, count = summed(logits, labels, shift=False)
        return {"loss": total / count, "logits": logits}


def whole_masks(rows: list[Row]) -> dict[str, Tensor]:
    """A mask of every token with every other, as some collators make it."""
    batch = collate(rows)
    real, width = batch["attention_mask"].bool(), batch["input_ids"].shape[1]
    seen = torch.tril(torch.ones(width, width, dtype=torch.bool))[None, None] & real[:, None, None, :]
    batch["attention_mask"] = torch.zeros(seen.shape, dtype=torch.float64).masked_fill(~seen, -1e30)
    return batch


def choices(count: int = 32) -> list[dict[str, Any]]:
    rows, draws = ragged(2 * count), torch.Generator().manual_seed(1)
    pairs = [[rows[2 * i]["input_ids"], rows[2 * i + 1]["input_ids"]] for i in range(count)]
    return [{"input_ids": pair, "labels": torch.randint(0, 2, (), generator=draws)} for pair in pairs]


def stacked_choices(rows: list[dict[str, Any]]) -> dict[str, Tensor]:
    width = max(len(ids) for row in rows for ids in row["input_ids"])
    padded = [torch.stack([F.pad(ids, (0, width - len(ids))) for ids in row["input_ids"]]) for row in rows]
    ids = torch.stack(padded)
    return {"input_ids": ids, "attention_mask": (ids != 0).long(), "labels": torch.stack([r["labels"] for r in rows])}


def multiple_choice() -> nn.Module:
    from transformers import BertForMultipleChoice

    return bert(BertForMultipleChoice)


def mean_of_own(owner: Any, model: Any, batch: dict[str, Any]) -> Tensor:
    total, count = tokens(owner, model, batch)
    return total / count


case("a recurrent model that reads padding", CAUSE, lambda: made(Recurrent), by_samples(own_loss), rows=classes)
case("a convolution over padding", CAUSE, lambda: made(Convolved), by_targets(own_loss, shift=False))
add("masks of every token with every other", llama, by_targets(mean_of_own), mean_of_own, collator=lambda: whole_masks)
case(
    "multiple choice", CAUSE, multiple_choice, by_samples(own_loss), rows=choices, collator=lambda: stacked_choices
)  # fmt: skip
