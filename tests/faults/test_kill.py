"""SIGKILL between any two file operations, and at any moment: the resumed run ends as if nothing had happened."""

from __future__ import annotations

import random
import shutil
from pathlib import Path
from typing import Any

import pytest

from .checks import INTERVAL, differences, half_removed, leftovers, newest_intact, said, trace

pytestmark = pytest.mark.xdist_group("faults-kill")

SAVING: dict[str, dict[str, Any]] = {
    "now": {"async_save": False},
    "in the background": {},
    "now, keeping one": {"async_save": False, "save_total_limit": 1},
    "in the background, keeping one": {"save_total_limit": 1},
    "now, each epoch's last step twice": {"async_save": False, "save_steps": 4, "save_twice": True},
    "in the background, twice, keeping one": {"save_steps": 4, "save_twice": True, "save_total_limit": 1},
}


def resumed_ends_alike(forks: Any, folder: Path, reference: Any, options: dict[str, Any]) -> list[str]:
    """Start the same command again; returns what went wrong."""
    begun = trace(folder, "saving")
    newest = newest_intact(folder)
    wrong = []
    interval = options.get("save_steps", INTERVAL)
    if begun and newest < begun[-1] - interval:
        wrong.append(f"the save of step {begun[-1]} had begun, but the newest checkpoint is {newest}")
    status = forks.run("train", folder, **options)
    if status != 0:
        return [*wrong, f"going on ended with {status}: {said(folder)[-2000:]}"]
    if trace(folder, "begin")[-1] != newest:
        wrong.append(f"went on from {trace(folder, 'begin')[-1]} instead of {newest}")
    wrong += differences(folder, reference(**options))
    if len(trace(folder, "saving")) > len(begun):  # leftovers are collected by the next save
        wrong += [f"left over: {name}" for name in leftovers(folder, keep=options.get("save_total_limit"))]
    return wrong


def boundaries(forks: Any, folder: Path, options: dict[str, Any]) -> list[str]:
    """The boundaries an uninterrupted run passes."""
    assert forks.run("listed", folder, **options) == 0, said(folder)
    return Path(f"{folder}.boundaries").read_text().splitlines()


def spread(labels: list[str], every: int) -> list[int]:
    """Some of the boundaries: each n-th, and around whatever makes the last checkpoints visible or takes one away."""
    decisive = ("rename .checkpoint", "rename checkpoint", "unlink checkpoint")
    visible = [i for i, label in enumerate(labels) if label.startswith(decisive)]
    return sorted({*range(every // 2, len(labels), every), *visible[-6:]})


def cut_at(forks: Any, folder: Path, numbers: list[int], labels: list[str], reference: Any, options: Any) -> None:
    wrong: dict[str, list[str]] = {}
    killed = 0
    for number in numbers:
        case = folder / f"cut-{number}"
        status = forks.run("cut", case, boundary=number, **options)
        if status == -9:
            killed += 1
        elif status != 0:  # in the background a run may pass fewer boundaries
            wrong[labels[number]] = [f"ended with {status}: {said(case)[-2000:]}"]
            continue
        found = resumed_ends_alike(forks, case, reference, options) if status == -9 else []
        if found:
            wrong[f"{number}: {labels[number]}"] = found
        shutil.rmtree(case, ignore_errors=True)
    assert not wrong, f"{len(wrong)} of {len(numbers)}: {wrong}"
    assert killed >= 0.9 * len(numbers)


@pytest.mark.parametrize("how", SAVING)
def test_killed_at_some_boundaries(how: str, forks: Any, reference: Any, tmp_path: Path) -> None:
    labels = boundaries(forks, tmp_path / "listed", SAVING[how])
    assert len(labels) > 200
    cut_at(forks, tmp_path, spread(labels, 131), labels, reference, SAVING[how])


@pytest.mark.grid
@pytest.mark.slow
@pytest.mark.parametrize("how", SAVING)
def test_killed_at_every_boundary(how: str, forks: Any, reference: Any, tmp_path: Path) -> None:
    labels = boundaries(forks, tmp_path / "listed", SAVING[how])
    cut_at(forks, tmp_path, list(range(len(labels))), labels, reference, SAVING[how])


def test_a_removal_that_was_cut_off_is_finished_later(forks: Any, tmp_path: Path) -> None:
    options = {"async_save": False, "save_total_limit": 1}
    labels = boundaries(forks, tmp_path / "listed", options)
    first = next(i for i, label in enumerate(labels) if label.startswith(("unlink", "rename checkpoint")))
    for number in (first + 1, first + 6, first + 12):
        folder = tmp_path / f"cut-{number}"
        assert forks.run("cut", folder, boundary=number, **options) == -9
        assert forks.run("train", folder, **options) == 0
        assert not half_removed(folder)


def killed_at_random(forks: Any, folder: Path, reference: Any, numbers: range) -> None:
    """Killed and started again until it is through, each time after another while."""
    options = {"pause": 0.01}
    wrong: dict[int, list[str]] = {}
    kills = 0
    for number in numbers:
        moments = random.Random(number)
        case = folder / f"random-{number}"
        for _ in range(2):
            if forks.run("train", case, kill_after=moments.uniform(0.02, 0.45), **options) != -9:
                break
            kills += 1
        found = resumed_ends_alike(forks, case, reference, options)
        if found:
            wrong[number] = found
        shutil.rmtree(case, ignore_errors=True)
    assert not wrong, f"{len(wrong)} of {len(numbers)}: {wrong}"
    assert kills, "no run was killed at all: the moments are too late"


def test_killed_at_random_moments(forks: Any, reference: Any, tmp_path: Path) -> None:
    killed_at_random(forks, tmp_path, reference, range(10))


@pytest.mark.grid
@pytest.mark.slow
def test_killed_at_random_moments_of_200_runs(forks: Any, reference: Any, tmp_path: Path) -> None:
    killed_at_random(forks, tmp_path, reference, range(1000, 1200))
