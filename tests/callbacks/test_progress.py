"""The live line, and the plain lines where there is no terminal."""

from __future__ import annotations

import io
import re
import sys
from types import SimpleNamespace

import pytest
from rich.console import Console

from loopwright.callbacks.pace import Pace
from loopwright.callbacks.progress import ProgressCallback
from loopwright.callbacks.text import clock_time, log_line, rate, short
from loopwright.core.state import TrainerControl, TrainerState

ARGS = SimpleNamespace()


class Screen:
    """A trainer's events on a console that writes to memory, with a clock that is moved by hand."""

    def __init__(self, *, terminal, max_steps=100, step=0, zero=True, width=120, **options):
        self.file = io.StringIO()
        self.now = 0.0
        console = Console(file=self.file, force_terminal=terminal, width=width, color_system=None, legacy_windows=False)
        self.callback = ProgressCallback(console=console, clock=lambda: self.now, **options)
        self.state = TrainerState(max_steps=max_steps, global_step=step, is_world_process_zero=zero)

    def fire(self, event, **kwargs):
        getattr(self.callback, event)(ARGS, self.state, TrainerControl(), **kwargs)

    def steps(self, count, seconds=1.0):
        for _ in range(count):
            self.now += seconds
            self.state.global_step += 1
            self.fire("on_step_end")

    def lines(self):
        """What was written, without control sequences, one line per line drawn or printed."""
        text = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", self.file.getvalue())
        return [line.rstrip() for line in re.split(r"[\r\n]+", text) if line.strip()]


@pytest.fixture(autouse=True)
def a_terminal_that_can_move_its_cursor(monkeypatch):
    monkeypatch.setenv("TERM", "xterm")


@pytest.fixture
def terminal(request):
    screen = Screen(terminal=True, **getattr(request, "param", {}))
    yield screen
    screen.callback._close()


def test_a_terminal_shows_step_loss_rate_and_time_left(terminal):
    terminal.fire("on_train_begin")
    terminal.steps(10, seconds=2.0)
    terminal.fire("on_log", logs={"loss": 1.23456, "grad_norm": 2.0})
    terminal.steps(1, seconds=2.0)
    assert re.fullmatch(r"training +━+─+ 11/100  loss 1.235  0.5 steps/s, 0:02:58 left", terminal.lines()[-1])


def test_a_terminal_shows_each_log_once_above_the_line(terminal):
    terminal.fire("on_train_begin")
    terminal.steps(3)
    terminal.fire("on_log", logs={"loss": 0.5, "total_flos": 1e20})
    terminal.steps(3)
    assert [line for line in terminal.lines() if line.startswith("step")] == ["step 3/100  loss 0.5"]


@pytest.mark.parametrize("terminal", [{"width": 80, "max_steps": 1000000}, {"width": 40}], indirect=True)
def test_a_narrow_terminal_gets_one_line_still(terminal):
    terminal.fire("on_train_begin")
    terminal.steps(100)
    terminal.fire("on_log", logs={"loss": 1.23456e-05})
    terminal.steps(5)
    assert all(line.startswith(("training", "step")) for line in terminal.lines())


def test_drawing_is_throttled(terminal):
    terminal.fire("on_train_begin")
    terminal.steps(1000, seconds=0.001)
    assert 8 <= sum("steps/s" in line for line in terminal.lines()) <= 14


def test_an_update_that_is_not_drawn_costs_next_to_nothing(terminal):
    terminal.fire("on_train_begin")
    terminal.steps(2)
    calls = []

    def note(frame, event, arg):
        if event in ("call", "c_call"):
            calls.append(frame.f_code.co_name)

    terminal.state.global_step += 1
    on_step_end, state, control = terminal.callback.on_step_end, terminal.state, TrainerControl()
    sys.setprofile(note)
    on_step_end(ARGS, state, control)
    sys.setprofile(None)
    assert len(calls) <= 3, calls


def test_evaluation_has_its_own_line_that_goes_away(terminal):
    terminal.fire("on_train_begin")
    terminal.steps(2)
    for _ in range(3):
        terminal.now += 1
        terminal.fire("on_prediction_step", eval_dataloader=[0] * 8)
    assert re.fullmatch(r"evaluation ━+─+ 3/8  1 batches/s, 0:00:05 left", terminal.lines()[-1])
    terminal.fire("on_evaluate", metrics={})
    terminal.steps(1)
    assert terminal.lines()[-1].startswith("training")


def test_a_loader_without_length_still_counts(terminal):
    terminal.fire("on_prediction_step", eval_dataloader=iter(()))
    terminal.now += 1
    terminal.fire("on_prediction_step", eval_dataloader=iter(()))
    assert re.fullmatch(r"evaluation ─+ 2  1 batches/s", terminal.lines()[-1])


def test_an_evaluation_alone_opens_and_closes_the_display(terminal):
    before = sys.stdout
    terminal.fire("on_prediction_step", eval_dataloader=[0])
    assert sys.stdout is not before
    terminal.fire("on_predict", metrics={})
    assert sys.stdout is before
    assert terminal.callback._live is None


def test_the_time_of_evaluations_is_not_in_the_rate_but_in_the_time_left(terminal):
    terminal.fire("on_train_begin")
    terminal.steps(11)
    terminal.fire("on_prediction_step", eval_dataloader=[0])
    terminal.now += 100
    terminal.fire("on_evaluate", metrics={})
    terminal.steps(10)
    assert terminal.callback.training.per_second == pytest.approx(1)
    assert terminal.callback.training.seconds_left() == pytest.approx(79 * 120 / 20)


@pytest.mark.parametrize("terminal", [{"step": 50}], indirect=True)
def test_a_resumed_run_counts_its_own_time_only(terminal):
    terminal.fire("on_train_begin")
    terminal.steps(11, seconds=0.5)
    assert terminal.lines()[-1].endswith("61/100  2 steps/s, 0:00:19 left")


def test_what_the_user_prints_appears_above_the_line(terminal):
    terminal.fire("on_train_begin")
    terminal.steps(2)
    print("hello from the user")
    terminal.steps(1)
    assert "hello from the user" in terminal.lines()


def test_a_crashed_run_leaves_cursor_and_next_run_in_order(terminal):
    before = sys.stdout
    terminal.fire("on_train_begin")
    terminal.steps(1)
    assert terminal.file.getvalue().rfind("\x1b[?25h") > terminal.file.getvalue().rfind("\x1b[?25l")
    another = Screen(terminal=True)
    another.fire("on_train_begin")
    assert terminal.callback._live is None
    another.fire("on_train_end")
    assert sys.stdout is before


def test_the_last_state_of_the_line_stays(terminal):
    terminal.fire("on_train_begin")
    terminal.steps(100, seconds=0.01)
    terminal.fire("on_train_end")
    assert "100/100" in terminal.lines()[-1]


def test_without_a_terminal_there_are_the_first_step_and_one_plain_line_per_log():
    screen = Screen(terminal=False)
    screen.fire("on_train_begin")
    screen.steps(10)
    screen.fire("on_log", logs={"loss": 1.23456, "epoch": 0.1})
    for _ in range(5):
        screen.fire("on_prediction_step", eval_dataloader=[0] * 5)
    screen.fire("on_log", logs={"eval_loss": 2.0, "eval_note": "y" * 200})
    screen.fire("on_evaluate", metrics={})
    screen.fire("on_train_end")
    begun, first, second = screen.file.getvalue().splitlines()
    assert begun == "step 1/100"
    assert first == "step 10/100  loss 1.235  epoch 0.1  (1 steps/s, 0:01:30 left)"
    assert second.startswith(f"step 10/100  eval_loss 2  eval_note {'y' * 100}... (200 characters, max_str_len=100)")
    assert "\x1b" not in screen.file.getvalue()


def test_a_dumb_terminal_gets_plain_lines(monkeypatch):
    monkeypatch.setenv("TERM", "dumb")
    screen = Screen(terminal=True)
    screen.fire("on_train_begin")
    screen.steps(5)
    screen.fire("on_log", logs={"loss": 1.0})
    assert screen.lines()[1:] == ["step 5/100  loss 1  (1 steps/s, 0:01:35 left)"]


def test_the_line_says_how_fast_the_work_is():
    screen = Screen(terminal=False)
    screen.fire("on_train_begin")
    screen.steps(5)
    screen.fire("on_log", logs={"loss": 1.0}, pace={"tokens_per_second": 58691.0, "mfu": 0.59})
    screen.fire("on_log", logs={"eval_loss": 2.0}, pace=None)
    _, first, second = screen.lines()
    assert first == "step 5/100  loss 1  (58.7k tokens/s, MFU 59.0%, 1 steps/s, 0:01:35 left)"
    assert second == "step 5/100  eval_loss 2"


def test_without_logs_there_is_a_line_a_minute():
    screen = Screen(terminal=False, max_steps=1000)
    screen.fire("on_train_begin")
    screen.steps(130)
    for _ in range(70):
        screen.now += 1
        screen.fire("on_prediction_step", eval_dataloader=[0] * 80)
    begun, first, second, evaluation = screen.lines()
    assert (begun, first) == ("step 1/1,000", "step 61/1,000  (1 steps/s, 0:15:39 left)")
    assert second.startswith("step 121/1,000") and evaluation.startswith("evaluation 51/80  (1 batches/s, 0:00:29 left")


def test_a_first_step_that_is_logged_has_one_line():
    screen = Screen(terminal=False)
    screen.fire("on_train_begin")
    screen.now, screen.state.global_step = 1.0, 1
    screen.callback.on_step_end(ARGS, screen.state, TrainerControl(should_log=True))
    screen.fire("on_log", logs={"loss": 1.0})
    assert screen.lines() == ["step 1/100  loss 1  (- steps/s)"]


def test_lines_about_the_run_are_printed(terminal):
    plain = Screen(terminal=False)
    for screen in (plain, terminal):
        screen.fire("on_train_begin")
        screen.callback.show_line("saved checkpoint-50 [/bold]")
        assert "saved checkpoint-50 [/bold]" in screen.lines()


@pytest.mark.parametrize(("before", "after"), [(1.0, 0.1), (0.1, 1.0), (0.01, 1.0), (30.0, 0.05), (1.0, 20.0)])
@pytest.mark.parametrize("terminal", [True, False])
def test_speed_and_time_left_follow_a_change_of_speed(before, after, terminal):
    screen = Screen(terminal=terminal, max_steps=100_000)
    screen.fire("on_train_begin")
    screen.steps(500, seconds=before)
    screen.steps(max(int(11 / after), 12), seconds=after)
    pace = screen.callback.training
    left = (100_000 - pace.done) * after
    screen.callback._close()
    assert pace.per_second == pytest.approx(1 / after, rel=0.05)
    assert pace.seconds_left() == pytest.approx(left, rel=0.05)


def test_saving_is_not_in_the_rate_but_in_the_time_left():
    screen = Screen(terminal=False)
    screen.fire("on_train_begin")
    screen.steps(11)
    screen.now += 40
    screen.fire("on_save")
    screen.steps(10)
    assert screen.callback.training.per_second == pytest.approx(1)
    assert screen.callback.training.seconds_left() == pytest.approx(79 * 3)


def test_logs_outside_training_are_plain_too():
    screen = Screen(terminal=False)
    screen.fire("on_log", logs={"eval_loss": 2.0})
    assert screen.lines() == ["eval_loss 2"]


@pytest.mark.parametrize("terminal", [True, False])
def test_other_processes_show_nothing(terminal):
    screen = Screen(terminal=terminal, zero=False)
    screen.fire("on_train_begin")
    screen.steps(3)
    screen.fire("on_prediction_step", eval_dataloader=[0])
    screen.fire("on_evaluate", metrics={})
    screen.fire("on_log", logs={"loss": 1.0})
    screen.fire("on_train_end")
    assert screen.file.getvalue() == ""


def test_logs_are_not_changed():
    logs = {"loss": 1.23456, "total_flos": 1.0}
    Screen(terminal=False).fire("on_log", logs=logs)
    assert logs == {"loss": 1.23456, "total_flos": 1.0}


def test_pace_without_progress_has_no_time_left():
    pace = Pace("steps", 0, 10, now=0.0)
    assert pace.seconds_left() is None
    assert pace.speed() == "- steps/s"


@pytest.mark.parametrize(
    ("seconds", "text"), [(0, "0:00:00"), (59.9, "0:00:59"), (3661, "1:01:01"), (2 * 86400 + 3600, "2d 1:00:00")]
)
def test_clock_time(seconds, text):
    assert clock_time(seconds) == text


@pytest.mark.parametrize(
    ("speed", "text"),
    [(0, "- steps/s"), (0.02, "50.0 s/step"), (3.456, "3.46 steps/s"), (12345.6, "12,346 steps/s")],
)
def test_rate(speed, text):
    assert rate(speed) == text


def test_short_keeps_what_is_not_a_float():
    assert [short(value) for value in (1, True, None, "x", 0.123456, 5e-5)] == [1, True, None, "x", "0.1235", "5e-05"]
    assert [short(value) for value in (12345.6, 1234567, -98765, 1e20)] == ["12,346", "1,234,567", "-98,765", "1e+20"]
    assert log_line({"loss": 2.0, "total_flos": 3.0, "n": 4}) == "loss 2  n 4"


def test_the_display_is_a_bar_for_subclasses(terminal):
    screen = terminal
    screen.fire("on_train_begin")
    bar = screen.callback.training_bar
    screen.steps(3)
    assert (bar.n, bar.total) == (3, 100)
    bar.write("a line of mine")
    bar.set_postfix({"f1": 0.51234})
    bar.set_description("fold 2")
    bar.update()
    screen.fire("on_prediction_step", eval_dataloader=[0, 1])
    assert screen.callback.prediction_bar.total == 2
    screen.fire("on_evaluate")
    screen.fire("on_train_end")
    assert screen.callback.training_bar is screen.callback.prediction_bar is None
    assert "a line of mine" in screen.lines() and any("fold 2  f1 0.5123" in line for line in screen.lines())


class Counted:
    """A bar of the user."""

    def __init__(self):
        self.steps, self.lines, self.is_closed = 0, [], False

    def update(self, steps):
        self.steps += steps

    def write(self, text):
        self.lines.append(text)

    def close(self):
        self.is_closed = True


def test_a_bar_of_a_subclass_is_used():
    class Own(ProgressCallback):
        def on_train_begin(self, args, state, control, **kwargs):
            self.training_bar = Counted()
            self.current_step = 0

    screen = Screen(terminal=False)
    screen.callback = callback = Own()
    screen.fire("on_train_begin")
    bar = callback.training_bar
    screen.steps(3)
    screen.fire("on_log", logs={"loss": 0.5})
    screen.fire("on_train_end")
    assert bar.steps == 3 and bar.is_closed and "loss 0.5" in bar.lines[0]
    assert callback.training_bar is None
