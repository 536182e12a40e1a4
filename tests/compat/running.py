"""Functions that train on transformers' Trainer and on loopwright's, in a process each; their rows are compared."""

from __future__ import annotations

import faulthandler
import importlib.util
import json
import math
import os
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
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
LONGEST = 240
"""Seconds after which a function counts as hanging: the stacks of its threads are printed, and the process ends."""


def main() -> None:
    """FOLDER OWNERS MODULE.NAME ...: run functions for each owner ("ours", "theirs"), in a fork of this process each.

    Writes FOLDER/OWNER/MODULE.NAME.json. torch and transformers are imported once, before the forks; libraries that
    derive from transformers' classes are imported after `install()`.
    """
    folder, owners, *wanted = sys.argv[1:]
    import torch
    from transformers import Seq2SeqTrainer, Trainer  # noqa: F401

    for package in ("datasets", "peft"):
        if importlib.util.find_spec(package) is not None:
            importlib.import_module(package)
    torch.set_num_threads(1)
    for whose in owners.split(","):
        place = Path(folder, whose)
        place.mkdir()
        child = os.fork()
        if not child:
            os._exit(_run_all(whose, place, wanted))
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0, f"the process of {whose} failed"


def _run_all(whose: str, folder: Path, wanted: list[str]) -> int:
    try:
        if whose == "ours":
            import loopwright.compat

            loopwright.compat.install()
        started = time.monotonic()
        for each in wanted:
            module, name = each.split(".")
            faulthandler.dump_traceback_later(LONGEST, exit=True)
            found = _result(importlib.import_module(f"tests.compat.{module}").RECIPES[name])
            Path(folder, f"{each}.json").write_text(json.dumps(found, default=str))
            seconds = time.monotonic() - started
            print(f"{whose} {each} {'failed' if 'error' in found else 'done'} after {seconds:.0f} s", flush=True)
        faulthandler.cancel_dump_traceback_later()
    except BaseException:
        traceback.print_exc()
        return 1
    return 0


def _result(function: Callable[[str], Rows]) -> dict[str, Any]:
    try:
        with tempfile.TemporaryDirectory() as place:
            return {"rows": function(place)}
    except BaseException:  # also SystemExit, which is part of the comparison
        return {"error": traceback.format_exc()}


def selected(request: pytest.FixtureRequest, recipes: Recipes) -> list[str]:
    """The names that the tests of the fixture's module run with."""
    items = [item for item in request.session.items if item.path == request.path]
    wanted = {item.callspec.params.get("name") for item in items if hasattr(item, "callspec")}
    return [name for name in recipes if name in wanted]


def results_of(
    names: Mapping[str, Iterable[str]],
    folder: Path,
    python: str = sys.executable,
    owners: Iterable[str] = ("theirs", "ours"),
) -> Results:
    """Run functions, given by name for each module of this folder; `install()` changes a whole process."""
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([str(SOURCE), str(ROOT)]),
        "HF_HUB_OFFLINE": "1",
        "OMP_NUM_THREADS": "1",
    }
    wanted, log = [f"{module}.{name}" for module in names for name in names[module]], folder / "log"
    command = [python, "-m", "tests.compat.running", str(folder), ",".join(owners), *wanted]
    with log.open("w") as stream:
        process = subprocess.Popen(command, env=environment, stdout=stream, stderr=stream, start_new_session=True)
        code = None
        try:
            code = process.wait(1500)
        except subprocess.TimeoutExpired:
            pass
        finally:
            with suppress(ProcessLookupError):  # also its children, if it did not end by itself
                os.killpg(process.pid, signal.SIGKILL)
    assert code == 0, f"{'timed out' if code is None else f'exit code {code}'}: {log.read_text()[-4000:]}"
    return {
        whose: {each.split(".")[1]: json.loads((folder / whose / f"{each}.json").read_text()) for each in wanted}
        for whose in owners
    }


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


if __name__ == "__main__":
    main()
