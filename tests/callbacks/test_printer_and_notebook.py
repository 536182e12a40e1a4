"""Printed dictionaries, the notebook table, and which of them a trainer gets."""

from __future__ import annotations

import sys
import types
from types import SimpleNamespace

import pytest

from loopwright.callbacks.defaults import default_callbacks
from loopwright.callbacks.notebook import NotebookProgressCallback, in_notebook, render_html, table_values
from loopwright.callbacks.printer import PrinterCallback
from loopwright.core.state import TrainerControl, TrainerState


def test_printer_prints_what_transformers_prints(capsys):
    theirs = pytest.importorskip("transformers.trainer_callback").PrinterCallback()
    logs = {"loss": 1.23456, "learning_rate": 5e-05, "step_count": 3, "total_flos": 1.0}
    state = TrainerState()
    PrinterCallback().on_log(None, state, TrainerControl(), logs=logs)
    ours = capsys.readouterr().out
    theirs.on_log(None, state, TrainerControl(), logs=dict(logs))
    assert ours == capsys.readouterr().out == "{'loss': '1.235', 'learning_rate': '5e-05', 'step_count': 3}\n"
    assert "total_flos" in logs


def test_printer_is_silent_in_other_processes(capsys):
    PrinterCallback().on_log(None, TrainerState(is_local_process_zero=False), TrainerControl(), logs={"loss": 1.0})
    assert capsys.readouterr().out == ""


class Cell:
    """A notebook cell that remembers every page it was shown."""

    def __init__(self, **args):
        self.pages = []
        self.now = 0.0
        self.callback = NotebookProgressCallback(show=self.pages.append, clock=lambda: self.now)
        self.args = SimpleNamespace(**{"eval_strategy": "no", **args})
        self.state = TrainerState(max_steps=10)

    def fire(self, event, **kwargs):
        getattr(self.callback, event)(self.args, self.state, TrainerControl(), **kwargs)

    def step(self):
        self.now += 1
        self.state.global_step += 1
        self.fire("on_step_end")


def test_without_evaluation_there_is_a_row_per_log():
    cell = Cell()
    cell.fire("on_train_begin")
    for loss in (2.0, 1.23456):
        cell.step()
        cell.fire("on_log", logs={"loss": loss})
    assert "<th>Step</th><th>Training Loss</th>" in cell.pages[-1]
    assert "<tr><td>1</td><td>2</td></tr><tr><td>2</td><td>1.235</td></tr>" in cell.pages[-1]
    assert '<progress value="2" max="10"' in cell.pages[-1]


def test_with_evaluation_there_is_a_row_per_evaluation():
    cell = Cell(eval_strategy="steps")
    cell.fire("on_train_begin")
    cell.step()
    cell.fire("on_evaluate", metrics={"eval_loss": 3.0, "eval_f1": 0.5, "eval_runtime": 1.0, "epoch": 1})
    cell.step()
    cell.fire("on_log", logs={"loss": 1.5})
    cell.fire("on_evaluate", metrics={"eval_loss": 2.0, "eval_f1": 0.75, "eval_runtime": 1.0, "epoch": 2})
    cell.fire("on_train_end")
    page = cell.pages[-1]
    assert "<th>Step</th><th>Training Loss</th><th>Validation Loss</th><th>F1</th>" in page
    assert "<tr><td>1</td><td>No log</td><td>3</td><td>0.5</td></tr>" in page
    assert "<tr><td>2</td><td>1.5</td><td>2</td><td>0.75</td></tr>" in page


def test_several_datasets_of_a_step_share_a_row():
    cell = Cell(eval_strategy="steps")
    cell.fire("on_train_begin")
    cell.step()
    cell.fire("on_evaluate", metrics={"eval_a_loss": 3.0, "eval_a_runtime": 1.0})
    cell.fire("on_evaluate", metrics={"eval_b_loss": 4.0, "eval_b_runtime": 1.0})
    assert cell.callback.rows == [{"Step": 1, "Training Loss": "No log", "A Loss": 3.0, "B Loss": 4.0}]


def test_evaluation_progress_is_shown_and_goes_away():
    cell = Cell(eval_strategy="steps")
    cell.fire("on_train_begin")
    cell.now += 1
    cell.fire("on_prediction_step", eval_dataloader=[0] * 4)
    assert '<progress value="1" max="4"' in cell.pages[-1]
    cell.fire("on_evaluate", metrics={"eval_loss": 1.0})
    assert cell.pages[-1].count("<progress") == 1


def test_an_evaluation_alone_gets_its_own_table():
    cell = Cell()
    cell.fire("on_prediction_step", eval_dataloader=[0])
    cell.fire("on_evaluate", metrics={"eval_loss": 1.0})
    assert "Validation Loss" in cell.pages[-1]
    assert cell.callback.rows == []


def test_drawing_is_throttled():
    cell = Cell()
    cell.fire("on_train_begin")
    for _ in range(100):
        cell.now -= 0.99
        cell.step()
    assert len(cell.pages) <= 5


def test_names_and_values_are_escaped():
    page = render_html([{"Step": 1, "<b>": "<script>"}])
    assert "<script>" not in page and "&lt;script&gt;" in page and "&lt;b&gt;" in page


def test_columns_leave_out_speeds():
    assert table_values({"eval_loss": 1, "eval_top_5": 2, "eval_runtime": 3, "eval_samples_per_second": 4}) == {
        "Validation Loss": 1,
        "Top 5": 2,
    }


@pytest.fixture
def fake_ipython(monkeypatch):
    """An IPython whose display remembers what it shows."""
    shown = []
    handle = SimpleNamespace(update=shown.append)
    package, display = types.ModuleType("IPython"), types.ModuleType("IPython.display")
    package.get_ipython = lambda: SimpleNamespace(config={"IPKernelApp": {}})
    display.HTML = str
    display.display = lambda value, display_id: handle
    monkeypatch.setitem(sys.modules, "IPython", package)
    monkeypatch.setitem(sys.modules, "IPython.display", display)
    return SimpleNamespace(shown=shown, package=package)


def test_a_notebook_is_recognized(fake_ipython):
    assert in_notebook()
    fake_ipython.package.get_ipython = lambda: SimpleNamespace(config={"TerminalIPythonApp": {}})
    assert not in_notebook()
    fake_ipython.package.get_ipython = lambda: None
    assert not in_notebook()


def test_the_table_goes_through_ipython(fake_ipython):
    callback, state = NotebookProgressCallback(), TrainerState(max_steps=3)
    args = SimpleNamespace(eval_strategy="no")
    callback.on_train_begin(args, state, TrainerControl())
    callback.on_log(args, state, TrainerControl(), logs={"loss": 4.0})
    assert "<td>4</td>" in fake_ipython.shown[-1]


@pytest.mark.parametrize("is_imported", [False, True])
def test_outside_a_notebook_nothing_is_shown(is_imported, monkeypatch, caplog):
    package = types.ModuleType("IPython")
    package.get_ipython = lambda: None
    monkeypatch.setitem(sys.modules, "IPython", package) if is_imported else monkeypatch.delitem(
        sys.modules, "IPython", raising=False
    )
    callback, state = NotebookProgressCallback(), TrainerState(max_steps=3)
    args = SimpleNamespace(eval_strategy="no")
    with caplog.at_level("INFO", logger="loopwright"):
        callback.on_train_begin(args, state, TrainerControl())
    callback.on_log(args, state, TrainerControl(), logs={"loss": 4.0})
    callback.on_prediction_step(args, state, TrainerControl(), eval_dataloader=[1, 2])
    callback.on_evaluate(args, state, TrainerControl(), metrics={"eval_loss": 2.0})
    callback.on_train_end(args, state, TrainerControl())
    assert "NotebookProgressCallback shows nothing here" in caplog.text


def test_without_ipython_this_is_no_notebook(monkeypatch):
    monkeypatch.delitem(sys.modules, "IPython", raising=False)
    assert not in_notebook()
    assert "IPython" not in sys.modules


def names(args):
    return [type(callback).__name__ for callback in default_callbacks(args)]


@pytest.mark.parametrize(
    ("disable_tqdm", "is_notebook", "expected"),
    [
        (False, False, "ProgressCallback"),
        (None, False, "ProgressCallback"),
        (True, False, "PrinterCallback"),
        (True, True, "PrinterCallback"),
        (False, True, "NotebookProgressCallback"),
    ],
)
def test_default_callbacks(monkeypatch, disable_tqdm, is_notebook, expected):
    monkeypatch.setattr("loopwright.callbacks.defaults.in_notebook", lambda: is_notebook)
    args = SimpleNamespace(disable_tqdm=disable_tqdm, report_to=[])
    assert names(args) == ["DefaultFlowCallback", expected, "MetricsFileCallback", "ReportCallback"]
    args.html_report = False
    assert names(args) == ["DefaultFlowCallback", expected, "MetricsFileCallback"]


def test_default_callbacks_include_the_reporters_asked_for():
    pytest.importorskip("tensorboard")
    args = SimpleNamespace(disable_tqdm=True, report_to=["tensorboard"], html_report=False)
    assert names(args) == ["DefaultFlowCallback", "PrinterCallback", "MetricsFileCallback", "TensorBoardCallback"]
