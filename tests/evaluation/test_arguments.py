"""Every argument of evaluation does what it says, and evaluation changes nothing it should not."""

from __future__ import annotations

import dataclasses
import json
import random
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import loopwright
from loopwright import ArgumentsError, DataError, EarlyStoppingCallback, EvalPrediction, TrainerCallback
from loopwright.errors import LoopwrightError
from tests import models

SPEED = ("runtime", "samples_per_second", "steps_per_second")
UNTRAINED = (*SPEED, "model_preparation_time")
"""The times of an evaluation before training."""


class Point(nn.Module):
    """A classifier of points with everything a model may return."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.head, self.dropout = nn.Linear(3, 4), nn.Dropout(dropout)

    def forward(self, x: Tensor, labels: Tensor | None = None) -> dict[str, Any]:
        logits = self.head(self.dropout(x))
        outputs = {"logits": logits, "hidden": (x * 2, {"deep": x.sum(-1)}), "names": [f"{v:.3f}" for v in x[:, 0]]}
        return outputs if labels is None else {"loss": nn.functional.cross_entropy(logits, labels), **outputs}


def points(n: int = 10, *, seed: int = 3, labelled: bool = True) -> list[dict[str, Tensor]]:
    g = torch.Generator().manual_seed(seed)
    x, y = torch.randn(n, 3, generator=g, dtype=torch.float64), torch.randint(0, 4, (n,), generator=g)
    return [{"x": a, **({"labels": b} if labelled else {})} for a, b in zip(x, y, strict=True)]


def stacked(rows: list[dict[str, Tensor]], name: str) -> Tensor:
    return torch.stack([row[name] for row in rows])


def accuracy(prediction: EvalPrediction) -> dict[str, float]:
    logits = prediction.predictions[0] if isinstance(prediction.predictions, tuple) else prediction.predictions
    return {"accuracy": float((np.asarray(logits).argmax(-1) == np.asarray(prediction.label_ids)).mean())}


def make(folder: Any, *, model: nn.Module | None = None, data: Any = None, **options: Any) -> Any:
    options = {"per_device_eval_batch_size": 4, "per_device_train_batch_size": 4, "report_to": [], **options}
    model = models.made(Point) if model is None else model
    return models.trainer_of(model, data, folder, collator=None, **options)


class Seen:
    """A metrics function that keeps what it was given."""

    def __init__(self) -> None:
        self.calls: list[Any] = []

    def __call__(self, prediction: Any) -> dict[str, float]:
        self.calls.append(prediction)
        return {"calls": len(self.calls)}


# ---- what is kept ----------------------------------------------------------------------------------------------------


def test_outputs_keep_their_nesting_and_their_order(tmp_path: Any) -> None:
    rows, trainer = points(10), make(tmp_path)
    logits, (doubled, deep), names = trainer.predict(rows).predictions
    x = stacked(rows, "x")
    np.testing.assert_allclose(logits, trainer.model.head(x).detach(), atol=1e-12)
    np.testing.assert_array_equal(doubled, x * 2)
    np.testing.assert_allclose(deep["deep"], x.sum(-1), atol=1e-12)
    assert names == [f"{v:.3f}" for v in x[:, 0]]


@pytest.mark.parametrize("keys, left", [(["hidden", "names"], 1), (["names"], 2), ([], 3), (None, 3)])
def test_ignore_keys_leave_outputs_out(keys: Any, left: int, tmp_path: Any) -> None:
    found = make(tmp_path).predict(points(), ignore_keys=keys).predictions
    assert (1 if isinstance(found, np.ndarray) else len(found)) == left


def test_ignore_keys_reach_the_evaluations_of_training(tmp_path: Any) -> None:
    seen = Seen()
    trainer = make(tmp_path, data=points(), eval_dataset=points(), compute_metrics=seen, max_steps=2,
                   eval_strategy="steps", eval_steps=1)  # fmt: skip
    trainer.train(ignore_keys_for_eval=["hidden", "names"])
    assert [call.predictions.shape for call in seen.calls] == [(10, 4), (10, 4)]


def test_the_loss_alone(tmp_path: Any) -> None:
    seen = Seen()
    trainer = make(tmp_path, compute_metrics=seen, prediction_loss_only=True)
    assert set(trainer.evaluate(points())) == {"eval_loss", "epoch", *(f"eval_{name}" for name in UNTRAINED)}
    output = trainer.predict(points())
    assert output.predictions is None and output.label_ids is None and "test_loss" in output.metrics
    assert seen.calls == []


@pytest.mark.parametrize("include", [[], ["inputs"], ["loss"], ["inputs", "loss"]])
@pytest.mark.parametrize("per_batch", [False, True])
def test_metrics_are_given_what_they_ask_for(include: list[str], per_batch: bool, tmp_path: Any) -> None:
    calls: list[Any] = []

    def metrics(prediction: Any, compute_result: bool = True) -> dict[str, float]:
        calls.append(prediction)
        return {}

    rows = points(10)
    trainer = make(tmp_path, compute_metrics=metrics, include_for_metrics=include, batch_eval_metrics=per_batch)
    trainer.evaluate(rows)
    assert len(calls) == (3 if per_batch else 1)
    x, labels, logits = stacked(rows, "x"), stacked(rows, "labels"), trainer.model.head(stacked(rows, "x")).detach()
    means = [float(nn.functional.cross_entropy(logits[i : i + 4], labels[i : i + 4])) for i in (0, 4, 8)]
    for call, start in zip(calls, (0, 4, 8), strict=False):
        some = slice(start, start + 4) if per_batch else slice(0, 10)
        assert len(call) == 2 + len(include)
        np.testing.assert_array_equal(call.label_ids, labels[some])
        if "inputs" in include:  # this model has no main input, so there are all of them
            np.testing.assert_array_equal(call.inputs["x"], x[some])
            assert set(call.inputs) == ({"x", "labels"} if per_batch else {"x"})  # a batch is given as it is
        if "loss" in include:
            np.testing.assert_allclose(call.losses, np.repeat(means, [4, 4, 2])[some], rtol=1e-12)


def test_the_main_input_is_the_one_the_model_names(tmp_path: Any) -> None:
    model, seen = models.made(Point), Seen()
    model.main_input_name = "x"
    make(tmp_path, model=model, compute_metrics=seen, include_for_metrics=["inputs"]).evaluate(points())
    np.testing.assert_array_equal(seen.calls[0].inputs, stacked(points(), "x"))


def test_logits_are_preprocessed_before_they_are_kept(tmp_path: Any) -> None:
    rows = points(10)

    def best(outputs: Any, labels: Any) -> Any:
        assert isinstance(outputs[0], Tensor) and len(outputs[0]) == len(labels)
        return outputs[0].argmax(-1)

    trainer = make(tmp_path, preprocess_logits_for_metrics=best)
    expected = trainer.model.head(stacked(rows, "x")).argmax(-1)
    np.testing.assert_array_equal(trainer.predict(rows).predictions, expected)


def test_batches_may_stay_apart(tmp_path: Any) -> None:
    seen, rows = Seen(), points(10)
    trainer = make(tmp_path, compute_metrics=seen, eval_do_concat_batches=False)
    output = trainer.predict(rows, ignore_keys=["hidden", "names"])
    assert [len(batch) for batch in output.predictions] == [len(batch) for batch in output.label_ids] == [4, 4, 2]
    np.testing.assert_array_equal(np.concatenate(output.label_ids), stacked(rows, "labels"))
    assert [len(batch) for batch in seen.calls[0].predictions] == [4, 4, 2]


def test_metrics_collected_by_batch_are_told_the_last_one(tmp_path: Any) -> None:
    told: list[bool] = []
    state = {"right": 0, "seen": 0}

    def metrics(prediction: Any, compute_result: bool) -> dict[str, float]:
        told.append(compute_result)
        state["right"] += int((prediction.predictions[0].argmax(-1) == prediction.label_ids).sum())
        state["seen"] += len(prediction.label_ids)
        return {"accuracy": state["right"] / state["seen"]} if compute_result else {}

    rows = points(10)
    trainer = make(tmp_path, compute_metrics=metrics, batch_eval_metrics=True)
    expected = make(tmp_path, compute_metrics=accuracy).evaluate(rows)["eval_accuracy"]
    assert trainer.evaluate(rows)["eval_accuracy"] == expected
    assert told == [False, False, True]
    state.update(right=0, seen=0)
    output = trainer.predict(rows)
    assert output.metrics["test_accuracy"] == expected and output.predictions[0].shape == (10, 4)


@pytest.mark.parametrize("steps", [None, 1, 2, 5])
def test_accumulating_on_the_device_changes_no_number(steps: int | None, tmp_path: Any) -> None:
    rows = points(10)
    expected = make(tmp_path).predict(rows)
    output = make(tmp_path, eval_accumulation_steps=steps).predict(rows)
    np.testing.assert_array_equal(output.predictions[0], expected.predictions[0])
    assert output.metrics["test_loss"] == expected.metrics["test_loss"]


class TwoLabels(nn.Module):
    """Start and end of a span, each with its own labels."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(3, 2)

    def forward(self, x: Tensor, start_labels: Any = None, end_labels: Any = None) -> tuple[Tensor, ...]:
        start, end = self.head(x).unbind(-1)
        if start_labels is None:
            return start, end
        return nn.functional.mse_loss(start, start_labels) + nn.functional.mse_loss(end, end_labels), start, end


def test_several_label_tensors(tmp_path: Any) -> None:
    g = torch.Generator().manual_seed(0)
    rows = [
        {name: torch.randn(shape, generator=g, dtype=torch.float64) for name, shape in
         (("x", (3,)), ("start_labels", ()), ("end_labels", ()))} for _ in range(10)
    ]  # fmt: skip
    trainer = make(tmp_path, model=models.made(TwoLabels))
    output = trainer.predict(rows)
    whole = trainer.model(*(stacked(rows, name) for name in ("x", "start_labels", "end_labels")))
    assert output.metrics["test_loss"] == pytest.approx(float(whole[0].detach()), rel=1e-12)
    for i, name in enumerate(("start_labels", "end_labels")):
        np.testing.assert_array_equal(output.label_ids[i], stacked(rows, name))
        np.testing.assert_allclose(output.predictions[i], whole[1 + i].detach(), atol=1e-12)
    bare = trainer.predict([{"x": row["x"]} for row in rows])
    assert bare.label_ids is None and "test_loss" not in bare.metrics
    np.testing.assert_array_equal(bare.predictions[1], output.predictions[1])


@dataclasses.dataclass
class Answer:
    """An output that is neither a dict nor a tuple."""

    loss: Any
    logits: Any
    masked: Any


class Objects(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(3, 4)

    def forward(self, x: Tensor, labels: Any = None) -> Answer:
        logits = self.head(x)
        loss = None if labels is None else nn.functional.cross_entropy(logits, labels)
        return Answer(loss, logits, logits[:, : 1 + int(labels[0])] > 0 if labels is not None else logits > 0)


def test_an_output_object_and_ragged_truth_values(tmp_path: Any) -> None:
    """-100 is neither True nor False, so padded truth values become numbers."""
    rows, trainer = points(10), make(tmp_path, model=models.made(Objects))
    logits, masked = trainer.predict(rows).predictions
    expected = trainer.model.head(stacked(rows, "x")).detach().numpy()
    np.testing.assert_allclose(logits, expected, atol=1e-12)
    for start in (0, 4, 8):
        width = 1 + int(rows[start]["labels"])
        np.testing.assert_array_equal(masked[start : start + 4, :width], expected[start : start + 4, :width] > 0)
        assert (masked[start : start + 4, width:] == -100).all()


class PerSample(Point):
    """A list with one entry for each sample, as detectors give."""

    def forward(self, x: Tensor, labels: Any = None) -> Any:
        found = super().forward(x, labels)
        return {"loss": found["loss"], "boxes": [x[i] for i in range(len(x))]}


def test_outputs_that_cannot_be_joined_say_what_to_do(tmp_path: Any) -> None:
    with pytest.raises(DataError, match="eval_do_concat_batches=False"):
        make(tmp_path, model=models.made(PerSample)).predict(points(10))
    apart = make(tmp_path, model=models.made(PerSample), eval_do_concat_batches=False).predict(points(10)).predictions
    assert [len(boxes) for boxes in apart] == [4, 4, 2]


@pytest.mark.parametrize("metrics", [None, accuracy, {"accuracy": "torchmetrics"}])
def test_data_without_labels_can_be_predicted(metrics: Any, tmp_path: Any) -> None:
    if isinstance(metrics, dict):
        classification = pytest.importorskip("torchmetrics.classification")
        metrics = {"accuracy": classification.MulticlassAccuracy(4)}
    trainer = make(tmp_path, compute_metrics=metrics)
    output = trainer.predict(points(10, labelled=False))
    assert output.label_ids is None
    assert {name for name in output.metrics if not name.endswith(UNTRAINED)} == set()
    np.testing.assert_array_equal(output.predictions[0], trainer.predict(points(10)).predictions[0])


@pytest.mark.parametrize("metrics", [None, accuracy])
def test_an_evaluation_without_labels_says_that_it_shows_nothing(metrics: Any, tmp_path: Any) -> None:
    trainer = make(tmp_path, eval_dataset=points(labelled=False), compute_metrics=metrics)
    trainer.predict(points(labelled=False))
    assert not trainer._loopwright.notices.told
    assert set(trainer.evaluate()) == {"epoch", *(f"eval_{name}" for name in UNTRAINED)}
    [told] = trainer._loopwright.notices.told
    assert "neither a loss nor metrics" in told and "label_names" in told


class EmptyLoader(loopwright.Trainer):
    """Its metrics are computed elsewhere."""

    def get_eval_dataloader(self, eval_dataset: Any = None) -> Any:
        return torch.utils.data.DataLoader([])


class OwnStep(loopwright.Trainer):
    def prediction_step(self, model: Any, inputs: Any, prediction_loss_only: bool, ignore_keys: Any = None) -> Any:
        return None, None, None


@pytest.mark.parametrize("cls", [EmptyLoader, OwnStep])
def test_an_evaluation_that_is_to_show_nothing_is_not_reported(cls: Any, tmp_path: Any) -> None:
    args = loopwright.TrainingArguments(str(tmp_path), use_cpu=True)
    trainer = cls(models.made(Point), args, eval_dataset=points())
    assert "eval_loss" not in trainer.evaluate()
    assert not [told for told in trainer._loopwright.notices.told if "neither a loss" in told]


def test_a_metrics_function_must_be_able_to_collect(tmp_path: Any) -> None:
    with pytest.raises((ArgumentsError, TypeError), match="compute_result"):
        make(tmp_path, compute_metrics=lambda prediction: {}, batch_eval_metrics=True).evaluate(points())


# ---- names -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("prefix", ["eval", "valid", "eval_long"])
def test_keys_have_the_prefix(prefix: str, tmp_path: Any) -> None:
    trainer = make(tmp_path, compute_metrics=accuracy)
    names = {f"{prefix}_{name}" for name in ("loss", "accuracy", *UNTRAINED)}
    assert set(trainer.evaluate(points(), metric_key_prefix=prefix)) == {*names, "epoch"}
    assert set(trainer.predict(points(), metric_key_prefix=prefix).metrics) == names


def test_a_metric_that_has_the_prefix_keeps_its_name(tmp_path: Any) -> None:
    metrics = make(tmp_path, compute_metrics=lambda p: {"eval_own": 1, "other": 2}).evaluate(points())
    assert metrics["eval_own"] == 1 and metrics["eval_other"] == 2 and "eval_eval_own" not in metrics


@pytest.mark.parametrize("value", [np.float32(0.5), np.array(0.5), np.array([0.5]), torch.tensor(0.5), 0.5])
def test_metrics_become_plain_numbers(value: Any, tmp_path: Any) -> None:
    found = make(tmp_path, compute_metrics=lambda p: {"m": value}).evaluate(points())["eval_m"]
    assert type(found) is float and found == 0.5


def test_a_metric_that_contains_itself_or_has_no_value_is_refused(tmp_path: Any) -> None:
    itself: list[Any] = []
    itself.append(itself)
    for value, text in ((itself, "contains itself"), (torch.ones(1, device="meta"), "'eval_m' is a Tensor")):
        with pytest.raises(LoopwrightError, match=text):
            make(tmp_path, compute_metrics=lambda p, value=value: {"m": value}).evaluate(points())


class Listener(TrainerCallback):
    def __init__(self) -> None:
        self.evaluated: list[Any] = []
        self.logged: list[Any] = []
        self.predicted = 0

    def on_evaluate(self, args: Any, state: Any, control: Any, metrics: Any, **kwargs: Any) -> None:
        self.evaluated.append((state.global_step, dict(metrics)))

    def on_predict(self, args: Any, state: Any, control: Any, metrics: Any, **kwargs: Any) -> None:
        self.predicted += 1

    def on_log(self, args: Any, state: Any, control: Any, logs: Any, **kwargs: Any) -> None:
        self.logged.append((state.global_step, set(logs)))

    def steps(self) -> list[int]:
        return [step for step, _ in self.evaluated]


def test_named_sets_have_their_own_keys_and_events(tmp_path: Any) -> None:
    listener, sets = Listener(), {"short": points(5), "long": points(9, seed=8)}
    trainer = make(tmp_path, eval_dataset=sets, compute_metrics=accuracy, callbacks=[listener])
    metrics = trainer.evaluate()
    each = ("loss", "accuracy", *UNTRAINED)
    assert set(metrics) == {"epoch", *(f"eval_{name}_{m}" for name in sets for m in each)}
    assert [{m for m in seen if m != "epoch"} for _, seen in listener.evaluated] == [
        {f"eval_{name}_{m}" for m in each} for name in sets
    ]
    for name, rows in sets.items():
        alone = trainer.evaluate(rows)
        assert trainer.evaluate(name, metric_key_prefix="eval")["eval_loss"] == alone["eval_loss"]
        assert metrics[f"eval_{name}_loss"] == alone["eval_loss"]
        assert metrics[f"eval_{name}_accuracy"] == alone["eval_accuracy"]
    other = trainer.evaluate({"new": points(3)}, metric_key_prefix="test")
    assert "test_new_loss" in other
    with pytest.raises(DataError, match="short, long"):
        trainer.evaluate("medium")


# ---- when ------------------------------------------------------------------------------------------------------------

EPOCH = 5  # updates of an epoch: 20 points, batches of 4

WHEN: list[tuple[dict[str, Any], list[int]]] = [
    ({"eval_strategy": "steps", "eval_steps": 4}, [4, 8, 10]),
    ({"eval_strategy": "steps", "eval_steps": 5}, [5, 10]),
    ({"eval_strategy": "steps", "eval_steps": 0.3}, [3, 6, 9, 10]),
    ({"eval_strategy": "steps", "eval_steps": 100}, [10]),
    ({"eval_strategy": "steps", "logging_steps": 3}, [3, 6, 9, 10]),
    ({"eval_strategy": "epoch"}, [5, 10]),
    ({"eval_strategy": "steps", "eval_steps": 2, "eval_delay": 5}, [6, 8, 10]),
    ({"eval_strategy": "steps", "eval_steps": 2, "eval_delay": 11}, []),
    ({"eval_strategy": "epoch", "eval_delay": 1.5}, [10]),
    ({"eval_strategy": "epoch", "eval_on_start": True}, [0, 5, 10]),
    ({"eval_strategy": "steps", "eval_steps": 7, "eval_on_start": True, "eval_delay": 8}, [0, 10]),
    ({"eval_strategy": "steps", "eval_steps": 4, "max_steps": 6}, [4, 6]),
    ({"eval_strategy": "no"}, []),
]


@pytest.mark.parametrize("options, steps", WHEN, ids=str)
def test_evaluations_come_when_asked(options: dict[str, Any], steps: list[int], tmp_path: Any) -> None:
    listener = Listener()
    options = {"num_train_epochs": 2, "callbacks": [listener], **options}
    trainer = make(tmp_path, data=points(20), eval_dataset=points(), **options)
    trainer.train()
    assert listener.steps() == steps
    history = [row for row in trainer.state.log_history if "eval_loss" in row]
    assert [row["step"] for row in history] == steps
    for row in history:
        assert set(row) == {"eval_loss", "epoch", "step", *(f"eval_{name}" for name in SPEED)}
        assert row["epoch"] == row["step"] / EPOCH
    assert [keys for _, keys in listener.logged if "eval_loss" in keys] == [set(row) - {"step"} for row in history]


@pytest.mark.parametrize("patience, stops", [(1, 6), (2, 8), (9, 20)])
def test_early_stopping_counts_evaluations(patience: int, stops: int, tmp_path: Any) -> None:
    """Accuracies of the evaluations at steps 2, 4, 6 ...: the second is the best."""
    series = iter([0.1, 0.5, *[0.4] * 20])
    listener = Listener()
    trainer = make(tmp_path, data=points(40), eval_dataset=points(), max_steps=20, eval_strategy="steps", eval_steps=2,
                   metric_for_best_model="accuracy", compute_metrics=lambda p: {"accuracy": next(series)},
                   callbacks=[EarlyStoppingCallback(patience), listener])  # fmt: skip
    series = iter([0.0, *series])  # the look at one batch before the first step
    trainer.train()
    assert trainer.state.global_step == listener.steps()[-1] == stops
    assert trainer.state.best_metric == 0.5 and trainer.state.best_global_step == 4


# ---- what evaluation leaves alone ------------------------------------------------------------------------------------


class Draws(torch.utils.data.Dataset):
    """Every sample draws from all three streams."""

    def __init__(self, rows: list[Any]) -> None:
        self.rows = rows

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> Any:
        noise = random.random() + np.random.rand() + float(torch.rand(()))
        return {**self.rows[index], "x": self.rows[index]["x"] + noise}


def streams() -> tuple[Any, ...]:
    return random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state().tolist()


@pytest.mark.parametrize("call", ["evaluate", "predict"])
def test_random_streams_are_left_as_found(call: str, tmp_path: Any) -> None:
    trainer = make(tmp_path, model=models.made(Point, 0.5))
    trainer.compute_metrics = lambda p: {"noise": random.random() + np.random.rand() + float(torch.rand(()))}
    before = streams()
    getattr(trainer, call)(Draws(points()))
    assert streams() == before


@pytest.mark.parametrize("options", [
    {"eval_strategy": "steps", "eval_steps": 1},
    {"eval_strategy": "steps", "eval_steps": 3, "eval_on_start": True},
    {"eval_strategy": "epoch", "metric_for_best_model": "loss"},
])  # fmt: skip
def test_training_is_the_same_with_and_without_evaluation(options: dict[str, Any], tmp_path: Any) -> None:
    def losses(**options: Any) -> list[float]:
        trainer = make(tmp_path, model=models.made(Point, 0.3), data=Draws(points(20)), eval_dataset=Draws(points()),
                       num_train_epochs=2, train_sampling_strategy="random", **options)  # fmt: skip
        trainer.train()
        return [row["loss"] for row in trainer.state.log_history if "loss" in row]

    assert losses(**options) == losses()


@pytest.mark.parametrize("mode", [True, False])
@pytest.mark.parametrize("fails", [False, True])
def test_the_model_goes_back_to_the_mode_it_was_in(mode: bool, fails: bool, tmp_path: Any) -> None:
    modes: list[bool] = []

    class Watched(Point):
        def forward(self, x: Tensor, labels: Any = None) -> Any:
            modes.append(self.training)
            if fails:
                raise RuntimeError("no")
            return super().forward(x, labels)

    trainer = make(tmp_path, model=models.made(Watched))
    trainer.model.train(mode)
    try:
        trainer.evaluate(points())
    except RuntimeError:
        assert fails
    assert not any(modes) and modes
    assert trainer.model.training is mode


@pytest.mark.parametrize("mode", [True, False])
def test_parts_of_the_model_go_back_to_the_mode_they_were_in(mode: bool, tmp_path: Any) -> None:
    trainer = make(tmp_path)
    trainer.model.train(mode)
    trainer.model.dropout.train(not mode)
    trainer.evaluate(points())
    assert [each.training for each in trainer.model.modules()] == [mode, mode, not mode]


def test_an_override_may_return_the_loss_of_each_sample(tmp_path: Any) -> None:
    class Each(loopwright.Trainer):
        def prediction_step(self, *args: Any, **kwargs: Any) -> Any:
            loss, logits, labels = super().prediction_step(*args, **kwargs)
            return loss.repeat(3), logits, labels

    found = [make(tmp_path, cls=cls).evaluate(points())["eval_loss"] for cls in (loopwright.Trainer, Each)]
    assert found[0] == pytest.approx(found[1])


# ---- results as text and files ---------------------------------------------------------------------------------------


def test_metrics_are_readable_as_transformers_shows_them(tmp_path: Any) -> None:
    theirs = pytest.importorskip("transformers.trainer_pt_utils")
    trainer = make(tmp_path)
    for seconds in (0, 0.004, 0.5, 1, 9.999, 10, 10.0, 59.5, 60, 100.25, 600.0, 3600, 36000.5, 86400.0, 1234567.891):
        metrics = {"eval_runtime": seconds, "train_mem_cpu_alloc_delta": 123456789, "total_flos": 7.5e12,
                   "eval_loss": 0.123456, "eval_samples": 10, "epoch": 1.0}  # fmt: skip
        assert trainer.metrics_format(metrics) == theirs.metrics_format(metrics)


def test_metrics_are_printed_and_written(tmp_path: Any, capsys: Any) -> None:
    trainer = make(tmp_path, compute_metrics=accuracy)
    first, second = trainer.evaluate(points()), trainer.predict(points()).metrics
    capsys.readouterr()
    trainer.log_metrics("eval", first)
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "***** eval metrics *****"
    assert [line.split("=")[0].strip() for line in lines[1:]] == sorted(first)
    assert len({line.index("=") for line in lines[1:]}) == 1
    trainer.save_metrics("eval", first)
    trainer.save_metrics("test", second)
    trainer.save_metrics("apart", {"lonely": 1}, combined=False)
    assert json.loads((tmp_path / "eval_results.json").read_text()) == first
    assert json.loads((tmp_path / "test_results.json").read_text()) == second
    assert json.loads((tmp_path / "apart_results.json").read_text()) == {"lonely": 1}
    assert json.loads((tmp_path / "all_results.json").read_text()) == {**first, **second}


def test_the_state_is_written(tmp_path: Any) -> None:
    trainer = make(tmp_path, data=points(), eval_dataset=points(), max_steps=3, eval_strategy="steps", eval_steps=2)
    trainer.train()
    trainer.save_state()
    written = json.loads((tmp_path / "trainer_state.json").read_text())
    assert written["global_step"] == 3 and written["log_history"] == trainer.state.log_history
    assert loopwright.TrainerState.load_from_json(str(tmp_path / "trainer_state.json")).global_step == 3


def test_predict_tells_its_own_event_and_logs_nothing(tmp_path: Any) -> None:
    listener = Listener()
    make(tmp_path, callbacks=[listener]).predict(points())
    assert listener.predicted == 1 and listener.evaluated == [] and listener.logged == []


# ---- the page about evaluation ---------------------------------------------------------------------------------------

PAGE = Path(__file__).parents[2] / "docs" / "evaluation.md"


def test_the_examples_of_the_page_run(capsys: Any) -> None:
    pytest.importorskip("transformers")
    shared: dict[str, Any] = {}
    examples = re.findall(r"```python\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)
    for example in examples:
        exec(compile(example, str(PAGE), "exec"), shared)
    assert len(examples) == 4
    shown = capsys.readouterr().out
    assert "eval_long_accuracy" in shown and "test_loss" in shown
    assert shared["trainer"].state.log_history[-1]["eval_exact_match"] == 1.0
