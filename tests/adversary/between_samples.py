"""What a few short samples do not show: losses between samples, windows, positions by row, rope by the longest."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from .cases import case
from .models import (
    SIZES,
    Around,
    Pooled,
    classes,
    collate,
    llama,
    made,
    own_loss,
    prompts,
    ragged,
    summed,
    tokens,
)
from .reference import as_written, pooled

CAUSE = "R2"


# ---- losses between samples -----------------------------------------------------------------------------------------


class Contrastive(Pooled):
    """Supervised contrastive: samples of one class attract each other, those without a partner do not count."""

    def result(self, first: Tensor, labels: Any) -> Any:
        found = F.normalize(self.head(first), dim=-1)
        if labels is None:
            return {"logits": found}
        likeness = 2 * found @ found.T
        own = torch.eye(len(labels), dtype=torch.bool)
        same = (labels[:, None] == labels[None, :]) & ~own
        logs = likeness.masked_fill(own, -1e9).log_softmax(-1)
        each = -(logs * same).sum(-1) / same.sum(-1).clamp(min=1)
        some = same.any(-1)
        return {"loss": (each * some).sum() / some.sum().clamp(min=1) + 0 * first.sum(), "logits": found}


def many_classes(count: int = 32) -> list[Any]:
    """So many classes that four samples hardly share one."""
    rows = ragged(count)
    return [{**row, "labels": torch.tensor((number * 5 + number // 3) % 6)} for number, row in enumerate(rows)]


case("supervised contrastive", CAUSE, lambda: made(Contrastive), None, written=as_written(own_loss), rows=many_classes)


class InBatchNegatives(Pooled):
    """Every sample's other samples are its negatives, as in retrieval."""

    def result(self, first: Tensor, labels: Any) -> Any:
        if labels is None:
            return {"logits": first}
        likeness = self.head(first) @ self.head(first.flip(-1)).T
        return {"loss": F.cross_entropy(likeness, torch.arange(len(first))), "logits": likeness}


case("negatives of the batch", CAUSE, lambda: made(InBatchNegatives), None, written=as_written(own_loss), rows=classes)


class Mining(Around):
    """Learns from the four hardest samples of a batch only: from all where there are no more than four."""

    def result(self, logits: Tensor, labels: Any) -> Any:
        if labels is None:
            return {"logits": logits}
        each = F.cross_entropy(logits[:, :-1].transpose(1, 2), labels[:, 1:], reduction="none").sum(1)
        return {"loss": each.topk(min(4, len(each))).values.mean(), "logits": logits}


case("hard-example mining", CAUSE, lambda: made(Mining), None, written=as_written(own_loss))


class TokenMining(Around):
    """Learns from the hardest quarter of the batch's tokens."""

    def result(self, logits: Tensor, labels: Any) -> Any:
        if labels is None:
            return {"logits": logits}
        each = F.cross_entropy(
            logits[:, :-1].reshape(-1, logits.shape[-1]), labels[:, 1:].reshape(-1), reduction="none"
        )
        hardest = each.topk(max(1, int((labels[:, 1:] != -100).sum()) // 4)).values
        return {"loss": hardest.mean(), "logits": logits}


case("mining of tokens", CAUSE, lambda: made(TokenMining), None, written=as_written(own_loss), rows=prompts)


class Crowd(Around):
    """Something else as soon as more than four samples are together."""

    def changed(self, hidden: Tensor, mask: Any) -> Tensor:
        return hidden + 0.2 * hidden.mean(0, keepdim=True) if len(hidden) > 4 else hidden


case("more than four samples together", CAUSE, lambda: made(Crowd), pooled(tokens), written=as_written(own_loss))


class Ranking(Pooled):
    """Every pair of the batch whose targets differ is ranked."""

    def result(self, first: Tensor, labels: Any) -> Any:
        scores = self.head(first)[:, 0]
        if labels is None:
            return {"logits": scores}
        above = labels[:, None] > labels[None, :]
        pairs = F.softplus(scores[None, :] - scores[:, None])
        return {"loss": (pairs * above).sum() / above.sum().clamp(min=1), "logits": scores}


case("ranking within the batch", CAUSE, lambda: made(Ranking), None, written=as_written(own_loss), rows=classes)


# ---- windows and chunks in the model's own mask ---------------------------------------------------------------------

SHORT_FIRST = (4, 3, 5, 2, 5, 3, 4, 2) + (12, 4, 17, 9, 3, 15, 6, 11) * 3
"""An update of samples that fit into a window, and then longer ones."""


def short_first() -> list[Any]:
    return ragged(32, lengths=SHORT_FIRST)


def of_family(config: str, model: str, **options: Any) -> Any:
    import transformers

    settings = getattr(transformers, config)(**{**SIZES, "num_hidden_layers": 2, **options})
    settings._experts_implementation = "eager"  # the others know no double precision
    return made(getattr(transformers, model), settings)


EXPERTS = {"num_experts_per_tok": 2, "output_router_logits": False}
WINDOWED = {
    "llama4 chunks": lambda: of_family(
        "Llama4TextConfig", "Llama4ForCausalLM", attention_chunk_size=6, head_dim=8, num_local_experts=2,
        intermediate_size_mlp=24, interleave_moe_layer_step=2, no_rope_layers=[1, 0], attn_temperature_tuning=False,
    ),
    "llama4 temperature": lambda: of_family(
        "Llama4TextConfig", "Llama4ForCausalLM", attention_chunk_size=512, head_dim=8, num_local_experts=2,
        intermediate_size_mlp=24, interleave_moe_layer_step=2, no_rope_layers=[1, 0], attn_temperature_tuning=True,
        floor_scale=8, attn_scale=0.5,
    ),
    "phimoe window": lambda: of_family(
        "PhimoeConfig", "PhimoeForCausalLM", sliding_window=6, num_local_experts=2, input_jitter_noise=0.0,
        router_jitter_noise=0.0, **EXPERTS,
    ),
    "qwen2-moe window": lambda: of_family(
        "Qwen2MoeConfig", "Qwen2MoeForCausalLM", sliding_window=6, use_sliding_window=True, max_window_layers=28,
        num_experts=4, moe_intermediate_size=8, shared_expert_intermediate_size=8, **EXPERTS,
    ),
    "mistral window": lambda: of_family("MistralConfig", "MistralForCausalLM", sliding_window=6),
}  # fmt: skip
for name, make in WINDOWED.items():
    case(name, CAUSE, make, pooled(tokens), rows=short_first)


class OwnWindow(Around):
    """Puts a window into the mask itself, as far as it can: tokens farther back are not seen."""

    window = 6

    def forward(
        self, input_ids: Tensor, attention_mask: Any = None, labels: Any = None, position_ids: Any = None
    ) -> Any:
        if input_ids.shape[1] > self.window and attention_mask is not None and attention_mask.dim() == 2:
            places = torch.arange(input_ids.shape[1])
            near = (places[:, None] >= places[None]) & (places[:, None] - places[None] < self.window)
            attention_mask = (near & attention_mask.bool()[:, None]).unsqueeze(1)
        return super().forward(input_ids, attention_mask, labels, position_ids)


case("a window in the model's own mask", CAUSE, lambda: made(OwnWindow), pooled(tokens), rows=short_first)


# ---- longer than a probe --------------------------------------------------------------------------------------------

LONG = (300, 12, 280, 40, 9, 30, 22, 5)


def long_rows() -> list[Any]:
    return ragged(16, lengths=LONG)


class LongWindow(OwnWindow):
    window = 270


class LongBranch(Around):
    """Rows beyond 256 tokens are read in another way."""

    def changed(self, hidden: Tensor, mask: Any) -> Tensor:
        return hidden * 0.5 if hidden.shape[1] > 256 else hidden


case("a window longer than a probe", CAUSE, lambda: made(LongWindow), pooled(tokens), rows=long_rows, updates=2)
case("a branch for long rows", CAUSE, lambda: made(LongBranch), pooled(tokens), rows=long_rows, updates=2)


# ---- position by row, rope by the longest ---------------------------------------------------------------------------


class RowTemperature(Around):
    """Hidden states grow beyond the tenth place of a row, whichever sample stands there."""

    def changed(self, hidden: Tensor, mask: Any) -> Tensor:
        grown = 1 + torch.log1p(torch.arange(hidden.shape[1]).double() // 10)
        return hidden * grown.unsqueeze(-1)


case("position by row", CAUSE, lambda: made(RowTemperature), pooled(tokens), rows=short_first)
DYNAMIC = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0}
LONGROPE = {
    "rope_type": "longrope", "short_factor": [1.0, 1.0, 1.0, 1.0], "long_factor": [1.5, 2.0, 3.0, 4.0],
    "original_max_position_embeddings": 8, "factor": 4.0, "rope_theta": 10000.0,
}  # fmt: skip


def rope(parameters: dict[str, Any], most: int) -> Any:
    return llama(rope_parameters=dict(parameters), max_position_embeddings=most)


SHORT_AND_LONG = (4, 3, 5, 2, 5, 3, 4, 2) + (4, 6, 5, 3, 12, 7, 17, 9) * 3
"""Short at first; then one half of an update stays short."""


def short_and_long() -> list[Any]:
    return ragged(32, lengths=SHORT_AND_LONG)


case("dynamic rope", CAUSE, lambda: rope(DYNAMIC, 8), pooled(tokens))
case("dynamic rope, short at first", CAUSE, lambda: rope(DYNAMIC, 8), pooled(tokens), rows=short_and_long)
case("longrope", CAUSE, lambda: rope(LONGROPE, 32), pooled(tokens))
case("longrope, short at first", CAUSE, lambda: rope(LONGROPE, 32), pooled(tokens), rows=short_and_long)


class LongestScale(Around):
    """Everything is scaled by the longest sample of the batch, read from the mask."""

    def changed(self, hidden: Tensor, mask: Any) -> Tensor:
        longest = hidden.shape[1] if mask is None or mask.dim() != 2 else int(mask.sum(1).max())
        return hidden * (1 + 0.1 * longest) ** 0.5 / 1.5


case(
    "scaled by the longest of the batch", CAUSE, lambda: made(LongestScale), pooled(tokens),
    written=as_written(own_loss),
)  # fmt: skip


# ---- a small part of the gradient -----------------------------------------------------------------------------------


class SmallGate(Around):
    """One number with a tiny gradient, which depends on the width of the row alone."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = torch.nn.Parameter(torch.ones((), dtype=torch.float64))

    def result(self, logits: Tensor, labels: Any) -> Any:
        if labels is None:
            return {"logits": logits}
        total, count = summed(logits, labels)
        return {"loss": total / count + 1e-6 * self.gate * logits.shape[1], "logits": logits}


def by_width(owner: Any, model: Any, batch: dict[str, Any]) -> tuple[Tensor, Tensor]:
    """The gate's part is the batch's own, weighed as its tokens are."""
    width = batch["input_ids"].shape[1]
    total, count = tokens(owner, model, batch)
    return total + int(count) * 1e-6 * model.gate * width, count


def small_gate(found: Any, split: Any) -> str | None:
    """Its relative error, since it is smaller than what the others are measured by."""
    from .running import by_hand

    if split.accumulation > 1:
        return None
    expected = [float(each["gate"]) for each in by_hand(SMALL_GATE, split).gradients]
    found = [float(each["gate"]) for each in found.gradients]
    wrong = [abs(a - b) / abs(a) for a, b in zip(expected, found, strict=True)]
    return None if max(wrong) < 1e-9 else f"the gate's gradient is off by {max(wrong):.0e}"


SMALL_GATE = case("a small part that is wholly wrong", CAUSE, lambda: made(SmallGate), pooled(by_width),
                  judge=small_gate)  # fmt: skip


def wide(rows: list[Any]) -> Any:
    return collate(rows, width=24)


case("as wide as it is padded", CAUSE, lambda: made(RowTemperature), pooled(tokens), collator=lambda: wide)
