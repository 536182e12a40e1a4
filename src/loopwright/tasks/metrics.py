"""Metrics of the tasks, computed here: nothing is downloaded."""

from __future__ import annotations

import math
import re
import string
from collections import Counter
from collections.abc import Callable, Hashable, Sequence
from typing import Any

import numpy as np

Scores = dict[str, float]
IGNORED = -100
"""The label of a token that is not a target."""


def chosen(metrics: Sequence[str], computed: Callable[[], Scores]) -> Scores:
    """The requested ones of the scores."""
    scores = computed()
    return {name: scores[name] for name in metrics}


# ---- classes ---------------------------------------------------------------------------------------------------------


def class_scores(predicted: np.ndarray, expected: np.ndarray) -> Scores:
    """Accuracy, and precision, recall and F1 as means over the classes that occur."""
    precisions, recalls, scores = [], [], []
    for label in np.union1d(predicted, expected):
        hits = int(((predicted == label) & (expected == label)).sum())
        precisions.append(_ratio(hits, int((predicted == label).sum())))
        recalls.append(_ratio(hits, int((expected == label).sum())))
        scores.append(_harmonic(precisions[-1], recalls[-1]))
    return {
        "accuracy": float((predicted == expected).mean()),
        "precision": float(np.mean(precisions)),
        "recall": float(np.mean(recalls)),
        "f1": float(np.mean(scores)),
    }


def _ratio(part: float, whole: float) -> float:
    return part / whole if whole else 0.0


def _harmonic(first: float, second: float) -> float:
    return 2 * first * second / (first + second) if first + second else 0.0


# ---- numbers ---------------------------------------------------------------------------------------------------------


def number_scores(predicted: np.ndarray, expected: np.ndarray) -> Scores:
    """Errors of a regression. `r2` is 0 if all expected values are equal."""
    predicted, expected = predicted.astype(np.float64), expected.astype(np.float64)
    difference = predicted - expected
    spread = float(((expected - expected.mean(axis=0)) ** 2).sum())
    squared = float((difference**2).mean())
    return {
        "mse": squared,
        "rmse": math.sqrt(squared),
        "mae": float(np.abs(difference).mean()),
        "r2": 1 - float((difference**2).sum()) / spread if spread else 0.0,
    }


# ---- entities --------------------------------------------------------------------------------------------------------

Entity = tuple[int, int, int, str]
"""Sentence, first token, token after the last, and type."""


INSIDE = ("I", "E", "L")
"""Beginnings of tags that continue an entity."""
LAST = ("E", "L", "S", "U")
"""Beginnings of tags after which an entity has ended."""


def entities(tags: Sequence[Sequence[str]]) -> set[Entity]:
    """The entities of sentences tagged with B-, I- and O; I- of another type begins a new entity.

    Data may also mark the last token of an entity (E- or L-), and an entity of one token (S- or U-).
    """
    found: set[Entity] = set()
    for number, sentence in enumerate(tags):
        start, kind = 0, ""
        for index, tag in enumerate([*sentence, "O"]):
            prefix, _, name = tag.partition("-")
            if not name:
                prefix, name = ("O", "") if tag == "O" else ("I", tag)
            if kind and (prefix not in INSIDE or name != kind):
                found.add((number, start, index, kind))
                kind = ""
            if prefix != "O" and not kind:
                start, kind = index, name
            if prefix in LAST:
                found.add((number, start, index + 1, kind))
                kind = ""
    return found


def entity_scores(predicted: Sequence[Sequence[str]], expected: Sequence[Sequence[str]]) -> Scores:
    """Precision, recall and F1 of whole entities, and the accuracy of single tags."""
    guessed, wanted = entities(predicted), entities(expected)
    hits = len(guessed & wanted)
    precision, recall = _ratio(hits, len(guessed)), _ratio(hits, len(wanted))
    sentences = zip(predicted, expected, strict=True)
    pairs = [pair for first, second in sentences for pair in zip(first, second, strict=True)]
    return {
        "f1": _harmonic(precision, recall),
        "precision": precision,
        "recall": recall,
        "accuracy": _ratio(sum(a == b for a, b in pairs), len(pairs)),
    }


# ---- texts -----------------------------------------------------------------------------------------------------------

_ARTICLES = re.compile(r"\b(a|an|the)\b")
_PUNCTUATION = str.maketrans("", "", string.punctuation)


def normalized(text: str) -> list[str]:
    """The words of a text without upper case, punctuation and articles."""
    return _ARTICLES.sub(" ", text.lower().translate(_PUNCTUATION)).split()


def answer_scores(predicted: Sequence[str], expected: Sequence[Sequence[str]]) -> Scores:
    """Exact match and F1 of words, for each question with the best of its expected answers."""
    exact, overlap = 0.0, 0.0
    for guess, answers in zip(predicted, expected, strict=True):
        wanted = list(answers) or [""]
        exact += max(float(normalized(guess) == normalized(answer)) for answer in wanted)
        overlap += max(_overlap(normalized(guess), normalized(answer)) for answer in wanted)
    count = max(1, len(predicted))
    return {"exact_match": exact / count, "f1": overlap / count, "token_f1": overlap / count}


def _overlap(guess: list[str], wanted: list[str]) -> float:
    if not guess or not wanted:
        return float(guess == wanted)
    common = sum((Counter(guess) & Counter(wanted)).values())
    return _harmonic(common / len(guess), common / len(wanted))


def rouge_l(predicted: Sequence[str], expected: Sequence[str]) -> float:
    """The mean F1 of the longest common subsequence of words."""
    total = 0.0
    for guess, wanted in zip(predicted, expected, strict=True):
        first, second = guess.lower().split(), wanted.lower().split()
        common = _longest_common(first, second)
        total += _harmonic(_ratio(common, len(first)), _ratio(common, len(second)))
    return total / max(1, len(predicted))


def _longest_common(first: Sequence[Hashable], second: Sequence[Hashable]) -> int:
    row = [0] * (len(second) + 1)
    for left in first:
        diagonal = 0
        for index, right in enumerate(second, start=1):
            above = row[index]
            row[index] = diagonal + 1 if left == right else max(above, row[index - 1])
            diagonal = above
    return row[-1]


def edit_rate(predicted: Sequence[Sequence[Hashable]], expected: Sequence[Sequence[Hashable]]) -> float:
    """Edits that turn the predictions into the expected sequences, divided by the expected length."""
    edits = sum(_edits(guess, wanted) for guess, wanted in zip(predicted, expected, strict=True))
    return edits / max(1, sum(map(len, expected)))


def _edits(first: Sequence[Hashable], second: Sequence[Hashable]) -> int:
    row = list(range(len(second) + 1))
    for number, left in enumerate(first, start=1):
        diagonal, row[0] = row[0], number
        for index, right in enumerate(second, start=1):
            change = diagonal + (left != right)
            diagonal, row[index] = row[index], min(change, row[index] + 1, row[index - 1] + 1)
    return row[-1]


# ---- language models -------------------------------------------------------------------------------------------------


def token_sums(logits: Any, labels: Any, *, shift: bool) -> Any:
    """For each sample: the sum of its targets' negative log-likelihoods, its correct targets, and its targets.

    Computed batch by batch, so that evaluation keeps three numbers a sample instead of all logits.
    """
    import torch
    from torch.nn import functional

    logits = logits[0] if isinstance(logits, (tuple, list)) else logits
    if shift:
        logits, labels = logits[:, :-1], labels[:, 1:]
    is_target = labels != IGNORED
    losses = functional.cross_entropy(logits.float().transpose(1, 2), labels, ignore_index=IGNORED, reduction="none")
    hits = (logits.argmax(-1) == labels) & is_target
    return torch.stack([losses.sum(1), hits.sum(1).float(), is_target.sum(1).float()], dim=1)


def token_scores(sums: np.ndarray) -> Scores:
    """Perplexity and accuracy over all targets, from the results of `token_sums`."""
    loss, hits, targets = np.asarray(sums, dtype=np.float64).sum(axis=0)
    return {
        "perplexity": float(np.exp(min(_ratio(loss, targets), 700.0))),
        "token_accuracy": _ratio(hits, targets),
    }
