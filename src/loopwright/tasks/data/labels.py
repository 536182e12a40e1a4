"""Classes of data: their names, their numbers, and the metrics of predicted ones."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from ...args.problems import short
from ...errors import ArgumentsError, DataError, some
from ..metrics import chosen, class_scores
from ..model.models import known_labels
from ..request import Request
from .readers import Rows

MOST_CLASSES = 10_000
MOST_NAMED = 5
"""Classes that a note names."""


def label_names(
    splits: Sequence[Rows],
    column: str,
    given: list[str] | None,
    request: Request,
    *,
    nested: bool = False,
    order_of_model: bool = True,
) -> list[str]:
    """The names of the classes in order; raises if a row has another class, or there is only one.

    `nested`: each row has a list of classes. `order_of_model`: a model with the same classes determines the order.
    """
    found: dict[str, str] = {}
    for rows in splits:
        for index, row in enumerate(rows):
            for value in row[column] if nested else [row[column]]:
                found.setdefault(_name(value, rows, index, column), rows.row(index))
    if given is not None:
        twice = next((name for name in given if given.count(name) > 1), None)
        if twice is not None:
            raise ArgumentsError(f"{request.place('data.labels')} has the class {twice!r} more than once; remove one")
        unknown = next((name for name in found if name not in given), None)
        if unknown is not None:
            raise DataError(
                f"{found[unknown]}: {column}={unknown!r} is not one of the classes that "
                f"{request.place('data.labels')} lists"
            )
        return list(given)
    if len(found) > MOST_CLASSES:
        raise DataError(f"{splits[0].name}: the column {column!r} has {len(found):,} classes; is it a label?")
    if len(found) < 2:
        raise DataError(f"{splits[0].name}: the column {column!r} has only the class {', '.join(found)!r}")
    known = known_labels(request) if order_of_model else []
    return known if {*known} == {*found} else sorted(found, key=_order)


def label_notes(
    train: Rows, held: Rows | None, column: str, *, given: list[str] | None = None, nested: bool = False
) -> list[str]:
    """What may be wrong with classes that `label_names` has accepted: unseen ones, and two spellings of one."""
    trained = _counts(train, column, nested)
    validated = {} if held is None else _counts(held, column, nested)
    return [
        *unseen_classes(trained, validated, "" if held is None else held.name),
        *([] if given is not None else _alike([*trained, *validated], train.name, column)),
    ]


def _counts(rows: Rows, column: str, nested: bool) -> Counter[str]:
    return Counter(name_of(value) for row in rows for value in (row[column] if nested else [row[column]]))


def unseen_classes(trained: Iterable[str], validated: Mapping[str, int], source: str) -> list[str]:
    """A note about classes of the validation data that are not trained; `validated` has their numbers of samples."""
    known = {*trained}
    unseen = {name: count for name, count in validated.items() if name not in known}
    if not unseen:
        return []
    listed = some((f"{name!r} ({count:,})" for name, count in unseen.items()), MOST_NAMED)
    verb = "does" if len(unseen) == 1 else "do"
    problem = f"{source}: {len(unseen):,} of the classes of the validation data {verb} not occur in the training data"
    return [f"{problem}, so the model cannot learn them: {listed}; add training samples of them, or remove them"]


def _alike(names: Iterable[str], source: str, column: str) -> list[str]:
    spelt: dict[str, str] = {}
    for name in dict.fromkeys(names):
        first = spelt.setdefault(" ".join(name.split()).casefold(), name)
        if first != name:
            two = f"{source}: the column {column!r} has the classes {first!r} and {name!r}"
            return [f"{two}, which differ only in case or white space; correct the data if they are the same"]
    return []


def _order(name: str) -> tuple[bool, float, str]:
    """Numbers in their order, before texts."""
    try:
        return False, float(name), name
    except ValueError:
        return True, 0.0, name


def _name(value: Any, rows: Rows, index: int, column: str) -> str:
    if isinstance(value, bool | int | str) and value != "":
        return str(value)
    if isinstance(value, float) and value.is_integer():
        return str(int(value))
    raise DataError(f"{rows.row(index)}: {column}={short(value)} is not a class; use a text or an integer")


def name_of(value: Any) -> str:
    """The name of a class that `label_names` has accepted."""
    return str(int(value)) if isinstance(value, float) else str(value)


def with_numbers(rows: Iterable[dict[str, Any]], column: str, names: Sequence[str]) -> list[int]:
    """The class of each row as a number."""
    numbers = {name: index for index, name in enumerate(names)}
    return [numbers[name_of(row[column])] for row in rows]


def class_options(names: Sequence[str]) -> dict[str, Any]:
    """The values of a model's configuration that follow from the names of the classes."""
    numbers = {name: index for index, name in enumerate(names)}
    return {"num_labels": len(names), "id2label": dict(enumerate(names)), "label2id": numbers}


def class_metrics(metrics: list[str]) -> Callable[[Any], dict[str, float]] | None:
    """The metrics function of a classification; None without metrics."""
    if not metrics:
        return None

    def compute(prediction: Any) -> dict[str, float]:
        logits = prediction.predictions
        logits = logits[0] if isinstance(logits, tuple) else logits
        return chosen(metrics, lambda: class_scores(np.argmax(logits, axis=-1), np.asarray(prediction.label_ids)))

    return compute
