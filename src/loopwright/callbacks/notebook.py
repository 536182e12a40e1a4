"""A table and a chart of the loss in a notebook cell, updated while a run trains."""

from __future__ import annotations

import html
import math
import sys
import time
from collections import deque
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

from ..core.events import TrainerCallback
from ..notices import logger
from ..report.series import Series
from ..report.svg import svg_chart
from .pace import Pace, evaluation_pace
from .text import NOT_SHOWN, short

if TYPE_CHECKING:
    from ..args.base import BaseArguments

REFRESH_SECONDS = 0.5
LINES = 8
"""The latest lines about the run that are shown."""
ROWS = 50
"""The latest rows of the table that are shown: a notebook stores its outputs."""
CURVES = ("loss", "eval_loss")
_NOT_A_COLUMN = ("_runtime", "_per_second", "_model_preparation_time")


def in_notebook() -> bool:
    """Whether this code runs in a notebook that can show HTML."""
    shell = _shell()
    return shell is not None and "IPKernelApp" in getattr(shell, "config", {})


class NotebookProgressCallback(TrainerCallback):
    """Shows a progress bar, a chart of the losses and a table of step, training loss, validation loss and metrics.

    Without evaluations the table has a row per log, otherwise a row per evaluation. The chart is an SVG without
    scripts, so a saved notebook shows it when it is opened again.
    """

    def __init__(
        self, *, show: Callable[[str], None] | None = None, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.rows: list[dict[str, Any]] = []
        self.curves: dict[str, Series] = {}
        self.left_out = 0
        """Rows that are not shown any more."""
        self.lines: deque[str] = deque(maxlen=LINES)
        self.training: Pace | None = None
        self.evaluation: Pace | None = None
        self._given_show, self._clock = show, clock
        self._show: Callable[[str], None] | None = None
        self._due = self._log_due = -math.inf
        self._loss: Any = None
        self._is_active = False

    def on_train_begin(self, args: BaseArguments, state: Any, control: Any, **kwargs: Any) -> None:
        self._is_active = state.is_world_process_zero
        if not self._is_active:
            return
        self._clear_table()
        self._loss, self.evaluation = None, None
        self.lines.clear()
        self.training = Pace("steps", state.global_step, state.max_steps, self._clock())
        self._show = self._given_show or _display()
        self._draw()

    def on_step_end(self, args: BaseArguments, state: Any, control: Any, **kwargs: Any) -> None:
        if not self._is_active or self.training is None:
            return
        now = self._clock()
        if not self.training.has_started:
            self.training.start(state.global_step, now)
        self.training.done, self.training.latest = state.global_step, now
        if now >= self._due:
            self.training.advance(state.global_step, now)
            self._draw()

    def on_prediction_step(
        self, args: BaseArguments, state: Any, control: Any, eval_dataloader: Any = None, **kwargs: Any
    ) -> None:
        if not state.is_world_process_zero:
            return
        now = self._clock()
        if self.evaluation is None:
            self._show = self._show or self._given_show or _display()
            self.evaluation = evaluation_pace(eval_dataloader, now)
        else:
            self.evaluation.done += 1
        if now >= self._due:
            self.evaluation.advance(self.evaluation.done, now)
            self._draw()

    def on_log(
        self, args: BaseArguments, state: Any, control: Any, logs: dict[str, Any] | None = None, **kwargs: Any
    ) -> None:
        if not self._is_active or not logs or "loss" not in logs:
            return
        self._loss = logs["loss"]
        self._add_points(state.global_step, logs)
        if args.eval_strategy == "no":
            self._add_row({"Step": state.global_step, "Training Loss": self._loss})
        if self._clock() >= self._log_due:
            self._draw()
            self._log_due = self._due

    def on_evaluate(
        self, args: BaseArguments, state: Any, control: Any, metrics: dict[str, Any] | None = None, **kwargs: Any
    ) -> None:
        self.evaluation = None
        if not state.is_world_process_zero:
            return
        self._add_evaluation(state.global_step, metrics or {})
        self._add_points(state.global_step, metrics or {})
        if self.training is not None:
            self.training.pause_until(self._clock())
        self._draw()
        self._forget_display_outside_training()

    def on_predict(self, args: BaseArguments, state: Any, control: Any, **kwargs: Any) -> None:
        self.evaluation = None
        self._draw()
        self._forget_display_outside_training()

    def on_save(self, args: BaseArguments, state: Any, control: Any, **kwargs: Any) -> None:
        if self.training is not None:
            self.training.pause_until(self._clock())

    def on_train_end(self, args: BaseArguments, state: Any, control: Any, **kwargs: Any) -> None:
        if self.training is not None:
            self.training.advance(state.global_step, self._clock())
        self._end()

    def left(self) -> None:
        """Called when training has ended, even if on_train_end was not called: after an error or an interrupt."""
        if self._is_active:
            self._end()

    def _end(self) -> None:
        """Draw a last time; what is shown next gets a display of its own."""
        self.evaluation = None
        self._draw()
        self.training, self._show, self._is_active = None, None, False
        self._clear_table()
        self.lines.clear()

    def show_line(self, line: str) -> None:
        """Show a line about the run above the table."""
        self.lines.append(line)
        self._draw()

    def _add_evaluation(self, step: int, metrics: dict[str, Any]) -> None:
        values = table_values(metrics)
        last = self.rows[-1] if self.rows else None
        # Several evaluation datasets of one step share a row.
        if last is not None and last["Step"] == step and not values.keys() & last.keys():
            last.update(values)
        else:
            loss = "No log" if self._loss is None else self._loss
            self._add_row({"Step": step, "Training Loss": loss, **values})

    def _add_row(self, row: dict[str, Any]) -> None:
        self.rows.append(row)
        self.left_out += len(self.rows) - len(self.rows[-ROWS:])
        self.rows = self.rows[-ROWS:]

    def _add_points(self, step: int, numbers: dict[str, Any]) -> None:
        for name in CURVES:
            if isinstance(numbers.get(name), (int, float)):
                self.curves.setdefault(name, Series()).add(step, float(numbers[name]))

    def _clear_table(self) -> None:
        self.rows, self.curves, self.left_out = [], {}, 0

    def _forget_display_outside_training(self) -> None:
        if self.training is None:
            self._show = None
            self._clear_table()

    def _draw(self) -> None:
        if self._show is not None:
            self._due = self._clock() + REFRESH_SECONDS
            paces = [pace for pace in (self.training, self.evaluation) if pace]
            lines = list(self.lines)
            if self.left_out:
                lines.append(f"the latest {len(self.rows)} of {len(self.rows) + self.left_out:,} rows")
            self._show(render_html(self.rows, paces, lines, chart=svg_chart(self.curves)))


def table_values(metrics: dict[str, Any]) -> dict[str, Any]:
    """The columns and values of one evaluation: eval_loss is Validation Loss, eval_f1 is F1."""
    columns = {}
    for name, value in metrics.items():
        if name == "epoch" or name in NOT_SHOWN or name.endswith(_NOT_A_COLUMN):
            continue
        columns["Validation Loss" if name == "eval_loss" else _title(name)] = value
    return columns


def render_html(
    rows: list[dict[str, Any]],
    paces: list[Pace] | tuple[Pace, ...] = (),
    lines: Iterable[str] = (),
    *,
    chart: str = "",
) -> str:
    """Lines about the run, progress bars, the chart and the table, as HTML."""
    text = "".join(f"<div>{html.escape(line)}</div>" for line in lines)
    bars = "".join(
        f'<div><progress value="{pace.done}" max="{pace.total or pace.done or 1}" style="width:300px"></progress> '
        f"[{html.escape(pace.position())}, {html.escape(pace.speed())}]</div>"
        for pace in paces
    )
    if not rows:
        return f"{text}{bars}{chart}"
    columns = list(dict.fromkeys(name for row in rows for name in row))
    head = "".join(f"<th>{html.escape(name)}</th>" for name in columns)
    body = "".join(
        "<tr>" + "".join(f"<td>{html.escape(str(short(row.get(name, ''))))}</td>" for name in columns) + "</tr>"
        for row in rows
    )
    return f'{text}{bars}{chart}<table border="1"><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>'


def _title(name: str) -> str:
    return name.removeprefix("eval_").replace("_", " ").title()


def _display() -> Callable[[str], None]:
    """A function that shows HTML in this cell and, called again, replaces it; outside a notebook it shows nothing."""
    if _shell() is None:
        logger.info("NotebookProgressCallback shows nothing here: this process is not the kernel of a notebook")
        return lambda text: None
    from IPython.display import HTML, display

    handle = display(HTML(""), display_id=True)
    return lambda text: handle.update(HTML(text))


def _shell() -> Any:
    """The interactive shell of this process, if there is one."""
    ipython = sys.modules.get("IPython")
    return None if ipython is None else ipython.get_ipython()
