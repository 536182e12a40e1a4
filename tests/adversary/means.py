"""What a loss is a mean over: its items, its samples, nothing, or something else."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from loopwright import Trainer

from .cases import case
from .models import (
    CLASSES,
    WIDTH,
    Around,
    Pooled,
    bert,
    bert_config,
    changing,
    classes,
    collate,
    llama,
    logits_of,
    made,
    own_loss,
    per_sequence,
    prompts,
    ragged,
    summed,
    tokens,
)
from .reference import Batch, BatchLoss, Loop, UpdateLoss, added_up, as_written, by_samples, pooled

CAUSE = "R5"


def trainer_with(loss: BatchLoss) -> type[Trainer]:
    """A trainer whose compute_loss is this one."""

    class Theirs(Trainer):
        def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False, **kwargs: Any) -> Any:
            found = loss(self, model, inputs)
            return (found, {}) if return_outputs else found

    return Theirs


def user(name: str, one: BatchLoss, truth: UpdateLoss | None, make: Any = llama, **more: Any) -> None:
    """A user's own compute_loss; as written is right as well if that is said."""
    case(name, CAUSE, make, truth, trainer=trainer_with(one), written=as_written(one), **more)


# ---- sequences ------------------------------------------------------------------------------------------------------


def sequence_mean(owner: Any, model: Any, batch: Batch) -> Tensor:
    labels = batch.pop("labels")
    return per_sequence(logits_of(model(**batch)), labels).mean()


user("mean over sequences", sequence_mean, by_samples(sequence_mean))
user("mean over sequences with prompts", sequence_mean, by_samples(sequence_mean), rows=prompts)


def reward(owner: Any, model: Any, batch: Batch) -> Tensor:
    """Rows of the batch are pairs of chosen and rejected answers."""
    labels = batch.pop("labels")
    scores = -per_sequence(logits_of(model(**batch)), labels)
    return -F.logsigmoid(2 * (scores[0::2] - scores[1::2])).mean()


user("reward of pairs", reward, by_samples(reward))


def pairs_of_columns(rows: list[Any]) -> Batch:
    """Chosen and rejected answers in columns of their own, as preference collators make them."""
    chosen, rejected = collate(rows), collate([*rows[1:], rows[0]])
    names = ("input_ids", "attention_mask", "labels")
    return {f"{kind}_{name}": batch[name] for kind, batch in (("chosen", chosen), ("rejected", rejected))
            for name in names}  # fmt: skip


def dpo(owner: Any, model: Any, batch: Batch) -> Tensor:
    scores = [
        per_sequence(logits_of(model(batch[f"{kind}_input_ids"], batch[f"{kind}_attention_mask"])),
                     batch[f"{kind}_labels"])
        for kind in ("chosen", "rejected")
    ]  # fmt: skip
    return -F.logsigmoid(scores[1] - scores[0]).mean()


user("preferences in columns", dpo, as_written(dpo), collator=lambda: pairs_of_columns,
     options={"remove_unused_columns": False})  # fmt: skip


class ModelSequences(Around):
    """A model whose own loss is a mean over sequences."""

    def result(self, logits: Tensor, labels: Any) -> Any:
        found = {"logits": logits}
        if labels is not None:
            found["loss"] = per_sequence(logits, labels).mean()
        return found


case("a model's own mean over sequences", CAUSE, lambda: made(ModelSequences), by_samples(own_loss),
     written=as_written(own_loss))  # fmt: skip


# ---- several parts --------------------------------------------------------------------------------------------------


def pretraining() -> nn.Module:
    from transformers import BertForPreTraining

    return made(BertForPreTraining, bert_config())


def masked_pairs(rows: list[Any]) -> Batch:
    """Some tokens to guess, another number in each sample, and whether two sentences belong together."""
    batch = collate(rows)
    places = torch.arange(batch["input_ids"].shape[1])
    chosen = (places + batch["input_ids"][:, :1]) % (2 + batch["input_ids"][:, :1] % 4) == 0
    labels = torch.where(chosen & (batch["attention_mask"] == 1), batch["input_ids"], -100)
    labels[:, 0] = batch["input_ids"][:, 0]
    return {**batch, "labels": labels, "next_sentence_label": batch["input_ids"][:, 0] % 2}


def pretraining_truth(loop: Loop, batches: list[Batch]) -> Tensor:
    masked = count = sentences = samples = 0
    for batch in batches:
        labels, related = batch["labels"], batch["next_sentence_label"]
        out = loop.model(batch["input_ids"], attention_mask=batch["attention_mask"])
        total, number = summed(out.prediction_logits, labels, shift=False)
        masked, count = masked + total, count + int(number)
        sentences = sentences + F.cross_entropy(out.seq_relationship_logits, related, reduction="sum")
        samples += len(related)
    return masked / count + sentences / samples


case("bert for pretraining", CAUSE, pretraining, pretraining_truth, written=as_written(own_loss),
     collator=lambda: masked_pairs, options={"remove_unused_columns": False})  # fmt: skip


class Answers(nn.Module):
    """Where an answer begins and ends: two columns of labels."""

    def __init__(self) -> None:
        super().__init__()
        self.bert, self.head = bert().bert, nn.Linear(WIDTH, 2).double()
        self.config = self.bert.config

    def forward(
        self, input_ids: Tensor, attention_mask: Any = None, start_positions: Any = None, end_positions: Any = None
    ) -> Any:
        logits = self.head(self.bert(input_ids, attention_mask=attention_mask).last_hidden_state)
        logits = logits.masked_fill((attention_mask == 0).unsqueeze(-1), -1e9)
        found: dict[str, Tensor] = {"logits": logits}
        if start_positions is not None:
            ends = (F.cross_entropy(logits[..., 0], start_positions), F.cross_entropy(logits[..., 1], end_positions))
            found["loss"] = (ends[0] + ends[1]) / 2
        return found


def with_answers(rows: list[Any]) -> Batch:
    batch = collate(rows)
    batch.pop("labels")
    lengths = batch["attention_mask"].sum(1)
    return {**batch, "start_positions": lengths // 3, "end_positions": lengths - 1}


case("answers with two label columns", CAUSE, lambda: made(Answers), by_samples(own_loss),
     collator=lambda: with_answers, written=as_written(own_loss))  # fmt: skip


# ---- what is counted ------------------------------------------------------------------------------------------------


def own_index(owner: Any, model: Any, batch: Batch) -> Tensor:
    total, count = own_index_parts(owner, model, batch)
    return total / count


def own_index_parts(owner: Any, model: Any, batch: Batch) -> tuple[Tensor, Tensor]:
    """Padding, and every token below 20, is no target."""
    labels = batch.pop("labels")
    labels = torch.where(labels < 20, 0, labels)
    return summed(logits_of(model(**batch)), labels, ignored=0)


def zeros_for_labels(batch: dict[str, Tensor], update: int) -> dict[str, Tensor]:
    labels = batch["labels"]
    return {**batch, "labels": torch.where((labels == -100) | (labels < 20), 0, labels)}


user("an ignore_index of one's own", own_index, pooled(own_index_parts))
user("an ignore_index of the collator's own", own_index, pooled(own_index_parts), collator=changing(zeros_for_labels))
WEIGHTS = torch.tensor([0.2, 1.0, 4.0], dtype=torch.float64)
TOKEN_WEIGHTS = torch.linspace(0.1, 3, 40, dtype=torch.float64)


def class_weighted(owner: Any, model: Any, batch: Batch) -> Tensor:
    labels = batch.pop("labels")
    return F.cross_entropy(logits_of(model(**batch)), labels, weight=WEIGHTS)


def class_weighted_truth(loop: Loop, batches: list[Batch]) -> Tensor:
    total: Any = 0.0
    weight = 0.0
    for batch in batches:
        logits = logits_of(loop.model(batch["input_ids"], attention_mask=batch["attention_mask"]))
        total = total + F.cross_entropy(logits, batch["labels"], weight=WEIGHTS, reduction="sum")
        weight += float(WEIGHTS[batch["labels"]].sum())
    return total / weight


user("class weights", class_weighted, class_weighted_truth, bert, rows=classes)


def token_weighted(owner: Any, model: Any, batch: Batch) -> Tensor:
    labels = batch.pop("labels")[:, 1:].reshape(-1)
    logits = logits_of(model(**batch))[:, :-1].reshape(-1, 40)
    return F.cross_entropy(logits, labels, weight=TOKEN_WEIGHTS)


user("weights of tokens", token_weighted, None)


def summed_loss(owner: Any, model: Any, batch: Batch) -> Tensor:
    return tokens(owner, model, batch)[0] / 10


user("a sum", summed_loss, added_up(summed_loss))


def summed_classes(owner: Any, model: Any, batch: Batch) -> Tensor:
    labels = batch.pop("labels")
    return F.cross_entropy(logits_of(model(**batch)), labels, reduction="sum")


user("a sum over samples", summed_classes, added_up(summed_classes), bert, rows=classes)


class SumModel(Around):
    def result(self, logits: Tensor, labels: Any) -> Any:
        found = {"logits": logits}
        if labels is not None:
            found["loss"] = summed(logits, labels)[0]
        return found


case("a model's own sum", CAUSE, lambda: made(SumModel), added_up(own_loss), written=as_written(own_loss))


def focal(owner: Any, model: Any, batch: Batch) -> Tensor:
    """Divided by the positives, as detectors do."""
    labels = batch.pop("labels")
    chance = logits_of(model(**batch)).softmax(-1).gather(1, labels[:, None])[:, 0]
    return (-((1 - chance) ** 2) * chance.log()).sum() / (labels > 0).sum().clamp(min=1)


user("divided by the positives", focal, None, bert, rows=classes)


def root_of_mean(owner: Any, model: Any, batch: Batch) -> Tensor:
    labels = batch.pop("labels")
    return (logits_of(model(**batch))[:, 0] - labels).square().mean().sqrt()


user("the root of a mean", root_of_mean, None, bert, rows=classes)


def dice(owner: Any, model: Any, batch: Batch) -> Tensor:
    labels = F.one_hot(batch.pop("labels"), CLASSES).double()
    chances = logits_of(model(**batch)).softmax(-1)
    return 1 - (2 * (chances * labels).sum() + 1) / (chances.sum() + labels.sum() + 1)


user("dice over the batch", dice, None, bert, rows=classes)


def padded_mean(owner: Any, model: Any, batch: Batch) -> Tensor:
    """A mean over every place of the batch, padding as well."""
    labels = batch.pop("labels")[:, 1:]
    each = F.cross_entropy(logits_of(model(**batch))[:, :-1].transpose(1, 2), labels, reduction="none")
    return each.mean()


user("a mean over padding as well", padded_mean, None)


def with_decay(owner: Any, model: Any, batch: Batch) -> Tensor:
    total, count = tokens(owner, model, batch)
    return total / count + 0.01 * model.lm_head.weight.square().sum()


def decay_truth(loop: Loop, batches: list[Batch]) -> Tensor:
    return pooled(tokens)(loop, batches) + 0.01 * loop.model.lm_head.weight.square().sum()


user("a mean and a penalty on weights", with_decay, decay_truth)


# ---- functions of outputs -------------------------------------------------------------------------------------------


def function(name: str, one: Callable[..., Any], truth: UpdateLoss | None, make: Any = llama, **more: Any) -> None:
    """The same as compute_loss_func."""

    def whole(owner: Any, model: Any, batch: Batch) -> Tensor:
        labels = batch.pop("labels")
        return one(model(**batch), labels)

    case(name, CAUSE, make, truth, written=as_written(whole), given=lambda: {"compute_loss_func": one}, **more)


def sequences_of(outputs: Any, labels: Tensor) -> Tensor:
    return per_sequence(logits_of(outputs), labels).mean()


def sum_of(outputs: Any, labels: Tensor, num_items_in_batch: Any = None) -> Tensor:
    return summed(logits_of(outputs), labels)[0] / 10


def scaled_and_not(outputs: Any, labels: Tensor, num_items_in_batch: Any = None) -> Tensor:
    total, count = summed(logits_of(outputs), labels)
    divided = total / (count if num_items_in_batch is None else num_items_in_batch)
    return divided + 0.3 * per_sequence(logits_of(outputs), labels).mean()


function("a function over sequences", sequences_of, by_samples(sequence_mean))
function("a function that sums", sum_of, added_up(summed_loss))


def scaled_truth(loop: Loop, batches: list[Batch]) -> Tensor:
    return pooled(tokens)(loop, batches) + 0.3 * by_samples(sequence_mean)(loop, batches)


def scaled_written(loop: Loop, batches: list[Batch]) -> Tensor:
    return pooled(tokens)(loop, batches) + 0.3 * as_written(sequence_mean)(loop, batches)


case("one part divided by items and one by samples", CAUSE, llama, scaled_truth, written=scaled_written,
     given=lambda: {"compute_loss_func": scaled_and_not})  # fmt: skip


# ---- other tasks ----------------------------------------------------------------------------------------------------


class Speech(nn.Module):
    """Frames to letters, by connectionist temporal classification."""

    def __init__(self, reduction: str) -> None:
        super().__init__()
        self.reduction, self.mix, self.head = reduction, nn.Linear(6, WIDTH), nn.Linear(WIDTH, 10)

    def forward(self, input_values: Tensor, attention_mask: Tensor, labels: Any = None) -> Any:
        logits = self.head(torch.tanh(self.mix(input_values)))
        found = {"logits": logits}
        if labels is not None:
            counted = labels >= 0
            found["loss"] = F.ctc_loss(
                logits.log_softmax(-1).transpose(0, 1), labels[counted], attention_mask.sum(1), counted.sum(1),
                reduction=self.reduction, zero_infinity=True,
            )  # fmt: skip
        return found


def spoken(count: int = 32) -> list[Any]:
    draws = torch.Generator().manual_seed(8)
    made = []
    for number in range(count):
        length = (19, 8, 14, 26, 11, 9, 30, 16)[number % 8]
        values = torch.randn(length, 6, generator=draws, dtype=torch.float64)
        letters = torch.randint(1, 10, (2 + number % 5,), generator=draws)
        made.append({"input_values": values, "labels": letters})
    return made


def collate_speech(rows: list[Any]) -> Batch:
    pad = nn.utils.rnn.pad_sequence
    frames = [row["input_values"] for row in rows]
    return {
        "input_values": pad(frames, batch_first=True),
        "attention_mask": pad([torch.ones(len(each), dtype=torch.long) for each in frames], batch_first=True),
        "labels": pad([row["labels"] for row in rows], batch_first=True, padding_value=-100),
    }


for reduction, truth in {"sum": added_up(own_loss), "mean": as_written(own_loss)}.items():
    case(f"ctc, its {reduction}", CAUSE, lambda reduction=reduction: made(Speech, reduction), truth,
         written=as_written(own_loss), rows=spoken, collator=lambda: collate_speech)  # fmt: skip


class Segmenter(nn.Module):
    """A class for every pixel; 255 is nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Conv2d(3, 8, 3, padding=1), nn.Conv2d(8, CLASSES, 1)

    def forward(self, pixel_values: Tensor, labels: Any = None) -> Any:
        logits = self.two(torch.tanh(self.one(pixel_values)))
        found = {"logits": logits}
        if labels is not None:
            found["loss"] = F.cross_entropy(logits, labels, ignore_index=255)
        return found


def pictures(count: int = 32) -> list[Any]:
    draws = torch.Generator().manual_seed(9)
    made = []
    for number in range(count):
        labels = torch.randint(0, CLASSES, (6, 6), generator=draws)
        labels[: number % 6] = 255
        made.append({"pixel_values": torch.randn(3, 6, 6, generator=draws, dtype=torch.float64), "labels": labels})
    return made


def collate_pictures(rows: list[Any]) -> Batch:
    return {name: torch.stack([row[name] for row in rows]) for name in rows[0]}


def pixels(owner: Any, model: Any, batch: Batch) -> tuple[Tensor, Tensor]:
    logits = model(batch["pixel_values"])["logits"]
    labels = batch["labels"]
    return F.cross_entropy(logits, labels, ignore_index=255, reduction="sum"), (labels != 255).sum()


case("segmentation that ignores 255", CAUSE, lambda: made(Segmenter), pooled(pixels), written=as_written(own_loss),
     rows=pictures, collator=lambda: collate_pictures)  # fmt: skip


# ---- no labels at all -----------------------------------------------------------------------------------------------


class SemiSupervised(Pooled):
    """Learns from labels where there are any, and from two views of every sample."""

    def forward(self, input_ids: Tensor, attention_mask: Any = None, labels: Any = None) -> Any:
        one = self.head(self.first(input_ids, attention_mask))
        found = {"logits": one}
        if labels is not None:
            two = self.head(0.9 * self.first(input_ids, attention_mask).roll(1, -1))
            apart = (one.softmax(-1) - two.softmax(-1)).square().sum(-1)
            found["loss"] = (F.cross_entropy(one, labels, reduction="none") + apart).mean()
        return found


def some_labels(count: int = 32) -> list[Any]:
    """Four samples with labels, four without, and in the last update none with."""
    rows = classes(count)
    for number, row in enumerate(rows):
        if number % 8 >= 4 or number >= 24:
            row["labels"] = torch.tensor(-100)
    return rows


case("micro-batches without labels that teach something", CAUSE, lambda: made(SemiSupervised), by_samples(own_loss),
     rows=some_labels, written=as_written(own_loss))  # fmt: skip


def some_tokens(count: int = 32) -> list[Any]:
    """The same for tokens, whose mean over none does not exist."""
    rows = ragged(count)
    for number, row in enumerate(rows):
        if number % 8 >= 4:
            row["labels"][:] = -100
    return rows


case("micro-batches without labels that teach nothing", CAUSE, llama, pooled(tokens), rows=some_tokens)


class TokensAndViews(Around):
    """The same for tokens: a part that needs no labels, over samples."""

    def result(self, logits: Tensor, labels: Any) -> Any:
        found = {"logits": logits}
        if labels is not None:
            total, _ = summed(logits, labels)
            found["loss"] = total / len(labels) + logits[:, 0].logsumexp(-1).square().mean()
        return found


case("no labels, and a part over samples", CAUSE, lambda: made(TokensAndViews), by_samples(own_loss),
     rows=some_tokens, written=as_written(own_loss))  # fmt: skip


# ---- divided by the accumulation ------------------------------------------------------------------------------------


def divided(owner: Any, model: Any, batch: Batch) -> Tensor:
    labels = batch.pop("labels")
    return F.cross_entropy(logits_of(model(**batch)), labels) / owner.args.gradient_accumulation_steps


def divided_tokens(owner: Any, model: Any, batch: Batch) -> Tensor:
    total, count = tokens(owner, model, batch)
    return total / count / owner.args.gradient_accumulation_steps


def same_count(count: int = 32) -> list[Any]:
    """Every sample has one target, so that a mean of means is the mean."""
    rows = ragged(count)
    for row in rows:
        row["labels"][:-1] = -100
    return rows


case("divided by the accumulation already", CAUSE, bert, added_up(divided), rows=classes,
     trainer=trainer_with(divided))  # fmt: skip
case("tokens divided by the accumulation already", CAUSE, llama, added_up(divided_tokens), rows=same_count,
     trainer=trainer_with(divided_tokens))  # fmt: skip
