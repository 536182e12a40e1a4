"""What a model does only while it trains: a comparison in another mode does not see it."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from .cases import case
from .models import Around, Pooled, classes, made, own_loss, summed, tokens
from .reference import as_written, by_samples, pooled

CAUSE = "R1"


# ---- the batch doubled in forward -----------------------------------------------------------------------------------


def others(ids: Tensor) -> Tensor:
    """The same tokens with every third exchanged, as dropout would make two views of one sample."""
    third = torch.arange(ids.shape[-1]) % 3 == 1
    return torch.where(third & (ids > 2), (ids + 7) % 37 + 3, ids)


class RDrop(Around):
    """Two views of every sample in one forward, which must agree."""

    def forward(
        self, input_ids: Tensor, attention_mask: Any = None, labels: Any = None, position_ids: Any = None
    ) -> Any:
        if not self.training:
            return super().forward(input_ids, attention_mask, labels, position_ids)
        twice = {"attention_mask": attention_mask, "position_ids": position_ids}
        twice = {name: torch.cat([value, value]) for name, value in twice.items() if value is not None}
        logits = super().forward(torch.cat([input_ids, others(input_ids)]), **twice)["logits"]
        one, two = logits.chunk(2)
        loss, count = agreement(one, two, labels)
        return {"loss": loss / count, "logits": one}


def agreement(one: Tensor, two: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    first, count = summed(one, labels)
    second, _ = summed(two, labels)
    counted = (labels[:, 1:] != -100).unsqueeze(-1)
    apart = F.kl_div(one[:, :-1].log_softmax(-1), two[:, :-1].softmax(-1), reduction="none") * counted
    return first + second + apart.sum(), count


def r_drop_truth(owner: Any, model: RDrop, batch: dict[str, Any]) -> tuple[Tensor, Tensor]:
    labels, ids, mask = batch["labels"], batch["input_ids"], batch["attention_mask"]
    views = [Around.forward(model, each, mask)["logits"] for each in (ids, others(ids))]
    return agreement(*views, labels)


case("r-drop of tokens", CAUSE, lambda: made(RDrop), pooled(r_drop_truth))


class RDropClasses(Pooled):
    def forward(self, input_ids: Tensor, attention_mask: Any = None, labels: Any = None) -> Any:
        if not self.training:
            return super().forward(input_ids, attention_mask, labels)
        ids, mask = torch.cat([input_ids, others(input_ids)]), torch.cat([attention_mask] * 2)
        one, two = self.head(self.first(ids, mask)).chunk(2)
        apart = F.kl_div(one.log_softmax(-1), two.softmax(-1), reduction="batchmean")
        return {"loss": F.cross_entropy(one, labels) + F.cross_entropy(two, labels) + apart, "logits": one}


case("r-drop of classes", CAUSE, lambda: made(RDropClasses), by_samples(own_loss), rows=classes)


# ---- over the batch -------------------------------------------------------------------------------------------------


class Mixup(Pooled):
    """Every sample mixed with its neighbour in the batch."""

    def result(self, first: Tensor, labels: Any) -> Any:
        if not self.training:
            return super().result(first, labels)
        logits = self.head(0.7 * first + 0.3 * first.roll(1, 0))
        loss = 0.7 * F.cross_entropy(logits, labels) + 0.3 * F.cross_entropy(logits, labels.roll(1, 0))
        return {"loss": loss, "logits": logits}


case("mixup over the batch", CAUSE, lambda: made(Mixup), None, written=as_written(own_loss), rows=classes)


class MixedEmbeddings(Around):
    """Mixup of embeddings of tokens, while the targets stay."""

    def embedded(self, hidden: Tensor, mask: Any) -> Tensor:
        return 0.8 * hidden + 0.2 * hidden.flip(0) if self.training else hidden


case(
    "embeddings mixed over the batch", CAUSE, lambda: made(MixedEmbeddings), pooled(tokens),
    written=as_written(own_loss),
)  # fmt: skip


class Spread(Pooled):
    """Pulls the samples of a batch apart."""

    def result(self, first: Tensor, labels: Any) -> Any:
        found = super().result(first, labels)
        if self.training and labels is not None:
            found["loss"] = found["loss"] + 0.3 * (first - first.mean(0)).square().mean()
        return found


case("a regulariser over the batch", CAUSE, lambda: made(Spread), None, written=as_written(own_loss), rows=classes)


class Activity(Around):
    """A regulariser over every place of the padded batch, real or not."""

    def changed(self, hidden: Tensor, mask: Any) -> Tensor:
        self.activity = hidden.square().mean()
        return hidden

    def result(self, logits: Tensor, labels: Any) -> Any:
        found = super().result(logits, labels)
        if self.training and "loss" in found:
            found["loss"] = found["loss"] + 0.05 * self.activity
        return found


def activity(owner: Any, model: Any, batch: dict[str, Any]) -> tuple[Tensor, Tensor]:
    """Micro-batches weighed by their targets, which is what the loss is the mean of but for the regulariser."""
    count = (batch["labels"][:, 1:] != -100).sum()
    return own_loss(owner, model, batch) * count, count


case(
    "a regulariser over the padded batch", CAUSE, lambda: made(Activity), pooled(activity), written=as_written(own_loss)
)


class Normed(Pooled):
    """Batch normalisation without running statistics."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(16, track_running_stats=False).double()

    def result(self, first: Tensor, labels: Any) -> Any:
        return super().result(self.norm(first) if self.training else first, labels)


case("statistics of the batch", CAUSE, lambda: made(Normed), None, written=as_written(own_loss), rows=classes)


# ---- by the length of the row ---------------------------------------------------------------------------------------


class LengthNoise(Around):
    """Noise on embeddings that is the smaller the longer the rows are, made from the tokens themselves."""

    def embedded(self, hidden: Tensor, mask: Any) -> Tensor:
        if not self.training:
            return hidden
        noise = torch.sin(1e3 * hidden.detach())
        return hidden + 0.5 * noise / (hidden.shape[1] * hidden.shape[2]) ** 0.5


case(
    "noise scaled by length", CAUSE, lambda: made(LengthNoise), pooled(tokens), written=as_written(own_loss),
    says="loss|padd|length",
)  # fmt: skip


class RowDropout(Around):
    """Every fourth place of a row is left out while training, counted along the row."""

    def changed(self, hidden: Tensor, mask: Any) -> Tensor:
        if not self.training:
            return hidden
        return hidden * (torch.arange(hidden.shape[1]) % 4 != 2).unsqueeze(-1)


case("places left out, counted along the row", CAUSE, lambda: made(RowDropout), pooled(tokens))


class WidthGradient(Around):
    """The same loss, and a gradient that is divided by the width of the batch on its way back."""

    def changed(self, hidden: Tensor, mask: Any) -> Tensor:
        if self.training and hidden.requires_grad:
            hidden.register_hook(lambda gradient: gradient * 8 / gradient.shape[1])
        return hidden


case("a gradient scaled by the width", CAUSE, lambda: made(WidthGradient), pooled(tokens))


# ---- state carried from batch to batch ------------------------------------------------------------------------------


class Centred(Around):
    """Subtracts the mean of earlier batches: kept in a buffer, an attribute or a list, as the subclass says."""

    home = "buffer"

    def __init__(self) -> None:
        super().__init__()
        self.calls, self.bank = 0, []
        start = torch.zeros(16, dtype=torch.float64)
        if self.home == "buffer":
            self.register_buffer("mean", start, persistent=False)
        else:
            self.mean = start

    def changed(self, hidden: Tensor, mask: Any) -> Tensor:
        if not self.training:
            return hidden
        result = hidden - 0.5 * (sum(self.bank) / len(self.bank) if self.bank else self.mean)
        now = hidden.detach().mean((0, 1))
        self.calls += 1
        if self.home == "list":
            self.bank = [*self.bank[-2:], now]
        elif self.home == "buffer":
            self.mean.copy_(0.5 * self.mean + 0.5 * now)
        else:
            self.mean = 0.5 * self.mean + 0.5 * now
        return result


class CentredByAttribute(Centred):
    home = "attribute"


class CentredByList(Centred):
    home = "list"


for kind in (Centred, CentredByAttribute, CentredByList):
    case(
        f"state carried in a {kind.home}", CAUSE, lambda kind=kind: made(kind), pooled(tokens),
        written=as_written(own_loss), says="loss|state",
    )  # fmt: skip


class EverySecond(Around):
    """Something else in every second forward, by a counter in Python."""

    calls = 0

    def changed(self, hidden: Tensor, mask: Any) -> Tensor:
        if not self.training:
            return hidden
        self.calls += 1
        return hidden * (1.0 if self.calls % 2 else 0.5)


case(
    "every second forward is another", CAUSE, lambda: made(EverySecond), pooled(tokens), written=as_written(own_loss),
    says="loss|state|forward",
)  # fmt: skip


# ---- a branch more --------------------------------------------------------------------------------------------------


class Auxiliary(Around):
    """A second head and loss that only training has; nothing is wrong with it."""

    def __init__(self) -> None:
        super().__init__()
        self.second = nn.Linear(40, 40).double()

    def result(self, logits: Tensor, labels: Any) -> Any:
        found = super().result(logits, labels)
        if self.training and labels is not None:
            total, count = summed(self.second(logits), labels)
            found["loss"] = found["loss"] + 0.3 * total / count
        return found


def auxiliary_truth(owner: Any, model: Auxiliary, batch: dict[str, Any]) -> tuple[Tensor, Tensor]:
    labels = batch.pop("labels")
    logits = model(**batch)["logits"]
    (one, count), (two, _) = summed(logits, labels), summed(model.second(logits), labels)
    return one + 0.3 * two, count


case("a second head that only training has", CAUSE, lambda: made(Auxiliary), pooled(auxiliary_truth))


class Refusing(Around):
    """Runs in training only."""

    def forward(self, *given: Any, **named: Any) -> Any:
        assert self.training, "this model only trains"
        return super().forward(*given, **named)


case("a model that only trains", CAUSE, lambda: made(Refusing), pooled(tokens))


# ---- chance per sample ----------------------------------------------------------------------------------------------


class DropPath(nn.Module):
    """Leaves a branch out for whole samples, and counts how many it drew for."""

    def __init__(self, rate: float) -> None:
        super().__init__()
        self.drop_prob, self.drawn = rate, 0

    def forward(self, hidden: Tensor) -> Tensor:
        if not self.training or not self.drop_prob:
            return hidden
        self.drawn += len(hidden)
        kept = torch.rand(len(hidden), *[1] * (hidden.dim() - 1), dtype=hidden.dtype) >= self.drop_prob
        return hidden * kept / (1 - self.drop_prob)


class WithDropPath(Around):
    def __init__(self) -> None:
        super().__init__()
        self.branch, self.path = nn.Linear(16, 16).double(), DropPath(0.4)

    def changed(self, hidden: Tensor, mask: Any) -> Tensor:
        return hidden + self.path(torch.tanh(self.branch(hidden)))


def seeded(owner: Any, number: int) -> None:
    torch.manual_seed(1000 + number)


def draws_per_sample(found: Any, split: Any) -> str | None:
    """Whether every sample had a draw of its own, and nothing else had one."""
    drawn, samples = found.trainer.model.path.drawn, 8 * len(found.gradients)
    return None if drawn == samples else f"{drawn} draws for {samples} samples"


case("drop path", CAUSE, lambda: made(WithDropPath), pooled(tokens), act=seeded, judge=draws_per_sample)


class Trunk(Pooled):
    """Leaves whole samples out of a branch, counted by the first dimension of whatever comes."""

    def __init__(self) -> None:
        super().__init__()
        self.branch, self.path = nn.Linear(16, 16).double(), DropPath(0.4)
        self.bert.encoder.layer[0].output.register_module("path", self.path)

    def first(self, input_ids: Tensor, attention_mask: Any) -> Tensor:
        layer = self.bert.encoder.layer[0]
        hook = layer.intermediate.register_forward_hook(lambda module, given, result: self.path(result))
        try:
            return super().first(input_ids, attention_mask)
        finally:
            hook.remove()


case(
    "drop path inside an encoder", CAUSE, lambda: made(Trunk), by_samples(own_loss), rows=classes, act=seeded,
    judge=draws_per_sample,
)  # fmt: skip


class LengthChance(LengthNoise):
    """The same noise, drawn."""

    def embedded(self, hidden: Tensor, mask: Any) -> Tensor:
        if not self.training:
            return hidden
        return hidden + torch.rand_like(hidden) / (hidden.shape[1] * hidden.shape[2]) ** 0.5


case(
    "drawn noise scaled by length", CAUSE, lambda: made(LengthChance), pooled(tokens), written=as_written(own_loss),
    act=seeded, says="loss|padd|length",
)  # fmt: skip
