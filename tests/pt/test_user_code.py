"""An error of the user's code keeps its type and traceback, with one line: which part, when, on what, what to do."""

from __future__ import annotations

import sys
import threading
import time
import traceback
import tracemalloc
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from loopwright import ArgumentsError, BusyError, DataError, MetricError, Trainer, TrainerCallback, TrainingArguments
from loopwright.core.user_code import error_notes
from loopwright.core.user_code.error_notes import BEGINNING, describe
from loopwright.pt.data.loading_errors import each_of
from tests.models import Regression, regression_data
from tests.pt.odd_inputs import Made, Samples, Stream, breaks_after, callback, stacked, train

DATA = regression_data(8)


def note_of(error: BaseException) -> str:
    """The one note of an error, which is also the last line of its traceback."""
    notes = [note for note in getattr(error, "__notes__", []) if note.startswith(BEGINNING)]
    assert len(notes) == 1, notes
    text = "".join(traceback.format_exception(error))
    assert text.count(BEGINNING) == 1, "the note of a worker is in the text once"
    assert text.rstrip().endswith(notes[0])
    return notes[0]


@pytest.mark.parametrize("workers", [0, 1])
def test_an_item_of_the_dataset(workers: int) -> None:
    def item(index: int) -> Any:
        if index == 986:
            raise FileNotFoundError("no image")
        return DATA[index % 8]

    options = {"per_device_train_batch_size": 250, "max_steps": 4, "dataloader_num_workers": workers}
    with pytest.raises(FileNotFoundError, match="no image") as caught:
        train(data=Samples(1000, item), options=options)
    note = note_of(caught.value)
    assert "item 986 of the" in note and "try dataset[986] alone" in note and "at step " in note


@pytest.mark.parametrize("workers", [0, 1])
def test_the_collator(workers: int) -> None:
    def collate(samples: list[Any]) -> Any:
        raise ZeroDivisionError("no tokens")

    options = {"dataloader_num_workers": workers, "per_device_train_batch_size": 3}
    with pytest.raises(ZeroDivisionError, match="no tokens") as caught:
        train(data_collator=collate, options=options)
    note = note_of(caught.value)
    assert "the data collator on items [" in note and "at step 1" in note
    assert "given: list of 3: {x: float32 (4,), labels: float32 ()}" in note


@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.parametrize("where", ["an item", "the collator", "the collator of a stream"])
def test_a_stop_iteration_does_not_end_the_data(where: str, workers: int) -> None:
    """A loop takes it for the end: the rest of the epoch, or of an evaluation, would be left out silently."""

    def item(index: int) -> Any:
        return next(iter([])) if index == 5 and where == "an item" else DATA[index]

    def collate(samples: list[Any]) -> Any:
        if where != "an item" and any(sample["x"] is DATA[5]["x"] for sample in samples):
            raise StopIteration("no tokens")
        return stacked(samples)

    data: Any = Stream(lambda: iter(DATA)) if "stream" in where else Samples(8, item)
    options = {"dataloader_num_workers": workers, "per_device_train_batch_size": 2, "max_steps": 4}
    with pytest.raises(RuntimeError, match="StopIteration") as caught:
        train(data=data, data_collator=collate, options=options)
    assert "item 5 of the" in note_of(caught.value) or "the data collator" in note_of(caught.value)
    args = TrainingArguments("run", use_cpu=True, per_device_eval_batch_size=2, dataloader_num_workers=workers)
    with pytest.raises(RuntimeError, match="StopIteration"):
        Trainer(Regression(), args, data_collator=collate).evaluate(data)


def test_the_stop_iteration_of_an_iterator_is_its_end() -> None:
    class Batches(torch.utils.data.IterableDataset[Any]):
        def __iter__(self) -> Any:
            self.left = 3
            return self

        def __next__(self) -> Any:
            self.left -= 1
            if self.left < 0:
                raise StopIteration
            return stacked(DATA[:2])

    for size in (None, 1):
        assert len(list(each_of(torch.utils.data.DataLoader(Batches(), batch_size=size)))) == 3


def test_a_stream() -> None:
    with pytest.raises(OSError, match="closed") as caught:
        train(data=Stream(lambda: breaks_after(5)), options={"per_device_train_batch_size": 4})
    assert "the training dataset, in sample 1 of a batch, at step 2" in note_of(caught.value)
    with pytest.raises(OSError, match="closed") as caught:
        train(data=Stream(lambda: breaks_after(5)), options={"dataloader_num_workers": 1})
    assert "sample 5 of the dataset's stream in a worker; at step 1" in note_of(caught.value)


@pytest.mark.parametrize("accumulation", [1, 2])
def test_the_forward_of_a_model(accumulation: int) -> None:
    def fail(y: torch.Tensor) -> Any:
        raise KeyError("hidden")

    options = {"gradient_accumulation_steps": accumulation, "per_device_train_batch_size": 2}
    with pytest.raises(KeyError, match="hidden") as caught:
        train(Made(fail), options=options)
    note = note_of(caught.value)
    assert "Made.forward, called by the training step, at step 1, epoch 0" in note
    assert "given: {x: float32 (2, 4), labels: float32 (2,)}" in note


def test_columns_that_a_forward_does_not_have() -> None:
    data = [{"x": each["x"], "labels": each["labels"], "surplus": each["x"]} for each in DATA]
    with pytest.raises(TypeError, match="surplus") as caught:
        train(data=data, options={"remove_unused_columns": False})
    assert "compare the columns of the dataset" in note_of(caught.value)


def test_compute_loss_of_a_subclass() -> None:
    class Mine(Trainer):
        def compute_loss(self, model: Any, inputs: Any, **kwargs: Any) -> Any:
            raise IndexError("class 7")

    args = TrainingArguments("run", use_cpu=True, max_steps=1, disable_tqdm=True)
    with pytest.raises(IndexError) as caught:
        Mine(Regression(), args, train_dataset=DATA).train()
    assert "Mine.compute_loss, called by the training step, at step 1" in note_of(caught.value)
    with pytest.raises(IndexError) as caught:
        Mine(Regression(), args, eval_dataset=DATA).evaluate()
    assert "Mine.compute_loss, called by" in note_of(caught.value)


def test_a_metric() -> None:
    def fail(*given: Any) -> Any:
        raise ZeroDivisionError("no positives")

    with pytest.raises(ZeroDivisionError) as caught:
        train(evaluate=True, compute_metrics=fail)
    assert "compute_metrics at step 3, epoch 3; given: predictions float32 (8,), label_ids float32 (8,)" in note_of(
        caught.value
    )
    with pytest.raises(ZeroDivisionError) as caught:
        train(evaluate=True, compute_metrics=lambda p: {}, preprocess_logits_for_metrics=fail)
    assert "preprocess_logits_for_metrics at step 3" in note_of(caught.value)
    with pytest.raises(MetricError, match=r"compute_metrics returned \[0.5\], not a dict; return a dict"):
        train(evaluate=True, compute_metrics=lambda p: [0.5])
    with pytest.raises(MetricError, match="named 1, a int; use text"):
        train(evaluate=True, compute_metrics=lambda p: {1: 0.5})


def test_a_callback_with_another_signature() -> None:
    with pytest.raises(TypeError) as caught:
        train(callbacks=[callback("on_step_end", lambda self, args: None)])
    note = note_of(caught.value)
    assert "the callback Odd.on_step_end at step 1, epoch 1" in note
    assert "define it as on_step_end(self, args, state, control, **kwargs)" in note


def test_model_init_optimizer_and_schedule() -> None:
    def fail(*given: Any, **options: Any) -> Any:
        raise RuntimeError("no weights")

    with pytest.raises(RuntimeError) as caught:
        train(model_init=lambda: fail())
    assert "raised in model_init" in note_of(caught.value)
    model = Regression()
    optimizer = type("Odd", (torch.optim.SGD,), {"step": fail})(model.parameters(), lr=0.1)
    with pytest.raises(RuntimeError) as caught:
        train(model, optimizers=(optimizer, None))
    assert "the step of the optimizer Odd at step 1" in note_of(caught.value)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (2 - step))
    with pytest.raises(ZeroDivisionError) as caught:
        train(model, optimizers=(optimizer, schedule))
    assert "the step of the schedule LambdaLR at step 2" in note_of(caught.value)


def test_errors_of_loopwright_have_no_note() -> None:
    with pytest.raises(DataError) as caught:
        train(data=[None] * 4)
    assert not getattr(caught.value, "__notes__", [])


def test_a_description_is_short_and_shows_no_contents() -> None:
    many = {f"column{i}": np.zeros((2, 3)) for i in range(50)}
    assert describe(many).count("column") == 8 and describe(many).endswith("...}")
    assert describe(["secret"] * 3) == "list of 3: str of length 6"
    assert describe([torch.zeros(2), torch.zeros(3)]) == "list of 2: float32 (2,) or float32 (3,)"
    assert describe(torch.zeros(2, device="meta")) == "float32 (2,) on meta"

    class Hostile:
        @property
        def shape(self) -> Any:
            raise ValueError("no")

    assert describe([Hostile()]) == "list of 1: Hostile"


# ---- refused at once ------------------------------------------------------------------------------------------------


def test_an_optimizer_of_another_model_is_refused() -> None:
    with pytest.raises(ArgumentsError, match=r"SGD holds 4 parameters and none of them is the model's"):
        train(optimizers=(torch.optim.SGD(Regression().parameters(), lr=0.1), None))
    model, margin = Regression(), nn.Linear(1, 1)
    train(model, optimizers=(torch.optim.SGD([*model.parameters(), *margin.parameters()], lr=0.1), None))


def test_an_optimizer_or_a_schedule_that_cannot_be_used_is_refused() -> None:
    model = Regression()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    other = torch.optim.lr_scheduler.ConstantLR(torch.optim.SGD(model.parameters(), lr=0.1))
    for pair, message in (
        ((torch.optim.LBFGS(model.parameters()), None), "LBFGS.step needs a closure"),
        (("adamw", None), "an optimizer, an object with step and param_groups, not str"),
        ((optimizer, "linear"), "a learning-rate scheduler, an object with step, not str"),
        ((optimizer, other), "the schedule of another optimizer"),
        ((None, other), "the schedule of another optimizer"),
    ):
        with pytest.raises(ArgumentsError, match=message):
            train(model, optimizers=pair)


KINDS = ["text", "number", "nothing", "object", "class", "function"]


@pytest.mark.parametrize("thing", ["early_stopping", 3, None, object(), dict, print], ids=KINDS)
def test_what_is_no_callback_is_refused(thing: Any) -> None:
    with pytest.raises(ArgumentsError, match="is not a callback"):
        train(callbacks=[thing])
    trainer = train()
    with pytest.raises(ArgumentsError, match="is not a callback"):
        trainer.add_callback(thing)


def test_callbacks_that_are_no_list_and_classes_that_need_arguments() -> None:
    with pytest.raises(ArgumentsError, match=r"callbacks must be a list.*pass \[callback\]"):
        train(callbacks=TrainerCallback())
    needs = type("Needs", (TrainerCallback,), {"__init__": lambda self, needed: None})
    with pytest.raises(ArgumentsError, match="Needs cannot be created without arguments.*pass an instance"):
        train(callbacks=[needs])


def test_train_inside_train_is_refused_and_evaluate_is_not() -> None:
    args = TrainingArguments("run", use_cpu=True, max_steps=2, disable_tqdm=True, logging_steps=1)
    refused: list[str] = []

    class Again(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            thread = threading.Thread(target=again)
            thread.start()
            thread.join()
            again()
            trainer.evaluate()

    def again() -> None:
        try:
            trainer.train()
        except BusyError as error:
            refused.append(str(error))

    trainer = Trainer(Regression(), args, train_dataset=DATA, eval_dataset=DATA, callbacks=[Again()])
    assert trainer.train().global_step == 2
    assert len(refused) == 4 and "is training (step 1)" in refused[0]
    assert trainer.train().global_step == 2, "a trainer can train again when it is done"


def test_a_run_that_ends_early_says_so(caplog: pytest.LogCaptureFixture) -> None:
    class Lying(Stream):
        def __len__(self) -> int:
            return 80

    train(data=Lying(lambda: iter(DATA)), options={"max_steps": -1, "num_train_epochs": 2})
    assert "training ended after 2 of 20 steps: 2 epochs" in caplog.text
    caplog.clear()
    used = iter(DATA)
    train(data=Stream(lambda: used), options={"max_steps": 30})
    assert "no batch in epoch 1; stopping training after step 1 of 30" in caplog.text
    caplog.clear()
    train(options={"max_steps": 4})
    assert "ended after" not in caplog.text and "stopping training" not in caplog.text


# ---- many samples ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("strategy", ["random", "sequential"])
def test_a_dataset_of_three_hundred_million_samples(workers: int, strategy: str) -> None:
    options = {"dataloader_num_workers": workers, "train_sampling_strategy": strategy, "save_strategy": "no"}
    tracemalloc.start()
    started = time.process_time()
    train(data=Samples(300_000_000), options=options)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert time.process_time() - started < 20
    assert peak < 50 * 2**20


def test_a_large_dataset_resumes_inside_an_epoch(tmp_path: Any) -> None:
    def run(resume: Any, steps: int) -> list[int]:
        seen: list[int] = []

        def item(index: int) -> Any:
            seen.append(index)
            return DATA[index % 8]

        args = TrainingArguments(
            str(tmp_path / "run"), use_cpu=True, disable_tqdm=True, max_steps=steps, save_steps=2,
            per_device_train_batch_size=4, speed="off",
        )  # fmt: skip
        Trainer(Regression(), args, train_dataset=Samples(300_000_000, item), data_collator=stacked).train(resume)
        return seen

    first = run(None, 2)
    assert run(str(tmp_path / "run" / "checkpoint-2"), 4)[:8] == run(False, 4)[8:16]
    assert len(set(first)) == 8 and max(first) > 10_000_000


def test_nothing_is_paid_for_notes_while_nothing_fails() -> None:
    """No function of the module that makes notes is called in a run without an error."""
    calls: list[str] = []

    def profile(frame: Any, event: str, argument: Any) -> None:
        if event == "call" and frame.f_code.co_filename == error_notes.__file__:
            calls.append(frame.f_code.co_name)

    sys.setprofile(profile)
    try:
        train(options={"max_steps": 5})
    finally:
        sys.setprofile(None)
    assert calls == []
