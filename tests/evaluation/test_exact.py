"""The numbers of an evaluation are those of the whole set, for any batches."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings, strategies as st
from torch import Tensor, nn
from torch.utils.data import IterableDataset, get_worker_info

import loopwright
from tests import models

TOLERANCE = 1e-12
LENGTHS = [2 + (7 * i) % 8 for i in range(33)]
EVERY = range(1, 34)


def ragged(lengths: Any = LENGTHS, ignored: Any = None) -> list[dict[str, Tensor]]:
    """Sequences of these lengths whose first targets are -100: none of the first, one of the second, and so on."""
    rows = models.samples(lengths)
    for i, row in enumerate(rows):
        hidden = i % 4 if ignored is None else ignored[i]
        row["labels"][: min(hidden, len(row["labels"]) if ignored is not None else len(row["labels"]) - 1)] = -100
    return rows


class Stream(IterableDataset):
    """The rows one by one, without a length; several workers share them out."""

    def __init__(self, rows: list[Any]) -> None:
        self.rows = rows

    def __iter__(self) -> Iterator[Any]:
        worker = get_worker_info()
        return iter(self.rows if worker is None else self.rows[worker.id :: worker.num_workers])


def accuracy(prediction: Any) -> dict[str, Any]:
    counted = prediction.label_ids != -100
    right = (prediction.predictions.argmax(-1) == prediction.label_ids)[counted]
    return {"accuracy": float(right.mean()) if right.size else 0.0, "targets": int(counted.sum())}


class Case:
    """A model in double precision with the values every batching has to give."""

    def __init__(self, model: nn.Module, *, shift: bool = False) -> None:
        self.model, self.shift = model.eval(), shift
        self._logits: dict[tuple[int, ...], Tensor] = {}
        """By the tokens of a sample: no test trains the model."""

    def logits(self, row: dict[str, Tensor]) -> Tensor:
        tokens = tuple(row["input_ids"].tolist())
        if tokens not in self._logits:
            with torch.no_grad():
                self._logits[tokens] = self.model(input_ids=row["input_ids"][None])["logits"][0]
        return self._logits[tokens]

    def loss(self, rows: list[dict[str, Tensor]]) -> float | None:
        parts = [models.summed(self.logits(row)[None], row["labels"][None], shift=self.shift) for row in rows]
        targets = sum(int(count) for _, count in parts)
        return sum(float(total) for total, _ in parts) / targets if targets else None

    def accuracy(self, rows: list[dict[str, Tensor]]) -> float:
        right = torch.cat([(self.logits(row).argmax(-1) == row["labels"])[row["labels"] != -100] for row in rows])
        return float(right.double().mean()) if len(right) else 0.0

    def trainer(self, folder: Any, **options: Any) -> Any:
        return models.trainer_of(self.model, None, folder, compute_metrics=accuracy, **options)


def double_llama() -> nn.Module:
    """A Llama whose loss stays in double precision; its own one computes in single."""
    model = models.llama()

    def loss(logits: Tensor, labels: Tensor, vocab_size: int, num_items_in_batch: Any = None, **kwargs: Any) -> Tensor:
        total, count = models.summed(logits, labels, shift=True)
        return total / (count if num_items_in_batch is None else num_items_in_batch)

    model.loss_function = loss
    return model


CASES = {
    "plain": lambda: Case(models.made(models.Tokens)),
    "plain shifted": lambda: Case(models.made(models.ShiftedTokens), shift=True),
    "bert": lambda: Case(models.bert_tokens()),
    "llama": lambda: Case(double_llama(), shift=True),
}
BATCHES = {"plain": range(1, 9), "plain shifted": range(1, 9), "bert": (1, 3, 5, 8), "llama": (1, 2, 4, 7)}


@pytest.fixture(params=CASES, ids=lambda name: name.replace(" ", "_"))
def case(request: pytest.FixtureRequest) -> Case:
    if request.param in ("bert", "llama"):
        pytest.importorskip("transformers")
    made = CASES[request.param]()
    made.batches = BATCHES[request.param]
    return made


def assert_exact(metrics: dict[str, float], case: Case, rows: list[dict[str, Tensor]], prefix: str = "eval") -> None:
    loss = case.loss(rows)
    if loss is None:
        assert f"{prefix}_loss" not in metrics
    else:
        assert metrics[f"{prefix}_loss"] == pytest.approx(loss, rel=TOLERANCE, abs=TOLERANCE)
    assert metrics[f"{prefix}_accuracy"] == case.accuracy(rows)
    assert metrics[f"{prefix}_targets"] == sum(int((row["labels"] != -100).sum()) for row in rows)


def test_every_number_of_samples_and_every_batch_size_give_the_same(case: Case, tmp_path: Any) -> None:
    rows, trainer = ragged(), case.trainer(tmp_path)
    sizes = EVERY if len(case.batches) == 8 else (1, 2, 3, 5, 8, 13, 16, 21, 32, 33)
    for batch in case.batches:
        trainer.args.per_device_eval_batch_size = batch
        for n in sizes:
            assert_exact(trainer.evaluate(rows[:n]), case, rows[:n])


def test_a_stream_gives_the_same(case: Case, tmp_path: Any) -> None:
    rows, trainer = ragged(), case.trainer(tmp_path)
    for n, batch in ((1, 1), (7, 3), (33, 8), (32, 4), (5, 8)):
        trainer.args.per_device_eval_batch_size = batch
        assert_exact(trainer.evaluate(Stream(rows[:n])), case, rows[:n])
        output = trainer.predict(Stream(rows[:n]))
        assert_exact(output.metrics, case, rows[:n], prefix="test")
        assert_in_order(output, case, rows[:n])


@settings(max_examples=40)
@given(
    lengths=st.lists(st.integers(2, 9), min_size=1, max_size=12),
    hidden=st.lists(st.integers(0, 9), min_size=12, max_size=12),
    batch=st.integers(1, 8),
)
@pytest.mark.parametrize("name", ["plain", "plain shifted"])
def test_any_lengths_and_any_ignored_targets(name: str, lengths: Any, hidden: Any, batch: int, tmp_path: Any) -> None:
    """Whole samples and whole batches without a target among them."""
    case = CASES[name]()
    rows = ragged(lengths, hidden)
    trainer = case.trainer(tmp_path, per_device_eval_batch_size=batch)
    trainer.evaluate(ragged())  # has seen once which targets this loss counts
    assert_exact(trainer.evaluate(rows), case, rows)


def assert_in_order(output: Any, case: Case, rows: list[dict[str, Tensor]]) -> None:
    """Row i holds what the model says about sample i, and -100 beyond the widest sample of its batch."""
    width = max(len(row["input_ids"]) for row in rows)
    assert output.predictions.shape == (len(rows), width, models.VOCAB) and output.predictions.dtype == np.float64
    assert output.label_ids.shape == (len(rows), width)
    for i, row in enumerate(rows):
        length = len(row["input_ids"])
        np.testing.assert_allclose(output.predictions[i, :length], case.logits(row), rtol=0, atol=TOLERANCE)
        assert output.label_ids[i].tolist() == row["labels"].tolist() + [-100] * (width - length)


@pytest.mark.parametrize("batch", [1, 2, 5, 8])
def test_predictions_are_in_the_order_of_the_data(case: Case, batch: int, tmp_path: Any) -> None:
    trainer = case.trainer(tmp_path, per_device_eval_batch_size=batch)
    for n in (1, 4, 17, 33):
        rows = ragged()[:n]
        output = trainer.predict(rows)
        assert_in_order(output, case, rows)
        assert_exact(output.metrics, case, rows, prefix="test")
        for start in range(0, n, batch):
            widest = max(len(row["input_ids"]) for row in rows[start : start + batch])
            assert (output.predictions[start : start + batch, widest:] == -100).all()


@pytest.mark.parametrize("n, batch", [(1, 4), (13, 4)])
def test_two_workers_give_the_same_in_the_same_order(n: int, batch: int, tmp_path: Any) -> None:
    case, rows = CASES["plain"](), ragged()[:n]
    trainer = case.trainer(tmp_path, per_device_eval_batch_size=batch, dataloader_num_workers=2)
    output = trainer.predict(rows)
    assert_in_order(output, case, rows)
    assert_exact(output.metrics, case, rows, prefix="test")


def test_a_stream_shared_by_two_workers_gives_the_same(tmp_path: Any) -> None:
    case, rows = CASES["plain"](), ragged()[:13]
    trainer = case.trainer(tmp_path, per_device_eval_batch_size=4, dataloader_num_workers=2)
    assert_exact(trainer.evaluate(Stream(rows)), case, rows)


@pytest.mark.parametrize("streams", [False, True])
def test_a_dataset_of_the_datasets_package_gives_the_same(streams: bool, tmp_path: Any) -> None:
    datasets = pytest.importorskip("datasets")
    case, rows = CASES["plain"](), ragged()[:11]
    data = datasets.Dataset.from_list([{name: value.tolist() for name, value in row.items()} for row in rows])
    data = (data.to_iterable_dataset() if streams else data).with_format("torch")
    trainer = case.trainer(tmp_path, per_device_eval_batch_size=3)
    output = trainer.predict(data)
    assert_exact(output.metrics, case, rows, prefix="test")
    assert_in_order(output, case, rows)


class Regression(nn.Module):
    """Several outputs of each sample, all of them targets."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(3, 2)

    def forward(self, x: Tensor, labels: Tensor) -> dict[str, Tensor]:
        y = self.head(x)
        return {"loss": nn.functional.mse_loss(y, labels), "y": y}


@pytest.mark.parametrize("batch", range(1, 9))
def test_a_regression_is_exact(batch: int, tmp_path: Any) -> None:
    model = models.made(Regression)
    x, y = torch.randn(33, 3, dtype=torch.float64), torch.randn(33, 2, dtype=torch.float64)
    rows = [{"x": a, "labels": b} for a, b in zip(x, y, strict=True)]
    trainer = models.trainer_of(model, None, tmp_path, collator=None, per_device_eval_batch_size=batch)
    for n in EVERY:
        whole = float(nn.functional.mse_loss(model.head(x[:n]), y[:n]).detach())
        assert trainer.evaluate(rows[:n])["eval_loss"] == pytest.approx(whole, rel=TOLERANCE)


class Weighted(loopwright.Trainer):
    """Classes have weights, so the loss is a weighted mean: neither samples nor targets are its denominator."""

    weights = torch.linspace(0.1, 3.0, models.VOCAB, dtype=torch.float64)

    def compute_loss(self, model: Any, inputs: Any) -> Any:
        logits = model(inputs["input_ids"])["logits"].flatten(0, 1)
        return self.pair(logits, inputs["labels"].flatten())

    def pair(self, logits: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        total = nn.functional.cross_entropy(logits, labels, weight=self.weights, reduction="sum")
        return total, self.weights[labels[labels != -100]].sum()


class WeightedWithOutputs(Weighted):
    def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False, **kwargs: Any) -> Any:
        outputs = model(inputs["input_ids"])
        pair = self.pair(outputs["logits"].flatten(0, 1), inputs["labels"].flatten())
        return (pair, outputs) if return_outputs else pair


@pytest.mark.parametrize("cls", [Weighted, WeightedWithOutputs])
@pytest.mark.parametrize("batch", [1, 3, 8])
def test_a_loss_given_as_sum_and_count_is_exact(cls: Any, batch: int, tmp_path: Any) -> None:
    case, rows = CASES["plain"](), ragged()[:20]
    trainer = case.trainer(tmp_path, cls=cls, per_device_eval_batch_size=batch)
    pairs = [trainer.pair(case.logits(row), row["labels"]) for row in rows]
    whole = float(sum(total for total, _ in pairs) / sum(count for _, count in pairs))
    metrics = trainer.evaluate(rows)
    assert metrics["eval_loss"] == pytest.approx(whole, rel=TOLERANCE)
    assert metrics["eval_accuracy"] == case.accuracy(rows)


class AnyArguments(nn.Module):
    """A wrapper that names no argument of its forward, as adapters do."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.inner(*args, **kwargs)


@pytest.mark.parametrize("batch", [1, 4])
def test_a_wrapper_that_hides_its_arguments_has_a_loss_all_the_same(batch: int, tmp_path: Any) -> None:
    case, rows = CASES["plain"](), ragged()[:9]
    trainer = models.trainer_of(
        AnyArguments(case.model), None, tmp_path, compute_metrics=accuracy, per_device_eval_batch_size=batch
    )
    assert_exact(trainer.evaluate(rows), case, rows)


@pytest.mark.parametrize("batch", [1, 3, 8])
def test_batch_means_are_those_of_transformers_by_definition(batch: int, tmp_path: Any) -> None:
    """Every batch's mean counts once per sample of the batch, so it does depend on the batch size."""
    case, rows = CASES["plain"](), ragged()[:14]
    trainer = case.trainer(tmp_path, per_device_eval_batch_size=batch, eval_loss_reduction="batch_mean")
    parts = [rows[start : start + batch] for start in range(0, 14, batch)]
    expected = sum((case.loss(part) or 0.0) * len(part) for part in parts) / 14
    assert trainer.evaluate(rows)["eval_loss"] == pytest.approx(expected, rel=TOLERANCE)
