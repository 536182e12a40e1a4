"""A run that is killed, gets a signal or is stopped, and resumes, ends bitwise equal to an uninterrupted one."""

from __future__ import annotations

import json
import signal
from pathlib import Path
from typing import Any

import pytest

from loopwright.core.checkpoint.manager import CheckpointManager
from loopwright.core.checkpoint.manifest import damage, read_manifest
from loopwright.notices import Notices

from .frameworks import MOSTLY_TORCH, spread

SAVED = 75


def newest(folder: Path) -> int:
    """The step of the newest complete checkpoint; its files are whole."""
    complete = CheckpointManager(folder, notices=Notices(quiet=True)).complete()
    for path in complete.values():
        manifest = read_manifest(path)
        assert manifest is not None and damage(path, manifest) is None
    return max(complete, default=0)


def ends_alike(processes: Any, framework: Any, folder: Path, references: Path, **options: Any) -> None:
    status = processes.run(framework, "train", folder, **options)
    assert status == 0, Path(f"{folder}.out").read_text()[-3000:]
    whole = processes.whole(framework, references, **options)
    mine, theirs = (json.loads(Path(f"{each}.result").read_text()) for each in (folder, whole))
    assert {name for name in theirs if mine[name] != theirs[name]} == set()


CASES: dict[str, tuple[int, dict[str, Any]]] = {
    "in an epoch": (5, {}),
    "at the end of an epoch": (9, {"save_steps": 4}),
    "accumulating": (6, {"gradient_accumulation_steps": 2, "per_device_train_batch_size": 2, "async_save": False}),
}


@pytest.mark.parametrize(("framework", "case"), spread(CASES, "accumulating"), indirect=["framework"])
def test_killed_and_resumed_to_the_last_bit(
    case: str, framework: Any, processes: Any, references: Path, tmp_path: Path
) -> None:
    step, options = CASES[case]
    folder = tmp_path / "run"
    assert processes.run(framework, "killed", folder, step=step, **options) == -signal.SIGKILL
    every = options.get("save_steps", 3)
    last = (step - 1) // every * every
    assert newest(folder) in (last, last - every)  # the save in flight may be lost, no other
    ends_alike(processes, framework, folder, references, **options)


EVALUATING = {"eval_strategy": "steps", "eval_steps": 2, "save_steps": 4}


@pytest.mark.parametrize(
    ("framework", "number"), spread([signal.SIGTERM, signal.SIGUSR1]), indirect=["framework"]
)
def test_a_signal_saves_the_last_update_and_exits_with_75(
    number: int, framework: Any, processes: Any, references: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "run"
    status = processes.run(framework, "signalled", folder, number=int(number), step=6, **EVALUATING)
    assert status == SAVED, Path(f"{folder}.out").read_text()[-3000:]
    assert newest(folder) == 6
    if number == signal.SIGTERM:  # both take the same way
        ends_alike(processes, framework, folder, references, **EVALUATING)


@pytest.mark.parametrize("framework", MOSTLY_TORCH, indirect=True)
def test_ctrl_c_finishes_the_update_and_goes_on_to_the_caller(framework: Any, processes: Any, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    assert processes.run(framework, "signalled", folder, number=int(signal.SIGINT), step=5, **EVALUATING) == 130
    assert newest(folder) == 4


@pytest.mark.parametrize("framework", MOSTLY_TORCH, indirect=True)
def test_a_second_signal_stops_at_once(framework: Any, processes: Any, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    term = int(signal.SIGTERM)
    assert processes.run(framework, "signalled", folder, number=term, step=3, times=2, save_steps=9) == -term
    assert newest(folder) == 0
