"""What a run of scripts/train.py wrote down, and the undisturbed run it is compared with."""

from __future__ import annotations

import json
import os
import runpy
import sys
from functools import cache
from pathlib import Path
from typing import Any
from unittest import mock

import torch

from .jobs import SCRIPTS

TRAIN = str(SCRIPTS / "train.py")


def lines(folder: Path, rank: int | None = 0) -> list[dict[str, Any]]:
    """The finished updates of a rank (or of all), in the order of time."""
    files = folder.glob(f"updates-{'*' if rank is None else rank}-*.jsonl")
    found = [json.loads(line) for file in files for line in file.read_text().splitlines() if line.endswith("}")]
    return sorted(found, key=lambda line: line["time"])


def last_step(folder: Path) -> int:
    return max((line["step"] for line in lines(folder)), default=0)


def checkpoints(folder: Path) -> list[int]:
    """Steps of the published checkpoints."""
    return sorted(int(path.parent.name.split("-")[1]) for path in folder.glob("checkpoint-*/manifest.json"))


def kept(folder: Path) -> dict[int, dict[str, Any]]:
    """For each step the update that counts: the last one done, since a killed run does some again."""
    return {line["step"]: line for line in lines(folder)}


@cache
def undisturbed(folder: str, *words: str) -> Path:
    """The folder of a run of one process that nothing happens to."""
    run_here("--output", folder, "--save-steps", "1000", *words)
    return Path(folder)


def run_here(*words: str, **variables: str) -> None:
    """Run the script in this process, which has imported torch, with these variables in its environment."""
    with mock.patch.object(sys, "argv", [TRAIN, *words]), mock.patch.dict(os.environ, variables):
        runpy.run_path(TRAIN, run_name="__main__")


def hurry(folder: Path) -> None:
    """From now on no update takes longer than it must."""
    (folder / "hurry").touch()


def assert_same_run(folder: Path, reference: Path, rows: int) -> None:
    """Every sample once, the learning rates of the undisturbed run, and its weights within 1e-10."""
    ours, theirs = kept(folder), kept(reference)
    assert sorted(ours) == sorted(theirs)
    ids = [each for step in sorted(ours) for each in ours[step]["ids"]]
    assert sorted(ids) == list(range(rows))
    for step, line in theirs.items():
        assert sorted(ours[step]["ids"]) == sorted(line["ids"]), step
        assert ours[step]["lr"] == line["lr"], step
    weights, expected = (torch.load(place / "weights.pt") for place in (folder, reference))
    for name, value in expected.items():
        assert value.dtype == torch.float64
        torch.testing.assert_close(weights[name], value, rtol=0, atol=1e-10)
