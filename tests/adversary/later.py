"""What the first update does not show: what comes later is another thing."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from .cases import case
from .models import (
    Around,
    Pooled,
    changing,
    classes,
    collate,
    gpt2,
    llama,
    logits_of,
    made,
    own_loss,
    per_sequence,
    ragged,
    tokens,
    unshifted,
)
from .reference import as_written, by_samples, pooled

CAUSE = "R3"
EVEN_FIRST = (6,) * 8
"""Equally long samples, whose order no layout changes."""


def wide(rows: list[Any]) -> Any:
    return collate(rows, width=16)


# ---- pairs of rows --------------------------------------------------------------------------------------------------


class Pairs(Pooled):
    """Rows come in pairs, the better one first."""

    def result(self, first: Tensor, labels: Any) -> Any:
        scores = self.head(first)[:, 0]
        if labels is None:
            return {"logits": scores}
        return {"loss": -F.logsigmoid(scores[0::2] - scores[1::2]).mean(), "logits": scores}


def pairs() -> list[Any]:
    return classes(32, lengths=EVEN_FIRST + (11, 3, 2, 9, 14, 5, 4, 12) * 3)


case("pairs of rows of unequal length", CAUSE, lambda: made(Pairs), by_samples(own_loss), rows=pairs,
     collator=lambda: wide, written=as_written(own_loss))  # fmt: skip


class TokenPairs(Around):
    """The same with rows of tokens: the first of two must be likelier."""

    def result(self, logits: Tensor, labels: Any) -> Any:
        if labels is None:
            return {"logits": logits}
        each = -per_sequence(logits, labels)
        return {"loss": -F.logsigmoid(each[0::2] - each[1::2]).mean(), "logits": logits}


case("pairs of rows of tokens", CAUSE, lambda: made(TokenPairs), by_samples(own_loss),
     rows=lambda: ragged(32, lengths=EVEN_FIRST + (11, 3, 2, 9, 14, 5, 4, 12) * 3), collator=lambda: wide,
     written=as_written(own_loss))  # fmt: skip


# ---- a mean over sequences ------------------------------------------------------------------------------------------


def over_sequences(logits: Tensor, labels: Tensor, vocab_size: int, **kwargs: Any) -> Tensor:
    return per_sequence(logits, labels).mean()


def llama_over_sequences() -> nn.Module:
    model = llama()
    model.loss_function = over_sequences
    return model


def sequence_means(owner: Any, model: Any, batch: dict[str, Any]) -> Tensor:
    labels = batch.pop("labels")
    return per_sequence(logits_of(model(**batch)), labels).mean()


def same_targets_first() -> list[Any]:
    """In the first update every sample has one target, however long it is."""
    rows = ragged(32)
    for row in rows[:8]:
        row["labels"][:-1] = -100
    return rows


for name, rows in {"": ragged, ", seen later": same_targets_first}.items():
    case(f"loss_function as a mean over sequences{name}", CAUSE, llama_over_sequences, by_samples(sequence_means),
         rows=rows, written=as_written(sequence_means))  # fmt: skip


# ---- sides and positions --------------------------------------------------------------------------------------------


def to_the_left(batch: dict[str, Tensor]) -> dict[str, Tensor]:
    moved = {name: value.clone() for name, value in batch.items()}
    for row, length in enumerate(batch["attention_mask"].sum(1).tolist()):
        for value in moved.values():
            if value.dim() > 1:
                value[row] = value[row].roll(-length)
    return moved


def left_later(batch: dict[str, Tensor], update: int) -> dict[str, Tensor]:
    return to_the_left(batch) if update else batch


def left_always(batch: dict[str, Tensor], update: int) -> dict[str, Tensor]:
    return to_the_left(batch)


for name, change in {"later": left_later, "always": left_always}.items():
    for first in (0, 1):  # with and without a target that padding is asked for
        case(f"padding on the left {name}, learned positions, {first} ignored", CAUSE, gpt2, pooled(tokens),
             collator=changing(change), rows=lambda first=first: ragged(32, ignored=first))  # fmt: skip
        case(f"padding on the left {name}, rotary positions, {first} ignored", CAUSE, llama, pooled(tokens),
             collator=changing(change), rows=lambda first=first: ragged(32, ignored=first))  # fmt: skip


def unpadded_first(batch: dict[str, Tensor], update: int) -> dict[str, Tensor]:
    """No padding at all at first: every row is cut to the shortest."""
    if update:
        return to_the_left(batch)
    shortest = int(batch["attention_mask"].sum(1).min())
    return {name: value[:, :shortest].contiguous() for name, value in batch.items()}


case("no padding at first, later on the left", CAUSE, gpt2, pooled(tokens), collator=changing(unpadded_first))


# ---- a shift that shows later ---------------------------------------------------------------------------------------


def shiftless(inner: type[nn.Module]) -> type[nn.Module]:
    class UnshiftedForCausalLM(inner):  # type: ignore[misc, valid-type]
        """Named like a model of next tokens, and learns its own tokens."""

        def result(self, logits: Tensor, labels: Any) -> Any:
            found = {"logits": logits}
            if labels is not None:
                found["loss"] = F.cross_entropy(logits.reshape(-1, logits.shape[-1]), labels.reshape(-1))
            return found

    return UnshiftedForCausalLM


def first_ignored_first() -> list[Any]:
    rows = ragged(32)
    for row in rows[:8]:
        row["labels"][0] = -100
    return rows


for name, rows in {"later": first_ignored_first, "at once": ragged}.items():
    case(f"no shift, which shows {name}", CAUSE, lambda: made(shiftless(Around)), pooled(unshifted), rows=rows)
    case(f"a shift, which shows {name}", CAUSE, llama, pooled(tokens), rows=rows)
    case(f"a shift nobody guesses, which shows {name}", CAUSE, lambda: made(Around), pooled(tokens), rows=rows)


# ---- others ---------------------------------------------------------------------------------------------------------


def holes_later(batch: dict[str, Tensor], update: int) -> dict[str, Tensor]:
    if update:
        batch["attention_mask"][:, 1] = 0
    return batch


def no_mask_later(batch: dict[str, Tensor], update: int) -> dict[str, Tensor]:
    """The mask is left out, and what fills rows up is text."""
    if update:
        batch = {name: value for name, value in batch.items() if name != "attention_mask"}
    return batch


def other_padding_later(batch: dict[str, Tensor], update: int) -> dict[str, Tensor]:
    padding = batch["attention_mask"] == 0
    batch["input_ids"] = batch["input_ids"].masked_fill(padding, 2 if update else 0)
    return batch


def wider_later(batch: dict[str, Tensor], update: int) -> dict[str, Tensor]:
    grown = {"labels": -100}
    return {name: F.pad(value, (0, 3 * update), value=grown.get(name, 0)) for name, value in batch.items()}


def positions_later(batch: dict[str, Tensor], update: int) -> dict[str, Tensor]:
    width = batch["input_ids"].shape[1]
    return {**batch, "position_ids": (torch.arange(width) + (3 if update else 0)).expand_as(batch["input_ids"]).clone()}


class ByToken(Around):
    """Knows padding by its token, and learns from it."""

    def embedded(self, hidden: Tensor, mask: Any) -> Tensor:
        return hidden + 0.1 * hidden.mean(1, keepdim=True)


for name, change in {
    "holes in the mask": holes_later, "no mask": no_mask_later, "another token in the padding": other_padding_later,
    "wider batches": wider_later, "other positions": positions_later,
}.items():  # fmt: skip
    case(f"{name}, later", CAUSE, llama, pooled(tokens), collator=changing(change))
case("a mean over the padded row", CAUSE, lambda: made(ByToken), pooled(tokens), written=as_written(own_loss))


class Awakening(Around):
    """Changes after some forwards of training, as a schedule inside a model does; asked by the step it is told."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("step", torch.zeros((), dtype=torch.long))

    def changed(self, hidden: Tensor, mask: Any) -> Tensor:
        return hidden + 0.3 * hidden.mean(1, keepdim=True) if int(self.step) >= 2 else hidden


def tell_step(owner: Any, number: int) -> None:
    owner.model.step.fill_(number)


case("a model that changes with the step", CAUSE, lambda: made(Awakening), pooled(tokens), act=tell_step,
     written=as_written(own_loss), says="loss|update|differ")  # fmt: skip


class Threshold(Around):
    """Something else for samples longer than all of the first update."""

    def changed(self, hidden: Tensor, mask: Any) -> Tensor:
        return hidden * 0.5 if hidden.shape[1] > 14 else hidden


case("longer than ever, later", CAUSE, lambda: made(Threshold), pooled(tokens),
     rows=lambda: ragged(32, lengths=(9, 3, 14, 6, 5, 12, 4, 8) * 2 + (20, 3, 14, 6, 5, 18, 4, 8) * 2))  # fmt: skip
case("wider than long", CAUSE, lambda: made(Threshold), pooled(tokens),
     collator=lambda: lambda rows: collate(rows, width=18))  # fmt: skip
