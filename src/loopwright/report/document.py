"""The data of a report in JSON types: what the page, the terminal and `--json` show."""

from __future__ import annotations

import math
import time
from typing import Any

from ..core.measure.ledger import (
    COMPILING,
    DATA,
    EVALUATION,
    LOST,
    PARTS,
    PREPARING,
    PROVING,
    RESTARTS,
    SAVING,
    UPDATES,
)
from .folder import RunView
from .series import Series
from .verdict import verdict

FORMAT = 1

TITLES = {
    UPDATES: "Useful updates",
    DATA: "Waiting for data",
    COMPILING: "Compiling",
    PROVING: "Proving accelerations",
    EVALUATION: "Evaluation",
    SAVING: "Saving and loading checkpoints",
    PREPARING: "Preparing the first start",
    RESTARTS: "Restarts",
    LOST: "Lost work",
}

CHARTS: tuple[tuple[str, str, tuple[str, ...], str], ...] = (
    ("loss", "Loss", ("loss", "eval_loss"), ""),
    ("learning_rate", "Learning rate", ("learning_rate",), ""),
    ("grad_norm", "Gradient norm", ("grad_norm",), ""),
    ("tokens", "Tokens per second", ("tokens_per_second", "computed_tokens_per_second"), "tokens/s"),
    ("samples", "Samples per second", ("samples_per_second",), "samples/s"),
    ("steps", "Steps per second", ("steps_per_second",), "steps/s"),
    ("mfu", "Model FLOPs utilization (MFU)", ("mfu", "mfu_of_matmul"), "share"),
    ("memory", "Peak memory", ("peak_memory_gib",), "GiB"),
    ("data_wait", "Share of the time that waited for data", ("data_wait_share",), "share"),
    ("useful", "Share of tokens that are not padding", ("useful_token_share",), "share"),
)
"""Id, title, curves and unit of the charts that every run may have; other curves get one each."""
HIDDEN = ("recompiles", "nonfinite_steps", "total_flos", "num_input_tokens_seen")
MOST_CHARTS = 60


def document(runs: list[RunView]) -> dict[str, Any]:
    """The data of a page about these runs."""
    found = charts(runs)
    return {
        "format": FORMAT,
        "written": time.time(),
        "charts": found[:MOST_CHARTS],
        "left_out": [chart["title"] for chart in found[MOST_CHARTS:]],
        "runs": [run_document(run) for run in runs],
    }


def charts(runs: list[RunView]) -> list[dict[str, Any]]:
    """The charts that have at least one point."""
    names = sorted({name for run in runs for name in run.metrics.curves})
    known = {name for _, _, curves, _ in CHARTS for name in curves}
    listed = [(key, title, [name for name in curves if name in names], unit) for key, title, curves, unit in CHARTS]
    others = [(name, name, [name], "") for name in names if name not in known and name not in HIDDEN]
    found = [each for each in listed if each[2]] + others
    return [dict(zip(("id", "title", "curves", "unit"), each, strict=True)) for each in found]


def run_document(run: RunView) -> dict[str, Any]:
    """Everything about one run."""
    shown = {name for chart in charts([run])[:MOST_CHARTS] for name in chart["curves"]}
    findings = verdict(run)
    return {
        "name": run.name,
        "status": run.status,
        "step": run.step,
        "max_steps": run.max_steps,
        "epoch": run.metrics.epoch,
        "updated": run.now if run.recorded is None else run.recorded.updated,
        "verdict": findings[0],
        "findings": findings[1:],
        "curves": {name: _curve(curve) for name, curve in run.metrics.curves.items() if name in shown},
        "ledger": ledger_rows(run),
        "wall": run.wall,
        "starts": 1 if run.recorded is None else sum(e["kind"] != "rollback" for e in run.recorded.account.starts),
        "marks": run.marks(),
        "evaluations": list(run.metrics.evaluations),
        "texts": list(run.metrics.texts),
        "summary": {name: value for name, value in run.metrics.summary.items() if math.isfinite(value)},
        "notes": run.facts.get("notes", []),
        "config": run.facts.get("config", []),
        "environment": run.facts.get("environment", {}),
        "command": run.facts.get("command", ""),
        "values": run.facts.get("values", {}),
        "speed_plan": speed_rows(run.speed_plan),
    }


def ledger_rows(run: RunView) -> list[dict[str, Any]]:
    """The parts of the time ledger, with their shares."""
    wall = run.wall
    return [
        {"part": part, "title": TITLES[part], "seconds": run.seconds[part], "share": run.seconds[part] / wall}
        for part in PARTS
        if wall > 0
    ]


def speed_rows(plan: dict[str, Any]) -> list[dict[str, Any]]:
    """The accelerations of the speed plan, with the numbers of their proofs."""
    rows = plan.get("choices", [])
    return [
        {
            "name": str(row.get("name")),
            "on": bool(row.get("is_on", row.get("on"))),
            "reason": str(row.get("reason") or ""),
            "proof": ", ".join(f"{key} {value:.3g}" for key, value in numbers.items() if isinstance(value, float)),
        }
        for row in rows
        if isinstance(row, dict)
        for numbers in [row["numbers"] if isinstance(row.get("numbers"), dict) else {}]
    ]


def _curve(curve: Series) -> dict[str, Any]:
    xs, ys = curve.points()
    return {"x": [int(x) if x == int(x) else x for x in xs], "y": [None if y is None else _short(y) for y in ys]}


def _short(value: float) -> float:
    """Six digits: more cannot be seen."""
    return float(f"{value:.6g}")
