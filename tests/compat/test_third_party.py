"""Trainers of third-party libraries: the rows they log on loopwright are those they log on transformers' Trainer."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import loopwright

from .recipes import RECIPES

SOURCE = str(Path(loopwright.__file__).parents[1])
NEEDS = {
    **{name: "trl" for name in RECIPES if name.startswith("sft")},
    **dict.fromkeys(("dpo", "reward", "kto", "grpo", "rloo"), "trl"),
    **dict.fromkeys(("sentence_transformer", "cross_encoder", "sparse_encoder"), "sentence_transformers"),
    "setfit": "setfit",
}
"""The package of every recipe."""
TIMES = ("runtime", "per_second", "flos", "step_time")
"""Parts of the names of numbers that measure time."""


def rows_of(whose: str, folder: Path, names: list[str]) -> None:
    """Run recipes in a process of their own: an installation changes modules of the whole process."""
    (folder / whose).mkdir()
    environment = {**os.environ, "PYTHONPATH": SOURCE, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    script = str(Path(__file__).with_name("recipes.py"))
    subprocess.run(
        [sys.executable, script, whose, str(folder / whose), *names],
        check=True, timeout=900, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
    )  # fmt: skip


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    """What each recipe logged, by owner of the Trainer and name."""
    found: dict[str, dict[str, Any]] = {}
    folder = tmp_path_factory.mktemp("third-party")
    names = [name for name, package in NEEDS.items() if _is_installed(package)]
    for whose in ("theirs", "ours"):
        rows_of(whose, folder, names)
        found[whose] = {name: json.loads((folder / whose / f"{name}.json").read_text()) for name in names}
    return found


def _is_installed(package: str) -> bool:
    from importlib.util import find_spec

    return find_spec(package) is not None


@pytest.mark.parametrize("name", NEEDS)
def test_a_third_party_trainer_logs_the_same_rows(name: str, results: dict[str, dict[str, Any]]) -> None:
    if name not in results["theirs"]:
        pytest.skip(f"{NEEDS[name]} is not installed")
    theirs, ours = results["theirs"][name], results["ours"][name]
    assert "error" not in theirs, theirs["error"]
    assert "error" not in ours, ours["error"]
    assert len(ours["rows"]) == len(theirs["rows"]) > 3
    for expected, found in zip(theirs["rows"], ours["rows"], strict=True):
        assert _numbers(found) == pytest.approx(_numbers(expected), rel=1e-6, abs=1e-7)


def _numbers(row: dict[str, Any]) -> dict[str, Any]:
    """The numbers of a row that do not measure time.

    transformers' `train_loss` of a resumed run averages the updates after the checkpoint over all updates of the run.
    """
    left_out = (*TIMES, "resumed_train_loss")
    kept = {name: value for name, value in row.items() if not any(part in name for part in left_out)}
    return {name: value for name, value in kept.items() if isinstance(value, (int, float))}
