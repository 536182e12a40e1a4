"""Objects of torchmetrics and `evaluate` in place of a metrics function, fed batch by batch."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

import loopwright
from loopwright import ArgumentsError, DataError
from loopwright.pt.evaluation.metric_inputs import choices, scores
from tests import models
from tests.evaluation.test_arguments import Point, points
from tests.spreads import spread

torchmetrics = pytest.importorskip("torchmetrics")


def torch_accuracy(classes: int) -> Any:
    return torchmetrics.classification.MulticlassAccuracy(classes, average="micro")


def evaluate_metric(name: str = "accuracy", fewest: int = 0, **options: Any) -> Any:
    """A metric of the evaluate package, written here since its own ones have to be downloaded."""
    evaluate = pytest.importorskip("evaluate")
    datasets = pytest.importorskip("datasets")

    class Own(evaluate.Metric):
        def _info(self) -> Any:
            features = datasets.Features(dict.fromkeys(("predictions", "references"), datasets.Value("int64")))
            return evaluate.MetricInfo(description="", citation="", inputs_description="", features=features)

        def _compute(self, predictions: Any, references: Any) -> dict[str, float]:
            if len(predictions) < fewest:
                raise ValueError(f"{len(predictions)} are too few")
            return {name: float((np.asarray(predictions) == np.asarray(references)).mean())}

    return Own(cache_dir="evaluate", **options)  # in the folder of the test


class HandMade:
    """The least a metric object has to be."""

    def __init__(self) -> None:
        self.right = self.seen = 0

    def add_batch(self, *, predictions: Any, references: Any) -> None:
        self.right += int((predictions == references).sum())
        self.seen += len(references)

    def compute(self) -> dict[str, float]:
        result = {"accuracy": self.right / self.seen}
        self.right = self.seen = 0
        return result


def flat_accuracy(prediction: Any) -> dict[str, float]:
    """By hand: predictions that are not of ignored targets."""
    logits = prediction.predictions[0] if isinstance(prediction.predictions, tuple) else prediction.predictions
    counted = prediction.label_ids != -100
    return {"accuracy": float((logits.argmax(-1) == prediction.label_ids)[counted].mean())}


def next_token_accuracy(prediction: Any) -> dict[str, float]:
    labels = prediction.label_ids[:, 1:]
    counted = labels != -100
    return {"accuracy": float((prediction.predictions[:, :-1].argmax(-1) == labels)[counted].mean())}


OBJECTS = {
    "torchmetrics": torch_accuracy,
    "evaluate": lambda classes: evaluate_metric(),
    "evaluate in memory": lambda classes: evaluate_metric(keep_in_memory=True),
    "hand made": lambda classes: HandMade(),
}
TASKS: dict[str, tuple[Any, Any, Any, int]] = {
    "classes": (lambda: models.made(Point), lambda: points(22), flat_accuracy, 4),
    "tokens": (
        lambda: models.made(models.Tokens), lambda: models.samples([5, 9, 2, 7] * 5, ignored=1), flat_accuracy, 13,
    ),
    "next tokens": (
        lambda: models.made(models.ShiftedTokens), lambda: models.samples([5, 9, 2, 7] * 5), next_token_accuracy, 13,
    ),
    "llama": (models.llama, lambda: models.samples([5, 9, 2, 7] * 5, ignored=1), next_token_accuracy, 13),
}  # fmt: skip


def make(task: str, folder: Any, metrics: Any, **options: Any) -> tuple[Any, Any]:
    if task == "llama":
        pytest.importorskip("transformers")
    model, data, _, _ = TASKS[task]
    collator = None if task == "classes" else models.pad
    rows = data()
    return models.trainer_of(model(), rows, folder, collator=collator, compute_metrics=metrics, **options), rows


@pytest.mark.parametrize(
    ("kind", "task", "batch"), spread(OBJECTS, TASKS, [1, 4, 30]), ids=lambda value: str(value).replace(" ", "_")
)
def test_an_object_gives_what_a_function_gives(kind: str, task: str, batch: int, tmp_path: Any) -> None:
    function, classes = TASKS[task][2:]
    by_function, rows = make(task, tmp_path, function, per_device_eval_batch_size=batch)
    by_object, _ = make(task, tmp_path, {"accuracy": OBJECTS[kind](classes)}, per_device_eval_batch_size=batch)
    expected = by_function.evaluate(rows)
    assert 0 < expected["eval_accuracy"] < 1
    for _ in range(2):  # a second evaluation starts anew
        found = by_object.evaluate(rows)
        assert found["eval_accuracy"] == pytest.approx(expected["eval_accuracy"], rel=1e-6)
        assert set(found) == set(expected) and found["eval_loss"] == expected["eval_loss"]
    output, wanted = by_object.predict(rows), by_function.predict(rows)
    assert output.metrics["test_accuracy"] == pytest.approx(expected["eval_accuracy"], rel=1e-6)
    np.testing.assert_array_equal(output.label_ids, wanted.label_ids)
    first = [part.predictions[0] if task == "classes" else part.predictions for part in (output, wanted)]
    np.testing.assert_array_equal(*first)


def test_several_objects_of_several_kinds_together(tmp_path: Any) -> None:
    f1 = torchmetrics.classification.MulticlassF1Score(4)
    collection = torchmetrics.MetricCollection({"micro": torch_accuracy(4), "f1": f1})
    metrics = {"accuracy": torch_accuracy(4), "all": collection, "own": HandMade(), "third": evaluate_metric("share")}
    trainer, rows = make("classes", tmp_path, metrics, per_device_eval_batch_size=4)
    found = trainer.evaluate(rows)
    named = {name for name in found if not name.endswith(("_second", "time", "loss", "epoch"))}
    assert named == {"eval_accuracy", "eval_all_micro", "eval_all_f1", "eval_own_accuracy", "eval_third_share"}
    assert found["eval_all_micro"] == found["eval_accuracy"] == pytest.approx(found["eval_own_accuracy"], rel=1e-6)
    assert found["eval_third_share"] == found["eval_own_accuracy"]


def test_combined_metrics_of_evaluate(tmp_path: Any) -> None:
    evaluate = pytest.importorskip("evaluate")
    combined = evaluate.combine([evaluate_metric("a"), evaluate_metric("b")])
    trainer, rows = make("classes", tmp_path, {"both": combined}, per_device_eval_batch_size=4)
    found = [trainer.evaluate(rows) for _ in range(2)]
    assert found[0]["eval_both_a"] == found[1]["eval_both_b"]


@pytest.mark.parametrize("shape", [(), (1,)])
def test_a_regression(shape: tuple[int, ...], tmp_path: Any) -> None:
    """Labels are one number each, also where a model gives a column of predictions."""

    class Slope(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.w = torch.nn.Parameter(torch.tensor(0.5))

        def forward(self, x: Any, labels: Any) -> Any:
            y = (self.w * x).reshape(-1, *shape)
            return {"loss": ((y.reshape(-1) - labels) ** 2).mean(), "y": y}

    rows = [{"x": float(i), "labels": float(i % 3)} for i in range(11)]
    trainer = models.trainer_of(Slope(), None, tmp_path, collator=None, per_device_eval_batch_size=4,
                              compute_metrics={"mse": torchmetrics.MeanSquaredError()})  # fmt: skip
    found = trainer.evaluate(rows)
    assert found["eval_mse"] == pytest.approx(found["eval_loss"], rel=1e-6)


@pytest.mark.parametrize("kind", ["torchmetrics", "evaluate", "evaluate in memory"])
def test_what_a_broken_evaluation_left_behind_is_forgotten(kind: str, tmp_path: Any) -> None:
    trainer, rows = make("classes", tmp_path, {"accuracy": OBJECTS[kind](4)}, per_device_eval_batch_size=4)
    expected = trainer.evaluate(rows)["eval_accuracy"]
    broken = [*rows[:9], {"x": torch.zeros(5, dtype=torch.float64), "labels": torch.tensor(0)}]
    with pytest.raises(DataError):
        trainer.evaluate(broken)
    assert trainer.evaluate(rows)["eval_accuracy"] == expected


@pytest.mark.parametrize("kind", ["torchmetrics", "evaluate", "evaluate in memory"])
def test_the_look_before_the_first_step_leaves_no_trace(kind: str, tmp_path: Any) -> None:
    options = {"max_steps": 2, "eval_strategy": "steps", "eval_steps": 1, "per_device_eval_batch_size": 4,
               "learning_rate": 0.0, "metric_for_best_model": "accuracy", "eval_dataset": points(22)}  # fmt: skip
    trainer, _ = make("classes", tmp_path, {"accuracy": OBJECTS[kind](4)}, **options)
    expected = trainer.evaluate()["eval_accuracy"]
    trainer.train()
    assert [row["eval_accuracy"] for row in trainer.state.log_history if "eval_accuracy" in row] == [expected] * 2


def test_an_object_that_needs_more_than_one_batch_does_not_stop_training(tmp_path: Any) -> None:
    options = {"max_steps": 2, "eval_strategy": "steps", "eval_steps": 1, "per_device_eval_batch_size": 4,
               "learning_rate": 0.0, "metric_for_best_model": "accuracy", "eval_dataset": points(22)}  # fmt: skip
    picky = evaluate_metric(fewest=20)
    trainer, _ = make("classes", tmp_path, {"accuracy": picky, "other": torch_accuracy(4)}, **options)
    trainer.train()
    found = [row for row in trainer.state.log_history if "eval_accuracy" in row]
    assert len(found) == 2
    assert all(row["eval_accuracy"] == pytest.approx(row["eval_other"], rel=1e-6) for row in found)


def test_a_wrong_name_is_told_with_the_objects_names(tmp_path: Any) -> None:
    trainer, _ = make("classes", tmp_path, {"accuracy": torch_accuracy(4)}, eval_dataset=points(),
                         eval_strategy="epoch", metric_for_best_model="f1", max_steps=1)  # fmt: skip
    with pytest.raises(loopwright.MetricError, match="eval_accuracy, eval_loss"):
        trainer.train()


def test_what_is_no_metric_is_refused(tmp_path: Any) -> None:
    with pytest.raises(ArgumentsError, match="wrong has neither"):
        make("classes", tmp_path, {"accuracy": torch_accuracy(4), "wrong": len})


def test_predictions_that_do_not_stand_beside_labels_are_told(tmp_path: Any) -> None:
    """Generated ids, for example: there is not one for every label."""
    with pytest.raises(DataError, match="pass a function as compute_metrics"):
        scores(torch.zeros(2, 20), torch.zeros(2, 5, dtype=torch.long))


@pytest.mark.parametrize("shifted", [False, True])
def test_ignored_targets_are_left_out(shifted: bool) -> None:
    labels = torch.tensor([[4, 1, -100, 2], [-100, -100, 3, -100]])
    logits = torch.randn(2, 4, 5)
    kept = labels[:, 1:] if shifted else labels
    beside = logits[:, :-1] if shifted else logits
    found, targets = scores((logits, "others"), labels, shifted)
    assert targets.tolist() == [label for label in kept.flatten().tolist() if label != -100]
    torch.testing.assert_close(found, beside[kept != -100])
    chosen, references = choices(logits, labels, shifted)
    np.testing.assert_array_equal(chosen, found.argmax(-1))
    np.testing.assert_array_equal(references, targets)
