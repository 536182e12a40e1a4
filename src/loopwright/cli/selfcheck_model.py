"""The model and the data of `loopwright selfcheck`: small, of varying lengths, the same on every machine."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

VOCABULARY, WIDTH, LONGEST = 48, 32, 32


class TinyLanguageModel(nn.Module):
    """A small causal transformer that takes a mask, with tied embeddings."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.place = nn.Embedding(LONGEST, WIDTH)
        self.block = nn.TransformerEncoderLayer(WIDTH, 4, 2 * WIDTH, dropout=0.0, batch_first=True, norm_first=True)
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.head.weight = self.embed.weight

    def forward(
        self, input_ids: Tensor, attention_mask: Tensor | None = None, labels: Tensor | None = None
    ) -> dict[str, Tensor]:
        length = input_ids.shape[1]
        hidden = self.embed(input_ids) + self.place.weight[:length]
        later = torch.ones(length, length, device=hidden.device).triu(1).bool()
        hidden = self.block(hidden, src_mask=later)  # padding is on the right, and attention is causal
        logits = self.head(self.norm(hidden))
        if labels is None:
            return {"logits": logits}
        loss = F.cross_entropy(logits[:, :-1].reshape(-1, VOCABULARY), labels[:, 1:].reshape(-1))
        return {"loss": loss, "logits": logits}


def ragged_rows(count: int) -> list[dict[str, Tensor]]:
    """Rows of varying lengths whose tokens follow a simple rule, so that the loss decreases."""
    generator = torch.Generator().manual_seed(7)
    lengths = torch.randint(5, LONGEST + 1, (count,), generator=generator).tolist()
    starts = torch.randint(0, VOCABULARY, (count,), generator=generator).tolist()
    pairs = zip(lengths, starts, strict=True)
    rows = [torch.tensor([(start + 3 * k) % VOCABULARY for k in range(length)]) for length, start in pairs]
    return [{"input_ids": ids, "labels": ids.clone()} for ids in rows]


def pad_rows(rows: list[dict[str, Any]]) -> dict[str, Tensor]:
    """A batch padded to its longest row."""
    pad = nn.utils.rnn.pad_sequence
    return {
        "input_ids": pad([row["input_ids"] for row in rows], batch_first=True),
        "attention_mask": pad([torch.ones_like(row["input_ids"]) for row in rows], batch_first=True),
        "labels": pad([row["labels"] for row in rows], batch_first=True, padding_value=-100),
    }
