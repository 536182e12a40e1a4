"""Classifying texts, or pairs of texts."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ..args.field import Group, arg, list_of_names
from .data.readers import each_source, need_column, need_text, need_tokens, read_splits
from .declaration import CLASS_METRICS, Materials, Task
from .fields import DataFields, LengthFields
from .request import Request


@dataclass
class TextColumns(Group):
    """Columns of text classification."""

    title = "data"

    text_column: str = arg("text", "The column with the text.")
    text_pair_column: str | None = arg(None, "The column with a second text.")
    label_column: str = arg("label", "The column with the class: text or a number.")
    labels: list[str] | None = arg(
        None, "Names of the classes in the order of the model's outputs; defaults to those of the data, sorted.",
        check=list_of_names,
    )  # fmt: skip


@dataclass
class TextData(LengthFields, TextColumns, DataFields):
    """The block `data` of text classification."""


def build(request: Request) -> Materials:
    """Model and data of text classification."""
    from ..pt.data.collators import DataCollatorWithPadding
    from .data.labels import class_metrics, class_options, label_names, label_notes, with_numbers
    from .model.models import load_model, load_tokenizer

    data: TextData = request.data
    train, held = read_splits(request)
    splits = [rows for rows in (train, held) if rows is not None]
    for rows in splits:
        need_text(rows, data.text_column, "data.text_column", request)
        if data.text_pair_column is not None:
            need_text(rows, data.text_pair_column, "data.text_pair_column", request)
        need_column(rows, data.label_column, "data.label_column", request)
    names = label_names(splits, data.label_column, data.labels, request)
    tokenizer = load_tokenizer(request)

    def encoded(rows: Any) -> list[dict[str, Any]]:
        pair = None if data.text_pair_column is None else [row[data.text_pair_column] for row in rows]
        texts = tokenizer([row[data.text_column] for row in rows], pair, truncation=True, max_length=data.max_length)
        labels = with_numbers(rows, data.label_column, names)
        samples = [
            {**{key: values[index] for key, values in texts.items()}, "labels": labels[index]}
            for index in range(len(rows))
        ]
        need_tokens(rows, samples, data.text_column)
        return samples

    model = load_model(
        request,
        "AutoModelForSequenceClassification",
        **class_options(names),
        pad_token_id=tokenizer.pad_token_id,
    )
    return Materials(
        model=model,
        train_dataset=each_source(train, encoded),
        eval_dataset=None if held is None else encoded(held),
        processing_class=tokenizer,
        data_collator=DataCollatorWithPadding(tokenizer),
        compute_metrics=class_metrics(request.metrics),
        notes=label_notes(train, held, data.label_column, given=data.labels),
    )


TASK = Task(
    name="text-classification",
    help="classify texts, or pairs of texts",
    data=TextData,
    metrics=CLASS_METRICS,
    default_metrics=("accuracy", "f1"),
    build=build,
    example={
        "model": "distilbert/distilbert-base-uncased",
        "data": {
            "train": "train.jsonl",
            "validation": "validation.jsonl",
            "text_column": "text",
            "label_column": "label",
        },
    },
)
