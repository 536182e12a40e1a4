"""Cases made of parts: what the model does, what the loss is, what the data are, what happens meanwhile."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from loopwright import Trainer

from .cases import Case
from .later import to_the_left
from .means import trainer_with
from .models import Around, changing, collate, logits_of, made, per_sequence, summed
from .outside import of_places, of_samples
from .reference import Batch, UpdateLoss, added_up, as_written, by_samples, pooled

# ---- what a model does ----------------------------------------------------------------------------------------------


class Twisted(Around):
    """A language model with one peculiarity, in training only or always."""

    twist, only_training = "none", False

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Parameter(torch.ones((), dtype=torch.float64))
        self.register_buffer("mean", torch.zeros(16, dtype=torch.float64))
        self.calls, self.strength = 0, 0.3
        self.over = "tokens"
        self.extra: dict[str, Any] = {}

    def forward(
        self,
        input_ids: Tensor,
        attention_mask: Any = None,
        labels: Any = None,
        position_ids: Any = None,
        sample_weight: Any = None,
        values: Any = None,
    ) -> Any:
        self.extra = {"sample_weight": sample_weight, "values": values}
        return super().forward(input_ids, attention_mask, labels, position_ids)

    def embedded(self, hidden: Tensor, mask: Any) -> Tensor:
        values = self.extra["values"]
        return hidden if values is None else hidden + values[:, :, None]

    def changed(self, hidden: Tensor, mask: Any) -> Tensor:
        hidden = hidden * self.gate
        if self.extra["sample_weight"] is not None:
            hidden = hidden * self.extra["sample_weight"][:, None, None]
        if self.only_training and not self.training:
            return hidden
        return TWISTS[self.twist](self, hidden)

    def result(self, logits: Tensor, labels: Any) -> Any:
        found = {"logits": logits}
        if labels is not None:
            found["loss"] = LOSSES[self.over].of_logits(logits, labels)
        return found


def _state(model: Twisted, hidden: Tensor) -> Tensor:
    result = hidden - 0.5 * model.mean
    if model.training:
        model.mean.copy_(0.5 * model.mean + 0.5 * hidden.detach().mean((0, 1)))
    return result


def _counter(model: Twisted, hidden: Tensor) -> Tensor:
    model.calls += 1
    return hidden * (1.0 if model.calls % 3 else 0.5)


def _backward(model: Twisted, hidden: Tensor) -> Tensor:
    if hidden.requires_grad:
        hidden.register_hook(lambda gradient: gradient * 4 / gradient.shape[1])
    return hidden


TWISTS: dict[str, Callable[[Twisted, Tensor], Tensor]] = {
    "none": lambda model, hidden: hidden,
    "neighbours": lambda model, hidden: hidden + model.strength * hidden.flip(0),
    "mean of the batch": lambda model, hidden: hidden - model.strength * hidden.mean(0, keepdim=True),
    "mean of the row": lambda model, hidden: hidden - model.strength * hidden.mean(1, keepdim=True),
    "place in the row": lambda model, hidden: hidden * (1 + 0.1 * torch.arange(hidden.shape[1]).double()[:, None]),
    "width": lambda model, hidden: hidden * (1 + 0.05 * hidden.shape[1]),
    "many rows": lambda model, hidden: hidden * 0.5 if len(hidden) > 4 else hidden,
    "long rows": lambda model, hidden: hidden * 0.5 if hidden.shape[1] > 12 else hidden,
    "state": _state,
    "counter": _counter,
    "backward": _backward,
    "first row": lambda model, hidden: torch.cat([hidden[:1] * 2, hidden[1:]]),
}


# ---- what a loss is -------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Loss:
    """A loss of logits and labels, and that of a whole update from the losses of its micro-batches."""

    of_logits: Callable[[Tensor, Tensor], Tensor]
    parts: Callable[[Tensor, Tensor], tuple[Tensor, Any]] | None
    """A sum and what it is divided by, where an update's loss is defined."""


def _tokens(logits: Tensor, labels: Tensor) -> Tensor:
    total, count = summed(logits, labels)
    return total / count


def _sequences(logits: Tensor, labels: Tensor) -> tuple[Tensor, int]:
    return per_sequence(logits, labels).sum(), len(labels)


def _hardest(logits: Tensor, labels: Tensor) -> Tensor:
    return per_sequence(logits, labels).topk(max(1, len(labels) // 2)).values.mean()


def _unshifted(logits: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    return summed(logits, labels, shift=False)


def _mean(parts: Callable[..., tuple[Tensor, Any]]) -> Callable[[Tensor, Tensor], Tensor]:
    def loss(logits: Tensor, labels: Tensor) -> Tensor:
        total, count = parts(logits, labels)
        return total / count

    return loss


LOSSES: dict[str, Loss] = {
    "tokens": Loss(_tokens, summed),
    "tokens without a shift": Loss(_mean(_unshifted), _unshifted),
    "sequences": Loss(_mean(_sequences), _sequences),
    "a sum": Loss(lambda logits, labels: summed(logits, labels)[0] / 10, None),
    "the hardest": Loss(_hardest, None),
    "a root": Loss(lambda logits, labels: _tokens(logits, labels).sqrt(), None),
}
HOMES = ("model", "compute_loss", "compute_loss_func")


def update_loss(over: str) -> tuple[UpdateLoss | None, UpdateLoss]:
    """By definition, and as written."""
    loss = LOSSES[over]

    def one(owner: Any, model: Any, batch: Batch) -> Tensor:
        labels = batch.pop("labels")
        return loss.of_logits(logits_of(model(**batch)), labels)

    def parts(owner: Any, model: Any, batch: Batch) -> tuple[Tensor, Any]:
        labels = batch.pop("labels")
        assert loss.parts is not None
        return loss.parts(logits_of(model(**batch)), labels)

    if over == "a sum":
        return added_up(one), as_written(one)
    if loss.parts is None:
        return None, as_written(one)
    exact: UpdateLoss = by_samples(one) if over == "sequences" else pooled(parts)
    return exact, as_written(one)


# ---- what the data are ----------------------------------------------------------------------------------------------


def _left(batch: Batch) -> Batch:
    return to_the_left(batch)


def _holes(batch: Batch) -> Batch:
    batch["attention_mask"][:, 1] = 0
    return batch


def _outside(batch: Batch) -> Batch:
    labels = batch["labels"].clone()
    for row, length in enumerate(batch["attention_mask"].sum(1).tolist()):
        labels[row, length : length + 1] = 2
    return {**batch, "labels": labels}


def _wider(batch: Batch) -> Batch:
    width = batch["input_ids"].shape[1] + 5
    fill = {"labels": -100}
    return {name: nn.functional.pad(value, (0, width - value.shape[1]), value=fill.get(name, 0))
            for name, value in batch.items()}  # fmt: skip


def _weights(batch: Batch) -> Batch:
    return {**batch, "sample_weight": 0.5 + of_samples(batch).abs()}


def _values(batch: Batch) -> Batch:
    return {**batch, "values": of_places(batch)}


def _no_mask(batch: Batch) -> Batch:
    return {name: value for name, value in batch.items() if name != "attention_mask"}


def _few_labels(batch: Batch) -> Batch:
    labels = batch["labels"].clone()
    labels[: len(labels) // 2, :-1] = -100
    return {**batch, "labels": labels}


def _first_ignored(batch: Batch) -> Batch:
    labels = batch["labels"].clone()
    labels[:, 0] = -100
    return {**batch, "labels": labels}


ODD: dict[str, Callable[[Batch], Batch]] = {
    "nothing": dict,
    "padding on the left": _left,
    "holes": _holes,
    "targets outside the mask": _outside,
    "wider": _wider,
    "weights of samples": _weights,
    "values of places": _values,
    "no mask": _no_mask,
    "few labels": _few_labels,
    "no first targets": _first_ignored,
}


# ---- what happens meanwhile -----------------------------------------------------------------------------------------


def _freeze(owner: Any, number: int) -> None:
    owner.model.inner.model.layers.requires_grad_(number != 2)


def _eval(owner: Any, number: int) -> None:
    owner.model.eval()


def _stronger(owner: Any, number: int) -> None:
    owner.model.strength = 0.1 * number


def _late(owner: Any, number: int) -> None:
    """The peculiarity comes with the third update."""
    owner.model.strength = 0.0 if number < 2 else 0.4


def _shrink(owner: Any, number: int) -> None:
    with torch.no_grad():
        owner.model.gate.mul_(0.9)


ACTS: dict[str, Any] = {
    "nothing": None, "freezing": _freeze, "eval()": _eval, "a stronger twist": _stronger, "a late twist": _late,
    "a smaller weight": _shrink,
}  # fmt: skip


def _hook(owner: Any) -> None:
    owner.model.inner.model.embed_tokens.register_forward_hook(lambda module, given, result: result * 1.1)


def _width_hook(owner: Any) -> None:
    owner.model.inner.model.embed_tokens.register_forward_hook(
        lambda module, given, result: result * (1 + 0.05 * result.shape[1])
    )


def _gradient_hook(owner: Any) -> None:
    owner.model.inner.lm_head.weight.register_hook(lambda gradient: 0.5 * gradient)


HOOKS: dict[str, Any] = {"nothing": None, "a hook": _hook, "a hook by width": _width_hook,
                         "a hook on a gradient": _gradient_hook}  # fmt: skip


# ---- together -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Recipe:
    """One of each."""

    twist: str = "none"
    only_training: bool = False
    over: str = "tokens"
    home: str = "model"
    lengths: tuple[int, ...] = (9, 13, 14, 11, 5, 2, 4, 3)
    side: str = "right"
    width: int = 0
    odd: str = "nothing"
    odd_update: int = 1
    act: str = "nothing"
    hook: str = "nothing"
    clip: float = 0.0

    def rows(self) -> list[Any]:
        draws = torch.Generator().manual_seed(21)
        made = []
        for number in range(32):
            ids = torch.randint(3, 40, (self.lengths[number % len(self.lengths)],), generator=draws)
            made.append({"input_ids": ids, "labels": ids.clone()})
        return made

    def collator(self) -> Any:
        def base(rows: list[Any]) -> Batch:
            return collate(rows, left=self.side == "left", width=self.width)

        return changing(lambda batch, update: ODD[self.odd](batch) if update == self.odd_update else batch, base)()

    def make(self) -> nn.Module:
        model: Any = made(Twisted)
        model.twist, model.only_training = self.twist, self.only_training
        model.over = self.over if self.home == "model" else "tokens"
        return model

    def case(self) -> Case:
        loss, written = update_loss(self.over)
        more: dict[str, Any] = {}
        if self.home == "compute_loss":
            more["trainer"] = _trainer_over(self.over)
        elif self.home == "compute_loss_func":
            of_logits = LOSSES[self.over].of_logits
            more["given"] = lambda: {"compute_loss_func": lambda outputs, labels: of_logits(logits_of(outputs), labels)}
        return Case(
            "recipe", "grid", self.make, loss, written=written, rows=self.rows, collator=self.collator,
            act=ACTS[self.act], begin=HOOKS[self.hook], clip=self.clip, says="loss|state|model", **more,
        )  # fmt: skip


def _trainer_over(over: str) -> type[Trainer]:
    def one(owner: Any, model: Any, batch: Batch) -> Tensor:
        labels = batch.pop("labels")
        return LOSSES[over].of_logits(logits_of(model(**batch)), labels)

    return trainer_with(one)
