"""`loopwright compare RUN RUN ...`: results, time and differing arguments of several runs."""

from __future__ import annotations

import argparse
import json
from typing import Any

from ...callbacks.text import clock_time, short
from ...errors import ArgumentsError
from ...report.document import TITLES
from ...report.folder import RunView, open_run

DESCRIPTION = """Compare runs by their output folders: numbers, time ledger, arguments and versions that differ.

`loopwright report RUN RUN` draws the same runs in one page."""
NUMBERS = ("tokens_per_second", "samples_per_second", "steps_per_second", "mfu", "mfu_of_matmul", "peak_memory_gib")
MISSING = "-"


def run(words: list[str]) -> int:
    """Print the comparison."""
    parser = argparse.ArgumentParser(
        "loopwright compare", description=DESCRIPTION, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("runs", nargs="+", metavar="RUN")
    parser.add_argument("--json", action="store_true", help="print the comparison as JSON")
    options = parser.parse_args(words)
    if len(options.runs) < 2:
        raise ArgumentsError(f"compare needs two runs or more, and was given {len(options.runs)}: {options.runs[0]}")
    found = comparison([open_run(each).read() for each in options.runs])
    print(json.dumps(found) if options.json else text(found))
    return 0


def comparison(runs: list[RunView]) -> dict[str, Any]:
    """The rows of each part of the comparison, with one value per run."""
    return {
        "runs": [str(run.folder) for run in runs],
        "results": _results(runs),
        "time": {title: [run.seconds[part] for run in runs] for part, title in TITLES.items()},
        "arguments": _differing([{row["name"]: row["value"] for row in run.facts.get("config", [])} for run in runs]),
        "environment": _differing([run.facts.get("environment", {}) for run in runs]),
    }


def _results(runs: list[RunView]) -> dict[str, list[Any]]:
    rows: dict[str, list[Any]] = {
        "status": [run.status for run in runs],
        "steps": [run.step for run in runs],
        "wall time in seconds": [round(run.wall, 3) for run in runs],
        "loss (last)": [run.latest("loss") for run in runs],
    }
    losses = [run.metrics.curves.get("eval_loss") for run in runs]
    lowest = [min((y for y in curve.ys if y is not None), default=None) if curve else None for curve in losses]
    rows["eval_loss (lowest)"] = lowest
    names = sorted({name for run in runs for name in run.metrics.curves if name.startswith("eval_")})
    for name in [*names, *NUMBERS]:
        rows[f"{name} (last)"] = [run.latest(name) for run in runs]
    return {name: values for name, values in rows.items() if any(value is not None for value in values)}


def _differing(tables: list[dict[str, str]]) -> dict[str, list[str]]:
    names = dict.fromkeys(name for table in tables for name in table)
    rows = {name: [table.get(name, MISSING) for table in tables] for name in names}
    return {name: values for name, values in rows.items() if len(set(values)) > 1}


def text(found: dict[str, Any]) -> str:
    """The comparison as tables of plain text."""
    times = {title: [_duration(value) for value in values] for title, values in found["time"].items() if any(values)}
    parts = [("results", found["results"]), ("time", times), ("arguments that differ", found["arguments"])]
    parts.append(("versions and machines that differ", found["environment"]))
    lines: list[str] = []
    for title, rows in parts:
        if rows:
            lines += ["", f"{title}:", *_table(["", *found["runs"]], rows)]
    if not found["arguments"]:
        lines += ["", "no argument differs, as far as the folders show"]
    return "\n".join(lines[1:])


def _table(head: list[str], rows: dict[str, list[Any]]) -> list[str]:
    cells = [head, *([name, *[_cell(value) for value in values]] for name, values in rows.items())]
    widths = [max(len(row[column]) for row in cells) for column in range(len(head))]
    return ["  ".join(f"{cell:<{width}}" for cell, width in zip(row, widths, strict=True)).rstrip() for row in cells]


def _duration(seconds: float) -> str:
    return f"{seconds:.1f} s" if seconds < 60 else clock_time(seconds)


def _cell(value: Any) -> str:
    return MISSING if value is None else str(short(value))
