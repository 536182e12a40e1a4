"""The record of how a run was started, written beside its results so that it can be started again."""

from __future__ import annotations

import json
import os
import secrets
import sys
from pathlib import Path
from typing import Any

from ..args.secrets import masked_words
from ..errors import CheckpointError
from ..notices import logger
from .checkpoint.json_files import read_json
from .checkpoint.schema import named

FILE = "run.json"
RECORD = named()
STOPPED = "LOOPWRIGHT_STOPPED"
"""Variable with the path of a file that marks, for the launcher, that the process has saved and exits with code 75."""
RESUME = "LOOPWRIGHT_RESUME"
"""Set to `auto` by a launcher that restarts a run: it resumes from the newest checkpoint, if there is one."""


def write_record(output_dir: str | os.PathLike[str]) -> None:
    """Write the command, folder and interpreter of this process into the output folder."""
    words = {"argv": masked_words(sys.argv), "command": masked_words(sys.orig_argv)}
    record = {**words, "folder": os.getcwd(), "python": sys.executable, "job": job_id()}
    path = Path(output_dir) / FILE
    # Rank 0 of several machines may share the folder, so each writes a temporary file first.
    temporary = path.with_name(f".{FILE}.{secrets.token_hex(4)}")
    temporary.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    os.replace(temporary, path)


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


def is_restart(record: dict[str, Any] | None) -> bool:
    """Whether this is a restart: set by the launcher, or the folder's record has the same job name."""
    if os.environ.get(RESUME) == "auto" or os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") not in ("", "0"):
        return True
    return record is not None and job_id() is not None and record.get("job") == job_id()


def note_stop() -> None:
    """Mark for the launcher that this process has saved and exits: torch may still abort it on exit."""
    place = os.environ.get(STOPPED)
    if place:
        Path(place).touch()
