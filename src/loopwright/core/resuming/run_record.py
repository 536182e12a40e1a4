"""The record of how a run was started, written beside its results so that it can be started again."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

from ...args.secrets import masked_words
from ...errors import CheckpointError
from ...notices import logger
from ..checkpoint.json_files import read_json
from ..checkpoint.ownership.run_id import CurrentRun
from ..checkpoint.replacing import replace_text
from ..checkpoint.schema import named

FILE = "run.json"
RECORD = named()
STOPPED = "LOOPWRIGHT_STOPPED"
"""Variable with the path of a file that marks, for the launcher, that the process has saved and exits with code 75."""
RESUME = "LOOPWRIGHT_RESUME"
"""Set to `auto` by a launcher that restarts a run: it resumes from the newest checkpoint, if there is one."""
LAUNCH = "LOOPWRIGHT_LAUNCH"
"""Identifies one launch with all its restarts; set by launchers that start a run for the first time."""
TAKE_OVER = "LOOPWRIGHT_TAKE_OVER"
"""Set by `loopwright launch --take-over`."""


def write_record(output_dir: str | os.PathLike[str]) -> None:
    """Write the command, folder and interpreter of this process into the output folder."""
    words = {"argv": masked_words(sys.argv), "command": masked_words(sys.orig_argv)}
    try:
        folder = os.getcwd()
    except FileNotFoundError:  # it was removed; a run with an absolute output folder does not need it
        folder = ""
    record = {**words, "folder": folder, "python": sys.executable}
    path = Path(output_dir) / FILE
    try:
        replace_text(path, json.dumps(record, indent=1) + "\n")  # rank 0 of another machine may write the same file
    except OSError as error:
        logger.warning(f"{path} cannot be written ({error}); training continues, `loopwright replay` needs it")


def read_record(output_dir: str | os.PathLike[str]) -> dict[str, Any] | None:
    """The record in this folder, or None if it cannot be read."""
    path = Path(output_dir) / FILE
    try:
        found: dict[str, Any] = read_json(path, RECORD)
    except CheckpointError as error:
        if os.path.lexists(path):
            logger.warning(f"{error}; the record of how the run was started is ignored")
        return None
    return found


def job_id() -> str | None:
    """The launcher's name of this job, the same for all its restarts; None without one."""
    name = os.environ.get("TORCHELASTIC_RUN_ID")
    return None if name in (None, "", "none") else name  # torchrun uses "none" for no name


def launch_id() -> str | None:
    """Identifies this launch with all its restarts; None without a launcher that sets it."""
    return os.environ.get(LAUNCH) or None


def is_started_again() -> bool:
    """Whether the launcher has started this run before."""
    return os.environ.get(RESUME) == "auto" or os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") not in ("", "0")


def is_restart(current: CurrentRun | None) -> bool:
    """Whether this is a restart of the run that the folder belongs to: of the same launch, or of the same job."""
    if current is not None and job_id() is not None and current.job == job_id():
        return True
    if not is_started_again():
        return False
    # The first start may have ended before it took the folder, which then belongs to an earlier run.
    return current is None or launch_id() is None or current.launch == launch_id()


def is_take_over() -> bool:
    """Whether the launcher was started with --take-over."""
    return os.environ.get(TAKE_OVER) == "1"


def note_stop() -> None:
    """Mark for the launcher that this process has saved and exits: torch may still abort it on exit."""
    place = os.environ.get(STOPPED)
    if place:
        Path(place).touch()
