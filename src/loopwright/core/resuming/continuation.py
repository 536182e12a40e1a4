"""An interrupted run is resumed by the command that started it.

The record in the output folder says how its last run ended (`run_id.py`). A run that was stopped by a signal, or
killed, is resumed if the same script is started again with the same arguments and without a request to resume. One
that ended, or failed with an exception, is not.
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ...args.paths import fixed_folder, is_url
from ...args.problems import short
from ...args.secrets import masked_words
from ...notices import logger
from ..checkpoint.folder import ARGUMENTS, PROGRESS, STATE
from ..checkpoint.json_files import read_json
from ..checkpoint.ownership.run_id import FAILED, INTERRUPTED, RUNNING, CurrentRun
from ..checkpoint.schema import count, named, record
from ..shutdown.interruption import is_interactive

if TYPE_CHECKING:
    from ..internals import Internals

WITHOUT_EFFECT = ("resume_from_checkpoint", "take_over", "local_rank", "run_name", "logging_dir")
"""Arguments that may differ between two starts of the same run."""
MOST = 3
"""Differences that are named in a message."""
_calls: dict[tuple[int, str], int] = {}


def count_call(output_dir: str | os.PathLike[str] | None) -> int:
    """Count a call of train(): which one of this process, for this folder.

    A script may train several models in one folder: started again, its first call is not the one that was interrupted.
    """
    place = os.fspath(output_dir or "")
    key = os.getpid(), place if is_url(place) else fixed_folder(place)
    _calls[key] = _calls.get(key, 0) + 1
    return _calls[key]


def own_command() -> tuple[str, ...]:
    """The script of this process by its name and content, and its arguments without secrets; empty without a script."""
    script, *words = sys.argv or [""]
    if is_interactive() or script in ("", "-"):
        return ()
    if script == "-c":
        return ("-c", *masked_words(sys.orig_argv[1:]))
    try:
        content = hashlib.sha256(Path(script).read_bytes()).hexdigest()
    except OSError:  # the entry point of a package, or a program that has replaced its name
        content = ""
    return (Path(script).name, content, *masked_words(words))


def interrupted_checkpoint(internals: Internals, earlier: CurrentRun, call: int) -> str | None:
    """The newest checkpoint of the folder's last run if that was interrupted and this is the same command, or None."""
    manager = internals.run.checkpoints
    if earlier.status not in (RUNNING, INTERRUPTED, FAILED) or (manager.owner and manager.owner.has_seized):
        return None
    word, saved = "failed" if earlier.status == FAILED else "was interrupted", manager.complete()
    if not saved:
        logger.warning(f"{manager.folder}: the last run {word} before it saved a checkpoint; this run starts over")
        return None
    newest, reason = saved[max(saved)], _other_start(earlier, call)
    if reason is None:
        found = manager.find("auto")
        reason = None if found is None else _other_run(Path(found), internals.args.to_json_string(), earlier)
        if found is not None and reason is None:
            steps = read_json(Path(found) / STATE, record({"max_steps": count()}))["max_steps"]
            logger.warning(
                f"resuming the interrupted run from {Path(found).name} (of {steps} steps); "
                "set resume_from_checkpoint=False to start over"
            )
            return found
    logger.warning(
        f"{manager.folder}: the last run {word} and is not resumed{reason or ''}: this run starts over. "
        f'Set resume_from_checkpoint="auto" to resume such a run; to resume this one now, stop and pass "{newest}"'
    )
    return None


def _other_start(earlier: CurrentRun, call: int) -> str | None:
    """Why this start is not a repetition of the one that was interrupted, or None."""
    if earlier.status == FAILED:
        return ""
    if earlier.call != call:
        return f" (it was call {earlier.call} of train() in its process, this is call {call})"
    command = own_command()
    if earlier.command == command:
        return None
    if earlier.command[:1] != command[:1]:
        return f" (it was started by {earlier.command[0] if earlier.command else 'an interactive session'})"
    if earlier.command[1:2] != command[1:2]:
        return f" ({command[0]} has changed)"
    before, now = _only(earlier.command, command), _only(command, earlier.command)
    if before == now:  # only the order differs
        return f" (the arguments of {command[0]} have another order)"
    return f" (its command line differs: {before} -> {now})"


def _only(words: tuple[str, ...], others: tuple[str, ...]) -> str:
    """The arguments of a command line that the other one does not have."""
    found = [short(word) for word in words if word not in others]
    return f"{', '.join(found[:MOST])}{' ...' if len(found) > MOST else ''}" or "nothing"


def _other_run(checkpoint: Path, arguments: str, earlier: CurrentRun) -> str | None:
    """Why a checkpoint is not that of a run with these arguments, or None."""
    if not (checkpoint / PROGRESS).is_file():
        return f" ({checkpoint.name} holds the weights only)"
    if not (checkpoint / ARGUMENTS).is_file():
        return None if earlier.command else f" ({checkpoint.name} has no {ARGUMENTS})"
    before: dict[str, Any] = read_json(checkpoint / ARGUMENTS, named())
    now: dict[str, Any] = json.loads(arguments)
    names = [each for each in now if each in before and each not in WITHOUT_EFFECT and before[each] != now[each]]
    if not names:
        return None
    listed = ", ".join(f"{each}: {before[each]} -> {now[each]}" for each in names[:MOST])
    return f" ({listed}{' ...' if len(names) > MOST else ''})"
