"""The report on an update with non-finite numbers, found by running it again."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ..checkpoint.json_files import write_json


def write_incident(
    output_dir: str | Path,
    *,
    step: int,
    sample_ids: list[int] | None,
    bad_weights: list[str],
    examine: Callable[[Path], dict[str, Any]] | None,
) -> Path:
    """Write a folder with the step, its samples and the findings of `examine`, which may add files.

    `examine` is None if the batch could not be loaded again.
    """
    folder = Path(output_dir) / f"incident-step-{step}"
    folder.mkdir(parents=True, exist_ok=True)
    report: dict[str, Any] = {"step": step, "sample_ids": sample_ids, "bad_weights": bad_weights}
    if examine is None:
        report["note"] = "the data owns its order, so the batch could not be loaded again"
    else:
        report |= examine(folder)
    write_json(folder / "incident.json", report)
    return folder


def as_json_number(value: Any) -> float | str:
    """The number for JSON; non-finite values become strings."""
    number = float(value)
    return number if math.isfinite(number) else str(number)
