"""What causal and masked language models have in common: texts as blocks of tokens, and their metrics."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from ..args.field import Group, arg
from ..errors import DataError
from .data.readers import Rows, each_source, need_text, read_splits
from .fields import DataFields, LengthFields
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


def read_blocks(
    request: Request, tokenizer: Any, notes: list[str], *, fewest: int = 1, with_labels: bool = False
) -> tuple[Any, list[dict[str, Any]] | None]:
    """The samples to train on, of several sources by name, and to validate on.

    A sample needs `fewest` tokens to have a target; what is left out is added to `notes`. `with_labels`: every token
    is a target, also the end token of a tokenizer that pads with it, which a collator would take for padding.
    """
    train, held = read_splits(request)

    def blocks(rows: Rows) -> list[dict[str, Any]]:
        found = _blocks(rows, tokenizer, request, notes, fewest)
        return [{**each, "labels": list(each["input_ids"])} for each in found] if with_labels else found

    return each_source(train, blocks), None if held is None else blocks(held)


def _blocks(rows: Rows, tokenizer: Any, request: Request, notes: list[str], fewest: int) -> list[dict[str, Any]]:
    data: CorpusData = request.data
    need_text(rows, data.text_column, "data.text_column", request)
    texts = [row[data.text_column] for row in rows if row[data.text_column]]
    if not data.join:
        ids = tokenizer(texts, truncation=True, max_length=data.max_length)["input_ids"] if texts else []
        ids = [each for each in ids if len(each) >= fewest]
        _note_left_out(rows, len(ids), notes, fewest)
        return [{"input_ids": each, "attention_mask": [1] * len(each)} for each in ids]
    _note_left_out(rows, len(texts), notes, 1)
    ends = [tokenizer.eos_token_id] if tokenizer.eos_token_id is not None else []
    joined = list(_joined(tokenizer(texts, add_special_tokens=not ends)["input_ids"], ends))
    length = data.max_length
    blocks = [joined[start : start + length] for start in range(0, len(joined), length)]
    if len(blocks) > 1 and len(blocks[-1]) < 2:
        blocks.pop()  # a single token has no target
    if not blocks or len(blocks[0]) < 2:
        raise DataError(f"{rows.name}: the texts have fewer than two tokens")
    return [{"input_ids": block, "attention_mask": [1] * len(block)} for block in blocks]


def _note_left_out(rows: Rows, kept: int, notes: list[str], fewest: int) -> None:
    what = "are empty" if fewest == 1 else f"have fewer than {fewest} tokens"
    if not kept:
        raise DataError(f"{rows.name}: all {len(rows):,} texts {what}; there is nothing to train on")
    if kept < len(rows):
        notes.append(f"{rows.name}: {len(rows) - kept:,} of {len(rows):,} texts {what} and are left out")


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
