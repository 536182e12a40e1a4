"""What a user changes while a run trains: parameters, modes, optimizer, accumulation, numbers, losses."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from .cases import case
from .later import over_sequences, sequence_means
from .models import Around, llama, made, own_loss, per_sequence, ragged, summed, tokens
from .reference import Batch, Loop, as_written, by_samples, pooled
from .training_mode import Auxiliary, auxiliary_truth

CAUSE = "R6"


def everything(model: nn.Module) -> torch.optim.Optimizer:
    """An optimizer that knows all parameters, trained now or later."""
    return torch.optim.SGD(model.parameters(), lr=0.05)


# ---- parameters -----------------------------------------------------------------------------------------------------


def frozen_llama() -> nn.Module:
    model = llama()
    model.model.requires_grad_(False)
    return model


def unfreeze(owner: Any, number: int) -> None:
    if number == 1:
        owner.model.model.layers.requires_grad_(True)


def freeze(owner: Any, number: int) -> None:
    if number == 2:
        owner.model.model.layers.requires_grad_(False)


def now_and_then(owner: Any, number: int) -> None:
    owner.model.model.layers.requires_grad_(number % 2 == 1)


UNFREEZING = {"unfreezing": (frozen_llama, unfreeze), "freezing": (llama, freeze),
              "freezing now and then": (llama, now_and_then)}  # fmt: skip
for name, (make, act) in UNFREEZING.items():
    for clip in (0.0, 0.1):
        clipped = ", clipped" if clip else ""
        case(f"{name} in a callback{clipped}", CAUSE, make, pooled(tokens), act=act, clip=clip, optimizer=everything)
        case(f"{name} in a callback at learning rate 0{clipped}", CAUSE, make, pooled(tokens), act=act, clip=clip,
             rate=0.0)  # fmt: skip


def with_adapters() -> nn.Module:
    import peft

    config = {"r": 2, "target_modules": ["q_proj", "v_proj"], "task_type": "CAUSAL_LM", "init_lora_weights": False}
    torch.manual_seed(7)
    model = peft.get_peft_model(llama(), peft.LoraConfig(**config), adapter_name="one")
    model.add_adapter("two", peft.LoraConfig(**config))
    model.set_adapter("one")
    return model.double()


def other_adapter(owner: Any, number: int) -> None:
    owner.model.set_adapter("two" if number >= 2 else "one")


case("another adapter in a callback", CAUSE, with_adapters, pooled(tokens), act=other_adapter, optimizer=everything)
case("another adapter in a callback at learning rate 0", CAUSE, with_adapters, pooled(tokens), act=other_adapter,
     rate=0.0)  # fmt: skip


def add_group(owner: Any, number: int) -> None:
    """As one unfreezes by hand: the parameters are trained from now on, and the optimizer is told."""
    if number == 1:
        layers = owner.model.model.layers
        layers.requires_grad_(True)
        owner.optimizer.add_param_group({"params": list(layers.parameters()), "lr": 0.05})


case("unfreezing with a group of its own", CAUSE, frozen_llama, pooled(tokens), act=add_group)


def new_head(owner: Any, number: int) -> None:
    if number == 2:
        torch.manual_seed(11)
        owner.model.lm_head = nn.Linear(16, 40, bias=False).double()


case("another head in a callback", CAUSE, llama, pooled(tokens), act=new_head, rate=0.0)


def tie(owner: Any, number: int) -> None:
    if number == 2:
        owner.model.lm_head.weight = owner.model.model.embed_tokens.weight


case("weights tied in a callback", CAUSE, llama, pooled(tokens), act=tie, rate=0.0)


def new_storage(owner: Any, number: int) -> None:
    for parameter in owner.model.parameters():
        parameter.data = parameter.data * 0.99


case("weights replaced in a callback", CAUSE, llama, pooled(tokens), act=new_storage)


# ---- code -----------------------------------------------------------------------------------------------------------


def with_the_one_before(hidden: Tensor) -> Tensor:
    """Every token with a part of the token before it: in a row of samples also of another sample."""
    return hidden + 0.3 * torch.cat([torch.zeros_like(hidden[:, :1]), hidden[:, :-1]], dim=1)


def another_forward(owner: Any, number: int) -> None:
    if number == 2:
        norm = owner.model.model.norm
        written = norm.forward
        norm.forward = lambda hidden: with_the_one_before(written(hidden))


def another_class(owner: Any, number: int) -> None:
    if number == 2:
        norm = owner.model.model.norm
        kind = type(norm)
        norm.__class__ = type(
            "Mixed", (kind,), {"forward": lambda self, hidden: with_the_one_before(kind.forward(self, hidden))}
        )


case("another forward of a module in a callback", CAUSE, llama, pooled(tokens), act=another_forward)
case("another class of a module in a callback", CAUSE, llama, pooled(tokens), act=another_class)


# ---- modes and numbers ----------------------------------------------------------------------------------------------


def leave_in_eval(owner: Any, number: int) -> None:
    owner.model.eval()


case("eval() in a callback", CAUSE, lambda: made(Auxiliary), pooled(auxiliary_truth), after=leave_in_eval)
case("eval() before an update", CAUSE, lambda: made(Auxiliary), pooled(auxiliary_truth), act=leave_in_eval)


class KeepsEval(Auxiliary):
    """Keeps a part in eval mode whatever is asked, as frozen normalisation does."""

    def train(self, mode: bool = True) -> Any:
        super().train(mode)
        self.inner.eval()
        return self


case("a part that stays in eval mode", CAUSE, lambda: made(KeepsEval), pooled(auxiliary_truth))


class Divergent(Around):
    """A penalty on the logits, whose weight is a plain number on the module."""

    def __init__(self) -> None:
        super().__init__()
        self.beta = 0.0

    def result(self, logits: Tensor, labels: Any) -> Any:
        if labels is None:
            return {"logits": logits}
        total, count = divergent(logits, labels, self.beta)
        return {"loss": total / count, "logits": logits}


def divergent(logits: Tensor, labels: Tensor, beta: float) -> tuple[Tensor, Tensor]:
    total, count = summed(logits, labels)
    counted = labels[:, 1:] != -100
    return total + beta * (logits[:, :-1].logsumexp(-1).square() * counted).sum(), count


def divergent_truth(owner: Any, model: Any, batch: Batch) -> tuple[Tensor, Tensor]:
    labels = batch.pop("labels")
    return divergent(model(**batch)["logits"], labels, model.beta)


def warm_up(owner: Any, number: int) -> None:
    owner.model.beta = 0.1 * number


case("a weight of the loss changed in a callback", CAUSE, lambda: made(Divergent), pooled(divergent_truth), act=warm_up)


class Mixing(Around):
    """Mixes neighbours of the batch by a number on the module, which is 0 at first."""

    mix = 0.0

    def embedded(self, hidden: Tensor, mask: Any) -> Tensor:
        return (1 - self.mix) * hidden + self.mix * hidden.flip(0) if self.mix else hidden


def mix_more(owner: Any, number: int) -> None:
    owner.model.mix = 0.1 * max(0, number - 1)


case("mixing switched on in a callback", CAUSE, lambda: made(Mixing), pooled(tokens), act=mix_more,
     written=as_written(own_loss))  # fmt: skip


# ---- optimizer and accumulation -------------------------------------------------------------------------------------


def new_optimizer(owner: Any, number: int) -> None:
    if number == 1:
        owner.optimizer = torch.optim.SGD(owner.model.parameters(), lr=0.05, momentum=0.9)


case("another optimizer in a callback", CAUSE, llama, pooled(tokens), after=new_optimizer, updates=5,
     rows=lambda: ragged(40))  # fmt: skip


def more_micro_batches(owner: Any, number: int) -> None:
    if number == 1:
        owner.args.gradient_accumulation_steps *= 2


case("another accumulation in a callback", CAUSE, llama, pooled(tokens), after=more_micro_batches,
     rows=lambda: ragged(64))  # fmt: skip


# ---- losses ---------------------------------------------------------------------------------------------------------


def sequences_from_now_on(owner: Any, number: int) -> None:
    if number == 2:
        owner.model.loss_function = over_sequences


def by_the_time(loop: Loop, batches: list[Batch]) -> Tensor:
    late = len(loop.gradients) >= 2
    return by_samples(sequence_means)(loop, batches) if late else pooled(tokens)(loop, batches)


def written_by_the_time(loop: Loop, batches: list[Batch]) -> Tensor:
    late = len(loop.gradients) >= 2
    return as_written(sequence_means)(loop, batches) if late else pooled(tokens)(loop, batches)


case("another loss_function in a callback", CAUSE, llama, by_the_time, act=sequences_from_now_on,
     written=written_by_the_time)  # fmt: skip


class TwoLosses(Around):
    """A mean over tokens, and when a number on the module says so one over sequences."""

    over = "tokens"

    def result(self, logits: Tensor, labels: Any) -> Any:
        if labels is None or self.over == "tokens":
            return super().result(logits, labels)
        return {"loss": per_sequence(logits, labels).mean(), "logits": logits}


def over_others(owner: Any, number: int) -> None:
    owner.model.over = "sequences" if number >= 2 else "tokens"


case("another mean in a callback", CAUSE, lambda: made(TwoLosses), by_the_time, act=over_others,
     written=written_by_the_time)  # fmt: skip


class TwoStages(Around):
    """The same by a number whose name begins like that of the mode."""

    training_stage = 1

    def result(self, logits: Tensor, labels: Any) -> Any:
        if labels is None or self.training_stage == 1:
            return super().result(logits, labels)
        return {"loss": per_sequence(logits, labels).mean(), "logits": logits}


def next_stage(owner: Any, number: int) -> None:
    owner.model.training_stage = 2 if number >= 2 else 1


case("another stage in a callback", CAUSE, lambda: made(TwoStages), by_the_time, act=next_stage,
     written=written_by_the_time)  # fmt: skip


def of_the_class() -> nn.Module:
    return made(type("OfTheClass", (TwoStages,), {}))


def next_stage_of_the_class(owner: Any, number: int) -> None:
    type(owner.model).training_stage = 2 if number >= 2 else 1


case("another stage on the class in a callback", CAUSE, of_the_class, by_the_time, act=next_stage_of_the_class,
     written=written_by_the_time)  # fmt: skip


# ---- hooks ----------------------------------------------------------------------------------------------------------


def by_width(module: nn.Module, given: Any, result: Tensor) -> Tensor:
    return result * (1 + 0.1 * result.shape[1])


def hook_at_begin(owner: Any) -> None:
    owner.model.model.embed_tokens.register_forward_hook(by_width)


def hook_at_two(owner: Any, number: int) -> None:
    if number == 2:
        owner.model.model.embed_tokens.register_forward_hook(by_width)


def look(owner: Any) -> None:
    owner.shapes_seen = []
    owner.model.model.embed_tokens.register_forward_hook(
        lambda module, given, result: owner.shapes_seen.append(tuple(result.shape))
    )


def backwards(owner: Any, number: int) -> None:
    if number == 1:
        owner.model.lm_head.weight.register_hook(lambda gradient: 2 * gradient)
        owner.model.model.norm.register_full_backward_hook(lambda module, inner, outer: (inner[0] * 0.5,))


def saw_batches(found: Any, split: Any) -> None:
    """Every forward of the last updates had as many rows as the collator makes."""
    seen = found.trainer.shapes_seen[-2 * split.accumulation :]
    assert seen and all(shape[0] == split.size for shape in seen), seen


case("a hook from the beginning of training", CAUSE, llama, pooled(tokens), begin=hook_at_begin)
case("a hook from the third update on", CAUSE, llama, pooled(tokens), act=hook_at_two)
case("a hook that only looks", CAUSE, llama, pooled(tokens), begin=look, also=saw_batches)
case("hooks on gradients", CAUSE, llama, pooled(tokens), act=backwards)
