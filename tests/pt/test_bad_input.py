"""Bad input gets an error that says what is wrong, the value and what to do; nothing half-written stays behind."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import loopwright.errors
from loopwright import (
    ArgumentsError,
    CheckpointError,
    DataError,
    LoopwrightError,
    MetricError,
    ModelError,
    OutputError,
    Trainer,
    TrainerCallback,
    TrainingArguments,
    UnknownArgument,
)
from tests.models import Regression, regression_data

DATA = regression_data(8)


def arguments(folder: Any = "run", **options: Any) -> TrainingArguments:
    return TrainingArguments(
        str(folder), **{"max_steps": 3, "logging_steps": 1, "use_cpu": True, "disable_tqdm": True, **options}
    )


def train(model: Any = None, data: Any = DATA, *, options: Any = None, **given: Any) -> Any:
    trainer = Trainer(model or Regression(), arguments(**(options or {})), train_dataset=data, **given)
    trainer.train()
    return trainer


def left_behind(folder: Path) -> list[str]:
    """Whatever a failed run wrote that could be mistaken for a result; some files only describe it."""
    known = ("run.json", "current_run.json", "report.html", "report.data.js", "time_ledger.json")
    files = [path for path in folder.rglob("*") if path.is_file() and path.stat().st_size and path.name not in known]
    return sorted(path.relative_to(folder).as_posix() for path in files)


class Returns(nn.Module):
    """A model that returns whatever it is told to."""

    def __init__(self, make: Any) -> None:
        super().__init__()
        self.linear, self.make = nn.Linear(4, 1), make

    def forward(self, x: torch.Tensor, labels: torch.Tensor | None = None) -> Any:
        return self.make(self.linear(x).squeeze(-1))


# ---- data -----------------------------------------------------------------------------------------------------------


class EmptyStream(torch.utils.data.IterableDataset):
    def __iter__(self) -> Any:
        return iter([])


@pytest.mark.parametrize("data", [[], torch.utils.data.Subset(DATA, []), EmptyStream()], ids=["list", "map", "stream"])
def test_an_empty_dataset(data: Any, tmp_path: Path) -> None:
    with pytest.raises(DataError, match="training data(set)? (is empty|returned no batch)"):
        train(data=data)
    assert left_behind(tmp_path) == []


def test_an_empty_evaluation_dataset() -> None:
    trainer = Trainer(Regression(), arguments(), eval_dataset=[])
    with pytest.raises(DataError, match="evaluation dataset is empty"):
        trainer.evaluate()
    with pytest.raises(DataError, match="test dataset is empty"):
        trainer.predict([])
    with pytest.raises(DataError, match="returned no batch"):
        trainer.evaluate(EmptyStream())


def test_a_dataset_smaller_than_a_full_batch_that_must_be_full() -> None:
    with pytest.raises(DataError, match="no batch.*dataloader_drop_last"):
        train(data=DATA[:3], options={"dataloader_drop_last": True, "per_device_train_batch_size": 4})


def test_no_training_data() -> None:
    with pytest.raises(DataError, match="train_dataset"):
        train(data=None)
    with pytest.raises(DataError, match="eval_dataset"):
        Trainer(Regression(), arguments()).evaluate()


@pytest.mark.parametrize(
    ("collator", "workers"),
    [(None, 0), (None, 1), (torch.utils.data.default_collate, 0), (lambda rows: {"inputs": torch.ones(2)}, 0)],
    ids=["ours", "in a worker", "torch's", "own"],
)
def test_columns_that_match_no_argument_of_the_forward_show_both_lists(
    collator: Any, workers: int, tmp_path: Path
) -> None:
    data = [{"inputs": sample["x"], "target": sample["labels"]} for sample in DATA]
    with pytest.raises(DataError) as caught:
        train(data=data, data_collator=collator, options={"dataloader_num_workers": workers})
    text = str(caught.value)
    assert "columns: inputs" in text
    assert "arguments:" in text and "x" in text.split("arguments:")[1]
    assert "remove_unused_columns=False" in text
    assert left_behind(tmp_path) == []


def test_a_named_evaluation_set_that_does_not_exist() -> None:
    trainer = Trainer(Regression(), arguments(), eval_dataset={"small": DATA[:2], "large": DATA})
    with pytest.raises(DataError, match="'medium'.*small, large"):
        trainer.evaluate("medium")


# ---- loss -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda y: {"loss": y**2, "y": y}, r"shape is \(\d,\).*\.mean\(\)"),
        (lambda y: {"loss": 3.0}, "scalar tensor.*float: 3.0"),
        (lambda y: {"logits": y}, "no loss, only the keys logits.*compute_loss_func"),
        (lambda y: y, "no loss, only a tensor of shape.*compute_loss"),
        (lambda y: (y,), r"shape is \(\d,\)"),
        (lambda y: {"loss": None, "logits": y}, "no loss, only the keys loss, logits"),
        (lambda y: None, "no loss"),
    ],
    ids=["per sample", "a float", "no loss", "a tensor", "tuple without loss", "loss is None", "nothing"],
)
@pytest.mark.parametrize("accumulation", [1, 2])
def test_a_model_whose_output_is_no_loss(make: Any, message: str, accumulation: int, tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=message):
        train(Returns(make), options={"gradient_accumulation_steps": accumulation, "per_device_train_batch_size": 2})
    assert left_behind(tmp_path) == []


def test_a_loss_function_that_returns_no_scalar() -> None:
    with pytest.raises(ModelError, match=r"shape is \(8,\)"):
        train(Returns(lambda y: {"y": y}), compute_loss_func=lambda outputs, labels: (outputs["y"] - labels) ** 2)


def test_a_loss_without_gradient_says_so() -> None:
    with pytest.raises(ModelError, match="gradient"):
        train(Returns(lambda y: {"loss": y.detach().mean()}))


def test_a_model_without_anything_to_train_says_so() -> None:
    model = Regression()
    model.requires_grad_(False)
    with pytest.raises(ModelError, match="requires_grad|nothing to train|trainable"):
        train(model)


# ---- arguments ------------------------------------------------------------------------------------------------------


def test_all_contradictions_are_listed_together() -> None:
    with pytest.raises(ArgumentsError) as caught:
        TrainingArguments(
            "run", fp16=True, bf16=True, load_best_model_at_end=True, dataloader_prefetch_factor=2, learning_rate=-1,
            gradient_accumulation_steps=0, save_strategy="sometimes",
        )  # fmt: skip
    assert len(caught.value.problems) >= 6
    for name in ("fp16", "load_best_model_at_end", "dataloader_prefetch_factor=2", "learning_rate=-1",
                 "gradient_accumulation_steps=0", "sometimes"):  # fmt: skip
        assert name in str(caught.value)


def test_all_problems_of_the_constructor_are_listed_together() -> None:
    model = Regression()
    with pytest.raises(ArgumentsError) as caught:
        Trainer(
            model, arguments(max_steps=-1, eval_strategy="steps"), train_dataset=EmptyStream(), model_init=Regression,
            optimizers=(torch.optim.SGD(model.parameters()), None), optimizer_cls_and_kwargs=(torch.optim.SGD, {}),
        )  # fmt: skip
    text = str(caught.value)
    for words in ("exactly one of model and model_init", "cannot be combined with model_init", "not both",
                  "eval_strategy='steps' needs an eval_dataset", "max_steps"):  # fmt: skip
        assert words in text
    assert not os.path.exists("run")


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({}, "exactly one of model and model_init"),
        ({"model": Regression(), "model_init": Regression}, "exactly one of model and model_init"),
        ({"model": "bert-base"}, "torch.nn.Module, not str"),
        ({"model": Regression}, "torch.nn.Module"),
    ],
    ids=["neither", "both", "a string", "a class"],
)
def test_a_model_that_is_none_or_two(given: dict[str, Any], message: str) -> None:
    with pytest.raises(ArgumentsError, match=message):
        Trainer(args=arguments(), train_dataset=DATA, **given)


def test_a_model_factory_that_makes_nothing_or_wants_too_much() -> None:
    with pytest.raises(ModelError, match="returned None"):
        Trainer(args=arguments(), model_init=lambda: None)
    with pytest.raises(ArgumentsError, match="model_init takes no argument, or one"):
        Trainer(args=arguments(), model_init=lambda a, b: Regression())


def test_an_unknown_argument_of_the_constructor_is_named() -> None:
    with pytest.raises(UnknownArgument, match="'train_data'.*'train_dataset'"):
        Trainer(Regression(), arguments(), train_data=DATA)
    with pytest.raises(TypeError):
        Trainer(Regression(), arguments(), nonsense=1)


def test_arguments_of_another_kind_are_refused() -> None:
    with pytest.raises(ArgumentsError, match="TrainingArguments.*dict"):
        Trainer(Regression(), {"max_steps": 3}, train_dataset=DATA)


def test_an_unknown_keyword_of_train_is_an_error() -> None:
    with pytest.raises(TypeError, match="resume_from"):
        Trainer(Regression(), arguments(), train_dataset=DATA).train(resume_from="x")


def test_evaluation_without_data_to_evaluate() -> None:
    with pytest.raises(ArgumentsError, match="eval_strategy='epoch' needs an eval_dataset.*eval_strategy='no'"):
        Trainer(Regression(), arguments(eval_strategy="epoch"), train_dataset=DATA)


def test_a_metric_that_evaluation_does_not_produce_lists_those_it_does() -> None:
    trainer = Trainer(
        Regression(), arguments(eval_strategy="steps", eval_steps=1, metric_for_best_model="f1"),
        train_dataset=DATA, eval_dataset=DATA,
    )  # fmt: skip
    with pytest.raises(MetricError, match="'f1'.*eval_loss"):
        trainer.train()
    assert not list(Path("run").glob("checkpoint-*"))


def test_metrics_per_batch_need_a_function_that_can_collect() -> None:
    with pytest.raises(ArgumentsError, match="compute_result"):
        Trainer(
            Regression(), arguments(batch_eval_metrics=True), eval_dataset=DATA, compute_metrics=lambda prediction: {}
        )


def test_optimizers_that_are_not_what_they_should_be() -> None:
    with pytest.raises(ArgumentsError, match="optimizers"):
        Trainer(Regression(), arguments(), train_dataset=DATA, optimizers=torch.optim.SGD(Regression().parameters()))


# ---- folders --------------------------------------------------------------------------------------------------------


def test_an_output_folder_that_cannot_be_written_fails_before_training(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    for folder in (tmp_path / "file" / "run", tmp_path / "file", "/proc/loopwright"):
        with pytest.raises(OutputError, match="cannot be written.*choose another output_dir") as caught:
            Trainer(Regression(), arguments(folder), train_dataset=DATA)
        assert str(folder) in str(caught.value)
    assert (tmp_path / "file").read_text() == "in the way"


def test_a_folder_that_stops_being_writable_fails_with_the_weights_kept(tmp_path: Path) -> None:
    class InTheWay(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            if state.global_step == 2:
                (tmp_path / "run" / f".checkpoint-2.partial-{os.getpid()}").write_text("a file where a folder goes")

    options = {"save_steps": 1, "async_save": False}
    trainer = Trainer(Regression(), arguments(**options), train_dataset=DATA, callbacks=[InTheWay()])
    with pytest.raises((OutputError, CheckpointError)):
        trainer.train()
    assert (tmp_path / "run/checkpoint-1/manifest.json").is_file()
    assert not (tmp_path / "run/checkpoint-2").exists()


def test_an_error_in_a_callback_names_callback_event_and_step(tmp_path: Path) -> None:
    class Breaks(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            if state.global_step == 2:
                raise ValueError("broken")

    with pytest.raises(ValueError, match="broken") as caught:
        train(callbacks=[Breaks()], options={"save_steps": 1})
    assert caught.value.__notes__ == ["raised in the callback Breaks.on_step_end at step 2, epoch 2"]
    assert (tmp_path / "run/checkpoint-1/manifest.json").is_file()
    assert not list((tmp_path / "run").glob(".checkpoint*"))


def test_strict_turns_notices_into_errors() -> None:
    with pytest.raises(LoopwrightError, match="without effect.*eval_steps.*strict=True"):
        train(options={"strict": True, "eval_steps": 3})


def test_columns_that_the_model_does_not_take_are_no_error_in_strict_mode() -> None:
    train(data=[{**sample, "extra": torch.tensor(1.0)} for sample in DATA], options={"strict": True})


def test_every_error_has_a_place_in_the_tree() -> None:
    tree = loopwright.errors.__doc__ or ""
    for name, value in vars(loopwright.errors).items():
        if isinstance(value, type) and issubclass(value, LoopwrightError):
            assert name in tree
            assert getattr(loopwright, name) is value


@pytest.mark.parametrize("thing", [{"x": [1], "labels": [2]}, (each for each in range(3))], ids=["dict", "generator"])
def test_what_is_no_dataset_is_named(thing: Any, tmp_path: Path) -> None:
    trainer = Trainer(Regression(), TrainingArguments(str(tmp_path), max_steps=2, use_cpu=True), train_dataset=thing)
    with pytest.raises(DataError, match="the training dataset is a"):
        trainer.train()
