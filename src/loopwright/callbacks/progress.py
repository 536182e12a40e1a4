"""One live line while training, a second one while evaluating, plain lines where there is no terminal."""

from __future__ import annotations

import atexit
import math
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.errors import LiveError
from rich.live import Live
from rich.text import Text

from ..core.events import TrainerCallback
from ..core.shutdown.lost_output import discard_lost_output, lost_output_discarded
from ..report.braille import chart
from ..report.series import Series
from .bar import Bar
from .pace import Pace, evaluation_pace
from .text import log_line, short, work_line

if TYPE_CHECKING:
    from ..args.base import BaseArguments

REFRESH_SECONDS = 0.1
QUIET_SECONDS = 60.0
"""Without a terminal, a line appears at least this often."""
BAR_WIDTH = 24
CHART_HEIGHT = 10
TEXT_WIDTH = 70
"""Columns reserved for text; the bar gets the rest of a narrow terminal."""


class Display(Console):
    """A console of rich that does not end the process if the reader of its pipe has ended."""

    def on_broken_pipe(self) -> None:
        discard_lost_output()


class ProgressCallback(TrainerCallback):
    """Shows step and total, the latest loss, steps per second and the time left; prints each log as one line.

    Without a terminal it prints plain lines: the first step, each log, and one a minute when there is no log.

    It draws in the training thread, at most ten times a second: a drawing thread would be copied into forked data
    workers, and a step that is not drawn costs only one clock reading.
    """

    _drawing: ProgressCallback | None = None
    training_bar: Any = None
    """The display as a bar of tqdm while training, else None; a subclass may assign a bar of its own."""
    prediction_bar: Any = None
    """The same for an evaluation or a prediction."""
    current_step = 0

    def __init__(
        self,
        max_str_len: int = 100,
        *,
        console: Console | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.max_str_len = max_str_len
        self.training: Pace | None = None
        self.evaluation: Pace | None = None
        self._console, self._clock = console, clock
        self._live: Live | None = None
        self._due = -math.inf
        self._printed = clock()
        self._loss: Any = None
        self._work = ""
        self._curve: Series | None = None

    def on_train_begin(self, args: BaseArguments, state: Any, control: Any, **kwargs: Any) -> None:
        if not state.is_world_process_zero:
            return
        self._close()
        self._loss, self._work = None, ""
        self._curve = Series() if getattr(args, "chart", False) else None
        self.training = Pace("steps", state.global_step, state.max_steps, self._clock())
        self.training_bar, self.current_step = Bar(self.training, self._print, self._redraw), state.global_step
        self._open()

    def on_step_end(self, args: BaseArguments, state: Any, control: Any, **kwargs: Any) -> None:
        training = self.training
        if type(self.training_bar) is not Bar:
            self._advance_own_bar(state)
        if training is None:
            return
        now = self._clock()
        if not training.has_started:
            training.start(state.global_step, now)
            if self._live is None and not control.should_log:
                self._print(f"step {training.position()}")
        training.done, training.latest = state.global_step, now
        if now >= self._due:
            training.advance(state.global_step, now)
            self._show(now, training)

    def on_prediction_step(
        self, args: BaseArguments, state: Any, control: Any, eval_dataloader: Any = None, **kwargs: Any
    ) -> None:
        if not state.is_world_process_zero:
            return
        if self.evaluation is None:
            self.evaluation = evaluation_pace(eval_dataloader, self._clock())
            self.prediction_bar = self.prediction_bar or Bar(self.evaluation, self._print, self._redraw)
            self._open()
        else:
            self.evaluation.done += 1
        self.prediction_bar.update(1)
        now = self._clock()
        if now >= self._due:
            self.evaluation.advance(self.evaluation.done, now)
            self._show(now, self.evaluation, "evaluation")

    def on_evaluate(self, args: BaseArguments, state: Any, control: Any, **kwargs: Any) -> None:
        self._end_evaluation()

    def on_predict(self, args: BaseArguments, state: Any, control: Any, **kwargs: Any) -> None:
        self._end_evaluation()

    def on_save(self, args: BaseArguments, state: Any, control: Any, **kwargs: Any) -> None:
        if self.training is not None:
            self.training.pause_until(self._clock())

    def on_log(
        self,
        args: BaseArguments,
        state: Any,
        control: Any,
        logs: dict[str, Any] | None = None,
        pace: dict[str, float] | None = None,
        **kwargs: Any,
    ) -> None:
        if not state.is_world_process_zero or not logs:
            return
        if self.training is None and self.training_bar is not None:  # a bar of the user
            self.training_bar.write(log_line(logs, self.max_str_len))
            return
        self._loss = logs.get("loss", self._loss)
        self._work = work_line(pace) if pace else self._work
        if self._curve is not None and isinstance(logs.get("loss"), (int, float)):
            self._curve.add(state.global_step, float(logs["loss"]))
        self._print(self._log_line(state, logs))

    def on_train_end(self, args: BaseArguments, state: Any, control: Any, **kwargs: Any) -> None:
        if self.training is not None:
            self.training.advance(state.global_step, self._clock())
            self._draw(self._clock())
        self._close_bars()
        self.training = None
        self._close()

    def left(self) -> None:
        """Called when training has ended, even if on_train_end was not called."""
        self._close_bars()
        self.training = self.evaluation = None
        self._close()

    def _advance_own_bar(self, state: Any) -> None:
        """Advance a bar that a subclass has made."""
        if self.training_bar is not None:
            self.training_bar.update(state.global_step - self.current_step)
            self.current_step = state.global_step

    def _close_bars(self) -> None:
        for each in filter(None, (self.training_bar, self.prediction_bar)):
            each.close()
        self.training_bar = self.prediction_bar = None

    def _redraw(self) -> None:
        self._draw(self._clock())

    def show_line(self, line: str) -> None:
        """Print a line about the run."""
        self._print(line)

    def _end_evaluation(self) -> None:
        if self.prediction_bar is not None:
            self.prediction_bar.close()
            self.prediction_bar = None
        if self.evaluation is None:
            return
        self.evaluation = None
        if self.training is None:
            self._close()
        else:
            # The time of an evaluation must not change the speed of steps.
            self.training.pause_until(self._clock())
            self._draw(self._clock())

    def _log_line(self, state: Any, logs: dict[str, Any]) -> str:
        line = log_line(logs, self.max_str_len)
        if self.training is None:
            return line
        self.training.advance(state.global_step, self._clock())
        speed = f"  ({self._work}{self.training.speed()})" if "loss" in logs and not self._live else ""
        return f"step {self.training.position()}  {line}{speed}"

    def _print(self, line: str) -> None:
        self._printed = self._clock()
        # soft_wrap: a log is one line in a file, of any length.
        with lost_output_discarded():
            self._output.print(Text(line), soft_wrap=True)

    @property
    def _output(self) -> Console:
        # Looked up late: sys.stdout may have been replaced since the trainer was created.
        if self._console is None:
            self._console = Display()
        return self._console

    def _open(self) -> None:
        if not self._output.is_terminal or self._output.is_dumb_terminal or self._live is not None:
            return
        if ProgressCallback._drawing is not None:
            # A run that ended with an exception left its line behind.
            ProgressCallback._drawing._close()
        live = Live(console=self._output, auto_refresh=False, get_renderable=self._lines)
        try:
            with lost_output_discarded():
                live.start()
                # Show the cursor at once, so that a crash does not leave the terminal without one.
                self._output.show_cursor(True)
        except LiveError:
            # Another live display uses the terminal: print plain lines.
            return
        self._live, self._due = live, -math.inf
        ProgressCallback._drawing = self
        atexit.register(self._close)

    def _close(self) -> None:
        self.evaluation = None
        if self._live is None:
            return
        live, self._live = self._live, None
        ProgressCallback._drawing = None
        atexit.unregister(self._close)
        with lost_output_discarded():
            live.stop()

    def _show(self, now: float, pace: Pace, word: str = "step") -> None:
        """Draw the display, or print the position if nothing was printed for a while."""
        if self._live is not None:
            self._draw(now)
            return
        self._due = now + REFRESH_SECONDS
        if now - self._printed >= QUIET_SECONDS:
            self._print(f"{word} {pace.position()}  ({pace.speed()})")

    def _draw(self, now: float) -> None:
        if self._live is not None:
            self._due = now + REFRESH_SECONDS
            with lost_output_discarded():
                self._live.refresh()

    def _lines(self) -> Text:
        lines, width = [], min(max(self._output.width - TEXT_WIDTH, 0), BAR_WIDTH)
        if self._curve is not None and self._curve.xs:
            points = self._curve.points(4 * self._output.width)
            drawn = chart(points, title="loss", width=self._output.width, height=CHART_HEIGHT)
            lines += [Text(line.rstrip()) for line in drawn]
        if self.training is not None:
            loss = "" if self._loss is None else f"  loss {short(self._loss)}"
            lines.append(_bar(self.training, "training", loss + _text(self.training_bar), width, self._work))
        if self.evaluation is not None:
            lines.append(_bar(self.evaluation, "evaluation", _text(self.prediction_bar), width))
        return Text("\n", no_wrap=True, overflow="ellipsis").join(lines)


def _text(bar: Any) -> str:
    """What the user shows in a bar, if it is one of this display."""
    return f"  {bar.text}" if isinstance(bar, Bar) and bar.text else ""


def _bar(pace: Pace, title: str, extra: str, width: int, work: str = "") -> Text:
    share = min(pace.done / pace.total, 1.0) if pace.total else 0.0
    full = round(share * width)
    text = Text(f"{title:<10} ")
    text.append("━" * full, style="green")
    text.append("─" * (width - full), style="dim")
    text.append(f" {pace.position()}{extra}  {work}{pace.speed()}")
    return text
