"""Tiny models and data that both trainers can run."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn


class Regression(nn.Module):
    """y = Wx + b with an optional dropout."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.hidden, self.out = nn.Linear(4, 8), nn.Linear(8, 1)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: torch.Tensor, labels: torch.Tensor | None = None) -> dict[str, torch.Tensor]:
        y = self.out(self.dropout(torch.tanh(self.hidden(x)))).squeeze(-1)
        outputs = {"y": y}
        return outputs if labels is None else {"loss": nn.functional.mse_loss(y, labels), **outputs}


def regression_data(n: int) -> list[dict[str, Any]]:
    g = torch.Generator().manual_seed(1)
    x = torch.randn(n, 4, generator=g)
    return [{"x": x[i], "labels": x[i].sum()} for i in range(n)]


def token_data(n: int, *, labels: str, length: int = 12, vocab: int = 50) -> list[dict[str, Any]]:
    """Padded token sequences of different lengths; labels per sequence or per token."""
    g = torch.Generator().manual_seed(2)
    samples = []
    for _ in range(n):
        real = int(torch.randint(4, length + 1, (1,), generator=g))
        ids = torch.randint(3, vocab, (length,), generator=g)
        mask = (torch.arange(length) < real).long()
        ids = ids * mask
        target = torch.randint(0, 3, (), generator=g) if labels == "class" else torch.where(mask == 1, ids, -100)
        samples.append({"input_ids": ids, "attention_mask": mask, "labels": target})
    return samples


def bert(dropout: float) -> nn.Module:
    from transformers import BertConfig, BertForSequenceClassification

    return BertForSequenceClassification(
        BertConfig(
            vocab_size=50, hidden_size=16, num_hidden_layers=2, num_attention_heads=2, intermediate_size=32,
            max_position_embeddings=32, num_labels=3, hidden_dropout_prob=dropout, attention_probs_dropout_prob=dropout,
        )
    )  # fmt: skip


def llama(dropout: float) -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=50, hidden_size=16, num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=1,
            intermediate_size=32, max_position_embeddings=32, attention_dropout=dropout, pad_token_id=0,
        )
    )  # fmt: skip


def t5(dropout: float) -> nn.Module:
    from transformers import T5Config, T5ForConditionalGeneration

    return T5ForConditionalGeneration(
        T5Config(
            vocab_size=50, d_model=16, d_kv=8, d_ff=32, num_layers=2, num_heads=2, dropout_rate=dropout,
            decoder_start_token_id=0, pad_token_id=0,
        )
    )  # fmt: skip


@dataclass(frozen=True)
class Task:
    """A model and its data."""

    model: Callable[[float], nn.Module]
    data: Callable[[int], list[dict[str, Any]]]


TASKS = {
    "regression": Task(Regression, regression_data),
    "bert": Task(bert, lambda n: token_data(n, labels="class")),
    "llama": Task(llama, lambda n: token_data(n, labels="token")),
    "t5": Task(t5, lambda n: token_data(n, labels="token")),
}
