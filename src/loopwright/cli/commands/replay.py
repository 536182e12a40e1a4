"""`loopwright replay RUN --step N`: run up to a logged step again and compare the metrics.

The script of the run is run again in this process. Its trainer writes to a temporary folder, resumes from the newest
complete checkpoint before the step, logs at the same steps as the run, saves nothing and stops at the step.
"""

from __future__ import annotations

import argparse
import contextlib
import math
import os
import sys
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ...args.secrets import MASK
from ...callbacks.metrics_file import FILE_NAME, read_metrics
from ...core.events import TrainerCallback
from ...core.resuming.run_record import read_record
from ...errors import ArgumentsError, CheckpointError, some
from ...notices import Notices
from ..json_output import add_json, show
from ..script import Script, adjusted_trainers, script_in, script_of_record, split_at_dashes, without_reporters

if TYPE_CHECKING:
    from ...args.base import BaseArguments

COMPARED = ("loss", "grad_norm", "learning_rate")
INERT = {"save_trigger_file": None, "max_runtime": None, "push_to_hub": False, "logging_dir": None}
"""Arguments with effects outside the output folder, and values that disable them."""


class Replayed(BaseException):
    """Raised to end the user's script after the replay; not an Exception, so that scripts do not catch it."""


@dataclass
class Replay:
    """One replay: the request and its result."""

    run: Path
    step: int
    rows: dict[int, dict[str, Any]]
    """The logged rows by step."""
    scratch: Path
    trainer: Any = None
    requested: Any = None
    """The checkpoint the user's script asked to resume from."""
    start: str | None = None
    samples: list[int] | None = None
    row: dict[str, Any] = field(default_factory=dict)

    def adjust(self, trainer: Any, args: BaseArguments, callbacks: list[Any]) -> list[Any]:
        """Make a trainer write to the temporary folder; the first trainer of this run is replayed."""
        from ...callbacks.notebook import NotebookProgressCallback
        from ...callbacks.printer import PrinterCallback
        from ...callbacks.progress import ProgressCallback

        folder = str(self.scratch)
        if self.trainer is None and Path(str(args.output_dir)).resolve() == self.run:
            self.trainer = trainer
            self._listen_for_request(trainer)
        else:
            folder = tempfile.mkdtemp(dir=folder)
        for name, value in {**INERT, "output_dir": folder}.items():
            setattr(args, name, value)
        screens = (NotebookProgressCallback, PrinterCallback, ProgressCallback)
        return [each for each in without_reporters(callbacks) if not isinstance(each, screens)]

    def _listen_for_request(self, trainer: Any) -> None:
        """Record the checkpoint passed to `train()`: the run may have started from one in another folder."""
        internals = trainer._loopwright
        original = internals.resume_request

        def noted(*request: Any) -> Any:
            self.requested = original(*request)
            return self.requested

        internals.resume_request = noted

    def train(self, trainer: Any) -> Any:
        """Replaces `train()`: replays the run's trainer; other trainers train normally."""
        from ...core.trainer import BaseTrainer

        if trainer is self.trainer:
            self._replay(trainer)
            raise Replayed
        BaseTrainer.train_instead = None
        try:
            return trainer.train()
        finally:
            BaseTrainer.train_instead = self.train

    def _replay(self, trainer: Any) -> None:
        from ...core.loop import run_training

        self.start = self._checkpoint()
        trainer.add_callback(ReplayCallback(self))
        internals = trainer._loopwright
        internals.save_now = lambda: None
        trainer.is_in_train = True
        internals.new_run()
        internals.prepare_training(self.start)
        internals.start_clock()
        run_training(internals)
        rows = read_metrics(self.scratch) if (self.scratch / FILE_NAME).exists() else []
        self.row = logged_rows(rows).get(self.step, {})

    def _checkpoint(self) -> str | None:
        """The newest intact checkpoint before the step: one of the run, or the one its script resumed from."""
        from ...core.checkpoint.manager import CheckpointManager

        manager = CheckpointManager(self.run, notices=Notices(quiet=True))
        complete = manager.complete()
        for step in sorted((each for each in complete if each < self.step), reverse=True):
            try:
                return _resumable(manager, str(complete[step]))
            except CheckpointError as error:
                print(f"skipping: {error}", file=sys.stderr)
        if isinstance(self.requested, str) and os.path.isdir(self.requested):
            return self.requested
        return None


def _resumable(manager: Any, path: str) -> str:
    """The path of a checkpoint if it is intact and contains more than weights."""
    from ...core.checkpoint.folder import PROGRESS

    found = manager.find(path)
    if not os.path.isfile(os.path.join(path, PROGRESS)):
        raise CheckpointError(f"{os.path.basename(path)} holds weights only")
    return str(found)


class ReplayCallback(TrainerCallback):
    """Logs at the steps of the run and stops at the requested one; added last, so that its settings win."""

    def __init__(self, replay: Replay) -> None:
        self.replay = replay
        self._place: tuple[int, int] = (0, 0)

    def on_step_begin(self, args: BaseArguments, state: Any, control: Any, **kwargs: Any) -> None:
        progress = self.replay.trainer._loopwright.run.progress
        self._place = (progress.epoch, progress.samples_in_epoch)

    def on_step_end(self, args: BaseArguments, state: Any, control: Any, **kwargs: Any) -> None:
        control.should_log = state.global_step in self.replay.rows
        control.should_save = False
        control.should_training_stop = state.global_step >= self.replay.step
        if control.should_training_stop:
            control.should_evaluate = False
            self.replay.samples = self._samples()

    def on_epoch_end(self, args: BaseArguments, state: Any, control: Any, **kwargs: Any) -> None:
        control.should_save = control.should_log = False
        if state.global_step >= self.replay.step:
            control.should_evaluate = False

    def _samples(self) -> list[int] | None:
        """The samples of the last update, if loopwright determines the order."""
        run = self.replay.trainer._loopwright.run
        sampler = getattr(run, "order_sampler", None)
        if sampler is None:
            return None
        epoch, start = self._place
        return [int(each) for each in sampler.order.epoch(epoch)[start : run.progress.samples_in_epoch]]


def run(words: list[str]) -> int:
    """Replay a logged step and compare; 0 equal, 1 different, 2 invalid input."""
    own, command = split_at_dashes(words)
    parser = argparse.ArgumentParser(
        "loopwright replay",
        usage="loopwright replay RUN --step N [--trust | -- python train.py ...]",
        description="Run up to a logged step again and compare the metrics with those in metrics.jsonl.",
    )
    parser.add_argument("run", metavar="RUN", type=Path, help="the output folder of the run")
    parser.add_argument("--step", type=int, required=True, help="a step that was logged")
    parser.add_argument("--trust", action="store_true", help="run the script that the folder itself names")
    add_json(parser)
    options = parser.parse_args(own)
    rows = _rows_with(options.run, options.step)
    here = contextlib.chdir(os.getcwd())  # the script may run in another folder
    with tempfile.TemporaryDirectory(prefix="loopwright-replay-") as scratch, here:
        replay = Replay(options.run.resolve(), options.step, rows, Path(scratch).resolve())
        _run_script(replay, _script(options.run, command, trust=options.trust))
    differences = compare(rows[options.step], replay.row)
    found = {"step": options.step, "logged": rows[options.step], "replayed": replay.row, "equal": not differences}
    show(options, found, report(replay, differences))
    return 1 if differences else 0


def _rows_with(folder: Path, step: int) -> dict[int, dict[str, Any]]:
    """The logged rows of a run; raises if the requested step was not logged."""
    if not (folder / FILE_NAME).is_file():
        raise ArgumentsError(f"{folder} has no {FILE_NAME}; it is not the output folder of a run that logged anything")
    rows = logged_rows(read_metrics(folder))
    if step not in rows:
        raise ArgumentsError(f"step {step} was not logged in {folder}; logged steps: {_ranges(sorted(rows)) or 'none'}")
    return rows


def logged_rows(rows: list[dict[str, Any]]) -> dict[int, dict[str, Any]]:
    """The training rows by step, without those of evaluations."""
    return {row["step"]: row for row in rows if "loss" in row}


def _script(folder: Path, command: list[str], *, trust: bool) -> Script:
    """The script of the command, else of the run's record; changes to the run's working folder."""
    if command:
        return script_in(command)
    record = read_record(folder)
    if record is None and not (folder / "run.json").exists():
        raise ArgumentsError(f"{folder} has no run.json with the command of the run; give the command after --")
    if record is None or not _is_record(record):
        raise ArgumentsError(f"{folder / 'run.json'} is not the record of a run; give the command after --")
    if any(MASK in word for word in record["argv"]):
        raise ArgumentsError(
            f"the command in {folder / 'run.json'} was recorded without its secrets; give the command after --"
        )
    if not trust and not _is_trusted(folder, record):
        script = os.path.join(record["folder"], record["argv"][0])
        raise ArgumentsError(
            f"{folder / 'run.json'} names the script {script}, which would be run; add --trust if you trust this "
            "folder, or give the command after --"
        )
    if record["python"] != sys.executable:
        print(f"the run used {record['python']}, but this is {sys.executable}", file=sys.stderr)
    if not os.path.isdir(record["folder"]):
        raise ArgumentsError(
            f"the run was started in {record['folder']}, which does not exist; give the command after --"
        )
    os.chdir(record["folder"])
    return script_of_record(record["argv"])


def _is_record(record: Any) -> bool:
    texts = isinstance(record, dict) and all(isinstance(record.get(name), str) for name in ("python", "folder"))
    words = record.get("argv") if texts else None
    return isinstance(words, list) and bool(words) and all(isinstance(word, str) for word in words)


def _is_trusted(folder: Path, record: dict[str, Any]) -> bool:
    """Whether the user confirms the command on a terminal: a folder from elsewhere may name any script."""
    if not sys.stdin.isatty():
        return False
    words = " ".join(record["argv"])
    print(f"{folder / 'run.json'} names this command, to be run in {record['folder']}:\n  {words}")
    answer = input("Run it? [y/N] ")
    return answer.strip().lower() in ("y", "yes")


def _run_script(replay: Replay, script: Script) -> None:
    from ...core.trainer import BaseTrainer

    BaseTrainer.train_instead = replay.train
    try:
        with adjusted_trainers(replay.adjust):
            script.run()
    except Replayed:
        return
    finally:
        BaseTrainer.train_instead = None
    raise ArgumentsError(f"{script.target} exited without training into {replay.run}; is this the command of that run?")


def compare(logged: dict[str, Any], replayed: dict[str, Any]) -> list[str]:
    """The names whose values are not bitwise equal."""
    return [name for name in COMPARED if not _same(logged.get(name), replayed.get(name))]


def _same(one: Any, other: Any) -> bool:
    if isinstance(one, float) and isinstance(other, float) and math.isnan(one) and math.isnan(other):
        return True
    return bool(one == other)


def report(replay: Replay, differences: list[str]) -> str:
    """The report: each compared value, and the result."""
    logged = replay.rows[replay.step]
    start = os.path.basename(replay.start) if replay.start else "the start"
    own_order = "unknown: the dataset decides its own order"
    samples = own_order if replay.samples is None else some(map(str, replay.samples), 64)
    lines = [f"step {replay.step} of {replay.run}, replayed from {start}", f"samples: {samples}"]
    lines.append(f"{'':<14} {'logged':<24} {'replayed':<24}")
    for name in COMPARED:
        if name in logged or name in replay.row:
            mark = "differs" if name in differences else "same"
            lines.append(f"{name:<14} {_shown(logged, name):<24} {_shown(replay.row, name):<24} {mark}")
    if not replay.row:
        lines.append(f"the replay did not reach step {replay.step}; it ended at {replay.trainer.state.global_step}")
    return "\n".join([*lines, f"different: {', '.join(differences)}" if differences else "equal"])


def _shown(row: dict[str, Any], name: str) -> str:
    return repr(row[name]) if name in row else "-"


def _ranges(steps: list[int], most: int = 30) -> str:
    """Steps as text: all of them, or the first and last ones if there are many."""
    if len(steps) <= most:
        return ", ".join(map(str, steps))
    half = most // 2
    return f"{_ranges(steps[:half])}, ... ({len(steps)} in all) ..., {_ranges(steps[-half:])}"
