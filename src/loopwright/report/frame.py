"""What `loopwright watch` shows: one frame of plain lines, for any width."""

from __future__ import annotations

import textwrap

from ..callbacks.text import clock_time, short
from .braille import beside, chart
from .document import TITLES, ledger_rows
from .folder import RunView
from .series import Series
from .verdict import verdict

HEIGHT = 9
"""Rows of a chart."""
WIDEST = 58
"""Columns of one chart, if there is space for several."""
WANTED = ("loss", "eval_loss", "tokens_per_second", "samples_per_second", "learning_rate", "grad_norm")
NUMBERS = (
    ("loss", "loss"),
    ("eval_loss", "eval_loss"),
    ("learning_rate", "lr"),
    ("grad_norm", "grad_norm"),
    ("tokens_per_second", "tokens/s"),
    ("samples_per_second", "samples/s"),
    ("steps_per_second", "steps/s"),
    ("mfu", "MFU"),
    ("mfu_of_matmul", "MFU of matmul"),
    ("peak_memory_gib", "GiB"),
)
LATEST_MARKS = 3


def frame(run: RunView, width: int) -> list[str]:
    """The lines of a frame, none longer than `width`."""
    texts = ["  ".join(_pairs(run))]
    if run.wall > 0:
        texts.append("time: " + ", ".join(_shares(run)))
    texts += verdict(run)[:2]
    texts += [f"{mark['kind']} at step {mark['step']:,}: {mark['text']}" for mark in run.marks()[-LATEST_MARKS:]]
    wrapped = [line for text in texts for line in textwrap.wrap(text, width)]
    lines = [_fitted(_head(run), width), _progress(run, width), "", *_charts(run, width), "", *wrapped]
    return [line.rstrip() for line in lines]


def plain_line(run: RunView) -> str:
    """The position and the latest numbers as one line, for a log."""
    return f"{_position(run)}  {'  '.join(_pairs(run))}".rstrip()


def _head(run: RunView) -> str:
    epoch = "" if run.metrics.epoch is None else f"  epoch {run.metrics.epoch:.4g}"
    return f"{run.name}  {run.status}  {_position(run)}{epoch}  {clock_time(run.wall)} so far{_left(run)}"


def _position(run: RunView) -> str:
    return f"step {run.step:,}/{run.max_steps:,}" if run.max_steps else f"step {run.step:,}"


def _left(run: RunView) -> str:
    speed = run.last("steps_per_second")
    if not run.is_running or not speed or run.max_steps <= run.step:
        return ""
    return f", {clock_time((run.max_steps - run.step) / speed)} left"


def _progress(run: RunView, width: int) -> str:
    share = min(run.step / run.max_steps, 1.0) if run.max_steps else 0.0
    inner = width - 6
    full = round(share * inner)
    return f"{'━' * full}{'─' * (inner - full)} {share:4.0%}"


def _charts(run: RunView, width: int) -> list[str]:
    """As many charts as fit, the most important first."""
    number = max((width + 2) // (WIDEST + 2), 1)
    names = [name for name in WANTED if name in run.metrics.curves][:number] or ["loss"]
    each = (width - 2 * (len(names) - 1)) // len(names)
    drawn = []
    for name in names:
        points = run.metrics.curves.get(name, Series()).points(4 * each)
        drawn.append(chart(points, title=name, width=each, height=HEIGHT))
    return beside(drawn)


def _pairs(run: RunView) -> list[str]:
    values = [(title, run.latest(name)) for name, title in NUMBERS]
    return [f"{title} {short(value)}" for title, value in values if value is not None]


def _shares(run: RunView) -> list[str]:
    rows = sorted(ledger_rows(run), key=lambda row: -row["share"])
    return [f"{TITLES[row['part']].lower()} {row['share']:.0%}" for row in rows if row["share"] >= 0.01]


def _fitted(line: str, width: int) -> str:
    return line if len(line) <= width else f"{line[: width - 1]}…"
