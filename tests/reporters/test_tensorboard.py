"""TensorBoard files, read back by TensorBoard."""

from __future__ import annotations

import importlib.util
import json
import math
import os
import subprocess
import sys
from types import SimpleNamespace

import numpy
import pytest

from loopwright.core.state import TrainerControl, TrainerState, callback_states, restore_callback_states
from loopwright.errors import MissingPackage, NotAvailable
from loopwright.reporters.base import RunInfo, as_number
from loopwright.reporters.tensorboard import (
    EventFile,
    TensorBoardCallback,
    TensorBoardReporter,
    choose_log_dir,
)

pytest.importorskip("tensorboard")


def scalars(folder):
    """{tag: [(step, value), ...]} as TensorBoard's own reader sees it."""
    reader = loaded(folder)
    return {tag: [(e.step, e.value) for e in reader.Scalars(tag)] for tag in reader.Tags()["scalars"]}


def loaded(folder):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    return EventAccumulator(str(folder)).Reload()


@pytest.fixture(autouse=True)
def no_folder_from_the_environment(monkeypatch):
    monkeypatch.delenv("TENSORBOARD_LOGGING_DIR", raising=False)


class Run:
    def __init__(self, folder, *, step=0, callback=None, logging_dir=None, **args):
        self.callback = callback or TensorBoardCallback()
        self.args = SimpleNamespace(output_dir=str(folder), logging_dir=logging_dir, **args)
        self.state = TrainerState(global_step=step)

    def fire(self, event, **kwargs):
        getattr(self.callback, event)(self.args, self.state, TrainerControl(), **kwargs)
        self.callback.settle()
        return self

    def log(self, step, **logs):
        self.state.global_step = step
        return self.fire("on_log", logs=logs)


def test_what_is_logged_is_read_back(tmp_path):
    run = Run(tmp_path, logging_dir=str(tmp_path / "tb")).fire("on_train_begin")
    run.log(1, loss=0.5, learning_rate=0.25).log(2, loss=0.125).log(2, eval_loss=2.0).fire("on_train_end")
    assert scalars(tmp_path / "tb") == {
        "train/loss": [(1, 0.5), (2, 0.125)],
        "train/learning_rate": [(1, 0.25)],
        "eval/loss": [(2, 2.0)],
    }


def test_numbers_are_on_disk_at_once(tmp_path):
    Run(tmp_path, logging_dir=str(tmp_path)).fire("on_train_begin").log(1, loss=0.5)
    assert scalars(tmp_path) == {"train/loss": [(1, 0.5)]}


def test_arguments_and_model_configuration_are_texts(tmp_path):
    model = SimpleNamespace(config=SimpleNamespace(to_json_string=lambda: '{"layers": 2}'))
    run = Run(tmp_path, logging_dir=str(tmp_path), to_sanitized_dict=lambda: {"seed": 42})
    run.fire("on_train_begin", model=model).fire("on_train_end")
    reader = loaded(tmp_path)
    assert sorted(reader.Tags()["tensors"]) == ["args/text_summary", "model_config/text_summary"]
    (event,) = reader.Tensors("args/text_summary")
    assert json.loads(event.tensor_proto.string_val[0]) == {"seed": 42}
    metadata = reader.SummaryMetadata("args/text_summary")
    assert metadata.plugin_data.plugin_name == "text"


def test_the_folder_is_named_after_date_and_host(tmp_path):
    Run(tmp_path).fire("on_train_begin").log(1, loss=1.0)
    (folder,) = os.listdir(tmp_path / "runs")
    assert scalars(tmp_path / "runs" / folder) == {"train/loss": [(1, 1.0)]}


def test_the_environment_may_name_the_folder(tmp_path, monkeypatch):
    monkeypatch.setenv("TENSORBOARD_LOGGING_DIR", str(tmp_path / "env"))
    Run(tmp_path / "out").fire("on_train_begin").log(1, loss=1.0)
    assert scalars(tmp_path / "env") == {"train/loss": [(1, 1.0)]}


@pytest.mark.parametrize("logging_dir", [None, "tb"])
@pytest.mark.parametrize("resume_at", [2, 4, 6])
def test_a_resumed_run_has_each_step_once(tmp_path, resume_at, logging_dir):
    logging_dir = logging_dir and str(tmp_path / logging_dir)
    first = Run(tmp_path, logging_dir=logging_dir).fire("on_train_begin")
    saved = None
    for step in range(1, 7):
        first.log(step, loss=float(step))
        if step == resume_at:
            saved = json.loads(json.dumps(callback_states([first.callback])))
    second = Run(tmp_path, step=resume_at, logging_dir=logging_dir)
    restore_callback_states([second.callback], saved)
    second.fire("on_train_begin")
    for step in range(resume_at + 1, 9):
        second.log(step, loss=float(step) + 100)
    folder = logging_dir or tmp_path / "runs" / os.listdir(tmp_path / "runs")[0]
    expected = [(s, float(s) + (100 if s > resume_at else 0)) for s in range(1, 9)]
    assert scalars(folder) == {"train/loss": expected}
    assert len(os.listdir(folder)) == 2
    assert logging_dir or len(os.listdir(tmp_path / "runs")) == 1


def test_a_resumed_run_finds_its_folder_in_a_moved_output_folder(tmp_path):
    first = Run(tmp_path / "old").fire("on_train_begin").log(1, loss=1.0)
    saved = callback_states([first.callback])
    os.rename(tmp_path / "old", tmp_path / "new")
    second = Run(tmp_path / "new", step=1)
    restore_callback_states([second.callback], saved)
    second.fire("on_train_begin").log(2, loss=2.0)
    (folder,) = os.listdir(tmp_path / "new" / "runs")
    assert scalars(tmp_path / "new" / "runs" / folder) == {"train/loss": [(1, 1.0), (2, 2.0)]}
    assert not (tmp_path / "old").exists()


def test_an_evaluation_after_training_goes_to_the_same_folder(tmp_path):
    run = Run(tmp_path).fire("on_train_begin").log(3, loss=1.0).fire("on_train_end").log(3, eval_loss=2.0)
    (folder,) = os.listdir(tmp_path / "runs")
    assert scalars(run.callback.reporter.log_dir) == {"train/loss": [(3, 1.0)], "eval/loss": [(3, 2.0)]}
    assert run.callback.reporter.log_dir.endswith(folder)


def test_non_finite_numbers_are_kept(tmp_path):
    Run(tmp_path, logging_dir=str(tmp_path)).fire("on_train_begin").log(1, loss=math.nan, x=math.inf)
    values = scalars(tmp_path)
    assert math.isnan(values["train/loss"][0][1])
    assert values["train/x"] == [(1, math.inf)]


def test_what_is_no_number_is_left_out_and_said_once(tmp_path, caplog):
    run = Run(tmp_path, logging_dir=str(tmp_path)).fire("on_train_begin")
    run.log(1, loss=1.0, note="hi").log(2, note="ho")
    assert scalars(tmp_path) == {"train/loss": [(1, 1.0)]}
    assert caplog.text.count("TensorBoard accepts numbers only") == 1


@pytest.mark.parametrize(
    ("value", "number"),
    [
        (1, 1.0),
        (True, 1.0),
        (numpy.float32(0.5), 0.5),
        (numpy.array([2]), 2.0),
        (numpy.array([1, 2]), None),
        (numpy.array([]), None),
        ("3", None),
        (None, None),
        ({"a": 1}, None),
    ],
)
def test_as_number(value, number):
    assert as_number(value) == number


def test_a_tensor_is_a_number():
    torch = pytest.importorskip("torch")
    assert as_number(torch.tensor(0.5)) == 0.5
    assert as_number(torch.tensor([0.5, 1.0])) is None


def test_a_users_writer_is_fed_and_not_closed(tmp_path):
    writer = EventFile(tmp_path / "mine")
    run = Run(tmp_path, callback=TensorBoardCallback(writer)).fire("on_train_begin")
    run.log(1, loss=1.0).fire("on_train_end")
    writer.add_scalar("after", 2.0, 1)
    writer.close()
    assert scalars(tmp_path / "mine") == {"train/loss": [(1, 1.0)], "after": [(1, 2.0)]}
    assert not (tmp_path / "runs").exists()


def test_the_writer_of_torch_will_do(tmp_path):
    from torch.utils.tensorboard import SummaryWriter

    writer = SummaryWriter(str(tmp_path))
    callback = TensorBoardCallback(tb_writer=writer)
    run = Run(tmp_path, callback=callback, to_sanitized_dict=lambda: {"a": 1})
    run.fire("on_train_begin").log(1, loss=1.0).fire("on_train_end")
    writer.close()
    assert scalars(tmp_path) == {"train/loss": [(1, 1.0)]}


def test_artifacts_are_named(tmp_path):
    run = Run(tmp_path, logging_dir=str(tmp_path / "tb")).fire("on_train_begin")
    run.callback.artifact(tmp_path / "checkpoint-1", "best")
    run.fire("on_train_end")
    assert loaded(tmp_path / "tb").Tags()["tensors"] == ["artifact/best/text_summary"]


def test_files_of_one_second_keep_their_order(tmp_path):
    for value in range(5):
        file = EventFile(tmp_path)
        file.add_scalar("x", value, value)
        file.close()
    assert scalars(tmp_path)["x"] == [(n, float(n)) for n in range(5)]


def test_a_remote_folder_is_refused():
    with pytest.raises(NotAvailable, match="tb_writer"):
        choose_log_dir(RunInfo(run_id="x", logging_dir="gs://bucket/run"))


def test_without_the_package_the_error_says_what_to_install(monkeypatch):
    real = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *a: None if name == "tensorboard" else real(name, *a))
    with pytest.raises(MissingPackage, match="pip install tensorboard"):
        TensorBoardReporter()


def test_tensorflow_and_torch_are_never_imported(tmp_path):
    (tmp_path / "tensorflow.py").write_text("raise SystemExit('tensorflow was imported')\n")
    code = (
        "import sys, os\n"
        "from types import SimpleNamespace as S\n"
        "from loopwright.core.state import TrainerState, TrainerControl\n"
        "from loopwright.reporters.registry import reporter_callbacks\n"
        "(callback,) = reporter_callbacks(['tensorboard'])\n"
        "args = S(output_dir=sys.argv[1], logging_dir=sys.argv[1], to_dict=lambda: {'a': 1})\n"
        "state, control = TrainerState(global_step=1), TrainerControl()\n"
        "callback.on_train_begin(args, state, control)\n"
        "callback.on_log(args, state, control, logs={'loss': 1.5})\n"
        "callback.on_train_end(args, state, control)\n"
        "print([name for name in ('tensorflow', 'torch', 'tensorboard.compat.notf') if name in sys.modules])\n"
    )
    environment = {"PYTHONPATH": os.pathsep.join([str(tmp_path), *sys.path])}
    command = [sys.executable, "-c", code, str(tmp_path / "tb")]
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert done.stdout == "[]\n", done.stderr
    assert scalars(tmp_path / "tb") == {"train/loss": [(1, 1.5)]}
