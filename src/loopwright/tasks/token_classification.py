"""Classifying tokens: named entities, parts of speech."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ..args.field import Group, arg, list_of_names
from ..args.problems import short
from ..errors import DataError
from .data.readers import Rows, each_source, need_column, need_tokens, read_splits
from .declaration import Materials, Task
from .fields import DataFields, LengthFields
from .request import Request


@dataclass
class TokenColumns(Group):
    """Columns of token classification."""

    title = "data"

    tokens_column: str = arg("tokens", "The column with the list of words.")
    tags_column: str = arg("tags", "The column with the list of their tags, such as B-PER, I-PER and O.")
    labels: list[str] | None = arg(
        None, "The tags in the order of the model's outputs; defaults to those of the data, sorted.",
        check=list_of_names,
    )  # fmt: skip


@dataclass
class TokenData(LengthFields, TokenColumns, DataFields):
    """The block `data` of token classification."""


def build(request: Request) -> Materials:
    """Model and data of token classification."""
    from ..pt.data.collators import DataCollatorForTokenClassification
    from .data.labels import class_options, label_names, label_notes
    from .model.models import load_model, load_tokenizer

    data: TokenData = request.data
    train, held = read_splits(request)
    splits = [rows for rows in (train, held) if rows is not None]
    for rows in splits:
        _check_rows(rows, request)
    names = label_names(splits, data.tags_column, data.labels, request, nested=True)
    tokenizer = load_tokenizer(request)
    model = load_model(
        request,
        "AutoModelForTokenClassification",
        **class_options(names),
    )
    return Materials(
        model=model,
        train_dataset=each_source(train, lambda rows: _encoded(rows, tokenizer, names, data)),
        eval_dataset=None if held is None else _encoded(held, tokenizer, names, data),
        processing_class=tokenizer,
        data_collator=DataCollatorForTokenClassification(tokenizer),
        compute_metrics=_metrics(names, request.metrics) if request.metrics else None,
        preprocess_logits_for_metrics=lambda logits, labels: logits.argmax(-1),
        notes=label_notes(train, held, data.tags_column, given=data.labels, nested=True),
    )


def _check_rows(rows: Rows, request: Request) -> None:
    words, tags = request.data.tokens_column, request.data.tags_column
    need_column(rows, words, "data.tokens_column", request)
    need_column(rows, tags, "data.tags_column", request)
    for index, row in enumerate(rows):
        if not isinstance(row[words], list) or not isinstance(row[tags], list):
            raise DataError(f"{rows.row(index)}: {words} and {tags} must be lists")
        if len(row[words]) != len(row[tags]):
            raise DataError(
                f"{rows.row(index)} has {len(row[words])} {words} and {len(row[tags])} {tags}; each word needs one tag"
            )
        other = next((word for word in row[words] if not isinstance(word, str)), None)
        if other is not None:
            raise DataError(f"{rows.row(index)}: the word {short(other)} is not text; put it in quotes")


def _encoded(rows: Rows, tokenizer: Any, names: list[str], data: TokenData) -> list[dict[str, Any]]:
    """The rows as tokens; the first token of a word has its tag as label, the others none."""
    from .data.labels import name_of

    numbers = {name: index for index, name in enumerate(names)}
    glues = _glues_words(tokenizer)
    samples = []
    for row in rows:
        words = _spaced(row[data.tokens_column]) if glues else row[data.tokens_column]
        encoding = tokenizer(words, is_split_into_words=True, truncation=True, max_length=data.max_length)
        labels, before = [], None
        for word in encoding.word_ids():
            is_first = word is not None and word != before
            labels.append(numbers[name_of(row[data.tags_column][word])] if is_first else -100)
            before = word
        samples.append({**encoding, "labels": labels})
    need_tokens(rows, samples, data.tokens_column)
    return samples


def _glues_words(tokenizer: Any) -> bool:
    """Whether the tokenizer encodes words of a list as if there were no spaces between them, such as RoBERTa's."""

    def ids(words: list[str]) -> Any:
        return tokenizer(words, is_split_into_words=True)["input_ids"]

    as_text = tokenizer("a b")["input_ids"]
    return bool(ids(["a", "b"]) != as_text and ids(["a", " b"]) == as_text)


def _spaced(words: list[str]) -> list[str]:
    """The words as they are in a text: all but the first have a space before them."""
    return [f" {word}" if index and word else word for index, word in enumerate(words)]


def _metrics(names: list[str], metrics: list[str]) -> Any:
    def compute(prediction: Any) -> dict[str, float]:
        import numpy as np

        from .metrics import chosen, entity_scores

        guessed, wanted = [], []
        for row, labels in zip(prediction.predictions, np.asarray(prediction.label_ids), strict=True):
            kept = [(names[int(a)], names[int(b)]) for a, b in zip(row, labels, strict=False) if b != -100]
            guessed.append([a for a, _ in kept])
            wanted.append([b for _, b in kept])
        return chosen(metrics, lambda: entity_scores(guessed, wanted))

    return compute


TASK = Task(
    name="token-classification",
    help="tag words: named entities, parts of speech",
    data=TokenData,
    metrics={
        "f1": "F1 of whole entities",
        "precision": "precision of whole entities",
        "recall": "recall of whole entities",
        "accuracy": "fraction of correct tags",
    },
    default_metrics=("f1", "accuracy"),
    build=build,
    example={
        "model": "distilbert/distilbert-base-cased",
        "data": {
            "train": "train.jsonl",
            "validation": "validation.jsonl",
            "tokens_column": "tokens",
            "tags_column": "tags",
        },
    },
)
