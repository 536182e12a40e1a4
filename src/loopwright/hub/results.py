"""Measured results: the last evaluation of a run, as rows of the card and as a file of the Hub's evaluation results."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from math import isfinite
from typing import Any

import yaml

FILE = ".eval_results/loopwright.yaml"
SPEED = re.compile(r"_(runtime|(samples|steps|tokens)_per_second|jit_compilation_time|model_preparation_time)$")
"""Endings of numbers that measure the machine and not the model."""
REAL = re.compile(r"^[\w.-]+/[\w.-]+$")
"""The id of a dataset on the Hub."""


@dataclass(frozen=True)
class Results:
    """The numbers of the last evaluation."""

    step: int
    epoch: float | None
    metrics: dict[str, float]
    """Name, without the prefix eval_ -> value."""

    @classmethod
    def last(cls, history: Sequence[dict[str, Any]]) -> Results | None:
        """Those of a log history; None if nothing was evaluated. Several sets of one step are put together."""
        found: dict[str, float] = {}
        step, epoch = 0, None
        for row in reversed(list(history)):
            names = [name for name in row if name.startswith("eval_") and not SPEED.search(name)]
            if not names:
                continue
            if found and row.get("step") != step:
                break
            step, epoch = row.get("step", 0), row.get("epoch")
            found = {**{name.removeprefix("eval_"): row[name] for name in names}, **found}
        numbers = {name: each for name, each in found.items() if isinstance(each, (int, float)) and isfinite(each)}
        return cls(step, epoch, numbers) if numbers else None

    def main_metric(self, wanted: str | None) -> str | None:
        """The metric that measures the model: the one that selects the best model, or the only one besides the loss."""
        name = (wanted or "").removeprefix("eval_")
        if name in self.metrics and name != "loss":
            return name
        others = [each for each in self.metrics if each != "loss" and not each.endswith("_loss")]
        return others[0] if len(others) == 1 else None


def results_file(
    results: Results | None, *, metric: str | None, datasets: Sequence[str], tasks: Sequence[str | None]
) -> str | None:
    """The file of evaluation results that the Hub shows, or None unless a dataset of the Hub and a metric are known.

    `tasks` are the names of the benchmark's tasks, by dataset; one without a name is the task `default`.
    """
    name = None if results is None else results.main_metric(metric)
    known = [dataset for dataset in datasets if REAL.match(dataset)]
    if results is None or name is None or len(known) != 1:
        return None
    task = next((each for each, dataset in zip(tasks, datasets, strict=False) if dataset == known[0]), None)
    entry = {
        "dataset": {"id": known[0], "task_id": task or "default"},
        "value": results.metrics[name],
        "notes": f"{name}, measured by the trainer at step {results.step}",
    }
    return yaml.safe_dump([entry], sort_keys=False, allow_unicode=True)
