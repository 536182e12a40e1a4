"""Losses that ask for gradients, logits used twice, odd signatures and masks, counters, models that change."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from .cases import case
from .means import trainer_with
from .models import Around, changing, classes, collate, llama, logits_of, made, own_loss, ragged, summed, tokens
from .reference import Batch, as_written, by_samples, pooled

CAUSE = "besides"


def user(name: str, one: Any, truth: Any, make: Any = llama, **more: Any) -> None:
    case(name, CAUSE, make, truth, trainer=trainer_with(one), written=as_written(one), **more)


def mean(parts: Any) -> Any:
    """The loss of a micro-batch from its sum and its count."""

    def one(owner: Any, model: Any, batch: Batch) -> Tensor:
        total, count = parts(owner, model, batch)
        return total / count

    return one


# ---- losses that ask for gradients ----------------------------------------------------------------------------------


def embedded(model: Any, batch: Batch) -> Tensor:
    return model.get_input_embeddings()(batch["input_ids"])


def run(model: Any, hidden: Tensor, batch: Batch) -> Tensor:
    return logits_of(model(inputs_embeds=hidden, attention_mask=batch["attention_mask"]))


def unit(direction: Tensor) -> Tensor:
    """Of length one for each sample."""
    return direction / direction.flatten(1).norm(dim=1)[:, None, None].clamp(min=1e-12)


def fgm(owner: Any, model: Any, batch: Batch) -> tuple[Tensor, Tensor]:
    """Learns from embeddings moved against the loss."""
    clean = embedded(model, batch)
    total, count = summed(run(model, clean, batch), batch["labels"])
    start = clean.detach().requires_grad_()
    (against,) = torch.autograd.grad(summed(run(model, start, batch), batch["labels"])[0], start)
    moved, _ = summed(run(model, clean + 0.5 * unit(against), batch), batch["labels"])
    return total + moved, count


def apart(one: Tensor, two: Tensor, labels: Tensor) -> Tensor:
    counted = (labels[:, 1:] != -100).unsqueeze(-1)
    each = F.kl_div(two[:, :-1].log_softmax(-1), one[:, :-1].softmax(-1), reduction="none")
    return (each * counted).sum()


def vat(owner: Any, model: Any, batch: Batch) -> tuple[Tensor, Tensor]:
    """Virtual adversarial training: the direction in which the answer changes most, without labels."""
    clean = embedded(model, batch)
    logits = run(model, clean, batch)
    total, count = summed(logits, batch["labels"])
    start = (1e-2 * unit(torch.sin(9e2 * clean.detach()))).requires_grad_()
    there = apart(logits.detach(), run(model, clean.detach() + start, batch), batch["labels"])
    (direction,) = torch.autograd.grad(there, start)
    return total + apart(logits.detach(), run(model, clean + 0.5 * unit(direction), batch), batch["labels"]), count


def smart(owner: Any, model: Any, batch: Batch) -> tuple[Tensor, Tensor]:
    """Smoothness both ways, around every sample."""
    clean = embedded(model, batch)
    logits = run(model, clean, batch)
    total, count = summed(logits, batch["labels"])
    start = (clean.detach() + 1e-2 * torch.sin(7e2 * clean.detach())).requires_grad_()
    (direction,) = torch.autograd.grad(apart(logits.detach(), run(model, start, batch), batch["labels"]), start)
    moved = run(model, start.detach() + 1e-2 * unit(direction), batch)
    return total + apart(logits, moved, batch["labels"]) + apart(moved, logits, batch["labels"]), count


for name, parts in {"fgm": fgm, "vat": vat, "smart": smart}.items():
    user(f"{name} in compute_loss", mean(parts), pooled(parts))


def in_place_fgm(owner: Any, model: Any, batch: Batch) -> tuple[Tensor, Tensor]:
    """As often written: the embedding matrix itself is moved, and moved back."""
    weight = model.get_input_embeddings().weight
    labels = batch.pop("labels")
    total, count = summed(logits_of(model(**batch)), labels)
    (against,) = torch.autograd.grad(total, weight, retain_graph=True)
    step = (0.3 * against / against.norm()).detach()
    moved = torch.func.functional_call(model, {NAME: weight + step}, (), dict(batch))
    return total + summed(logits_of(moved), labels)[0], count


NAME = "model.embed_tokens.weight"
user("the whole embedding moved against the loss", mean(in_place_fgm), None)


def penalised(owner: Any, model: Any, batch: Batch) -> Tensor:
    """A penalty on the gradient, which is differentiated again."""
    labels, weight = batch["labels"], model.lm_head.weight
    outputs = model(**batch)
    (gradient,) = torch.autograd.grad(outputs.loss, weight, create_graph=True)
    assert labels is not None
    return outputs.loss + gradient.square().sum()


def penalised_embeddings(owner: Any, model: Any, batch: Batch) -> Tensor:
    labels = batch.pop("labels")
    total, count = summed(logits_of(model(**batch)), labels)
    (gradient,) = torch.autograd.grad(total / count, model.get_input_embeddings().weight, create_graph=True)
    return total / count + gradient.square().sum()


def eager() -> nn.Module:
    return llama(attn_implementation="eager")


user("a gradient penalty on the model's loss", penalised, None, eager)
user("a gradient penalty on embeddings", penalised_embeddings, None, eager)


def by_logits(owner: Any, model: Any, batch: Batch) -> Tensor:
    """Asks for the gradient with respect to the logits, and follows it a second time."""
    outputs = model(**batch)
    (gradient,) = torch.autograd.grad(outputs.loss, outputs.logits, retain_graph=True)
    return outputs.loss + (gradient.detach() * outputs.logits).sum()


def by_logits_parts(owner: Any, model: Any, batch: Batch) -> tuple[Tensor, Tensor]:
    """What follows the gradient a second time is the gradient."""
    total, count = tokens(owner, model, batch)
    return 2 * total, count


user("the gradient by the logits", by_logits, pooled(by_logits_parts))


def kept_logits(owner: Any, model: Any, batch: Batch) -> Tensor:
    outputs = model(**batch)
    outputs.logits.retain_grad()
    return outputs.loss + 0.0 * outputs.logits.sum()


user("logits that keep their gradient", kept_logits, pooled(tokens))


# ---- logits used twice ----------------------------------------------------------------------------------------------


def second_targets(batch: Batch) -> Tensor:
    return torch.where(batch["labels"] == -100, -100, (batch["labels"] * 7) % 37 + 3)


def second_entropy(owner: Any, model: Any, batch: Batch) -> Tensor:
    others = second_targets(batch)
    outputs = model(**batch)
    total, count = summed(outputs.logits, others)
    return outputs.loss + 0.5 * total / count


def second_parts(owner: Any, model: Any, batch: Batch) -> tuple[Tensor, Tensor]:
    others, labels = second_targets(batch), batch.pop("labels")
    logits = logits_of(model(**batch))
    (one, count), (two, _) = summed(logits, labels), summed(logits, others)
    return one + 0.5 * two, count


user("a second cross entropy on other targets", second_entropy, pooled(second_parts))


class SecondEntropy(nn.Module):
    """The same inside a model, which asks for the loss of one model twice."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = llama()
        self.config = self.inner.config

    def get_output_embeddings(self) -> Any:
        return self.inner.lm_head

    def forward(
        self, input_ids: Tensor, attention_mask: Any = None, labels: Any = None, position_ids: Any = None
    ) -> Any:
        outputs = self.inner(input_ids, attention_mask=attention_mask, labels=labels, position_ids=position_ids)
        if labels is not None:
            logits, others = outputs.logits[:, :-1], second_targets({"labels": labels})[:, 1:]
            outputs["loss"] = outputs.loss + 0.5 * F.cross_entropy(logits.reshape(-1, 40), others.reshape(-1))
        return outputs


case("a second cross entropy inside the model", CAUSE, lambda: made(SecondEntropy), pooled(second_parts))


def scores_of_logits(owner: Any, model: Any, batch: Batch) -> Tensor:
    """Cross entropy of part of the logits: the first ten classes only, where those are the targets."""
    outputs = model(**batch)
    labels = batch["labels"][:, 1:]
    few = torch.where(labels < 10, labels, -100)
    return outputs.loss + F.cross_entropy(outputs.logits[:, :-1, :10].reshape(-1, 10), few.reshape(-1),
                                          reduction="sum") / (labels != -100).sum()  # fmt: skip


def scores_parts(owner: Any, model: Any, batch: Batch) -> tuple[Tensor, Tensor]:
    labels = batch.pop("labels")
    logits = logits_of(model(**batch))
    total, count = summed(logits, labels)
    few = torch.where(labels < 10, labels, -100)
    return total + summed(logits[..., :10], few)[0], count


user("cross entropy of some of the logits", scores_of_logits, pooled(scores_parts))


def fewer_targets(logits: Tensor, batch: Batch) -> tuple[Tensor, Tensor]:
    """Other targets, and fewer of them."""
    return summed(logits, torch.where(batch["labels"] < 15, -100, batch["labels"]))


def own_tokens(logits: Tensor, batch: Batch) -> tuple[Tensor, Tensor]:
    """The same tokens, not shifted."""
    return summed(logits, batch["labels"], shift=False)


def last_token(logits: Tensor, batch: Batch) -> tuple[Tensor, Tensor]:
    """One target for each sample, from its first token."""
    total = F.cross_entropy(logits[:, 0], batch["input_ids"][:, 0], reduction="sum")
    return total, torch.tensor(len(logits))


def plain_mean(parts: Any) -> Any:
    """As users write it: what F.cross_entropy divides by is its own affair."""

    def one(owner: Any, model: Any, batch: Batch) -> Tensor:
        outputs = model(**batch)
        logits, labels = outputs.logits, batch["labels"]
        if parts is fewer_targets:
            fewer = torch.where(labels < 15, -100, labels)[:, 1:]
            return outputs.loss + 0.5 * F.cross_entropy(logits[:, :-1].reshape(-1, 40), fewer.reshape(-1))
        if parts is own_tokens:
            return outputs.loss + 0.5 * F.cross_entropy(logits.view(-1, 40), labels.view(-1))
        return outputs.loss + 0.5 * F.cross_entropy(logits[:, 0], batch["input_ids"][:, 0])

    return one


def both(parts: Any) -> Any:
    """Each of the two divided by its own targets, over the whole update."""

    def loss(loop: Any, batches: list[Batch]) -> Tensor:
        def other(owner: Any, model: Any, batch: Batch) -> tuple[Tensor, Tensor]:
            given = {name: value for name, value in batch.items() if name != "labels"}
            return parts(logits_of(model(**given)), batch)

        return pooled(tokens)(loop, batches) + 0.5 * pooled(other)(loop, batches)

    return loss


for parts in (fewer_targets, own_tokens, last_token):
    user(f"a second cross entropy, {parts.__name__.replace('_', ' ')}", plain_mean(parts), both(parts))


# ---- signatures and masks -------------------------------------------------------------------------------------------


class Loose(Around):
    """Takes what comes."""

    def forward(self, input_ids: Tensor, **kw: Any) -> Any:  # type: ignore[override]
        return super().forward(input_ids, kw.get("attention_mask"), kw.get("labels"), kw.get("position_ids"))


case("forward(input_ids, **kw)", CAUSE, lambda: made(Loose), pooled(tokens), options={"remove_unused_columns": False})


class Looser(Around):
    def forward(self, **kw: Any) -> Any:  # type: ignore[override]
        return super().forward(kw["input_ids"], kw.get("attention_mask"), kw.get("labels"), kw.get("position_ids"))


case("forward(**kw)", CAUSE, lambda: made(Looser), pooled(tokens), options={"remove_unused_columns": False})
for kind in (torch.bfloat16, torch.float32, torch.bool, torch.uint8):

    def cast(batch: dict[str, Tensor], update: int, kind: torch.dtype = kind) -> dict[str, Tensor]:
        return {**batch, "attention_mask": batch["attention_mask"].to(kind)}

    case(f"a mask of {kind}", CAUSE, llama, pooled(tokens), collator=changing(cast))


# ---- counters -------------------------------------------------------------------------------------------------------


def counted(owner: Any, model: Any, batch: Batch) -> tuple[Tensor, Tensor]:
    """A warm-up by a counter on the object that computes the loss."""
    owner.asked = getattr(owner, "asked", 0) + 1
    total, count = tokens(owner, model, batch)
    return total * (1 + 0.1 * owner.asked), count


user("a counter on the trainer", mean(counted), pooled(counted), says="loss|state")


class Counting(Around):
    """A warm-up by a counter that the model keeps in a dictionary."""

    def __init__(self) -> None:
        super().__init__()
        self.figures = {"calls": 0, "seen": [0.0]}

    def result(self, logits: Tensor, labels: Any) -> Any:
        found = super().result(logits, labels)
        if labels is not None:
            self.figures["calls"] += 1  # type: ignore[operator]
            found["loss"] = found["loss"] * (1 + 0.1 * self.figures["calls"])  # type: ignore[operator]
        return found


def counted_in_model(owner: Any, model: Any, batch: Batch) -> tuple[Tensor, Tensor]:
    model.figures["calls"] += 1
    total, count = tokens(owner, model, batch)
    return total * (1 + 0.1 * model.figures["calls"]), count


case("a counter in a dictionary of the model", CAUSE, lambda: made(Counting), pooled(counted_in_model),
     written=as_written(own_loss), says="loss|state")  # fmt: skip


# ---- models that change themselves ----------------------------------------------------------------------------------


def bigbird() -> nn.Module:
    from transformers import BigBirdConfig, BigBirdForSequenceClassification

    return made(
        BigBirdForSequenceClassification,
        BigBirdConfig(
            vocab_size=40, hidden_size=16, num_hidden_layers=2, num_attention_heads=2, intermediate_size=24,
            max_position_embeddings=128, num_labels=3, hidden_dropout_prob=0, attention_probs_dropout_prob=0,
            classifier_dropout=0, attention_type="block_sparse", block_size=4, num_random_blocks=1,
            initializer_range=0.3,
        ),
    )  # fmt: skip


def long_classes() -> list[Any]:
    return classes(24, lengths=(60, 33, 41, 55, 12, 5, 9, 7))


def is_sparse(found: Any, split: Any) -> None:
    assert found.trainer.model.bert.attention_type == "block_sparse"
    layers = found.trainer.model.bert.encoder.layer
    assert all("BlockSparse" in type(layer.attention.self).__name__ for layer in layers)


def to_sixty(rows: list[Any]) -> Any:
    return collate(rows, width=60)


case("bigbird stays sparse", CAUSE, bigbird, by_samples(own_loss), rows=long_classes, collator=lambda: to_sixty,
     also=is_sparse, updates=3)  # fmt: skip


class Switching(Around):
    """Leaves its long-row path for good as soon as a short row comes."""

    def __init__(self) -> None:
        super().__init__()
        self.kind = "long"

    def changed(self, hidden: Tensor, mask: Any) -> Tensor:
        if hidden.shape[1] < 20:
            self.kind = "short"
        return hidden * (0.5 if self.kind == "long" else 1.0)


def long_path(found: Any, split: Any) -> None:
    assert found.trainer.model.kind == "long"


case("a model that leaves its path for good", CAUSE, lambda: made(Switching), pooled(tokens), also=long_path,
     rows=lambda: ragged(32), collator=lambda: lambda rows: collate(rows, width=24))  # fmt: skip
