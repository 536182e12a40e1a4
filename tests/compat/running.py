"""Functions that train on transformers' Trainer and on loopwright's, in a process each; their rows are compared."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest

import loopwright

Rows = list[dict[str, Any]]
Recipes = dict[str, Callable[[str], Rows]]
"""Functions that train in a folder and return rows of numbers, texts and lists of these."""
Results = dict[str, dict[str, dict[str, Any]]]
"""What each function returned, or its error, by "ours" or "theirs" and by name."""

ROOT = Path(__file__).parents[2]
SOURCE = Path(loopwright.__file__).parents[1]
TIMES = ("runtime", "per_second", "flos", "step_time", "resumed_train_loss")
"""Parts of the names of numbers that measure time. transformers' `train_loss` of a resumed run averages the updates
after the checkpoint over all updates of the run."""


def main(recipes: Recipes) -> None:
    """MODULE {ours,theirs} FOLDER NAME ...: run functions and write FOLDER/NAME.json."""
    whose, folder, *names = sys.argv[1:]
    if whose == "ours":
        import loopwright.compat

        loopwright.compat.install()
    import torch

    torch.set_num_threads(1)
    for name in names or recipes:
        found: dict[str, Any] = {}
        try:
            with tempfile.TemporaryDirectory() as place:
                found["rows"] = recipes[name](place)
        except BaseException:
            found["error"] = traceback.format_exc()
        Path(folder, f"{name}.json").write_text(json.dumps(found, default=str))
        print(name, "failed" if "error" in found else "done", flush=True)


def cases(recipes: Recipes, always: Iterable[str]) -> list[Any]:
    """Every name as a case of a test; those that are not in `always` are part of the whole grid."""
    spread = set(always)
    return [pytest.param(name, marks=[] if name in spread else [pytest.mark.grid]) for name in recipes]


def selected(request: pytest.FixtureRequest, recipes: Recipes) -> list[str]:
    """The names that a test of the fixture's module runs with."""
    items = [item for item in request.session.items if item.path == request.path]
    wanted = {item.callspec.params.get("name") for item in items if hasattr(item, "callspec")}
    return [name for name in recipes if name in wanted]


def results_of(
    module: str,
    names: Iterable[str],
    folder: Path,
    python: str = sys.executable,
    owners: Iterable[str] = ("theirs", "ours"),
) -> Results:
    """Run functions of a module of this folder in a process for each library; `install()` changes a whole process."""
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([str(SOURCE), str(ROOT)]),
        "HF_HUB_OFFLINE": "1",
        "OMP_NUM_THREADS": "1",
    }
    wanted, found = list(names), Results()
    for whose in owners:
        place = folder / whose
        place.mkdir()
        log = folder / f"{whose}.log"
        with log.open("w") as stream:
            command = [python, "-m", f"tests.compat.{module}", whose, str(place), *wanted]
            code = subprocess.run(command, timeout=900, env=environment, stdout=stream, stderr=stream).returncode
        assert code == 0, log.read_text()[-4000:]
        found[whose] = {name: json.loads((place / f"{name}.json").read_text()) for name in wanted}
    return found


def compare(name: str, results: Results, rel: float = 1e-6) -> None:
    """Fail if a function failed under a library or the rows differ."""
    theirs, ours = results["theirs"][name], results["ours"][name]
    assert "error" not in theirs, theirs["error"]
    assert "error" not in ours, ours["error"]
    assert len(ours["rows"]) == len(theirs["rows"]) > 0
    for number, (expected, found) in enumerate(zip(theirs["rows"], ours["rows"], strict=True)):
        wanted, had = _compared(expected), _compared(found)
        assert wanted.keys() == had.keys(), f"row {number}: {had.keys() ^ wanted.keys()}"
        differing = {key: (had[key], value) for key, value in wanted.items() if not _is_close(had[key], value, rel)}
        assert not differing, f"row {number}: (ours, theirs) = {differing}"


def _compared(row: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in row.items() if not any(part in name for part in TIMES)}


def _is_close(found: Any, expected: Any, rel: float) -> bool:
    """Whether values are equal, numbers within a tolerance."""
    if isinstance(expected, list) and isinstance(found, list):
        return len(found) == len(expected) and all(map(_is_close, found, expected, [rel] * len(found)))
    if isinstance(expected, dict) and isinstance(found, dict):
        return found.keys() == expected.keys() and all(_is_close(found[each], expected[each], rel) for each in expected)
    if isinstance(expected, float) and isinstance(found, (int, float)):
        return math.isclose(found, expected, rel_tol=rel, abs_tol=1e-7) or (math.isnan(found) and math.isnan(expected))
    return bool(found == expected)
