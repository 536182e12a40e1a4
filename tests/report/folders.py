"""Output folders as runs leave them, written without training: the same bytes each time."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

from loopwright.core.measure.ledger import PARTS

BEGAN = 1_790_000_000.0
SECONDS = {"updates": 520.0, "data_wait": 1240.0, "proving": 12.0, "evaluation": 90.0, "saving": 38.0,
           "preparing": 20.0, "restarts": 50.0, "lost_work": 30.0}  # fmt: skip


def rows(steps: int, *, every: int = 10, shift: float = 0.0) -> list[dict[str, Any]]:
    """The rows of metrics.jsonl."""
    found: list[dict[str, Any]] = []
    for step in range(every, steps + 1, every):
        share = step / steps
        found.append({
            "step": step, "epoch": round(3 * share, 4), "time": BEGAN + step,
            "loss": round(4.0 * math.exp(-3 * share) + 0.3 + shift + 0.1 * math.sin(step / 7), 5),
            "grad_norm": round(1.5 + math.cos(step / 11), 5), "learning_rate": 5e-5 * (1 - share),
            "pace": {"tokens_per_second": 58_000 + 900 * math.sin(step / 13), "steps_per_second": 0.25,
                     "samples_per_second": 8.0, "data_wait_share": 0.62, "mfu": 0.41, "peak_memory_gib": 11.5},
        })  # fmt: skip
        if step % (10 * every) == 0:
            loss = round(3.8 * math.exp(-2.8 * share) + 0.5 + shift, 5)
            found.append({"step": step, "epoch": round(3 * share, 4), "time": BEGAN + step, "eval_loss": loss,
                          "eval_f1": round(0.9 - loss / 10, 4), "eval_runtime": 3.0})  # fmt: skip
    return found


def write_rows(folder: Path, found: list[dict[str, Any]]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in found))


def write_ledger(folder: Path, *, step: int, max_steps: int, status: str = "finished", **values: Any) -> None:
    seconds = values.pop("seconds", SECONDS)
    starts = [{"kind": "start", "step": 0, "time": BEGAN}, {"kind": "resume", "step": 200, "time": BEGAN + 700}]
    document = {
        "run": "r", "launch": None, "status": status, "step": step, "max_steps": max_steps, "updated": BEGAN + 2000,
        "seconds": {part: seconds.get(part, 0.0) for part in PARTS}, "starts": starts, "saved": {}, **values,
    }  # fmt: skip
    (folder / "time_ledger.json").write_text(json.dumps(document))


def write_run(folder: Path, steps: int = 500, *, every: int = 10, shift: float = 0.0, status: str = "finished") -> Path:
    """The folder of a run that waited for its data, was restarted once and had one incident."""
    text = {"step": steps, "epoch": 3.0, "time": BEGAN, "sample": "Once upon a time <b>there</b> was a loop."}
    write_rows(folder, [*rows(steps, every=every, shift=shift), text])
    write_ledger(folder, step=steps, max_steps=steps, status=status)
    incident = folder / "incident-step-300"
    incident.mkdir(exist_ok=True)
    (incident / "incident.json").write_text(json.dumps({"step": 300, "first_bad_module": "layers.3.mlp"}))
    (folder / "run.json").write_text(
        json.dumps({"argv": ["train.py", "--lr", "5e-5"], "folder": ".", "python": "python"})
    )
    plan = {
        "choices": [{"name": "padding-free rows", "is_on": True, "reason": "31% padding", "numbers": {"loss": 1e-7}}]
    }
    (folder / "speed_plan.json").write_text(json.dumps(plan))
    config = {
        "learning_rate": {"value": 5e-5, "source": "run.yaml:3"},
        "seed": {"value": 42 + int(shift), "source": "default"},
    }
    (folder / "resolved_config.json").write_text(json.dumps(config))
    return folder
