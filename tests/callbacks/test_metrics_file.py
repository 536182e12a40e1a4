"""metrics.jsonl: each step exactly once through any number of crashes."""

from __future__ import annotations

import json
import math
import os
import random
from types import SimpleNamespace

import numpy
import pytest

from loopwright.callbacks.metrics_file import MetricsFileCallback, kind_of, read_metrics
from loopwright.core.state import TrainerControl, TrainerState
from loopwright.errors import OutputError


class Crash(Exception):
    pass


class Process:
    """One process of a run: its own callback, the folder shared with those before and after it."""

    def __init__(self, folder, *, step=0, is_world_process_zero=True):
        self.args = SimpleNamespace(output_dir=str(folder))
        self.state = TrainerState(global_step=step, epoch=step / 10, is_world_process_zero=is_world_process_zero)
        self.control = TrainerControl()
        self.callback = MetricsFileCallback(clock=lambda: 5.0)

    def fire(self, event, **kwargs):
        getattr(self.callback, event)(self.args, self.state, self.control, **kwargs)

    def log(self, **logs):
        self.fire("on_log", logs=logs)

    def begin(self):
        self.fire("on_train_begin")
        return self

    def at(self, step):
        self.state.global_step, self.state.epoch = step, step / 10
        return self


def places(folder):
    """(step, a name in the row) of every row."""
    names = ("loss", "eval_loss", "train_runtime", "test_loss", "mine")
    return [(row["step"], next(name for name in names if name in row)) for row in read_metrics(folder)]


def test_a_row_holds_step_epoch_time_and_the_logs(tmp_path):
    Process(tmp_path).begin().at(3).log(loss=0.25, epoch=0.3, learning_rate=1e-4)
    text = (tmp_path / "metrics.jsonl").read_text()
    assert json.loads(text) == {"step": 3, "epoch": 0.3, "time": 5.0, "loss": 0.25, "learning_rate": 1e-4}
    assert text.endswith("\n")


def test_numbers_json_does_not_have_survive(tmp_path):
    values = {
        "loss": math.nan,
        "a": math.inf,
        "b": -math.inf,
        "c": numpy.float32(0.5),
        "d": numpy.array([1, 2]),
        "e": {"f": math.inf},
    }
    Process(tmp_path).begin().at(1).log(**values)
    for line in (tmp_path / "metrics.jsonl").read_text().splitlines():
        json.loads(line, parse_constant=lambda name: pytest.fail(f"{name} is not JSON"))
    (row,) = read_metrics(tmp_path / "metrics.jsonl")
    assert math.isnan(row["loss"])
    assert (row["a"], row["b"], row["c"], row["d"], row["e"]) == (math.inf, -math.inf, 0.5, [1, 2], {"f": math.inf})


def test_pace_is_nested_and_only_in_rows_of_training(tmp_path):
    process = Process(tmp_path).begin().at(2)
    process.fire("on_log", logs={"loss": 0.5}, pace={"tokens_per_second": 9.0})
    process.fire("on_log", logs={"eval_loss": 0.5, "eval_runtime": 1.0}, pace={"tokens_per_second": 9.0})
    process.fire("on_log", logs={"loss": 0.5}, pace={})
    rows = read_metrics(tmp_path)
    assert [row.get("pace") for row in rows] == [{"tokens_per_second": 9.0}, None, None]
    assert [kind_of(row) for row in rows] == ["training", "eval", "training"]


def test_a_row_logged_again_after_a_resume_takes_the_place_of_the_one_with_another_pace(tmp_path):
    Process(tmp_path).begin().at(2).fire("on_log", logs={"loss": 0.5}, pace={"tokens_per_second": 9.0})
    second = Process(tmp_path, step=2).begin()
    second.fire("on_log", logs={"loss": 0.5}, pace={"tokens_per_second": 7.0})
    assert [row["pace"] for row in read_metrics(tmp_path)] == [{"tokens_per_second": 7.0}]


def test_a_value_nobody_can_write_becomes_text(tmp_path):
    Process(tmp_path).begin().at(1).log(loss=1.0, where=tmp_path)
    assert read_metrics(tmp_path)[0]["where"] == str(tmp_path)


def test_resume_drops_what_comes_after_the_checkpoint(tmp_path):
    first = Process(tmp_path).begin()
    for step in range(1, 8):
        first.at(step).log(loss=1.0 / step)
    second = Process(tmp_path, step=4).begin()
    assert places(tmp_path) == [(step, "loss") for step in range(1, 5)]
    second.at(5).log(loss=0.5)
    assert places(tmp_path) == [(step, "loss") for step in range(1, 6)]
    assert os.listdir(tmp_path) == ["metrics.jsonl"]


@pytest.mark.parametrize("seed", range(8))
def test_random_crashes_leave_each_row_exactly_once(tmp_path, seed):
    draw = random.Random(seed)
    last, saved = 30, 0
    expected = [(s, "loss") for s in range(1, last + 1)] + [(s, "eval_loss") for s in range(5, last + 1, 5)]
    expected.append((last, "train_runtime"))
    for crashes_left in reversed(range(12)):
        process = Process(tmp_path, step=saved).begin()
        try:
            saved = train(process, saved, last, crash_at=draw.randint(1, 40) if crashes_left else None)
            process.log(train_runtime=1.0, train_loss=0.1)
        except Crash as crash:
            saved = crash.args[0]
            tear_last_line(tmp_path / "metrics.jsonl", draw, saved)
    assert sorted(places(tmp_path)) == sorted(expected)


def train(process, saved, last, crash_at):
    """Log at each step, evaluate every fifth, save every third; raises Crash(last checkpoint) at its step."""
    for step in range(saved + 1, last + 1):
        process.at(step).log(loss=1.0 / step)
        if step % 5 == 0:
            process.log(eval_loss=2.0 / step, eval_runtime=0.1)
        if step % 3 == 0:
            saved = step
            process.fire("on_save")
        if step == crash_at:
            raise Crash(saved)
    return saved


def tear_last_line(path, draw, saved):
    """Cut into the last row, as a crash in the middle of a write does; rows before a checkpoint are safe on disk."""
    content = path.read_bytes()
    start = content.rfind(b"\n", 0, -1) + 1
    if json.loads(content[start:])["step"] > saved:
        path.write_bytes(content[: draw.randint(start, len(content))])


def test_a_last_line_cut_at_any_byte_is_dropped_or_whole(tmp_path):
    first = Process(tmp_path).begin()
    for step in (1, 2, 3):
        first.at(step).log(loss=float("inf"), note="später")
    content = (tmp_path / "metrics.jsonl").read_bytes()
    start = content.rfind(b"\n", 0, -1) + 1
    for cut in range(start, len(content) + 1):
        (tmp_path / "metrics.jsonl").write_bytes(content[:cut])
        is_whole = cut >= len(content) - 1
        assert [row["step"] for row in read_metrics(tmp_path)] == ([1, 2, 3] if is_whole else [1, 2])
        resumed = Process(tmp_path, step=3 if is_whole else 2).begin()
        if not is_whole:
            resumed.at(3).log(loss=1.0)
        resumed.at(4).log(loss=1.0)
        assert places(tmp_path) == [(1, "loss"), (2, "loss"), (3, "loss"), (4, "loss")]


def test_an_evaluation_after_a_torn_line_does_not_lose_its_row(tmp_path):
    Process(tmp_path).begin().at(1).log(loss=1.0)
    with open(tmp_path / "metrics.jsonl", "a") as file:
        file.write('{"step": 2, "lo')
    Process(tmp_path).at(1).log(eval_loss=1.0, eval_runtime=0.1)
    assert places(tmp_path) == [(1, "loss"), (1, "eval_loss")]


def test_a_torn_line_is_reported(tmp_path, caplog):
    (tmp_path / "metrics.jsonl").write_text('{"step": 1}\n{"st')
    assert read_metrics(tmp_path) == [{"step": 1}]
    assert "line 2 is not a complete row" in caplog.text


def test_a_crash_while_rewriting_leaves_the_old_file(tmp_path, monkeypatch):
    first = Process(tmp_path).begin()
    for step in (1, 2, 3):
        first.at(step).log(loss=1.0)
    before = (tmp_path / "metrics.jsonl").read_bytes()
    with monkeypatch.context() as patch, pytest.raises(Crash):
        patch.setattr(os, "replace", lambda *_: (_ for _ in ()).throw(Crash))
        Process(tmp_path, step=2).begin()
    assert (tmp_path / "metrics.jsonl").read_bytes() == before
    Process(tmp_path, step=2).begin()
    assert places(tmp_path) == [(1, "loss"), (2, "loss")]


def test_a_row_logged_again_for_the_resumed_step_replaces_the_old_one(tmp_path):
    first = Process(tmp_path).begin().at(4)
    first.log(loss=1.0)
    first.log(eval_loss=1.0, eval_runtime=0.1)
    first.log(eval_b_loss=1.0, eval_b_runtime=0.1, eval_loss=9.0)
    second = Process(tmp_path, step=4).begin()
    second.log(eval_loss=2.0, eval_runtime=0.2, eval_extra=1)
    rows = read_metrics(tmp_path)
    assert [row.get("eval_runtime", row.get("eval_b_runtime")) for row in rows] == [None, 0.1, 0.2]


def test_rerunning_a_finished_script_changes_nothing(tmp_path):
    for start in (0, 4, 4):
        process = Process(tmp_path, step=start).begin()
        for step in range(start + 1, 5):
            process.at(step).log(loss=1.0)
        process.log(train_runtime=1.0, train_loss=1.0)
        process.fire("on_train_end")
        process.log(eval_loss=1.0, eval_runtime=1.0)
    assert places(tmp_path) == [*((n, "loss") for n in range(1, 5)), (4, "train_runtime"), (4, "eval_loss")]


def test_a_new_run_keeps_the_files_of_those_before(tmp_path):
    for loss in (1.0, 2.0, 3.0):
        Process(tmp_path).begin().at(1).log(loss=loss)
    files = {name: read_metrics(tmp_path / name)[0]["loss"] for name in os.listdir(tmp_path)}
    assert files == {"metrics.1.jsonl": 1.0, "metrics.2.jsonl": 2.0, "metrics.jsonl": 3.0}


def test_training_twice_with_one_trainer_makes_two_files(tmp_path):
    process = Process(tmp_path)
    for loss in (1.0, 2.0):
        process.at(0).begin().at(1).log(loss=loss)
        process.fire("on_train_end")
        process.log(eval_loss=loss, eval_runtime=1.0)
    assert [row.get("loss", row.get("eval_loss")) for row in read_metrics(tmp_path / "metrics.1.jsonl")] == [1.0, 1.0]
    assert [row.get("loss", row.get("eval_loss")) for row in read_metrics(tmp_path)] == [2.0, 2.0]


def test_an_evaluation_before_training_belongs_to_the_new_run(tmp_path):
    Process(tmp_path).begin().at(1).log(loss=1.0)
    process = Process(tmp_path)
    process.log(eval_loss=9.0, eval_runtime=1.0)
    process.begin().at(1).log(loss=2.0)
    assert places(tmp_path / "metrics.1.jsonl") == [(1, "loss")]
    assert places(tmp_path) == [(0, "eval_loss"), (1, "loss")]


def test_evaluations_and_predictions_outside_training_are_kept(tmp_path):
    process = Process(tmp_path / "not" / "there" / "yet").at(7)
    process.log(eval_loss=1.0, eval_runtime=1.0)
    process.log(eval_loss=2.0, eval_runtime=1.0)
    process.fire("on_predict", metrics={"test_loss": 3.0, "test_runtime": 1.0})
    rows = [(7, "eval_loss"), (7, "eval_loss"), (7, "test_loss")]
    assert places(tmp_path / "not" / "there" / "yet") == rows


def test_a_users_own_rows_may_repeat_within_a_step(tmp_path):
    process = Process(tmp_path).begin().at(2)
    process.log(mine=1)
    process.log(mine=2)
    Process(tmp_path, step=2).begin().at(3).log(mine=3)
    assert [row["mine"] for row in read_metrics(tmp_path)] == [1, 2, 3]


def test_a_logged_step_does_not_hide_the_real_one(tmp_path):
    Process(tmp_path).begin().at(2).log(mine=1, step="x")
    assert read_metrics(tmp_path)[0]["step"] == 2


def test_only_the_first_process_writes(tmp_path):
    process = Process(tmp_path, is_world_process_zero=False).begin()
    process.at(1).log(loss=1.0)
    process.fire("on_save")
    process.fire("on_train_end")
    assert os.listdir(tmp_path) == []


def test_a_folder_that_cannot_be_written_is_a_clear_error_in_training(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(OutputError, match=r"metrics.jsonl cannot be written.*output_dir"):
        Process(tmp_path / "file").begin().at(1).log(loss=1.0)


def test_a_folder_that_cannot_be_written_does_not_stop_an_evaluation(tmp_path, caplog):
    (tmp_path / "file").touch()
    process = Process(tmp_path / "file")
    process.log(eval_loss=1.0, eval_runtime=1.0)
    process.log(eval_loss=1.0, eval_runtime=1.0)
    assert caplog.text.count("cannot be written") == 1


def test_rows_wait_while_the_disk_is_full(tmp_path, monkeypatch):
    import errno
    from types import SimpleNamespace

    from loopwright.callbacks import metrics_file

    callback = metrics_file.MetricsFileCallback()
    args = SimpleNamespace(output_dir=str(tmp_path))
    state = SimpleNamespace(is_world_process_zero=True, global_step=0, epoch=0.0)
    callback.on_train_begin(args, state, None)
    full = True
    write = callback._write

    def maybe_full(path, row):
        if full:
            with open(path, "a") as file:
                file.write('{"step": ')  # half a line
            raise OSError(errno.ENOSPC, "No space left on device")
        write(path, row)

    monkeypatch.setattr(callback, "_write", maybe_full)
    for step in (1, 2):
        state.global_step = step
        callback.on_log(args, state, None, logs={"loss": float(step)})
    full = False
    state.global_step = 3
    callback.on_log(args, state, None, logs={"loss": 3.0})
    assert [row["loss"] for row in metrics_file.read_metrics(tmp_path)] == [1.0, 2.0, 3.0]
