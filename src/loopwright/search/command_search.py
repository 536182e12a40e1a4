"""Searches over a command: each trial runs it with other values, and its evaluations are read from metrics.jsonl."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..callbacks.metrics_file import FILE_NAME, parsed_row, restored
from ..core.checkpoint.folder import STATE
from ..core.checkpoint.manager import CheckpointManager
from ..core.checkpoint.ownership.run_id import FINISHED, read_current
from ..core.resuming.run_record import RESUME
from ..core.shutdown.signals import FORWARDED, STOPPED_AFTER_SAVING
from ..core.trial import CONTINUE
from ..errors import ArgumentsError, SearchError
from ..notices import Notices
from .coordinator import Decide, Listen, checked
from .session import BaseSearch, Request
from .stopping import Stoppable
from .trial_run import Job, Outcome

TICK = 0.2
"""Seconds between two readings of metrics.jsonl."""

MakeWords = Callable[[dict[str, Any], str], list[str]]
"""The words of a command, from the values and the folder of a trial."""


@dataclass(frozen=True)
class Measurement:
    """The speed of a command, measured at its beginning."""

    seconds_per_step: float
    steps: int | None
    """The steps of a trial; None if the command ended before they were known."""
    seconds: float
    """Until the first numbers were logged: imports, data, the first updates."""

    @property
    def seconds_of_trial(self) -> float:
        """The predicted duration of a trial, without its evaluations."""
        return self.seconds + self.seconds_per_step * (self.steps or 0)


class CommandSearch(BaseSearch):
    """A search whose trials are runs of a command that trains with loopwright."""

    def __init__(
        self,
        request: Request,
        folder: str,
        make_words: MakeWords,
        metric: str,
        *,
        configuration: Mapping[str, Any] | None = None,
        seed: int = 0,
    ) -> None:
        super().__init__(request, folder, seed, Notices())
        self._make_words, self.metric = make_words, metric
        self._configuration = dict(configuration or {})
        """What the command reads from a file; trials of another content are not comparable."""
        self._measured: set[str] = set()
        if len(request.directions) > 1:
            raise ArgumentsError(f"direction={request.direction!r}: a search over a command has one metric")

    @property
    def may_run_several(self) -> bool:
        return True

    def arguments(self) -> dict[str, Any]:
        words = " ".join(self._make_words({}, "FOLDER"))
        return {"command": words, "metric": self.metric, "configuration": self._configuration}

    def run(self, job: Job, trial: Any, decide: Decide, listen: Listen | None = None) -> Outcome:
        """Run the command; a trial that is resumed runs it again, because the same command resumes."""
        if not job.resume and job.folder not in self._measured and os.path.exists(job.folder):
            raise ArgumentsError(f"{job.folder} holds an earlier run, which is not of this search; move or delete it")
        path, last, decision = Path(job.folder) / FILE_NAME, None, CONTINUE
        earlier = last_step(path, self.metric)
        process = self._start(job)
        ended = Stoppable(process)
        with self.running.holding(ended), ended.stopping():
            for step, metrics in evaluations(process, path, self.metric):
                last = step, checked(metrics[self.metric])
                if step > earlier:  # those before were decided on when they were made
                    if listen is not None:
                        listen(step, metrics, last[1])
                    decision = decide(*last)
                if decision != CONTINUE:
                    ended.request_stop()  # it saves, so that it can be resumed
                    break
            code = process.wait()
        # Between the evaluation and the signal the command may have finished by itself.
        finished = has_finished(job.folder)
        if code and not (decision != CONTINUE and (finished or code == STOPPED_AFTER_SAVING)):
            raise self._failure(job, code)
        if last is None:
            raise SearchError(
                f"trial {job.number} logged no {self.metric!r}; let it evaluate (eval_strategy), or set another metric"
            )
        newest = newest_checkpoint(job.folder)
        return Outcome(last[1], last[0], CONTINUE if finished else decision, newest, newest)

    def _failure(self, job: Job, code: int) -> BaseException:
        if code == STOPPED_AFTER_SAVING:
            return SystemExit(STOPPED_AFTER_SAVING)
        return SearchError(
            f"the command of trial {job.number} ended with exit code {code}; its output shows the reason"
        )

    def _start(self, job: Job) -> subprocess.Popen[bytes]:
        words = [sys.executable, "-m", f"{__package__}.command", *self._make_words(job.values, job.folder)]
        # Also a run that has finished, such as a short one that was measured, is not repeated.
        resumes = {RESUME: "auto"} if os.path.exists(job.folder) else {}
        return subprocess.Popen(words, start_new_session=True, env={**os.environ, FORWARDED: "1", **resumes})

    def measure(self, job: Job) -> Measurement | None:
        """Run the beginning of a trial, until it has logged its speed; None if it ends before that.

        Nothing is lost: it saves, and the same command resumes it.
        """
        self._measured.add(job.folder)
        started = time.monotonic()
        process, path = self._start(job), Path(job.folder) / FILE_NAME
        speed = None
        try:
            while process.poll() is None and speed is None:
                time.sleep(TICK)
                speed = next((row["pace"].get("steps_per_second") for row in rows(path) if "pace" in row), None)
            seconds = time.monotonic() - started
        finally:
            Stoppable(process).stop()
        if not speed:
            return None
        return Measurement(1 / speed, planned_steps(job.folder), seconds)


def rows(path: Path) -> list[dict[str, Any]]:
    """The complete lines of a metrics.jsonl that is being written."""
    try:
        lines = path.read_bytes().splitlines(keepends=True)
    except FileNotFoundError:
        return []
    found = (parsed_row(line) for line in lines if line.endswith(b"\n"))
    return [restored(row) for row in found if row is not None]


def evaluations(process: subprocess.Popen[bytes], path: Path, metric: str) -> Iterator[tuple[int, dict[str, float]]]:
    """The evaluations that a command logs, each once, until it ends; the file is rewritten when a run resumes."""
    seen = -1
    while True:
        has_ended = process.poll() is not None
        for row in rows(path):
            if metric in row and row["step"] > seen:
                seen = row["step"]
                yield seen, row
        if has_ended:
            return
        time.sleep(TICK)


def last_step(path: Path, metric: str) -> int:
    """The step of the last evaluation of an earlier part of a run; -1 without one."""
    return max((row["step"] for row in rows(path) if metric in row), default=-1)


def has_finished(folder: str) -> bool:
    """Whether the run of a folder has trained to its end."""
    current = read_current(CheckpointManager(folder, notices=Notices()).storage)
    return current is not None and current.status == FINISHED


def newest_checkpoint(folder: str) -> str | None:
    """The newest complete checkpoint of a folder."""
    saved = CheckpointManager(folder, notices=Notices()).complete()
    return str(saved[max(saved)]) if saved else None


def planned_steps(folder: str) -> int | None:
    """The steps of the run whose checkpoint a folder holds."""
    newest = newest_checkpoint(folder)
    if newest is None:
        return None
    steps: int | None = json.loads((Path(newest) / STATE).read_text(encoding="utf-8")).get("max_steps")
    return steps


def script_words(script: str, given: dict[str, Any], constant: dict[str, Any], folder: str) -> list[str]:
    """A script with `--name value` for each value, as HfArgumentParser and argparse read them."""
    values = {**constant, **given, "output_dir": folder}
    return [script, *(word for name, value in values.items() for word in (f"--{name}", text_of(value)))]


def text_of(value: Any) -> str:
    """A value as a word of a command line."""
    if isinstance(value, (list, dict)):
        return json.dumps(value)
    if value is None:
        raise ArgumentsError("a value of null cannot be passed to a script; leave it out")
    return repr(value) if isinstance(value, float) else str(value)
