"""What must hold after a run was interrupted and resumed."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

from loopwright.callbacks.metrics_file import read_metrics
from loopwright.core.checkpoint.folder import is_staging
from loopwright.core.checkpoint.manager import CheckpointManager
from loopwright.core.checkpoint.manifest import damage, read_manifest
from loopwright.notices import Notices

from .runs import CLOCKED

INTERVAL = 3
"""Updates between two saves in these runs."""


def result(folder: Path) -> dict[str, Any]:
    return json.loads(Path(f"{folder}.result").read_text())


def said(folder: Path) -> str:
    """What the processes of a run printed; a process may be killed before it has a file for that."""
    path = Path(f"{folder}.out")
    return path.read_text() if path.exists() else ""


def trace(folder: Path, word: str) -> list[int]:
    """The steps at which something happened, in order, over all processes of a run."""
    path = Path(f"{folder}.trace")
    lines = path.read_text().splitlines() if path.exists() else []
    return [int(line.split()[1]) for line in lines if line.split()[0] == word]


def rows(folder: Path) -> list[dict[str, Any]]:
    """metrics.jsonl without what a clock made."""
    kept = [
        {name: value for name, value in row.items() if name not in ("time", "pace") and not name.endswith(CLOCKED)}
        for row in read_metrics(folder)
    ]
    return sorted(kept, key=lambda row: (row["step"], "loss" not in row, "train_loss" in row))


class Reference:
    """The uninterrupted run of every set of options, trained once."""

    def __init__(self, forks: Any, folder: Path) -> None:
        self.forks, self.folder = forks, folder
        self._known: dict[str, Path] = {}

    def __call__(self, **options: Any) -> Path:
        key = json.dumps(options, sort_keys=True)
        if key not in self._known:
            folder = self.folder / f"reference-{len(self._known)}"
            assert self.forks.run("train", folder, resume=None, **options) == 0, said(folder)
            self._known[key] = folder
        return self._known[key]


def newest_intact(folder: Path) -> int:
    """The step of the newest complete checkpoint, whose files must be whole; 0 without any."""
    complete = CheckpointManager(folder, notices=Notices(quiet=True)).complete()
    if not complete:
        return 0
    step = max(complete)
    manifest = read_manifest(complete[step])
    assert manifest is not None
    assert damage(complete[step], manifest) is None
    assert manifest.step == step
    return step


def differences(folder: Path, reference: Path) -> list[str]:
    """Which of the things that must be equal are not."""
    mine, whole = result(folder), result(reference)
    ended = trace(folder, "begin")[-1] == whole["same"]["step"]  # nothing was left to train, so no stream was put back
    compared = {name: value for name, value in whole["same"].items() if not (ended and name == "random")}
    found = [name for name, value in compared.items() if mine["same"][name] != value]
    if mine["seen"] != whole["seen"][len(whole["seen"]) - len(mine["seen"]) :]:
        found.append(f"samples: {mine['seen']} is not the end of {whole['seen']}")
    kinds = Counter((row["step"], *sorted(row)) for row in rows(folder))
    found += [f"metrics.jsonl has {number} rows {kind}" for kind, number in kinds.items() if number > 1]
    if rows(folder) != rows(reference):
        found.append(f"metrics.jsonl: {rows(folder)} is not {rows(reference)}")
    return found


def leftovers(folder: Path, *, keep: int | None = None) -> list[str]:
    """What should not be in a folder once a save has gone well."""
    names = sorted(path.name for path in folder.iterdir())
    kept = [name for name in names if name.startswith("checkpoint-") and read_manifest(folder / name) is not None]
    partial = [name for name in names if is_staging(Path(name)) or name.endswith((".replaced", ".new"))]
    return partial + (kept if keep is not None and len(kept) > keep else [])


def half_removed(folder: Path) -> list[str]:
    """Checkpoints without a manifest: what an interrupted removal leaves."""
    return sorted(path.name for path in folder.glob("checkpoint-*") if read_manifest(path) is None)
