"""Tiny models in double precision, and ragged data for them."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

VOCAB, WIDTH, CLASSES = 40, 16, 3
LENGTHS = (9, 13, 14, 11, 5, 2, 4, 3, 3, 7, 2, 10, 6, 12, 14, 8)
"""Of the first update the long ones come first, so that another cut is another cut."""
IGNORED = -100
Row = dict[str, Tensor]


# ---- data -----------------------------------------------------------------------------------------------------------


def ragged(count: int = 32, *, lengths: Sequence[int] = LENGTHS, ignored: int = 0, seed: int = 3) -> list[Row]:
    """Sequences with a target for every token but the first `ignored`."""
    draws = torch.Generator().manual_seed(seed)
    made = []
    for number in range(count):
        ids = torch.randint(3, VOCAB, (lengths[number % len(lengths)],), generator=draws)
        labels = ids.clone()
        labels[:ignored] = IGNORED
        made.append({"input_ids": ids, "labels": labels})
    return made


def classes(count: int = 32, *, lengths: Sequence[int] = LENGTHS, seed: int = 3) -> list[Row]:
    """Sequences with one of three classes each."""
    rows = ragged(count, lengths=lengths, seed=seed)
    draws = torch.Generator().manual_seed(seed + 1)
    return [{**row, "labels": torch.randint(0, CLASSES, (), generator=draws)} for row in rows]


def prompts(count: int = 32, *, lengths: Sequence[int] = LENGTHS) -> list[Row]:
    """Sequences of which another part has no targets in each."""
    rows = ragged(count, lengths=lengths)
    for number, row in enumerate(rows):
        row["labels"][: number % max(1, len(row["labels"]) - 1)] = IGNORED
    return rows


def collate(rows: list[Row], *, left: bool = False, width: int = 0) -> dict[str, Tensor]:
    """A batch padded to its longest sample: 0, or -100 where a name says that it holds labels."""
    rows = [{**row, "attention_mask": torch.ones_like(row["input_ids"])} for row in rows]
    return {name: joined([row[name] for row in rows], name, left=left, width=width) for name in rows[0]}


def joined(values: list[Tensor], name: str, *, left: bool = False, width: int = 0) -> Tensor:
    if values[0].dim() == 0:
        return torch.stack(values)
    width = max(width, *(len(value) for value in values))
    fill = IGNORED if "label" in name else 0
    return torch.stack([_stretched(value, width, fill, left) for value in values])


def _stretched(value: Tensor, width: int, fill: int, left: bool) -> Tensor:
    missing = width - len(value)
    padding = value.new_full((missing, *value.shape[1:]), fill)
    return torch.cat([padding, value] if left else [value, padding])


class Changing:
    """A collator that knows the update it works for: counted in samples, so that splits and processes agree."""

    def __init__(self, change: Callable[[dict[str, Tensor], int], dict[str, Tensor]], base: Any = collate) -> None:
        self.change, self.base, self.seen = change, base, 0

    def __call__(self, rows: list[Row]) -> dict[str, Tensor]:
        batch = self.change(self.base(rows), self.seen // 8)
        self.seen += len(rows) * int(os.environ.get("WORLD_SIZE", "1"))
        return batch


def changing(change: Callable[[dict[str, Tensor], int], dict[str, Tensor]], base: Any = collate) -> Callable[[], Any]:
    """A new such collator for each run; told the number of the update."""
    return lambda: Changing(change, base)


# ---- models ---------------------------------------------------------------------------------------------------------


def made(kind: Callable[..., nn.Module], *given: Any, **options: Any) -> nn.Module:
    torch.manual_seed(5)
    return kind(*given, **options).double()


SIZES: dict[str, Any] = {
    "vocab_size": VOCAB, "hidden_size": WIDTH, "num_hidden_layers": 1, "num_attention_heads": 2,
    "num_key_value_heads": 1, "intermediate_size": 24, "max_position_embeddings": 512, "pad_token_id": 0,
    "bos_token_id": 1, "eos_token_id": 2, "initializer_range": 0.3,
}  # fmt: skip


def llama_config(**options: Any) -> Any:
    from transformers import LlamaConfig

    return LlamaConfig(**{**SIZES, **options})


def llama(kind: Any = None, **options: Any) -> nn.Module:
    """A causal language model that every layout can be tried on."""
    from transformers import LlamaForCausalLM

    return made(kind or LlamaForCausalLM, llama_config(**options))


def bert_config(**options: Any) -> Any:
    from transformers import BertConfig

    sizes = {name: value for name, value in SIZES.items() if name != "num_key_value_heads"}
    return BertConfig(
        **{**sizes, "num_labels": CLASSES, "hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0,
           "max_position_embeddings": 64, **options}
    )  # fmt: skip


def bert(kind: Any = None, **options: Any) -> nn.Module:
    """A classifier of sequences, by its first token."""
    from transformers import BertForSequenceClassification

    return made(kind or BertForSequenceClassification, bert_config(**options))


def gpt2(**options: Any) -> nn.Module:
    """A causal language model with learned positions, counted along the row."""
    from transformers import GPT2Config, GPT2LMHeadModel

    return made(
        GPT2LMHeadModel,
        GPT2Config(vocab_size=VOCAB, n_embd=WIDTH, n_layer=1, n_head=2, n_positions=64, resid_pdrop=0, embd_pdrop=0,
                   attn_pdrop=0, initializer_range=0.3, bos_token_id=1, eos_token_id=2, **options),
    )  # fmt: skip


class Around(nn.Module):
    """A causal language model inside another module; what is done to its hidden states is up to subclasses."""

    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.inner = llama(**options)
        self.config = self.inner.config

    def forward(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        labels: Tensor | None = None,
        position_ids: Tensor | None = None,
    ) -> Any:
        places = {} if position_ids is None else {"position_ids": position_ids}
        hidden = self.inner.model(
            inputs_embeds=self.embedded(self.inner.model.embed_tokens(input_ids), attention_mask),
            attention_mask=attention_mask,
            **places,
        ).last_hidden_state
        return self.result(self.inner.lm_head(self.changed(hidden, attention_mask)), labels)

    def embedded(self, hidden: Tensor, mask: Tensor | None) -> Tensor:
        return hidden

    def changed(self, hidden: Tensor, mask: Tensor | None) -> Tensor:
        return hidden

    def result(self, logits: Tensor, labels: Tensor | None) -> dict[str, Tensor]:
        if labels is None:
            return {"logits": logits}
        total, count = summed(logits, labels)
        return {"loss": total / count, "logits": logits}


class Pooled(nn.Module):
    """A classifier of sequences around an encoder, by its first token."""

    def __init__(self) -> None:
        super().__init__()
        self.bert = bert().bert
        self.config = self.bert.config
        self.head = nn.Linear(WIDTH, CLASSES).double()

    def first(self, input_ids: Tensor, attention_mask: Tensor | None) -> Tensor:
        return self.bert(input_ids, attention_mask=attention_mask).last_hidden_state[:, 0]

    def forward(self, input_ids: Tensor, attention_mask: Tensor | None = None, labels: Tensor | None = None) -> Any:
        return self.result(self.first(input_ids, attention_mask), labels)

    def result(self, first: Tensor, labels: Tensor | None) -> dict[str, Tensor]:
        logits = self.head(first)
        if labels is None:
            return {"logits": logits}
        return {"loss": F.cross_entropy(logits, labels), "logits": logits}


# ---- losses of micro-batches ----------------------------------------------------------------------------------------


def logits_of(outputs: Any) -> Tensor:
    return outputs["logits"] if isinstance(outputs, dict) else outputs.logits


def summed(logits: Tensor, labels: Tensor, *, shift: bool = True, ignored: int = IGNORED) -> tuple[Tensor, Tensor]:
    """The summed cross entropy and the number of its targets."""
    if shift:
        logits, labels = logits[:, :-1], labels[:, 1:]
    total = F.cross_entropy(
        logits.reshape(-1, logits.shape[-1]), labels.reshape(-1), ignore_index=ignored, reduction="sum"
    )
    return total, (labels != ignored).sum()


def tokens(owner: Any, model: Any, batch: dict[str, Any]) -> tuple[Tensor, Tensor]:
    """Of a model of next tokens, from its logits alone."""
    labels = batch.pop("labels")
    return summed(logits_of(model(**batch)), labels)


def unshifted(owner: Any, model: Any, batch: dict[str, Any]) -> tuple[Tensor, Tensor]:
    labels = batch.pop("labels")
    return summed(logits_of(model(**batch)), labels, shift=False)


def mean_of_tokens(owner: Any, model: Any, batch: dict[str, Any]) -> Tensor:
    total, count = tokens(owner, model, batch)
    return total / count


def class_loss(owner: Any, model: Any, batch: dict[str, Any]) -> tuple[Tensor, int]:
    labels = batch.pop("labels")
    logits = logits_of(model(**batch))
    return F.cross_entropy(logits, labels, reduction="sum"), len(labels)


def own_loss(owner: Any, model: Any, batch: dict[str, Any]) -> Tensor:
    """The loss a model gives a micro-batch itself."""
    outputs = model(**batch)
    return outputs["loss"]


def per_sequence(logits: Tensor, labels: Tensor) -> Tensor:
    """The mean of each sequence's own targets."""
    logits, labels = logits[:, :-1], labels[:, 1:]
    losses = F.cross_entropy(logits.transpose(1, 2), labels, ignore_index=IGNORED, reduction="none")
    return losses.sum(1) / (labels != IGNORED).sum(1).clamp(min=1)
