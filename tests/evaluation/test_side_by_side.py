"""Evaluation and prediction give what transformers gives, to the last digit where the arithmetic is the same."""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import pytest
import torch

import loopwright
from tests.models import TASKS, token_data

transformers = pytest.importorskip("transformers")

NAMES = ("regression", "bert", "t5", "llama")
TIMES = ("runtime", "per_second", "preparation_time")


def metrics(prediction: Any) -> dict[str, float]:
    """Numbers that change with any prediction, label, or their order."""
    predictions = prediction.predictions[0] if isinstance(prediction.predictions, tuple) else prediction.predictions
    places = np.arange(1, 1 + len(predictions)).reshape(-1, *[1] * (predictions.ndim - 1))
    return {
        "weighed": float((predictions.astype(np.float64) * places).sum()),
        "labels": float((prediction.label_ids * np.arange(1, 1 + len(prediction.label_ids)).reshape(
            -1, *[1] * (prediction.label_ids.ndim - 1))).sum()),
    }  # fmt: skip


def trainers(name: Any, folder: Any, **options: Any) -> tuple[Any, Any]:
    """Ours and theirs on copies of the same model, or of that of a task."""
    torch.manual_seed(0)
    model = TASKS[name].model(0.0) if isinstance(name, str) else name
    given = {key: options.pop(key) for key in ("compute_metrics", "preprocess_logits_for_metrics") if key in options}
    made = []
    for library, own in ((loopwright, {"eval_loss_reduction": "batch_mean"}), (transformers, {})):
        shared = {"use_cpu": True, "disable_tqdm": True, "report_to": [], **options}
        args = library.TrainingArguments(output_dir=str(folder), **shared, **own)
        made.append(library.Trainer(copy.deepcopy(model), args, **given))
    return made[0], made[1]


def assert_same_nest(ours: Any, theirs: Any) -> None:
    if isinstance(theirs, dict):
        assert ours.keys() == theirs.keys()
        assert_same_nest([*ours.values()], [*theirs.values()])
    elif isinstance(theirs, (tuple, list)):
        assert isinstance(ours, (tuple, list)) and len(ours) == len(theirs)
        for mine, other in zip(ours, theirs, strict=True):
            assert_same_nest(mine, other)
    elif theirs is None:
        assert ours is None
    else:
        assert ours.dtype == theirs.dtype
        np.testing.assert_array_equal(ours, theirs)


def timeless(found: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in found.items() if not name.endswith(TIMES)}


def assert_same_output(ours: Any, theirs: Any) -> None:
    assert_same_nest(ours.predictions, theirs.predictions)
    assert_same_nest(ours.label_ids, theirs.label_ids)
    assert ours.metrics.keys() == theirs.metrics.keys()
    for name, value in timeless(theirs.metrics).items():
        assert ours.metrics[name] == pytest.approx(value, rel=1e-6), name


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("batch", [1, 4, 5, 64])
def test_predict_gives_the_same(name: str, batch: int, tmp_path: Any) -> None:
    data = TASKS[name].data(19)
    ours, theirs = trainers(name, tmp_path, per_device_eval_batch_size=batch, compute_metrics=metrics)
    assert_same_output(ours.predict(data), theirs.predict(data))


@pytest.mark.parametrize("name", NAMES)
def test_evaluate_gives_the_same_under_the_same_names(name: str, tmp_path: Any) -> None:
    data = TASKS[name].data(19)
    ours, theirs = trainers(name, tmp_path, per_device_eval_batch_size=4, compute_metrics=metrics)
    for prefix in ("eval", "valid"):
        mine, other = (timeless(each.evaluate(data, metric_key_prefix=prefix)) for each in (ours, theirs))
        mine.pop("epoch", None), other.pop("epoch", None)
        assert mine.keys() == other.keys()
        assert mine == pytest.approx(other, rel=1e-6)


@pytest.mark.parametrize("name", ["bert", "t5"])
def test_ragged_batches_are_joined_in_the_same_way(name: str, tmp_path: Any) -> None:
    """Every batch has its own width; what is missing is -100 in both."""
    labels = "class" if name == "bert" else "token"
    data = [
        {key: value[: 4 + i % 7] if value.dim() else value for key, value in row.items()}
        for i, row in enumerate(token_data(17, labels=labels))
    ]
    fills = {"input_ids": 0, "attention_mask": 0, "labels": -100}

    def pad(rows: list[dict[str, Any]]) -> dict[str, Any]:
        width = max(len(row["input_ids"]) for row in rows)
        return {key: torch.stack([
            torch.nn.functional.pad(row[key], (0, width - len(row[key])), value=fill) if row[key].dim() else row[key]
            for row in rows]) for key, fill in fills.items()}  # fmt: skip

    ours, theirs = trainers(name, tmp_path, per_device_eval_batch_size=3, compute_metrics=metrics)
    ours.data_collator = theirs.data_collator = pad
    assert_same_output(ours.predict(data), theirs.predict(data))


def best(logits: Any, labels: Any) -> Any:
    return (logits[0] if isinstance(logits, tuple) else logits).argmax(-1)


OPTIONS: list[dict[str, Any]] = [
    {"eval_accumulation_steps": 2},
    {"prediction_loss_only": True},
    {"eval_do_concat_batches": False},
    {"preprocess_logits_for_metrics": best},
]


@pytest.mark.parametrize("options", OPTIONS, ids=lambda options: next(iter(options)))
@pytest.mark.parametrize("name", ["bert", "t5"])
def test_arguments_mean_the_same(name: str, options: dict[str, Any], tmp_path: Any) -> None:
    data = TASKS[name].data(11)
    ours, theirs = trainers(name, tmp_path, per_device_eval_batch_size=4, **options)
    assert_same_output(ours.predict(data), theirs.predict(data))


@pytest.mark.parametrize("include", [["inputs"], ["loss"], ["inputs", "loss"]])
def test_metrics_receive_the_same(include: list[str], tmp_path: Any) -> None:
    seen: list[Any] = []
    data = TASKS["bert"].data(11)
    both = trainers("bert", tmp_path, per_device_eval_batch_size=4, include_for_metrics=include,
                    compute_metrics=lambda p: seen.append(p) or {})  # fmt: skip
    for each in both:
        each.evaluate(data)
    ours, theirs = seen
    assert_same_nest(ours.predictions, theirs.predictions)
    assert_same_nest(ours.inputs, theirs.inputs)
    assert (ours.losses is None) == (theirs.losses is None) == ("loss" not in include)
    if "loss" in include:
        np.testing.assert_allclose(ours.losses, theirs.losses, rtol=1e-6)


@pytest.mark.parametrize("name", ["bert", "t5"])
def test_data_without_labels_gives_the_same(name: str, tmp_path: Any) -> None:
    data = [{key: value for key, value in row.items() if key != "labels"} for row in TASKS[name].data(7)]
    if name == "t5":
        data = [{**row, "decoder_input_ids": row["input_ids"]} for row in data]
    ours, theirs = trainers(name, tmp_path, per_device_eval_batch_size=3)
    assert_same_output(ours.predict(data), theirs.predict(data))


def test_batches_collected_one_by_one_are_the_same(tmp_path: Any) -> None:
    data = TASKS["bert"].data(11)
    calls: dict[int, list[Any]] = {}

    def collect(who: int) -> Any:
        def function(prediction: Any, compute_result: bool) -> dict[str, float]:
            predictions, labels = prediction
            calls.setdefault(who, []).append((predictions.tolist(), labels.tolist(), compute_result))
            return {"batches": len(calls[who])}

        return function

    results = []
    for who, each in enumerate(trainers("bert", tmp_path, per_device_eval_batch_size=4, batch_eval_metrics=True)):
        each.compute_metrics = collect(who)
        results.append(timeless(each.evaluate(data)))
    assert calls[0] == calls[1] and [last for *_, last in calls[0]] == [False, False, True]
    assert results[0]["eval_batches"] == results[1]["eval_batches"] == 3
    assert results[0]["eval_loss"] == pytest.approx(results[1]["eval_loss"], rel=1e-6)


def test_named_sets_have_the_same_names_and_numbers(tmp_path: Any) -> None:
    sets = {"a": TASKS["bert"].data(5), "b": TASKS["bert"].data(9)}
    ours, theirs = (timeless(each.evaluate(sets)) for each in trainers("bert", tmp_path, compute_metrics=metrics))
    ours.pop("epoch", None), theirs.pop("epoch", None)
    assert ours == pytest.approx(theirs, rel=1e-6)


class Outputs(torch.nn.Module):
    """Returns what `made` makes of logits and loss; the loss is None without labels."""

    def __init__(self, made: Any, **attributes: Any) -> None:
        super().__init__()
        self.head, self.made = torch.nn.Linear(3, 3), made
        for name, value in attributes.items():
            setattr(self, name, value)

    def forward(self, x: Any, labels: Any = None) -> Any:
        logits = self.head(x)
        return self.made(logits, None if labels is None else torch.nn.functional.cross_entropy(logits, labels))


def points(n: int, *, labelled: bool = True) -> list[dict[str, Any]]:
    x = torch.randn(n, 3, generator=torch.Generator().manual_seed(1))
    return [{"x": row, **({"labels": row.argmax()} if labelled else {})} for row in x]


@pytest.mark.parametrize("labelled", [True, False])
def test_a_number_before_the_scores_is_an_output_unless_it_is_the_loss(labelled: bool, tmp_path: Any) -> None:
    model = Outputs(lambda logits, loss: (logits.mean() if loss is None else loss, logits))
    ours, theirs = trainers(model, tmp_path, per_device_eval_batch_size=4)
    assert_same_output(ours.predict(points(8, labelled=labelled)), theirs.predict(points(8, labelled=labelled)))


@pytest.mark.parametrize("ignored", [[], ["hidden"], None])
def test_the_configuration_names_outputs_to_ignore(ignored: Any, tmp_path: Any) -> None:
    config = transformers.PretrainedConfig(**({} if ignored is None else {"keys_to_ignore_at_inference": ignored}))
    model = Outputs(
        lambda logits, loss: {"loss": loss, "logits": logits, "hidden": logits * 2, "past_key_values": logits},
        config=config,
    )
    ours, theirs = trainers(model, tmp_path, per_device_eval_batch_size=4)
    assert_same_output(ours.predict(points(8)), theirs.predict(points(8)))


@pytest.mark.parametrize(
    "made",
    [
        lambda logits, loss: (loss.reshape(1), logits),
        lambda logits, loss: (loss,),
        lambda logits, loss: {"loss": loss, "logits": logits, "each": [logits, (logits * 2,)]},
        lambda logits, loss: {"loss": loss, "part": transformers.utils.ModelOutput(logits=logits, each=[logits])},
    ],
    ids=["a loss of shape (1,)", "the loss only", "lists", "a named output"],
)
def test_predictions_have_the_structure_of_the_outputs(made: Any, tmp_path: Any) -> None:
    mine, other = (each.predict(points(9)) for each in trainers(Outputs(made), tmp_path, per_device_eval_batch_size=4))
    assert_same_output(mine, other)
    assert types_of(mine.predictions) == types_of(other.predictions)


def types_of(value: Any) -> Any:
    inner = value.values() if isinstance(value, dict) else value if isinstance(value, (tuple, list)) else ()
    return type(value), [types_of(each) for each in inner]


class Pairs(Outputs):
    """Computes its loss without labels, as CLIP does."""

    def forward(self, x: Any, return_loss: bool = True) -> Any:  # type: ignore[override]
        logits = self.head(x) @ x.T
        return {"loss": torch.nn.functional.cross_entropy(logits, torch.arange(len(x))), "rows": logits.sum(1)}


@pytest.mark.parametrize("per_batch", [False, True])
def test_metrics_of_a_model_without_labels_are_computed(per_batch: bool, tmp_path: Any) -> None:
    seen: list[Any] = []

    def function(prediction: Any, compute_result: bool = True) -> dict[str, float]:
        seen.append(prediction.label_ids)
        return {"sum": float(prediction.predictions.sum())}

    options = {"per_device_eval_batch_size": 4, "batch_eval_metrics": per_batch, "compute_metrics": function}
    ours, theirs = trainers(Pairs(None), tmp_path, **options)
    assert_same_output(ours.predict(points(8, labelled=False)), theirs.predict(points(8, labelled=False)))
    assert seen == [()] * (4 if per_batch else 2)


@pytest.mark.parametrize("name", ["loss", "test_loss"])
def test_a_metric_named_loss_has_the_same_value(name: str, tmp_path: Any) -> None:
    ours, theirs = trainers("regression", tmp_path, compute_metrics=lambda prediction: {name: 7.0})
    data = TASKS["regression"].data(5)
    assert_same_output(ours.predict(data), theirs.predict(data))


@pytest.mark.parametrize("include", [["inputs"], ["inputs", "loss"]])
def test_metrics_collected_by_batch_receive_the_whole_batch(include: list[str], tmp_path: Any) -> None:
    data = TASKS["bert"].data(8)
    seen: list[dict[str, Any]] = []

    def function(prediction: Any, compute_result: bool) -> dict[str, float]:
        seen.append({name: value.tolist() for name, value in prediction.inputs.items()})
        return {}

    options = {"batch_eval_metrics": True, "include_for_metrics": include, "compute_metrics": function}
    for each in trainers("bert", tmp_path, per_device_eval_batch_size=4, **options):
        each.evaluate(data)
    assert seen[:2] == seen[2:]
