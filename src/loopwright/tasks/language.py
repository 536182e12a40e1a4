"""What causal and masked language models have in common: texts as blocks of tokens, and their metrics."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from ..args.field import Group, arg
from ..errors import DataError
from .fields import DataFields, LengthFields
from .readers import Rows, need_text, read_splits
from .request import Request

METRICS = {
    "perplexity": "exp of the mean loss of all targets",
    "token_accuracy": "fraction of correctly predicted targets",
}


@dataclass
class CorpusColumns(Group):
    """Columns of texts."""

    title = "data"

    text_column: str = arg("text", "The column with the text.")
    join: bool = arg(
        True,
        "Join the texts, each followed by the end token, and split them into blocks of max_length; False: one sample "
        "for each text, truncated.",
    )


@dataclass
class CorpusData(LengthFields, CorpusColumns, DataFields):
    """The block `data` of language models."""


def read_blocks(request: Request, tokenizer: Any) -> tuple[list[dict[str, Any]], list[dict[str, Any]] | None]:
    """The samples to train on and to validate on."""
    train, held = read_splits(request)
    return _blocks(train, tokenizer, request), None if held is None else _blocks(held, tokenizer, request)


def _blocks(rows: Rows, tokenizer: Any, request: Request) -> list[dict[str, Any]]:
    data: CorpusData = request.data
    need_text(rows, data.text_column, "data.text_column", request)
    texts = [row[data.text_column] for row in rows]
    if not data.join:
        ids = tokenizer(texts, truncation=True, max_length=data.max_length)["input_ids"]
        return [{"input_ids": each, "attention_mask": [1] * len(each)} for each in ids if each]
    ends = [tokenizer.eos_token_id] if tokenizer.eos_token_id is not None else []
    joined = list(_joined(tokenizer(texts, add_special_tokens=not ends)["input_ids"], ends))
    length = data.max_length
    blocks = [joined[start : start + length] for start in range(0, len(joined), length)]
    if len(blocks) > 1 and len(blocks[-1]) < 2:
        blocks.pop()  # a single token has no target
    if not blocks or len(blocks[0]) < 2:
        raise DataError(f"{rows.name}: the texts have fewer than two tokens")
    return [{"input_ids": block, "attention_mask": [1] * len(block)} for block in blocks]


def _joined(texts: Iterable[list[int]], ends: list[int]) -> Iterable[int]:
    for ids in texts:
        yield from ids
        yield from ends


def token_metrics(metrics: list[str], *, shift: bool) -> dict[str, Any]:
    """The metrics of a language model as keyword arguments of `Materials`; empty without metrics."""
    if not metrics:
        return {}
    from .metrics import chosen, token_scores, token_sums

    return {
        "compute_metrics": lambda prediction: chosen(metrics, lambda: token_scores(prediction.predictions)),
        "preprocess_logits_for_metrics": lambda logits, labels: token_sums(logits, labels, shift=shift),
    }
