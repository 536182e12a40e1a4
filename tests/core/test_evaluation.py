"""The evaluation loop: the exact loss, and only what was requested."""

from __future__ import annotations

from fractions import Fraction
from typing import Any

import numpy as np
import pytest
from hypothesis import given, strategies as st

from loopwright.core.evaluation.loop import EvalPlan, EvalStep, WeightedLoss, needs_compute_result, run_evaluation

whole = st.integers(-1000, 1000).map(float)


class Read:
    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, values: list[Any]) -> list[float]:
        self.calls += 1
        return [float(value) for value in values]


def evaluate(steps: list[EvalStep], **options: Any) -> Any:
    plan = EvalPlan(**{"compute_metrics": None, "loss_only": False, **options})
    return run_evaluation(steps, plan, to_host=lambda x: x, read=Read(), prefix="eval")


def step(values: list[float], loss: float | None = 0.0, items: Any = None) -> EvalStep:
    rows = np.asarray(values)
    return EvalStep(loss, rows, rows * 2, rows * 3, len(values) if items is None else items, len(values))


@given(st.lists(st.tuples(whole, st.integers(0, 50)), max_size=30))
def test_the_mean_is_exact_and_skips_batches_without_targets(batches: list[tuple[float, int]]) -> None:
    losses = WeightedLoss(Read())
    for loss, weight in batches:
        losses.add(loss if weight else float("nan"), weight)
    weight = sum(weight for _, weight in batches)
    if not weight:
        assert losses.mean() is None
        return
    exact = sum(Fraction(loss) * weight for loss, weight in batches) / weight
    assert losses.mean() == pytest.approx(float(exact), rel=1e-12, abs=1e-12)


def test_weights_may_live_on_the_device() -> None:
    losses = WeightedLoss(Read())
    losses.add(np.float32(1.0), np.int64(3))
    losses.add(np.float32(float("nan")), np.int64(0))
    losses.add(np.float32(5.0), np.int64(1))
    assert losses.mean() == 2.0


def test_losses_are_read_in_large_groups() -> None:
    read = Read()
    losses = WeightedLoss(read)
    for _ in range(WeightedLoss.READ_AT + 1):
        losses.add(1.0, 1)
    assert losses.mean() == 1.0 and read.calls == 2


@given(st.lists(st.integers(1, 5), min_size=1, max_size=6), st.integers(1, 4))
def test_predictions_come_in_order(sizes: list[int], host_every: int) -> None:
    n = sum(sizes)
    numbers, steps, start = np.arange(float(n)), [], 0
    for size in sizes:
        steps.append(step(list(numbers[start : start + size])))
        start += size
    output = evaluate(steps, host_every=host_every, expected_rows=n)
    np.testing.assert_array_equal(output.predictions, numbers)
    np.testing.assert_array_equal(output.label_ids, numbers * 2)
    assert output.num_samples == n


def test_the_loss_is_weighted_by_items_or_samples() -> None:
    steps = [step([1, 2], loss=1.0, items=6), step([3], loss=4.0, items=2)]
    assert evaluate(steps).metrics["eval_loss"] == 1.75
    assert evaluate(steps, weight_by_items=False).metrics["eval_loss"] == 2.0


def test_only_the_loss() -> None:
    output = evaluate([step([1.0], loss=2.0)], loss_only=True, compute_metrics=lambda p: pytest.fail("not asked for"))
    assert output.predictions is None and output.metrics == {"eval_loss": 2.0}


def test_no_loss_no_key() -> None:
    assert evaluate([step([1.0], loss=None)]).metrics == {}


def test_metrics_get_a_prefix_and_plain_numbers() -> None:
    output = evaluate([step([1.0, 3.0])], compute_metrics=lambda p: {"mean": p.predictions.mean(), "eval_n": 2})
    assert output.metrics == {"eval_mean": 2.0, "eval_n": 2, "eval_loss": 0.0}
    assert type(output.metrics["eval_mean"]) is float


@pytest.mark.parametrize(
    ("include", "names"), [([], 2), (["inputs"], 3), (["loss"], 3), (["inputs", "loss"], 4)], ids=str
)
def test_metrics_see_what_they_asked_for(include: list[str], names: int) -> None:
    seen = []
    evaluate(
        [step([1.0, 2.0], loss=np.float64(0.5)), step([3.0], loss=np.float64(2.0))],
        include=include,
        compute_metrics=lambda p: seen.append(p) or {},
    )
    assert len(seen[0]) == names
    if "inputs" in include:
        assert seen[0].inputs.tolist() == [3.0, 6.0, 9.0]
    if "loss" in include:
        assert seen[0].losses.tolist() == [0.5, 0.5, 2.0]


def test_metrics_collected_batch_by_batch_give_their_result_once() -> None:
    calls: list[tuple[float, bool]] = []

    def metrics(prediction: Any, compute_result: bool) -> Any:
        calls.append((float(prediction.predictions.sum()), compute_result))
        return {"sum": sum(total for total, _ in calls)} if compute_result else None

    output = evaluate([step([1.0]), step([2.0]), step([3.0])], compute_metrics=metrics, per_batch_metrics=True)
    assert calls == [(1.0, False), (2.0, False), (3.0, True)]
    assert output.metrics["eval_sum"] == 6.0 and output.predictions is None


def test_needs_compute_result() -> None:
    assert needs_compute_result(lambda p, compute_result: {})
    assert not needs_compute_result(lambda p: {})
    assert not needs_compute_result(dict.fromkeys)
