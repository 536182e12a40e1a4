"""Live numbers: right, exactly once per log point, beside the log history, at no cost."""

from __future__ import annotations

import math
import time
from typing import Any

import pytest
import torch
from hypothesis import given, strategies as st
from torch import nn

import loopwright
from loopwright.callbacks.metrics_file import kind_of, read_metrics
from loopwright.callbacks.text import work_line
from loopwright.core.measure.throughput import Interval, ThroughputMeter
from loopwright.core.update import Update
from loopwright.pt.internals import TorchInternals
from loopwright.pt.measure.token_counter import TorchWorkCounter
from loopwright.speed.measure.step_timing import EVERY, FIRST, SECOND, StepTimer, TimeSplit, next_sample
from tests.models import Tokens, samples, trainer_of


class Clock:
    """A clock that moves when told to."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def update(pace: ThroughputMeter, *, samples: int = 2, real: Any = 10, computed: Any = 20, waited: float = 0.0) -> None:
    pace.updates += 1
    pace.samples += samples
    pace.micro_batches += 1
    pace.real_tokens += real
    pace.computed_tokens += computed
    pace.squared_lengths += math.nan
    pace.waited += waited


# ---- arithmetic -----------------------------------------------------------------------------------------------------


def test_numbers_are_counts_over_seconds() -> None:
    clock = Clock()
    pace = ThroughputMeter(clock=clock, peak_operations=1000.0, operations=lambda interval: 30 * interval.real_tokens)
    for _ in range(4):
        update(pace, waited=0.25)
    clock.now += 4.0
    assert pace.read() == {
        "tokens_per_second": 10.0,
        "computed_tokens_per_second": 20.0,
        "samples_per_second": 2.0,
        "steps_per_second": 1.0,
        "data_wait_share": 0.25,
        "useful_token_share": 0.5,
        "mfu": 0.3,
    }


def test_what_is_not_known_is_left_out() -> None:
    clock = Clock()
    pace = ThroughputMeter(clock=clock, peak_operations=None, operations=lambda _: 1.0, peak_memory=lambda: None)
    update(pace, real=math.nan, computed=math.nan)
    clock.now += 1
    assert set(pace.read()) == {"samples_per_second", "steps_per_second", "data_wait_share"}


def test_an_interval_without_updates_says_nothing_and_is_not_lost() -> None:
    clock = Clock()
    pace = ThroughputMeter(clock=clock)
    clock.now += 5
    assert pace.read() == {} == pace.whole()
    update(pace)
    clock.now += 5
    assert pace.read()["steps_per_second"] == 0.1


def test_time_left_out_belongs_to_no_update() -> None:
    clock = Clock()
    pace = ThroughputMeter(clock=clock)
    update(pace)
    clock.now += 1
    with pace.left_out():
        clock.now += 50
        with pace.left_out():  # a save inside an evaluation is not left out twice
            clock.now += 50
    clock.now += 1
    assert pace.read()["steps_per_second"] == 0.5
    update(pace)
    clock.now += 4
    assert pace.read()["steps_per_second"] == 0.25


def test_a_reading_inside_of_what_is_left_out_closes_the_interval_there() -> None:
    clock = Clock()
    pace = ThroughputMeter(clock=clock)
    update(pace)
    clock.now += 1
    with pace.left_out():
        clock.now += 10
        assert pace.read()["steps_per_second"] == 1.0
        clock.now += 10
        update(pace)
    clock.now += 2
    assert pace.read()["steps_per_second"] == 0.5


def test_the_first_interval_warms_up() -> None:
    clock = Clock()
    pace = ThroughputMeter(clock=clock)
    for seconds in (100, 1, 3):
        update(pace)
        clock.now += seconds
        pace.read()
    assert pace.whole()["steps_per_second"] == 0.5


def test_recompiles_are_those_of_the_interval() -> None:
    clock, count = Clock(), [None, 2, 2, 7]
    pace = ThroughputMeter(clock=clock, recompiles=lambda: count.pop(0))
    found = []
    for _ in range(3):
        update(pace)
        clock.now += 1
        found.append(pace.read()["recompiles"])
    assert found == [2, 0, 5]


@given(st.lists(st.tuples(st.integers(1, 50), st.floats(0.1, 50), st.floats(0, 50)), min_size=2, max_size=8))
def test_the_whole_is_what_the_intervals_were(plan: list[tuple[int, float, float]]) -> None:
    clock = Clock()
    pace = ThroughputMeter(clock=clock)
    for updates, seconds, pause in plan:
        for _ in range(updates):
            update(pace)
        with pace.left_out():
            clock.now += pause
        clock.now += seconds
        pace.read()
    done, took = sum(u for u, _, _ in plan[1:]), sum(s for _, s, _ in plan[1:])
    assert pace.whole()["steps_per_second"] == pytest.approx(done / took, rel=1e-3)


def test_intervals_add_up_field_by_field() -> None:
    one = Interval(1, 2, 3, 4, 5, 6, 7, 8, 9)
    assert one + one == Interval(2, 4, 6, 8, 10, 12, 14, 16, 18)


# ---- tokens ---------------------------------------------------------------------------------------------------------


def measured(batches: list[Any], *, squares: bool = False) -> tuple[Update, TorchWorkCounter]:
    work = TorchWorkCounter(Tokens(), "input_ids", tokens="no")
    work.squares = squares
    update = Update(batches)
    work.measure(update)
    return update, work


def padded(*lengths: int) -> dict[str, torch.Tensor]:
    mask = torch.zeros(len(lengths), max(lengths), dtype=torch.int64)
    for row, length in enumerate(lengths):
        mask[row, :length] = 1
    return {"input_ids": torch.ones_like(mask), "attention_mask": mask}


def test_padding_is_computed_and_not_real() -> None:
    update, work = measured([padded(3, 7), padded(2, 1)], squares=True)
    assert (int(update.real_tokens), update.computed_tokens) == (13, 18)
    assert int(update.squared_lengths) == 9 + 49 + 4 + 1
    assert work.counts


def test_without_a_mask_every_token_is_real() -> None:
    update, _ = measured([{"input_ids": torch.ones(2, 5, dtype=torch.int64)}])
    assert (update.real_tokens, update.computed_tokens, update.squared_lengths) == (10, 10, 50)


def test_flattened_rows_do_not_pass_for_one_long_sample() -> None:
    batch = {"input_ids": torch.ones(1, 9, dtype=torch.int64), "position_ids": torch.arange(9)[None]}
    update, _ = measured([batch])
    assert update.real_tokens == 9 and math.isnan(update.squared_lengths)


@pytest.mark.parametrize(
    "batch",
    [
        {"x": torch.zeros(2, 3)},
        {"input_ids": torch.zeros(2, 3)},
        (torch.zeros(2, 3),),
        {"input_ids": [1, 2]},
    ],
)
def test_batches_without_token_ids_have_no_tokens(batch: Any) -> None:
    update, _ = measured([batch])
    assert math.isnan(update.real_tokens) and math.isnan(update.computed_tokens)


def test_a_mask_of_another_shape_leaves_only_real_tokens_unknown() -> None:
    batch = padded(3, 4) | {"attention_mask": torch.ones(2, 1, 4, 4)}
    update, _ = measured([batch])
    assert math.isnan(update.real_tokens) and update.computed_tokens == 8


def test_what_has_nothing_to_count_is_asked_once() -> None:
    _, work = measured([{"x": torch.zeros(2, 3)}])
    assert not work.counts


# ---- in a run -------------------------------------------------------------------------------------------------------


def pad(features: list[Any]) -> dict[str, Any]:
    longest = max(len(each["input_ids"]) for each in features)
    batch = {"input_ids": torch.zeros(len(features), longest, dtype=torch.int64)}
    batch["attention_mask"], batch["labels"] = batch["input_ids"].clone(), batch["input_ids"] - 100
    for row, each in enumerate(features):
        length = len(each["input_ids"])
        batch["input_ids"][row, :length], batch["labels"][row, :length] = each["input_ids"], each["labels"]
        batch["attention_mask"][row, :length] = 1
    return batch


class Told(loopwright.TrainerCallback):
    """What each log was accompanied by."""

    def __init__(self) -> None:
        self.logs: list[tuple[dict[str, Any], Any]] = []

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, pace: Any = None, **kwargs: Any) -> None:
        self.logs.append((dict(logs), pace))


def run(folder: Any, *, lengths: list[int], **options: Any) -> Any:
    trainer = trainer_of(Tokens(), samples(lengths), folder, collator=pad, **options)
    trainer.train()
    return trainer


def test_numbers_go_to_callbacks_and_files_and_not_into_the_history(tmp_path: Any) -> None:
    told = Told()
    trainer = run(tmp_path, lengths=[3, 9] * 6, per_device_train_batch_size=2, num_train_epochs=1, logging_steps=2,
                  callbacks=[told])  # fmt: skip
    rows = [row for row in read_metrics(tmp_path) if kind_of(row) == "training"]
    assert [row["step"] for row in rows] == [2, 4, 6]
    for row in rows:
        assert row["pace"]["useful_token_share"] == pytest.approx(12 / 18, rel=1e-4)
        assert row["pace"]["computed_tokens_per_second"] == pytest.approx(1.5 * row["pace"]["tokens_per_second"], 1e-3)
        assert row["pace"]["samples_per_second"] == pytest.approx(2 * row["pace"]["steps_per_second"], 1e-3)
        assert 0 < row["pace"]["data_wait_share"] < 1 and row["pace"]["peak_memory_gib"] > 0
        assert "mfu" not in row["pace"]
    assert all("pace" not in row and "tokens_per_second" not in row for row in trainer.state.log_history)
    assert [bool(pace) for logs, pace in told.logs] == ["loss" in logs for logs, _ in told.logs]
    assert "pace" not in read_metrics(tmp_path)[-1]


def test_a_model_without_tokens_has_samples_and_updates(tmp_path: Any) -> None:
    class Line(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.line = nn.Linear(3, 1)

        def forward(self, x: Any, labels: Any) -> Any:
            return {"loss": ((self.line(x)[:, 0] - labels) ** 2).mean()}

    data = [{"x": torch.randn(3), "labels": torch.randn(())} for _ in range(8)]
    trainer = trainer_of(Line(), data, tmp_path, collator=None, num_train_epochs=1, logging_steps=4)
    trainer.train()
    numbers = trainer.speed_report().numbers
    assert numbers["samples_per_second"] > 0 and "tokens_per_second" not in numbers


def test_a_slow_loader_shows_as_waiting_and_a_slow_evaluation_does_not(tmp_path: Any) -> None:
    class Slow(list[Any]):
        def __getitem__(self, index: Any) -> Any:
            time.sleep(0.01)
            return super().__getitem__(index)

    class SlowCheck(loopwright.Trainer):
        def evaluate(self, *args: Any, **kwargs: Any) -> dict[str, float]:
            time.sleep(0.3)
            return {"eval_loss": 1.0}

    trainer = trainer_of(Tokens(), Slow(samples([4] * 12)), tmp_path, collator=pad, cls=SlowCheck, num_train_epochs=1,
                         per_device_train_batch_size=2, logging_steps=3, eval_strategy="steps", eval_steps=3,
                         eval_dataset=samples([4]))  # fmt: skip
    trainer.train()
    numbers = trainer.speed_report().numbers
    assert numbers["data_wait_share"] > 0.5
    assert numbers["steps_per_second"] > 10  # with the evaluation between the two log points it would be below


def test_work_line_shows_what_is_known() -> None:
    assert work_line({"tokens_per_second": 58691.0, "mfu": 0.59}) == "58.7k tokens/s, MFU 59.0%, "
    assert work_line({"tokens_per_second": 812.0}) == "812 tokens/s, "
    assert work_line({"tokens_per_second": 2.5e6}) == "2.5M tokens/s, "
    assert work_line({"steps_per_second": 3.0}) == ""


# ---- where the time goes --------------------------------------------------------------------------------------------


def test_samples_come_early_and_then_rarely() -> None:
    steps, step = [], 0
    for _ in range(4):
        step = next_sample(step)
        steps.append(step)
    assert steps == [FIRST, SECOND, SECOND + EVERY, SECOND + 2 * EVERY]
    assert next_sample(SECOND + EVERY - 1) == SECOND + EVERY


@pytest.mark.parametrize("accumulation", [1, 3])
def test_sampled_updates_are_split_and_leave_no_hook(accumulation: int, tmp_path: Any) -> None:
    trainer = run(tmp_path, lengths=[5] * (FIRST + 4) * accumulation, per_device_train_batch_size=1,
                  gradient_accumulation_steps=accumulation, num_train_epochs=1, logging_steps=1)  # fmt: skip
    report = trainer.speed_report()
    assert report.sampled_updates == 1
    assert {"data", "forward", "backward", "optimizer", "other"} == set(report.split)
    assert sum(report.split.values()) == pytest.approx(1)
    assert not trainer.model._forward_hooks and not trainer.model._forward_pre_hooks
    assert trainer._loopwright.run.step_timer is None


def test_hooks_go_when_the_run_fails_inside_a_sampled_update(tmp_path: Any) -> None:
    class Breaks(Tokens):
        calls = 0

        def forward(self, *args: Any, **kwargs: Any) -> Any:
            Breaks.calls += 1
            if Breaks.calls == FIRST + 1:
                raise ValueError("broken")
            return super().forward(*args, **kwargs)

    trainer = trainer_of(Breaks(), samples([5] * 20), tmp_path, collator=pad, per_device_train_batch_size=1)
    with pytest.raises(ValueError, match="broken"):
        trainer.train()
    assert not trainer.model._forward_hooks and not trainer.model._forward_pre_hooks
    assert trainer._loopwright.run.step_timer is None


def test_a_model_called_twice_has_no_separate_backward(tmp_path: Any) -> None:
    class Twice(loopwright.Trainer):
        def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False, **kwargs: Any) -> Any:
            return model(**inputs)["loss"] + model(**inputs)["loss"]

    trainer = trainer_of(Tokens(), samples([5] * (FIRST + 2)), tmp_path, collator=pad, cls=Twice, num_train_epochs=1,
                         per_device_train_batch_size=1)  # fmt: skip
    trainer.train()
    assert {"compute", "optimizer"} <= set(trainer.speed_report().split)
    assert not {"forward", "backward"} & set(trainer.speed_report().split)


def test_a_part_that_sleeps_is_found() -> None:
    model, device = nn.Linear(2, 2), torch.device("cpu")
    timer = StepTimer(device, model)
    time.sleep(0.02)
    timer.data_is_there()
    model(torch.zeros(1, 2))
    time.sleep(0.06)
    timer.gradients_are_done()
    time.sleep(0.02)
    timer.end(micro_batches=1, waited=0.01)
    found = TimeSplit()
    found.add(timer)
    found.read()
    shares = found.shares()
    assert max(shares, key=shares.get) == "backward"  # type: ignore[arg-type]
    assert shares["data"] > 0.05 and shares["optimizer"] > 0.1 and shares["forward"] < 0.2
    assert found.seconds() == pytest.approx(0.1, rel=0.6)


def test_an_evaluation_before_the_update_leaves_no_marks() -> None:
    model = nn.Linear(2, 2)
    timer = StepTimer(torch.device("cpu"), model)
    model(torch.zeros(1, 2))
    assert timer.marks.names() == ["begin"]
    timer.restart()
    timer.data_is_there()
    model(torch.zeros(1, 2))
    timer.gradients_are_done()
    model(torch.zeros(1, 2))
    timer.end(micro_batches=1, waited=0.0)
    assert timer.marks.names() == ["begin", "compute", "forward", "backward", "optimizer", "end"]


def test_a_device_without_timed_events_trains_all_the_same(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: Any) -> Any:
        raise NotImplementedError("no events here")

    monkeypatch.setattr("loopwright.pt.measure.throughput.StepTimer", refuse)
    trainer = run(tmp_path, lengths=[5] * (FIRST + 4), per_device_train_batch_size=1, num_train_epochs=1)
    assert trainer.state.global_step == FIRST + 4 and not trainer.speed_report().split


def test_a_model_compiled_as_a_whole_gets_no_hooks() -> None:
    model = nn.Linear(2, 2)
    model.compile(backend="eager")
    timer = StepTimer(torch.device("cpu"), model)
    assert not model._forward_hooks and not model._forward_pre_hooks
    timer.data_is_there()
    timer.gradients_are_done()
    timer.end(micro_batches=1, waited=0.0)
    parts = timer.parts()
    assert parts is not None and parts["compute"] > 0 and parts["forward"] == 0


def test_an_update_that_was_not_finished_says_nothing() -> None:
    timer = StepTimer(torch.device("cpu"), nn.Linear(2, 2))
    timer.data_is_there()
    timer.end(micro_batches=1, waited=0.0)
    assert timer.parts() is None


def test_the_run_is_the_same_with_and_without_anybody_looking(tmp_path: Any) -> None:
    def weights(at: int) -> list[torch.Tensor]:
        torch.manual_seed(0)
        model = Tokens()

        class Fixed(TorchInternals):
            def start_clock(self) -> None:
                super().start_clock()
                self.run.step_timer_at = at

        class Sampled(loopwright.Trainer):
            _loopwright_class = Fixed

        trainer = trainer_of(model, samples([5, 3] * 8), tmp_path / str(at), collator=pad, cls=Sampled,
                             num_train_epochs=1, per_device_train_batch_size=2)  # fmt: skip
        trainer.train()
        return [each.detach().clone() for each in trainer.model.parameters()]

    assert all(torch.equal(a, b) for a, b in zip(weights(-1), weights(3), strict=True))
