"""Text to text: translation, summarization."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ..args.field import Group, arg, positive
from .data.readers import Rows, each_source, need_text, need_tokens, read_splits
from .declaration import Materials, Task
from .fields import DataFields
from .request import Request


@dataclass
class PairColumns(Group):
    """Columns of pairs of texts."""

    title = "data"

    source_column: str = arg("source", "The column with the input.")
    target_column: str = arg("target", "The column with the output.")
    prefix: str = arg("", "Text before every input, such as 'summarize: '.")
    max_source_length: int = arg(512, "Tokens of an input; longer ones are truncated.", check=positive)
    max_target_length: int = arg(128, "Tokens of an output; longer ones are truncated.", check=positive)


@dataclass
class PairData(PairColumns, DataFields):
    """The block `data` of text to text."""


def build(request: Request) -> Materials:
    """Model and data of text to text."""
    from ..pt.data.collators import DataCollatorForSeq2Seq
    from .model.models import load_model, load_tokenizer

    tokenizer = load_tokenizer(request)
    train, held = read_splits(request)
    model = load_model(request, "AutoModelForSeq2SeqLM")
    samples = each_source(train, lambda rows: _encoded(rows, tokenizer, request))
    return Materials(
        model=model,
        train_dataset=samples,
        eval_dataset=None if held is None else _encoded(held, tokenizer, request),
        processing_class=tokenizer,
        data_collator=DataCollatorForSeq2Seq(tokenizer, model=model),
        compute_metrics=text_metrics(tokenizer, request.metrics) if request.metrics else None,
    )


def _encoded(rows: Rows, tokenizer: Any, request: Request) -> list[dict[str, Any]]:
    data: PairData = request.data
    need_text(rows, data.source_column, "data.source_column", request)
    need_text(rows, data.target_column, "data.target_column", request)
    sources = [data.prefix + row[data.source_column] for row in rows]
    inputs = tokenizer(sources, truncation=True, max_length=data.max_source_length)
    targets = tokenizer(
        text_target=[row[data.target_column] for row in rows], truncation=True, max_length=data.max_target_length
    )
    samples = [
        {
            "input_ids": inputs["input_ids"][index],
            "attention_mask": inputs["attention_mask"][index],
            "labels": targets["input_ids"][index],
        }
        for index in range(len(rows))
    ]
    need_tokens(rows, samples, data.source_column)
    need_tokens(rows, samples, data.target_column, "labels")
    return samples


def text_metrics(tokenizer: Any, metrics: list[str]) -> Any:
    """The metrics of generated texts."""

    def texts(ids: Any) -> list[str]:
        import numpy as np

        ids = np.asarray(ids)
        ids = np.where(ids < 0, tokenizer.pad_token_id, ids)
        return [text.strip() for text in tokenizer.batch_decode(ids, skip_special_tokens=True)]

    def compute(prediction: Any) -> dict[str, float]:
        from .metrics import answer_scores, chosen, rouge_l

        guessed = prediction.predictions
        guessed, wanted = texts(guessed[0] if isinstance(guessed, tuple) else guessed), texts(prediction.label_ids)
        return chosen(
            metrics,
            lambda: {
                "exact_match": sum(a == b for a, b in zip(guessed, wanted, strict=True)) / max(1, len(wanted)),
                "token_f1": answer_scores(guessed, [[text] for text in wanted])["token_f1"],
                "rouge_l": rouge_l(guessed, wanted),
            },
        )

    return compute


TASK = Task(
    name="seq2seq",
    help="text to text: translation, summarization",
    data=PairData,
    metrics={
        "rouge_l": "F1 of the longest common subsequence of words",
        "exact_match": "fraction of texts that are equal",
        "token_f1": "F1 of the words, without their order",
    },
    default_metrics=("rouge_l", "exact_match"),
    build=build,
    example={
        "model": "google-t5/t5-small",
        "data": {
            "train": "train.jsonl",
            "validation": "validation.jsonl",
            "source_column": "source",
            "target_column": "target",
        },
    },
    generates=True,
)
