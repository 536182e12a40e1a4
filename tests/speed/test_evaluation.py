"""Evaluation and prediction in proved layouts against the collator's batches, and what is refused."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, IterableDataset

from loopwright import Trainer, TrainingArguments
from loopwright.speed.attention import dispatch
from loopwright.speed.fused_loss import recipe
from loopwright.speed.planner.decision import FLAT, GROUPED, PAIRED, UNMASKED, UNPADDED
from tests.speed.architectures import build, collate, on_the_left, samples
from tests.speed.test_architectures import EXPECTED, IN_SINGLE_PRECISION

pytest.importorskip("transformers")
BATCH = 4


def trainer_of(
    model: nn.Module, data: Any, folder: Path, speed: str = "max", kind: type[Trainer] = Trainer, **more: Any
) -> Trainer:
    given = {name: more.pop(name) for name in GIVEN if name in more}
    args = TrainingArguments(
        str(folder), speed=speed, **{"per_device_eval_batch_size": BATCH, "report_to": "none", "use_cpu": True,
        "disable_tqdm": True, "save_strategy": "no", **more},
    )  # fmt: skip
    return kind(model, args, **{"eval_dataset": data, "data_collator": collate, **given})


GIVEN = ("compute_metrics", "preprocess_logits_for_metrics", "data_collator", "callbacks", "train_dataset")
GIVEN += ("compute_loss_func",)


ABOUT = ("evaluation", "predictions")


def chosen(trainer: Trainer) -> dict[str, bool]:
    """What the report says about evaluations."""
    rows = trainer.speed_report().as_dict()["choices"]
    return {row["name"].partition(": ")[2]: row["on"] for row in rows if row["name"].startswith(ABOUT)}


def reason(trainer: Trainer) -> str:
    rows = trainer.speed_report().as_dict()["choices"]
    return " | ".join(row["reason"] for row in rows if row["name"].startswith(ABOUT))


def numbers(metrics: Mapping[str, Any]) -> dict[str, float]:
    """The metrics without times."""
    return {name: value for name, value in metrics.items() if not name.endswith(("time", "per_second"))}


def assert_alike(found: Any, expected: Any, tolerance: float = 1e-10) -> None:
    """Predictions or labels: the same structure, shapes, dtypes and values."""
    if isinstance(expected, (tuple, list)):
        assert type(found) is type(expected) and len(found) == len(expected)
        for mine, other in zip(found, expected, strict=True):
            assert_alike(mine, other, tolerance)
        return
    assert found.shape == expected.shape and found.dtype == expected.dtype
    np.testing.assert_allclose(found, expected, rtol=tolerance, atol=tolerance)


# ---- the matrix -----------------------------------------------------------------------------------------------------

ALWAYS = {("llama", "causal"), ("bloom", "causal"), ("t5", "pair"), ("electra", "tokens")}
"""Of each layout one; the others run with `-m grid`."""


def cases() -> list[Any]:
    return [pytest.param(*case, marks=() if case in ALWAYS else pytest.mark.grid) for case in sorted(EXPECTED)]


@pytest.mark.parametrize(("kind", "task"), cases())
def test_the_loss_is_that_of_padded_batches(kind: str, task: str, doubles_stay: None, tmp_path: Path) -> None:
    model, data = build(kind, task), samples(14, task)
    tolerance = 1e-5 if kind in IN_SINGLE_PRECISION else 1e-10
    plain = trainer_of(model, data, tmp_path, "off").evaluate()
    fast = trainer_of(model, data, tmp_path)
    assert numbers(fast.evaluate()) == pytest.approx(numbers(plain), rel=tolerance)
    expected = GROUPED if EXPECTED[kind, task] == PAIRED else EXPECTED[kind, task]
    assert chosen(fast)[expected], reason(fast)


def predicted() -> list[Any]:
    kinds = sorted(kind for kind, task in EXPECTED if task == "class")
    few = ("roberta", "deberta-v2")
    return [pytest.param(kind, marks=() if kind in few else pytest.mark.grid) for kind in kinds]


@pytest.mark.parametrize("kind", predicted())
def test_predictions_are_those_of_padded_batches(kind: str, doubles_stay: None, tmp_path: Path) -> None:
    model, data = build(kind, "class"), samples(14, "class")
    plain = trainer_of(model, data, tmp_path, "off").predict(data)
    fast = trainer_of(model, data, tmp_path)
    found = fast.predict(data)
    assert chosen(fast)[EXPECTED[kind, "class"]], reason(fast)
    assert_alike(found.predictions, plain.predictions)
    assert_alike(found.label_ids, plain.label_ids, 0)
    assert numbers(found.metrics) == pytest.approx(numbers(plain.metrics), rel=1e-10)


# ---- what a user may ask for ----------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def bert() -> nn.Module:
    return build("bert", "class")


@pytest.fixture(scope="module")
def llama() -> nn.Module:
    return build("llama", "causal")


@pytest.fixture(scope="module")
def gpt() -> nn.Module:
    """A model that computes everything in double precision."""
    return build("gpt2", "causal")


SHAPES: list[Any] = []


def metrics_of(prediction: Any, compute_result: bool = True) -> dict[str, float]:
    values = prediction.predictions
    SHAPES.append(tuple(values.shape))
    extra = {"inputs": float(np.asarray(prediction.inputs).sum())} if prediction.inputs is not None else {}
    return {"sum": float(values.sum()), "labels": float(prediction.label_ids.sum()), **extra} if compute_result else {}


OPTIONS: dict[str, dict[str, Any]] = {
    "metrics": {"compute_metrics": metrics_of},
    "inputs of metrics": {"compute_metrics": metrics_of, "include_for_metrics": ["inputs"]},
    "metrics of batches": {"compute_metrics": metrics_of, "batch_eval_metrics": True},
    "preprocessed": {
        "compute_metrics": metrics_of,
        "preprocess_logits_for_metrics": lambda logits, labels: logits.argmax(-1) + 10 * labels.shape[0],
    },
    "accumulated": {"compute_metrics": metrics_of, "eval_accumulation_steps": 3},
    "not joined": {"eval_do_concat_batches": False},
    "label smoothing": {"label_smoothing_factor": 0.1},
    "larger batches": {"per_device_eval_batch_size": 7},
}


SOME = ("inputs of metrics", "metrics of batches", "preprocessed", "not joined")
"""Options that are always tested; the others run with `-m grid`."""


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name in SOME else pytest.mark.grid) for name in OPTIONS]
)
def test_options_are_served(name: str, bert: nn.Module, doubles_stay: None, tmp_path: Path) -> None:
    data, found = samples(13, "class"), []
    for speed in ("off", "max"):
        SHAPES.clear()
        trainer = trainer_of(bert, data, tmp_path, speed, **OPTIONS[name])
        output = trainer.predict(data)
        found.append((output, numbers(trainer.evaluate()), list(SHAPES)))
    (plain, numbers_off, shapes_off), (fast, numbers_max, shapes_max) = found
    assert any(chosen(trainer).values()), reason(trainer)
    assert numbers_max == pytest.approx(numbers_off, rel=1e-9) and shapes_max == shapes_off
    assert_alike(fast.predictions, plain.predictions, 1e-9)
    assert_alike(fast.label_ids, plain.label_ids, 0)


class Stream(IterableDataset):
    def __init__(self, rows: list[Any]) -> None:
        self.rows = rows

    def __iter__(self) -> Any:
        return iter(self.rows)


def test_streams_several_datasets_and_no_labels(bert: nn.Module, doubles_stay: None, tmp_path: Path) -> None:
    data = samples(13, "class")
    unlabelled = [{"input_ids": row["input_ids"]} for row in data]
    without = {"data_collator": lambda rows: {k: v for k, v in collate(
        [{**row, "labels": torch.tensor(0)} for row in rows]).items() if k != "labels"}}  # fmt: skip
    sets = {"a": data[:9], "b": samples(7, "class", seed=3)}
    for make, options in (
        (lambda trainer: trainer.predict(Stream(data)), {}),
        (lambda trainer: trainer.predict(unlabelled), without),
    ):
        plain = make(trainer_of(bert, data, tmp_path, "off", **options))
        fast = trainer_of(bert, data, tmp_path, **options)
        found = make(fast)
        assert chosen(fast)[UNPADDED], reason(fast)
        assert_alike(found.predictions, plain.predictions)
    plain_numbers = numbers(trainer_of(bert, sets, tmp_path, "off").evaluate())
    assert numbers(trainer_of(bert, sets, tmp_path).evaluate()) == pytest.approx(plain_numbers, rel=1e-10)


def test_evaluations_while_training(llama: nn.Module, doubles_stay: None, tmp_path: Path) -> None:
    data, found = samples(16, "causal"), []
    for speed in ("off", "max"):
        torch.manual_seed(0)
        trainer = trainer_of(
            build("llama", "causal"), samples(12, "causal", seed=5), tmp_path / speed, speed, train_dataset=data,
            eval_strategy="steps", eval_steps=1, max_steps=3, learning_rate=0.05, optim="sgd",
        )  # fmt: skip
        trainer.train()
        found.append([row["eval_loss"] for row in trainer.state.log_history if "eval_loss" in row])
    assert chosen(trainer)[FLAT], reason(trainer)
    assert len(found[0]) == 3 and found[1] == pytest.approx(found[0], rel=1e-9)


def test_padding_on_the_left(llama: nn.Module, doubles_stay: None, tmp_path: Path) -> None:
    data = [{**row, "labels": torch.where(torch.arange(len(row["labels"])) > 0, row["labels"], -100)}
            for row in samples(16, "causal")]  # fmt: skip
    options = {"data_collator": lambda rows: on_the_left(collate(rows))}
    plain = numbers(trainer_of(llama, data, tmp_path, "off", **options).evaluate())
    trainer = trainer_of(llama, data, tmp_path, **options)
    assert numbers(trainer.evaluate()) == pytest.approx(plain, rel=1e-9)
    assert chosen(trainer)[FLAT], reason(trainer)


def test_nothing_is_left_behind(llama: nn.Module, tmp_path: Path) -> None:
    data = samples(18, "causal")
    before = {name: parameter.clone() for name, parameter in llama.named_parameters()}
    trainer = trainer_of(llama, data, tmp_path)
    random = torch.get_rng_state()
    trainer.evaluate()
    assert chosen(trainer)[FLAT]
    assert torch.equal(random, torch.get_rng_state())
    assert "forward" not in vars(llama.lm_head) and llama.config._attn_implementation == "sdpa"
    assert all(torch.equal(before[name], parameter) for name, parameter in llama.named_parameters())
    assert all(parameter.grad is None for parameter in llama.parameters())


# ---- what falls back ------------------------------------------------------------------------------------------------


class OwnStep(Trainer):
    def prediction_step(self, *args: Any, **kwargs: Any) -> Any:
        return super().prediction_step(*args, **kwargs)


class OwnLoss(Trainer):
    def compute_loss(self, *args: Any, **kwargs: Any) -> Any:
        return super().compute_loss(*args, **kwargs)


class OwnInputs(Trainer):
    def _prepare_inputs(self, inputs: Any) -> Any:
        return super()._prepare_inputs(inputs)


class OwnLoader(Trainer):
    """Batches that are lists, which have no names."""

    def get_eval_dataloader(self, eval_dataset: Any = None) -> Any:
        return DataLoader(self.eval_dataset, batch_size=3, collate_fn=lambda rows: {**collate(rows), "texts": ["a"]})

    def _prepare_inputs(self, inputs: Any) -> Any:
        return super()._prepare_inputs({name: value for name, value in inputs.items() if name != "texts"})


def own_loss(outputs: Any, labels: Any, num_items_in_batch: Any = None) -> Tensor:
    return nn.functional.cross_entropy(outputs.logits, labels)


FALLS_BACK: dict[str, tuple[str, dict[str, Any]]] = {
    "prediction_step": ("prediction_step is overridden", {"kind": OwnStep}),
    "compute_loss": ("compute_loss is overridden", {"kind": OwnLoss}),
    "_prepare_inputs": ("_prepare_inputs is overridden", {"kind": OwnInputs}),
    "loader": ("_prepare_inputs is overridden", {"kind": OwnLoader}),
    "compute_loss_func": ("compute_loss_func is set", {"compute_loss_func": own_loss}),
    "batch mean": ("eval_loss_reduction='batch_mean'", {"eval_loss_reduction": "batch_mean"}),
    "losses": (
        "the loss of each batch",
        {"include_for_metrics": ["loss"], "compute_metrics": lambda p: {"losses": float(np.sum(p.losses))}},
    ),
    "debug": ("underflow_overflow", {"debug": ["underflow_overflow"]}),
}


@pytest.mark.parametrize("name", FALLS_BACK)
def test_what_falls_back_is_as_before_and_reported(
    name: str, bert: nn.Module, doubles_stay: None, tmp_path: Path
) -> None:
    text, options = FALLS_BACK[name]
    data = samples(13, "class")
    plain = numbers(trainer_of(bert, data, tmp_path, "off", **options).evaluate())
    trainer = trainer_of(bert, data, tmp_path, "max", **options)
    assert numbers(trainer.evaluate()) == plain
    assert text in reason(trainer) and not any(chosen(trainer).values())


def test_small_evaluations_are_not_proved(bert: nn.Module, tmp_path: Path) -> None:
    trainer = trainer_of(bert, samples(8, "class"), tmp_path, "auto")
    trainer.evaluate()
    assert "too small" in reason(trainer)


def test_outputs_of_tokens_keep_the_values_of_the_padding(doubles_stay: None, tmp_path: Path) -> None:
    model, data = build("bert", "tokens"), samples(14, "tokens")
    plain = trainer_of(model, data, tmp_path, "off").predict(data)
    fast = trainer_of(model, data, tmp_path)
    found = fast.predict(data)
    assert "one value per token" in reason(fast)
    np.testing.assert_array_equal(found.predictions, plain.predictions)


# ---- what is wrong is refused ---------------------------------------------------------------------------------------


class Odd(nn.Module):
    """A model in one of the ways in which samples or padding may matter."""

    def __init__(self, way: str) -> None:
        super().__init__()
        self.inner, self.way = build("bert", "class"), way
        self.config, self.calls = self.inner.config, 0

    def forward(self, input_ids: Tensor, attention_mask: Tensor, labels: Any = None) -> dict[str, Any]:
        self.calls += self.way == "counts calls"
        outputs = self.inner(input_ids=input_ids, attention_mask=attention_mask, labels=labels)
        logits = outputs.logits
        if self.way == "looks at padding":
            logits = logits + 1e-3 * input_ids.shape[1]
        elif self.way == "compares samples":
            logits = logits - logits.mean(0)
        elif self.way == "draws":
            logits = logits + 1e-3 * torch.randn_like(logits)
        return {"loss": nn.functional.cross_entropy(logits, labels), "logits": logits}


@pytest.mark.parametrize("way", ["looks at padding", "compares samples", "draws", "counts calls"])
def test_models_that_depend_on_their_batches_are_refused(way: str, doubles_stay: None, tmp_path: Path) -> None:
    data, found = samples(14, "class"), []
    for speed in ("off", "max"):
        torch.manual_seed(0)
        trainer = trainer_of(Odd(way), data, tmp_path, speed)
        found.append(trainer.predict(data))
    assert not any(chosen(trainer).values()), reason(trainer)
    np.testing.assert_array_equal(found[0].predictions, found[1].predictions)
    assert numbers(found[0].metrics) == numbers(found[1].metrics)


def planted(attend: Callable[..., Any]) -> Callable[..., Any]:
    """An attention that is off by one in a million in some places."""

    def wrong(*args: Any) -> Any:
        output = attend(*args).clone()
        output[..., ::3] *= 1 + 1e-6
        return output

    return wrong


def test_a_planted_attention_is_refused(
    gpt: nn.Module, doubles_stay: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dispatch, "one_by_one", planted(dispatch.one_by_one))
    data = samples(14, "causal")
    plain = numbers(trainer_of(gpt, data, tmp_path, "off").evaluate())
    trainer = trainer_of(gpt, data, tmp_path)
    assert numbers(trainer.evaluate()) == pytest.approx(plain, rel=1e-10)
    assert chosen(trainer)[FLAT] is False and chosen(trainer)[UNMASKED]


def test_a_planted_loss_is_refused(
    gpt: nn.Module, doubles_stay: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    exact = recipe.linear_cross_entropy
    monkeypatch.setattr(recipe, "linear_cross_entropy", lambda *args, **options: exact(*args, **options) * (1 + 1e-8))
    data = samples(14, "causal")
    plain = numbers(trainer_of(gpt, data, tmp_path, "off").evaluate())
    trainer = trainer_of(gpt, data, tmp_path)
    assert numbers(trainer.evaluate()) == pytest.approx(plain, rel=1e-10)
    assert chosen(trainer)["fused loss"] is False and chosen(trainer)[FLAT]


SWITCH = {"on": False}


class Switched(Odd):
    """Its outputs depend on the padding once a global says so."""

    def forward(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        self.way = "looks at padding" if SWITCH["on"] else ""
        return super().forward(*args, **kwargs)


@pytest.mark.parametrize("what", ["hook", "global"])
def test_a_change_between_evaluations_is_found(
    what: str, doubles_stay: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, data = Switched(""), samples(13, "class")
    model.way = ""
    trainer = trainer_of(model, data, tmp_path)
    trainer.predict(data)
    assert any(chosen(trainer).values()), reason(trainer)
    monkeypatch.setitem(SWITCH, "on", what == "global")
    if what == "hook":
        model.inner.classifier.register_forward_hook(lambda module, args, output: output + 1e-3 * len(output))
    found = trainer.predict(data).predictions
    np.testing.assert_array_equal(found, trainer_of(model, data, tmp_path, "off").predict(data).predictions)
    assert not any(chosen(trainer).values())


def test_longer_samples_than_the_proof_has_seen(bert: nn.Module, doubles_stay: None, tmp_path: Path) -> None:
    data = [*samples(8, "class", longest=6), *samples(12, "class", longest=48, seed=9)]
    plain = trainer_of(bert, data, tmp_path, "off").predict(data)
    trainer = trainer_of(bert, data, tmp_path)
    trainer.predict(data[:8])
    assert_alike(trainer.predict(data).predictions, plain.predictions)
    assert chosen(trainer)[UNPADDED], reason(trainer)


def test_data_without_a_mask_after_data_with_one(bert: nn.Module, doubles_stay: None, tmp_path: Path) -> None:
    data = samples(20, "class")
    alike = [{**row, "input_ids": torch.arange(5) + place % 7} for place, row in enumerate(data)]

    def own(rows: list[dict[str, Any]]) -> dict[str, Any]:
        is_alike = all(len(row["input_ids"]) == 5 for row in rows)
        return {name: value for name, value in collate(rows).items() if not (is_alike and name == "attention_mask")}

    plain = trainer_of(bert, data, tmp_path, "off", data_collator=own).predict(alike)
    trainer = trainer_of(bert, data, tmp_path, data_collator=own)
    trainer.predict(data)
    assert chosen(trainer)[UNPADDED], reason(trainer)
    assert_alike(trainer.predict(alike).predictions, plain.predictions)


class Small(Odd):
    """Runs out of memory beyond some tokens; only rows are that long."""

    def forward(self, input_ids: Tensor, attention_mask: Tensor, labels: Any = None) -> dict[str, Any]:
        if input_ids.numel() > 220 and SWITCH["on"]:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 MiB")
        return super().forward(input_ids, attention_mask, labels)


def test_out_of_memory_makes_pieces_smaller(
    doubles_stay: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = samples(18, "class", longest=20)
    plain = trainer_of(Small(""), data, tmp_path, "off").predict(data)
    trainer = trainer_of(Small(""), data, tmp_path, per_device_eval_batch_size=18)
    trainer.predict(data)
    monkeypatch.setitem(SWITCH, "on", True)
    monkeypatch.setattr("loopwright.speed.evaluation.engine.EvaluationEngine._agrees_again", lambda *args: True)
    assert_alike(trainer.predict(data).predictions, plain.predictions)
    assert any(chosen(trainer).values()), reason(trainer)


def test_the_models_of_earlier_runs_are_not_kept(tmp_path: Path) -> None:
    made: list[Any] = []

    def model_init() -> nn.Module:
        model = Odd("")
        made.append(weakref.ref(model))
        return model

    data = samples(8, "class")
    args = TrainingArguments(
        str(tmp_path), speed="max", max_steps=1, report_to="none", use_cpu=True, disable_tqdm=True, save_strategy="no"
    )
    trainer = Trainer(model_init=model_init, args=args, train_dataset=data, eval_dataset=data, data_collator=collate)
    for _ in range(2):
        trainer.train()
        trainer.evaluate()
    gc.collect()
    assert len(made) == 3 and [model() is None for model in made] == [True, True, False]
