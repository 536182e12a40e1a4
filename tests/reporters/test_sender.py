"""The queue and the thread of a reporter: nothing waits for it, nothing is sent twice, errors end nothing."""

from __future__ import annotations

import json
import os
import shutil
import threading

import numpy as np
import pytest

from loopwright.args.base import BaseArguments
from loopwright.callbacks.metrics_file import read_metrics
from loopwright.core.events import TrainerCallback
from loopwright.reporters.base import Numbers, Reporter, Row, RunInfo, without_stored
from loopwright.reporters.callback import ReporterCallback
from loopwright.reporters.sender import Sender
from tests.core.numpy_strategy import LinearModel
from tests.core.numpy_trainer import NumpyTrainer

STEPS = 6
LONG = 60.0
"""More seconds than any test takes; reached only if a test fails."""


class Ledger(Reporter):
    """Keeps its rows in a list that outlives a process, as a service does."""

    name = "ledger"

    def __init__(self, rows=None, *, stores=True):
        self.rows = [] if rows is None else rows
        self.stores = stores
        self.verbs = []

    def start(self, run):
        self.verbs.append("start")

    def log(self, values, step):
        self.rows.append((step, *sorted(values)))

    def flush(self):
        return self.stores

    def finish(self, status):
        self.verbs.append(f"finish {status}")


class Blocked(Ledger):
    """A tracker that does not answer until it is released."""

    def __init__(self):
        super().__init__()
        self.release = threading.Event()

    def log(self, values, step):
        assert self.release.wait(LONG)
        super().log(values, step)


class Raising(Ledger):
    def __init__(self, *verbs):
        super().__init__()
        self.raising = verbs

    def _maybe(self, verb):
        if verb in self.raising:
            raise ConnectionError(f"{verb} does not answer")

    def start(self, run):
        self._maybe("start")

    def log(self, values, step):
        self._maybe("log")
        super().log(values, step)

    def flush(self):
        self._maybe("flush")
        return True

    def finish(self, status):
        self._maybe("finish")


class AtTheEnd(TrainerCallback):
    """Calls a function when training has done its last step, and before the reporters are finished."""

    def __init__(self, action):
        self.action, self.steps = action, 0

    def on_step_end(self, args, state, control, **kwargs):
        self.steps += 1

    def on_train_end(self, args, state, control, **kwargs):
        self.action()


def train(folder, *callbacks, **options):
    samples = [(row, row.sum(keepdims=True)) for row in np.random.default_rng(0).normal(size=(16, 3))]
    args = BaseArguments(
        str(folder), max_steps=STEPS, per_device_train_batch_size=4, logging_steps=1, disable_tqdm=True,
        **{"save_strategy": "no", **options},
    )
    trainer = NumpyTrainer(LinearModel(3), args, samples, callbacks=callbacks)
    trainer.train(resume_from_checkpoint="auto" if options else None)
    return trainer


def steps_in_metrics(folder):
    return [row["step"] for row in read_metrics(folder) if "loss" in row]


def rows(first, last):
    return [Row(step, "training", {"train/loss": float(step)}) for step in range(first, last + 1)]


def test_no_update_waits_for_a_tracker(tmp_path):
    reporter = Blocked()
    received = []

    def end():
        received.extend(reporter.rows)
        reporter.release.set()

    counting = AtTheEnd(end)
    train(tmp_path, counting, ReporterCallback(reporter))
    assert counting.steps == STEPS
    assert received == []  # all updates were done while the tracker had not answered its first call
    assert [row[0] for row in reporter.rows] == [*range(1, STEPS + 1), STEPS]
    assert steps_in_metrics(tmp_path) == list(range(1, STEPS + 1))


def test_the_end_of_training_waits_for_a_limited_time(tmp_path, caplog):
    reporter = Blocked()
    callback = ReporterCallback(reporter)
    callback.finish_seconds = 0.05
    train(tmp_path, callback)
    assert caplog.text.count("ledger: 7 of 7 rows were not sent (7 after waiting 0 s)") == 1
    assert steps_in_metrics(tmp_path) == list(range(1, STEPS + 1))
    reporter.release.set()


@pytest.mark.parametrize("verb", ["start", "log", "flush", "finish"])
def test_an_error_of_a_tracker_is_reported_once_and_ends_nothing(tmp_path, caplog, verb):
    counting = AtTheEnd(lambda: None)
    train(tmp_path, counting, ReporterCallback(Raising(verb)))
    assert counting.steps == STEPS
    assert caplog.text.count(f"ledger: {verb} failed: ConnectionError: {verb} does not answer. Training continues") == 1
    lost = caplog.text.count("ledger: 7 of 7 rows were not sent (7 after errors)")
    assert lost == (1 if verb in ("start", "log") else 0)
    assert steps_in_metrics(tmp_path) == list(range(1, STEPS + 1))


def test_rows_beyond_the_queue_are_dropped_counted_and_reported_once(caplog):
    reporter = Blocked()
    sender = Sender(reporter, limit=3)
    sender.begin(RunInfo("run"), [], None)
    sender.wait_started(LONG)
    for row in rows(1, 50):
        sender.send(row)
    reporter.release.set()
    sender.finish("finished", LONG)
    dropped = 50 - len(reporter.rows)
    assert dropped >= 50 - 3 - 100 and dropped > 0
    assert caplog.text.count(f"ledger: {dropped} of 50 rows were not sent ({dropped} because the queue was full)") == 1


def life(folder, ledger, *, run_id="run", resumed_from=None, logs=(), history=(), dies=False):
    """One process of a run; one that dies neither finishes nor waits for what it sent."""
    sender = Sender(ledger)
    sender.begin(RunInfo(run_id, resumed_from=resumed_from), list(history), str(folder))
    sender.wait_started(LONG)
    for row in logs:
        sender.send(row)
    assert sender.settle(LONG)
    if not dies:
        sender.finish("finished", LONG)


@pytest.mark.parametrize("saved", [0, 1, 3, 5])
def test_a_step_is_not_sent_twice_and_a_missed_one_is_sent_late(tmp_path, saved):
    stored = []
    life(tmp_path, Ledger(stored), logs=rows(1, 5), dies=True)
    if saved:
        # The resumed process has the rows up to its checkpoint in its history, among them one that was never sent.
        late = Row(saved, "eval", {"eval/loss": 0.0})
        life(
            tmp_path, Ledger(stored), resumed_from=saved, history=[*rows(1, saved), late], logs=rows(saved + 1, 8)
        )
        expected = [(step, "train/loss") for step in range(1, 9)] + [(saved, "eval/loss")]
    else:
        life(tmp_path, Ledger(stored), run_id="another run", logs=rows(1, 3))
        expected = [(step, "train/loss") for step in (1, 2, 3, 4, 5, 1, 2, 3)]
    assert sorted(stored) == sorted(expected)


class Forgetful(Ledger):
    """Has stored only the first rows when its process dies, and can say which."""

    def __init__(self, rows, stored):
        super().__init__(rows, stores=False)
        self.stored = stored

    def unstored(self, rows):
        return without_stored(rows, ((step, [name]) for step, name in self.stored))


@pytest.mark.parametrize("kept", range(6))
def test_what_a_tracker_lost_with_the_process_is_sent_again(tmp_path, kept):
    sent = []
    life(tmp_path, Forgetful(sent, []), logs=rows(1, 5), dies=True)
    survived = sent[:kept]
    life(tmp_path, Forgetful(survived, list(survived)), resumed_from=3, history=rows(1, 3), logs=rows(4, 8))
    assert sorted(survived) == [(step, "train/loss") for step in range(1, 9)]


def test_a_tracker_that_cannot_say_what_it_has_gets_nothing_twice(tmp_path, caplog):
    stored = []
    life(tmp_path, Ledger(stored, stores=False), logs=rows(1, 5), dies=True)
    life(tmp_path, Ledger(stored), resumed_from=3, history=rows(1, 3), logs=rows(4, 8))
    assert sorted(stored) == [(step, "train/loss") for step in range(1, 9)]
    assert "ledger: 5 rows were being sent when the run was killed, and are not sent again" in caplog.text


def test_the_missing_values_of_a_row_are_sent_alone(tmp_path):
    row = Row(4, "training", {"train/loss": 1.0, "train/lr": 2.0, "train/epoch": 0.5})
    found = without_stored([row], [(4, {"train/loss"}), (4, {"train/epoch"})])
    assert [list(each.values) for each in found] == [["train/lr"]]
    assert without_stored([row], [(4, {"train/epoch"})]) == [Row(4, "training", dict.fromkeys(row.values))]


def test_an_incomplete_line_of_the_journal_is_no_row(tmp_path):
    stored = []
    life(tmp_path, Ledger(stored), logs=rows(1, 2), dies=True)
    with open(tmp_path / "metrics.sent.ledger.run.jsonl", "a") as file:
        file.write('[3, "trai')
    life(tmp_path, Ledger(stored), resumed_from=2, history=rows(1, 2), logs=rows(3, 4))
    assert [row[0] for row in stored] == [1, 2, 3, 4]


def test_a_folder_that_cannot_be_written_stops_nothing(tmp_path, caplog):
    (tmp_path / "file").write_text("")
    stored = []
    life(tmp_path / "file", Ledger(stored), logs=rows(1, 3))
    assert [row[0] for row in stored] == [1, 2, 3]
    assert caplog.text.count("may receive some steps twice") == 1


def test_steps_that_are_undone_and_done_again_are_sent_once(tmp_path):
    stored = []
    sender = Sender(Ledger(stored))
    sender.begin(RunInfo("run"), [], str(tmp_path))
    for row in rows(1, 5):
        sender.send(row)
    sender.set_back(2)
    for row in rows(3, 7):
        sender.send(row)
    sender.finish("finished", LONG)
    assert [row[0] for row in stored] == [1, 2, 3, 4, 5, 6, 7]


def test_a_run_that_is_interrupted_and_resumed_continues_its_tracker_run(tmp_path):
    stored, ids = [], []

    class Named(Ledger):
        def start(self, run):
            ids.append((run.run_id, run.resumed_from, run.is_continued))

    class Stop(TrainerCallback):
        def on_step_end(self, args, state, control, **kwargs):
            if state.global_step == 5:
                raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        train(tmp_path, ReporterCallback(Named(stored)), Stop(), save_strategy="steps", save_steps=2)
    train(tmp_path, ReporterCallback(Named(stored)), save_strategy="steps", save_steps=2)
    (first, *_), (second, step, continued) = ids
    assert (first, step, continued) == (second, 4, True)
    assert [row[0] for row in stored] == [*range(1, STEPS + 1), STEPS]


def test_a_run_resumed_in_another_folder_is_a_new_run_with_the_whole_history(tmp_path):
    stored = []

    class Named(Ledger):
        def __init__(self):
            super().__init__()
            self.id = None

        def start(self, run):
            self.id = self.id or run.run_id

        def log(self, values, step):
            stored.append((self.id, step))

        def state_dict(self):
            return {"id": self.id}

        def load_state_dict(self, state):
            self.id = state["id"]

    train(tmp_path / "first", ReporterCallback(Named()), save_strategy="steps", save_steps=2)
    os.makedirs(tmp_path / "second")
    shutil.copytree(tmp_path / "first" / "checkpoint-4", tmp_path / "second" / "checkpoint-4")
    train(tmp_path / "second", ReporterCallback(Named()), save_strategy="steps", save_steps=2)
    steps = [*range(1, STEPS + 1), STEPS]
    ids = list(dict.fromkeys(name for name, _ in stored))
    assert [[step for name, step in stored if name == each] for each in ids] == [steps, steps]


def test_an_evaluation_before_resuming_keeps_the_record_of_the_run(tmp_path):
    stored = []
    life(tmp_path, Ledger(stored), logs=rows(1, 3), dies=True)
    life(tmp_path, Ledger(stored), run_id="evaluation", logs=[Row(0, "eval", {"eval/loss": 0.0})])
    life(tmp_path, Ledger(stored), resumed_from=2, history=rows(1, 2), logs=rows(3, 4))
    assert [row[0] for row in stored] == [1, 2, 3, 0, 4]


def test_numbers_of_the_journal_are_json(tmp_path):
    life(tmp_path, Ledger(), logs=rows(1, 1))
    lines = [json.loads(line) for line in (tmp_path / "metrics.sent.ledger.run.jsonl").read_text().splitlines()]
    assert lines[0] == {"run": "run", "state": {}}
    assert [1, "training", ["train/loss"]] in lines


def test_a_value_that_is_not_a_number_is_reported_once_with_its_name(caplog):
    numbers = Numbers("mlflow")
    assert numbers.of({"loss": np.float32(0.5), "note (%)": "text"}) == numbers.of({"loss": 0.5, "note (%)": "text"})
    assert caplog.text.count("mlflow accepts numbers only; note (%)='text' is not logged there.") == 1
