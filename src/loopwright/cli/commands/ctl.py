"""`loopwright ctl RUN REQUEST`: let a run save, evaluate, stop or change a setting after its current update."""

from __future__ import annotations

import time
from pathlib import Path

from ...errors import ArgumentsError
from ..command import DONE, FAILED, Result, Usage, Words, run_command

POLL = 0.1
USAGE = Usage(
    "ctl",
    "RUN save|evaluate|stop|set KEY=VALUE",
    "Let the run that trains in the folder RUN save a checkpoint, evaluate, stop after saving (the same command "
    "resumes it), or change a setting: learning_rate, logging_steps, eval_steps, save_steps.",
    options={"--wait=": "seconds to wait until the run has done it (default: do not wait)"},
    most=3,
)


def run(words: list[str]) -> int:
    """Send a request; returns the exit code."""
    return run_command(USAGE, words, _send)


def _send(words: Words) -> Result:
    from ...config.control_files import ACTIONS, read_request, send

    folder = Path(words.first("the output folder of a run"))
    if len(words.positional) < 2:
        raise ArgumentsError(f"loopwright ctl needs a request after the folder: {', '.join(ACTIONS)}")
    request = read_request(words.positional[1:])
    seconds = _seconds(words.options.get("--wait"))
    path = send(folder, request)
    data = {"run": str(folder), "request": str(request)}
    if seconds is None:
        return Result({**data, "done": None}, f"requested: {request}; the run does it after its current step")
    limit = time.monotonic() + seconds
    while path.exists():
        if time.monotonic() > limit:
            text = f"requested: {request}; the run has not done it within {seconds:g} seconds"
            return Result({**data, "done": False}, text, FAILED)
        time.sleep(POLL)
    return Result({**data, "done": True}, f"done: {request}", DONE)


def _seconds(value: str | bool | None) -> float | None:
    if value is None:
        return None
    from ...args.reading import read_float

    try:
        return read_float(value)
    except ValueError as error:
        raise ArgumentsError(f"--wait: {error}") from None
