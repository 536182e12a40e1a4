"""Metrics against scikit-learn and against values made by hand."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from loopwright.tasks import metrics


def test_classes_and_numbers() -> None:
    found = metrics.class_scores(np.array([0, 0, 1, 2]), np.array([0, 1, 1, 1]))
    assert found == pytest.approx({"accuracy": 0.5, "precision": 0.5, "recall": 4 / 9, "f1": (2 / 3 + 0.5) / 3})
    numbers = metrics.number_scores(np.array([1.0, 2.0]), np.array([1.0, 4.0]))
    assert numbers == pytest.approx({"mse": 2.0, "rmse": math.sqrt(2), "mae": 1.0, "r2": 1 - 4 / 4.5})


@pytest.mark.grid
def test_classes_and_numbers_agree_with_scikit_learn() -> None:
    sklearn = pytest.importorskip("sklearn.metrics")
    source = np.random.default_rng(0)
    guess, wanted = source.integers(0, 4, 200), source.integers(0, 3, 200)
    found = metrics.class_scores(guess, wanted)
    options = {"average": "macro", "zero_division": 0}
    assert found["accuracy"] == pytest.approx(sklearn.accuracy_score(wanted, guess))
    assert found["f1"] == pytest.approx(sklearn.f1_score(wanted, guess, **options))
    assert found["precision"] == pytest.approx(sklearn.precision_score(wanted, guess, **options))
    assert found["recall"] == pytest.approx(sklearn.recall_score(wanted, guess, **options))
    first, second = source.normal(size=50), source.normal(size=50)
    numbers = metrics.number_scores(first, second)
    assert numbers["mse"] == pytest.approx(sklearn.mean_squared_error(second, first))
    assert numbers["mae"] == pytest.approx(sklearn.mean_absolute_error(second, first))
    assert numbers["r2"] == pytest.approx(sklearn.r2_score(second, first))
    assert numbers["rmse"] == pytest.approx(math.sqrt(numbers["mse"]))


def test_entities() -> None:
    tags = [["B-PER", "I-PER", "O", "B-LOC", "B-LOC", "I-PER"], ["O", "I-ORG"]]
    assert metrics.entities(tags) == {
        (0, 0, 2, "PER"), (0, 3, 4, "LOC"), (0, 4, 5, "LOC"), (0, 5, 6, "PER"), (1, 1, 2, "ORG"),
    }  # fmt: skip
    found = metrics.entity_scores([["B-PER", "O", "O"]], [["B-PER", "I-PER", "O"]])
    assert found["f1"] == 0 and found["accuracy"] == pytest.approx(2 / 3)
    assert metrics.entity_scores(tags, tags)["f1"] == 1


@pytest.mark.parametrize("marks", ["BIES", "BILU"])
def test_entities_whose_last_token_is_marked(marks: str) -> None:
    first, inside, last, single = marks
    tags = [f"{first}-A", f"{inside}-A", f"{last}-A", f"{single}-A", f"{single}-B", "O", f"{first}-B", f"{last}-B"]
    assert metrics.entities([tags]) == {(0, 0, 3, "A"), (0, 3, 4, "A"), (0, 4, 5, "B"), (0, 6, 8, "B")}
    plain = ["B-A", "I-A", "I-A", "B-A", "B-B", "O", "B-B", "I-B"]
    assert metrics.entities([plain]) == metrics.entities([tags])


def test_texts() -> None:
    found = metrics.answer_scores(["the red cat", "dog"], [["A red cat!", "x"], ["cat", "big dog"]])
    assert found["exact_match"] == 0.5 and found["f1"] == pytest.approx((1 + 2 / 3) / 2)
    assert metrics.answer_scores([""], [[]])["exact_match"] == 1
    assert metrics.rouge_l(["a b c d"], ["a c d e"]) == pytest.approx(0.75)
    assert metrics.edit_rate(["a b c".split()], ["a x c d".split()]) == pytest.approx(0.5)
    assert metrics.edit_rate(["kitten"], ["sitting"]) == pytest.approx(3 / 7)


def test_tokens() -> None:
    logits = torch.randn(3, 5, 7, generator=torch.Generator().manual_seed(0))
    labels = torch.randint(0, 7, (3, 5), generator=torch.Generator().manual_seed(1))
    labels[0, 3:] = -100
    found = metrics.token_scores(metrics.token_sums(logits, labels, shift=True).numpy())
    flat, targets = logits[:, :-1].reshape(-1, 7), labels[:, 1:].reshape(-1)
    loss = torch.nn.functional.cross_entropy(flat, targets, ignore_index=-100)
    assert found["perplexity"] == pytest.approx(float(loss.exp()), rel=1e-5)
    kept = targets != -100
    assert found["token_accuracy"] == pytest.approx(float((flat.argmax(-1) == targets)[kept].float().mean()))
