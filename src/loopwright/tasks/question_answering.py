"""Extractive question answering: finding the answer in a context."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ..args.field import Group, arg, non_negative, positive
from ..args.problems import short
from ..errors import ArgumentsError, DataError
from .data.readers import Rows, each_source, need_column, need_text, read_splits
from .declaration import Materials, Task
from .fields import DataFields
from .request import Request

LONGEST_ANSWER = 30
"""Tokens of a predicted answer."""
BEST = 20
"""Starts and ends that are combined for each window."""


@dataclass
class QuestionColumns(Group):
    """Columns of questions."""

    title = "data"

    question_column: str = arg("question", "The column with the question.")
    context_column: str = arg("context", "The column with the context that holds the answer.")
    answers_column: str = arg(
        "answers", "The column with the answers: {'text': [...], 'answer_start': [...]}, as in SQuAD; empty for none."
    )
    max_length: int = arg(384, "Tokens of a question with a window of its context.", check=positive)
    stride: int = arg(128, "Tokens that two windows of a long context have in common.", check=non_negative)


@dataclass
class QuestionData(QuestionColumns, DataFields):
    """The block `data` of question answering."""


def build(request: Request) -> Materials:
    """Model and data of question answering."""
    from ..pt.data.collators import DataCollatorWithPadding
    from .model.models import load_model, load_tokenizer

    if request.data.stride >= request.data.max_length:
        raise ArgumentsError(
            f"{request.place('data.stride')}={request.data.stride} must be below max_length={request.data.max_length}"
        )
    tokenizer = load_tokenizer(request)
    tokenizer.padding_side = "right"  # padding before the tokens would move them away from their labels
    train, held = read_splits(request)
    notes: list[str] = []
    for rows in (train, held):
        if rows is not None:
            _check_rows(rows, request)
    held_windows = None if held is None else _windows(held, tokenizer, request, notes)
    return Materials(
        model=load_model(request, "AutoModelForQuestionAnswering"),
        train_dataset=each_source(
            train, lambda rows: [window["inputs"] for window in _windows(rows, tokenizer, request, notes)]
        ),
        eval_dataset=None if held_windows is None else [window["inputs"] for window in held_windows],
        processing_class=tokenizer,
        data_collator=DataCollatorWithPadding(tokenizer),
        compute_metrics=_metrics(held, held_windows, request) if held_windows and request.metrics else None,
        notes=notes,
    )


def _check_rows(rows: Rows, request: Request) -> None:
    data: QuestionData = request.data
    need_text(rows, data.question_column, "data.question_column", request)
    need_text(rows, data.context_column, "data.context_column", request)
    need_column(rows, data.answers_column, "data.answers_column", request)
    for index, row in enumerate(rows):
        answers = row[data.answers_column]
        if not _are_answers(answers):
            raise DataError(
                f"{rows.row(index)}: {data.answers_column}={short(answers)} needs the lists text, of texts, and "
                "answer_start, of as many integers"
            )
        for text, start in zip(answers["text"], answers["answer_start"], strict=True):
            if row[data.context_column][start : start + len(text)] != text:
                raise DataError(
                    f"{rows.row(index)}: the answer {short(text)} is not at character {start} of its context"
                )


def _are_answers(value: Any) -> bool:
    """Whether a value has the form of SQuAD's answers."""
    if not isinstance(value, dict) or not {"text", "answer_start"} <= value.keys():
        return False
    texts, starts = value["text"], value["answer_start"]
    if not isinstance(texts, list) or not isinstance(starts, list) or len(texts) != len(starts):
        return False
    return all(isinstance(text, str) for text in texts) and all(type(start) is int and start >= 0 for start in starts)


def _check_room(rows: Rows, tokenizer: Any, request: Request) -> None:
    """Raise if a long context cannot be divided: its question leaves no space beyond what two windows share."""
    data: QuestionData = request.data
    special = tokenizer.num_special_tokens_to_add(pair=True)

    def encoded(text: Any) -> Any:
        return tokenizer(text, add_special_tokens=False)["input_ids"]

    for index, question in enumerate(encoded([row[data.question_column] for row in rows])):
        room = data.max_length - special - len(question)
        if room <= data.stride and len(encoded(rows[index][data.context_column])) > room:
            raise DataError(
                f"{rows.row(index)}: its question has {len(question)} tokens, which leaves {max(0, room)} of "
                f"data.max_length={data.max_length} for the context, not more than data.stride={data.stride}; raise "
                "data.max_length, or lower data.stride"
            )


def _windows(rows: Rows, tokenizer: Any, request: Request, notes: list[str]) -> list[dict[str, Any]]:
    """Each question with every window of its context, and the place of its answer there."""
    data: QuestionData = request.data
    _check_room(rows, tokenizer, request)
    found = []
    for index, row in enumerate(rows):
        encoding = tokenizer(
            row[data.question_column],
            row[data.context_column],
            truncation="only_second",
            max_length=data.max_length,
            stride=data.stride,
            return_overflowing_tokens=True,
            return_offsets_mapping=True,
        )
        for window in range(len(encoding["input_ids"])):
            parts, offsets = encoding.sequence_ids(window), encoding["offset_mapping"][window]
            places = [offset if part == 1 else None for part, offset in zip(parts, offsets, strict=True)]
            start, end = _target(places, row[data.answers_column])
            keys = [key for key in tokenizer.model_input_names if key in encoding]
            inputs = {key: encoding[key][window] for key in keys}
            found.append(
                {"row": index, "places": places, "inputs": {**inputs, "start_positions": start, "end_positions": end}}
            )
    _note_unseen(rows, found, request, notes)
    return found


def _note_unseen(rows: Rows, windows: list[dict[str, Any]], request: Request, notes: list[str]) -> None:
    """Answers that no window holds are trained as if there were none."""
    seen = {window["row"] for window in windows if window["inputs"]["end_positions"]}
    asked = [index for index, row in enumerate(rows) if any(text.strip() for text in _first_answer(row, request))]
    unseen = [index for index in asked if index not in seen]
    if unseen:
        notes.append(
            f"{rows.name}: {len(unseen):,} of {len(asked):,} answers are in no window as a whole, and are trained as "
            f"if there were none, first that of row {rows.numbers[unseen[0]]}; raise data.max_length or data.stride"
        )


def _first_answer(row: dict[str, Any], request: Request) -> list[str]:
    texts: list[str] = row[request.data.answers_column]["text"][:1]
    return texts


def _target(places: list[Any], answers: dict[str, Any]) -> tuple[int, int]:
    """The first and the last token of the answer; (0, 0) if it is not in this window."""
    if not answers["text"] or not answers["text"][0].strip():
        return 0, 0
    # Tokens may leave out white space around them, so that of an answer does not count.
    text = answers["text"][0]
    first = answers["answer_start"][0] + len(text) - len(text.lstrip())
    last = first + len(text.strip())
    inside = [index for index, place in enumerate(places) if place and place[0] < last and place[1] > first]
    covered = inside and places[inside[0]][0] <= first and places[inside[-1]][1] >= last
    return (inside[0], inside[-1]) if covered else (0, 0)


def _metrics(rows: Any, windows: list[dict[str, Any]], request: Request) -> Any:
    data: QuestionData = request.data

    def compute(prediction: Any) -> dict[str, float]:
        from .metrics import answer_scores, chosen

        starts, ends = prediction.predictions[:2]
        best: dict[int, tuple[float, str]] = {}
        for window, start, end in zip(windows, starts, ends, strict=True):
            score, text = _best_answer(window["places"], start, end, rows[window["row"]][data.context_column])
            if window["row"] not in best or score > best[window["row"]][0]:
                best[window["row"]] = (score, text)
        guessed = [best[index][1] for index in range(len(rows))]
        wanted = [row[data.answers_column]["text"] for row in rows]
        return chosen(request.metrics, lambda: answer_scores(guessed, wanted))

    return compute


def _best_answer(places: list[Any], starts: Any, ends: Any, context: str) -> tuple[float, str]:
    """The most likely answer of a window with its score; an empty one if there is none."""
    import numpy as np

    best = (float(starts[0] + ends[0]), "")
    for start in np.argsort(starts)[::-1][:BEST]:
        for end in np.argsort(ends)[::-1][:BEST]:
            if start > end or end - start >= LONGEST_ANSWER or end >= len(places):
                continue
            if places[start] is None or places[end] is None:
                continue
            score = float(starts[start] + ends[end])
            if score > best[0]:
                best = (score, context[places[start][0] : places[end][1]])
    return best


TASK = Task(
    name="question-answering",
    help="find the answer to a question in a context",
    data=QuestionData,
    metrics={"exact_match": "fraction of exact answers", "f1": "F1 of the words of answers"},
    default_metrics=("exact_match", "f1"),
    build=build,
    example={
        "model": "distilbert/distilbert-base-cased",
        "data": {"train": "train.jsonl", "validation": "validation.jsonl", "max_length": 384, "stride": 128},
    },
)
