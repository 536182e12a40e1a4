"""From events to a reporter's calls."""

from __future__ import annotations

import gc
import json
import subprocess
import sys
import weakref
from types import SimpleNamespace

import pytest

from loopwright.core.events import TrainerCallback
from loopwright.core.state import TrainerControl, TrainerState, callback_states, restore_callback_states
from loopwright.reporters.base import Reporter
from loopwright.reporters.callback import ReporterCallback, reported_names
from tests.models import regression_run


class Notebook(Reporter):
    """Writes down every call."""

    name = "notebook"

    def __init__(self):
        self.calls = []
        self.page = 0

    def start(self, run):
        self.calls.append(("start", run))

    def log(self, values, step):
        self.calls.append(("log", step, values))

    def artifact(self, path, name):
        self.calls.append(("artifact", path, name))

    def finish(self, status):
        self.calls.append(("finish", status))

    def state_dict(self):
        return {"page": self.page}

    def load_state_dict(self, state):
        self.page = state["page"]

    def verbs(self):
        return [call[0] for call in self.calls]

    def runs(self):
        return [call[1] for call in self.calls if call[0] == "start"]


class Run:
    def __init__(self, *, step=0, zero=True, callback=None, **args):
        self.callback = callback or ReporterCallback(Notebook())
        self.reporter = self.callback.reporter
        self.args = SimpleNamespace(output_dir="out", run_name="mine", logging_dir=None, **args)
        self.state = TrainerState(global_step=step, is_world_process_zero=zero)

    def fire(self, event, **kwargs):
        getattr(self.callback, event)(self.args, self.state, TrainerControl(), **kwargs)
        self.callback.settle()
        return self

    def log(self, step, **logs):
        self.state.global_step = step
        return self.fire("on_log", logs=logs)


def test_names_are_sorted_into_sections():
    logs = {"loss": 1, "eval_loss": 2, "eval_f1": 3, "test_loss": 4, "train_runtime": 5, "evaluation": 6}
    assert reported_names(logs) == {
        "train/loss": 1,
        "eval/loss": 2,
        "eval/f1": 3,
        "test/loss": 4,
        "train/train_runtime": 5,
        "train/evaluation": 6,
    }


def test_names_are_those_transformers_gives():
    theirs = pytest.importorskip("transformers.integrations.integration_utils").rewrite_logs
    logs = {"loss": 1, "eval_loss": 2, "eval_eval_x": 3, "test_loss": 4, "train_runtime": 5, "epoch": 6}
    assert reported_names(logs) == theirs(logs)


def test_a_run_is_started_fed_and_finished():
    run = Run().fire("on_train_begin").log(1, loss=2.0).log(2, eval_loss=3.0).fire("on_train_end")
    assert run.reporter.calls[1:] == [
        ("log", 1, {"train/loss": 2.0}),
        ("log", 2, {"eval/loss": 3.0}),
        ("finish", "finished"),
    ]


def test_the_reporter_is_told_about_the_run():
    config = SimpleNamespace(to_json_string=lambda: '{"layers": 2}')
    args = {"to_sanitized_dict": lambda: {"seed": 42}}
    run = Run(**args).fire("on_train_begin", model=SimpleNamespace(config=config))
    (info,) = run.reporter.runs()
    assert (info.run_name, info.output_dir, info.resumed_from) == ("mine", "out", None)
    assert (info.config, info.model_config) == ({"seed": 42}, {"layers": 2})
    assert info.run_id == run.callback.run_id


@pytest.mark.parametrize(
    "model", [None, SimpleNamespace(), SimpleNamespace(config=3), SimpleNamespace(config={"a": 1})]
)
def test_any_model_will_do(model):
    (info,) = Run().fire("on_train_begin", model=model).reporter.runs()
    assert info.model_config == ({"a": 1} if getattr(model, "config", None) == {"a": 1} else {})


def test_other_processes_report_nothing():
    run = Run(zero=False).fire("on_train_begin").log(1, loss=1.0).fire("on_train_end")
    assert run.reporter.calls == []


def test_a_resumed_run_keeps_its_id_and_says_where_it_goes_on():
    first = Run().fire("on_train_begin").log(4, loss=1.0)
    first.reporter.page = 7
    saved = json.loads(json.dumps(callback_states([first.callback])))

    second = Run(step=4)
    assert restore_callback_states([second.callback], saved) == []
    second.fire("on_train_begin")
    (info,) = second.reporter.runs()
    assert (info.run_id, info.resumed_from) == (first.callback.run_id, 4)
    assert second.reporter.page == 7


def test_a_state_of_another_reporter_is_not_taken(caplog):
    run = Run(step=4)
    run.callback.load_state_dict({"reporter": "other", "run_id": "x", "state": {}})
    assert run.callback.run_id is None
    assert "'notebook' starts a new run" in caplog.text


def test_an_evaluation_after_training_belongs_to_the_same_run():
    run = Run().fire("on_train_begin").log(1, loss=1.0).fire("on_train_end").log(1, eval_loss=1.0)
    assert run.reporter.verbs() == ["start", "log", "finish", "start", "log"]
    first, second = run.reporter.runs()
    assert first.run_id == second.run_id
    assert second.resumed_from is None
    run.callback._at_exit()
    assert run.reporter.calls[-1] == ("finish", "finished")


def test_an_evaluation_before_training_belongs_to_the_same_run():
    run = Run().log(0, eval_loss=1.0).fire("on_train_begin").log(1, loss=1.0)
    assert run.reporter.verbs() == ["start", "log", "log"]


def test_an_evaluation_before_resuming_does_not_hide_where_the_run_goes_on():
    saved = callback_states([Run().fire("on_train_begin").callback])
    run = Run(step=0).log(0, eval_loss=1.0)
    restore_callback_states([run.callback], saved)
    run.state.global_step = 6
    run.fire("on_train_begin")
    assert run.reporter.verbs() == ["start", "log", "finish", "start"]
    assert run.reporter.runs()[-1].resumed_from == 6
    assert run.reporter.runs()[-1].run_id == saved["ReporterCallback"]["state_dict"]["run_id"]


def test_training_anew_is_another_run():
    run = Run().fire("on_train_begin").log(1, loss=1.0).fire("on_train_end")
    run.state.global_step = 0
    run.fire("on_train_begin")
    first, second = run.reporter.runs()
    assert first.run_id != second.run_id


def test_artifacts_reach_a_running_reporter_only():
    run = Run()
    run.callback.artifact("a", "b")
    run.fire("on_train_begin")
    run.callback.artifact("c", "d")
    run.callback.settle()
    assert [call for call in run.reporter.calls if call[0] == "artifact"] == [("artifact", "c", "d")]


def test_a_crashed_process_finishes_its_reporter():
    code = (
        "from types import SimpleNamespace as S\n"
        "from loopwright.core.state import TrainerState, TrainerControl\n"
        "from loopwright.reporters.base import Reporter\n"
        "class R(Reporter):\n"
        "    def finish(self, status): print('finish', status)\n"
        "R().as_callback().on_train_begin(S(), TrainerState(), TrainerControl())\n"
        "raise SystemExit('crash')\n"
    )
    environment = {"PYTHONPATH": ":".join(sys.path)}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment)
    assert done.stdout == "finish interrupted\n", done.stderr


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
def test_a_run_that_fails_finishes_its_reporter_before_train_returns(error, tmp_path):
    class Fails(TrainerCallback):
        def on_step_end(self, *given, **context):
            raise error

    callback = ReporterCallback(Notebook())
    with pytest.raises(error):
        regression_run(tmp_path, callbacks=[callback, Fails()])
    assert callback.reporter.calls[-1] == ("finish", "interrupted")


def test_an_evaluation_after_an_error_belongs_to_the_same_run():
    run = Run().fire("on_train_begin").log(1, loss=1.0)
    run.callback.left()
    run.log(1, eval_loss=2.0)
    assert run.reporter.verbs() == ["start", "log", "finish", "start", "log"]
    assert len({each.run_id for each in run.reporter.runs()}) == 1 and run.reporter.runs()[1].is_continued
    run.callback.left()
    assert run.reporter.verbs()[-1] == "log", "no training has ended"


@pytest.mark.parametrize("ends", [True, False])
def test_a_reporter_does_not_keep_the_model_in_memory(ends, tmp_path):
    class Short(Reporter):
        ends_with_training = ends

        def log(self, values, step):
            pass

    callback = ReporterCallback(Short())
    trainer = regression_run(tmp_path, callbacks=[callback], max_steps=1)
    model = weakref.ref(trainer.model)
    del trainer
    gc.collect()
    assert model() is None
    callback._at_exit()


def test_a_reporter_must_log():
    with pytest.raises(NotImplementedError, match="Reporter must define log"):
        Reporter().log({}, 1)
