"""Names of folders and files of a checkpoint."""

from __future__ import annotations

import re
from pathlib import Path

PREFIX = "checkpoint"
MANIFEST = "manifest.json"
STATE = "trainer_state.json"
PROGRESS = "progress.json"
ARGUMENTS = "arguments.json"
OPTIMIZER = "optimizer"
SCHEDULER = "scheduler.json"
SCALER = "scaler.json"
RNG = "rng.json"
MODEL = "model.safetensors"
MODULE = "module.safetensors"
"""Weights under the module's own names that `from_pretrained` would read wrongly, or that no other file holds."""
WEIGHTS = "weights.json"
"""Says that weights are under the module's own names, and in which files they are."""
RANKS = "ranks"
"""The folder with what only one process knows: one file per process, of runs with several."""
PINNED = "pinned"
"""A user who puts a file of this name into a checkpoint keeps it from being removed."""

REPLACED = ".replaced"
"""Ending of a checkpoint that has just got a successor of the same step; complete until it is removed."""

_NAME = re.compile(rf"^{PREFIX}-(\d+)({re.escape(REPLACED)})?$")
_STAGING = re.compile(rf"^\.{PREFIX}-\d+\.partial-.*$")


def folder_name(step: int) -> str:
    return f"{PREFIX}-{step}"


def staging_name(step: int, tag: str) -> str:
    return f".{PREFIX}-{step}.partial-{tag}"


def step_in_name(path: Path) -> int | None:
    """The step a folder's name claims, or None if it is no checkpoint's name."""
    match = _NAME.match(path.name)
    return int(match.group(1)) if match else None


def is_staging(path: Path) -> bool:
    return bool(_STAGING.match(path.name))
