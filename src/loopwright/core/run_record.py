"""How a run was started, written beside its results so that it can be started again."""

from __future__ import annotations

import json
import os
import secrets
import sys
from pathlib import Path
from typing import Any

FILE = "run.json"
STOPPED = "LOOPWRIGHT_STOPPED"
"""A file that a launcher wants to see once a process has saved and is about to leave with 75."""
RESUME = "LOOPWRIGHT_RESUME"
"""Set to `auto` by a launcher that starts a run again: it goes on from the newest checkpoint, if there is one."""


def write_record(output_dir: str | os.PathLike[str]) -> None:
    """Write the command, folder and interpreter of this process into the output folder."""
    words = {"argv": masked(sys.argv), "command": masked(sys.orig_argv)}
    record = {**words, "folder": os.getcwd(), "python": sys.executable, "job": job_id()}
    path = Path(output_dir) / FILE
    # First processes of several machines may share the folder: each has a file of its own until it is complete.
    temporary = path.with_name(f".{FILE}.{secrets.token_hex(4)}")
    temporary.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    os.replace(temporary, path)


def masked(words: list[str]) -> list[str]:
    """A command line without the values of options that end in token, key, password or secret."""
    result, hide = [], False
    for word in words:
        name, equals, _ = word.partition("=")
        secret = name.startswith("-") and name.lower().endswith(("token", "key", "password", "secret"))
        result.append("<masked>" if hide else f"{name}=<masked>" if secret and equals else word)
        hide = secret and not equals
    return result


def read_record(output_dir: str | os.PathLike[str]) -> dict[str, Any] | None:
    """How the run in this folder was started, or None if that is not known."""
    try:
        record: dict[str, Any] = json.loads((Path(output_dir) / FILE).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return record


def job_id() -> str | None:
    """The name a launcher gave to this job, the same through all its restarts; None without one."""
    name = os.environ.get("TORCHELASTIC_RUN_ID")
    return None if name in (None, "", "none") else name  # "none" is torchrun's word for no name


def is_restart(record: dict[str, Any] | None) -> bool:
    """Whether a launcher has started this job before: by its own word, or because the folder is this job's."""
    if os.environ.get(RESUME) == "auto" or os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") not in ("", "0"):
        return True
    return record is not None and job_id() is not None and record.get("job") == job_id()


def note_stop() -> None:
    """Tell the launcher that this process has saved and leaves: torch may still abort a process that is ending."""
    place = os.environ.get(STOPPED)
    if place:
        Path(place).touch()
