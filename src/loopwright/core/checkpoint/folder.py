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
"""Weights under the module's own names that `from_pretrained` would misread, or that no other file contains."""
WEIGHTS = "weights.json"
"""Lists the files with weights under the module's own names."""
RANKS = "ranks"
"""The folder with per-rank state: one file per rank of a distributed run."""
PINNED = "pinned"
"""A checkpoint that contains a file of this name is never removed."""

REPLACED = ".replaced"
"""Suffix of a checkpoint that is being replaced by a new one of the same step; it is complete until removed."""

_NAME = re.compile(rf"^{PREFIX}-(\d+)({re.escape(REPLACED)})?$")
_STAGING = re.compile(rf"^\.{PREFIX}-\d+\.partial-.*$")


def folder_name(step: int) -> str:
    return f"{PREFIX}-{step}"


def staging_name(step: int, tag: str) -> str:
    return f".{PREFIX}-{step}.partial-{tag}"


def step_in_name(path: Path) -> int | None:
    """The step in a folder's name, or None if it is not the name of a checkpoint."""
    match = _NAME.match(path.name)
    return int(match.group(1)) if match else None


def is_staging(path: Path) -> bool:
    return bool(_STAGING.match(path.name))
