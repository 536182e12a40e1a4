"""Whether an interrupted run may be resumed: its model and data must be those of the configuration."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from ..args.base import without_secrets
from ..args.paths import working_folder
from ..args.problems import short
from ..notices import logger
from .config import RESOLVED, Config

MOST = 3
"""Differences that are named in a message."""


def may_continue(config: Config) -> bool | None:
    """The value of `resume_from_checkpoint` for a run: False if model, data or adapter were changed, else None.

    The training arguments are compared when the run begins.
    """
    if config.args.resume_from_checkpoint is not None:
        return None
    before = _recorded(Path(working_folder(config.args.output_dir)))
    now: dict[str, Any] = without_secrets(config.blocks())
    changed = [key for key, value in now.items() if key in before and before[key] != value]
    if not changed:
        return None
    listed = ", ".join(f"{key}: {short(before[key])} -> {short(now[key])}" for key in changed[:MOST])
    has_saved = any(Path(working_folder(config.args.output_dir)).glob("checkpoint-*"))
    advice = '. Set resume_from_checkpoint="auto" to resume it anyway' if has_saved else ""
    logger.warning(
        f"{config.args.output_dir}: the last run had another configuration ({listed}); this run starts over{advice}"
    )
    return False


def _recorded(folder: Path) -> dict[str, Any]:
    try:
        values = json.loads((folder / RESOLVED).read_text(encoding="utf-8"))["values"]
        return {key: row["value"] for key, row in values.items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return {}  # there is none, or it is incomplete
