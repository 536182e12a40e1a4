"""`loopwright check CONFIG`: try a configuration in about a minute, and predict memory, disk space and time."""

from __future__ import annotations

import errno
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ...errors import CheckpointError
from ..command import DONE, FAILED, Result, Usage, Words, run_command
from ..model_errors import model_errors

if TYPE_CHECKING:
    from ...config import Config
    from ...config.trial import Measured
    from ...pt.trainer import Trainer

GIB, MIB = 2**30, 2**20
BUSY = 1.5
"""Programs that want a processor, for each processor, from which a machine is busy with others than the trial."""
TRAINED, PLAIN = "\033[1;32m", "\033[0m"
"""Colours of trained text on a terminal; elsewhere it is in double brackets."""
USAGE = Usage(
    "check",
    "CONFIG",
    "Try a configuration: some updates, an evaluation with its metrics, a save and a load, in a temporary folder. "
    "Predicts peak memory, disk space and time, and shows one sample. Exit code 1: the run would not fit.",
    takes_overrides=True,
)


def run(words: list[str]) -> int:
    """Try the configuration; returns the exit code."""
    return run_command(USAGE, words, _check)


def _check(words: Words) -> Result:
    from ...config import load_config
    from ...config.trial import SETTINGS, run_trial

    started = time.time()
    path = words.first("a configuration file")
    config = load_config(path, words.overrides)
    check_folder(config)
    with tempfile.TemporaryDirectory(prefix="loopwright-check-", ignore_cleanup_errors=True) as folder:
        trial = load_config(path, [*words.overrides, *SETTINGS, f"output_dir={folder}/run"])
        materials = trial.task.build(trial.request())
        with model_errors(config, words, lambda: 0):
            trainer, measured = run_trial(trial, materials, started=started, saves=lambda made: saves_of(config, made))
        words.is_input = False
        report = report_of(config, trainer, measured, materials.notes)
        report["sample"] = materials.sample() if materials.sample is not None else None
    return Result(report, text_of(report), DONE if not report["problems"] else FAILED)


def check_folder(config: Config) -> None:
    """Raise if the run could not write its output folder or resume from its checkpoint; creates nothing."""
    from ...args.paths import is_url, working_folder
    from ...core.actions import cannot_be_written
    from ...core.checkpoint.manager import CheckpointManager, get_last_checkpoint
    from ...notices import Notices

    folder, request = str(config.args.output_dir), config.args.resume_from_checkpoint
    existing = _existing(Path(working_folder(folder)))
    if not existing.is_dir() or not os.access(existing, os.W_OK):
        raise cannot_be_written(folder, os.strerror(errno.EACCES if existing.is_dir() else errno.ENOTDIR))
    if is_url(folder) or config.args.push_to_hub or request in (None, False, "auto"):
        return
    if request is True and get_last_checkpoint(folder) is None:
        raise CheckpointError(f"{folder} has no checkpoint, and resume_from_checkpoint=True needs one; remove it")
    if isinstance(request, str) and not is_url(request):
        CheckpointManager(folder, notices=Notices(quiet=True)).local(request, asked_by="resume_from_checkpoint=")


def saves_of(config: Config, trainer: Trainer) -> int:
    """How often the run of a configuration saves; `trainer` is that of its trial."""
    from ...config.trial import occurrences

    plan = trainer._loopwright.data.make_plan(trainer.get_train_dataloader())
    return occurrences(config.args.save_strategy, config.args.save_steps, plan.max_steps, plan.updates_per_epoch)


def report_of(config: Config, trainer: Trainer, found: Measured, notes: Sequence[str] = ()) -> dict[str, Any]:
    """Everything that the trial has shown, in JSON types; `notes` were printed when the data were read."""
    from ...config.trial import occurrences
    from ...core.measure.host_memory import free_memory, host_load
    from .explain import plan_of

    plan, args = plan_of(trainer), config.args
    steps, per_epoch = plan["steps"], plan["steps_per_epoch"]
    saves = saves_of(config, trainer)
    evaluations = occurrences(args.eval_strategy, args.eval_steps or args.logging_steps, steps, per_epoch)
    seconds = seconds_of(found, steps=steps, evaluations=evaluations, saves=saves)
    kept = min(saves, args.save_total_limit or saves) + 1 if saves else 0
    disk = shutil.disk_usage(_existing(Path(str(args.output_dir))))
    report: dict[str, Any] = {
        "plan": plan,
        "memory": found.memory,
        "memory_free": None if args.device.type == "cuda" else free_memory(),
        "load": host_load(),
        "checkpoint": {"bytes": found.checkpoint_bytes, "needed": found.checkpoint_bytes * kept, "free": disk.free},
        "seconds": {**seconds, "total": sum(seconds.values()), "per_step": found.update_seconds},
        "metrics": found.metrics,
        "loaded_step": found.loaded_step,
        "speed": found.speed.as_dict(),
        "speed_text": str(found.speed),
        "notes": list(notes),
    }
    refused = [f"{note} (an error because strict=True)" for note in notes if args.strict]
    report["problems"] = [*problems_of(report), *refused]
    return report


def seconds_of(found: Measured, *, steps: int, evaluations: int, saves: int) -> dict[str, float]:
    """The seconds of a run with so many updates, evaluations and saves, by the parts of its time ledger."""
    evaluation = (found.evaluation_seconds or 0.0) * evaluations + found.first_evaluation_seconds * bool(evaluations)
    return {
        "start": found.start_seconds,
        "once": found.once_seconds,
        "updates": found.update_seconds * steps + found.slower_seconds + found.closing_seconds,
        "evaluations": evaluation,
        "saves": found.save_seconds * saves + found.last_save_seconds * bool(saves),
        "end": found.end_seconds,
    }


def problems_of(report: dict[str, Any]) -> list[str]:
    """What would make the run fail."""
    found = []
    needed, free = report["checkpoint"]["needed"], report["checkpoint"]["free"]
    if needed > free:
        found.append(
            f"the checkpoints need {size(needed)} and the disk has {size(free)} free; lower save_total_limit or "
            "choose another output_dir"
        )
    if report["loaded_step"] is None:
        found.append("no checkpoint could be saved and loaded")
    return found


def _existing(path: Path) -> Path:
    """The nearest folder that exists."""
    path = path.absolute()
    while not path.exists() and path != path.parent:
        path = path.parent
    return path


# ---- text ------------------------------------------------------------------------------------------------------------

PARTS = {
    "program": "program, libraries and data",
    "weights": "weights",
    "gradients": "gradients",
    "optimizer": "optimizer",
    "activations": "activations and the rest",
    "peak": "peak",
}


def text_of(report: dict[str, Any]) -> str:
    """The report for a terminal."""
    plan, seconds, saved = report["plan"], report["seconds"], report["checkpoint"]
    lines = [
        f"{plan['model']}: {plan['parameters']:,} parameters, {plan['trained_parameters']:,} trained; {plan['device']}",
        (
            f"{plan['training_samples']:,} samples, {plan['steps']:,} steps of {plan['samples_per_step']:,} samples; "
            f"{plan['strategy']}"
        ),
        "",
        f"memory ({'of the GPU' if 'cuda' in plan['device'] else 'of the process'}):",
        *(f"  {title:<28}{size(report['memory'][name]):>12}" for name, title in PARTS.items()),
        f"checkpoint: {size(saved['bytes'])}; the run needs {size(saved['needed'])} of {size(saved['free'])} free",
        (
            f"time: {duration(seconds['total'])} ({seconds['per_step'] * 1000:,.1f} ms a step; start "
            f"{duration(seconds['start'])}, proofs and compiling {duration(seconds['once'])}, updates "
            f"{duration(seconds['updates'])}, evaluations {duration(seconds['evaluations'])}, saves "
            f"{duration(seconds['saves'])}, end {duration(seconds['end'])})"
        ),
    ]
    if (report["load"] or 0.0) > BUSY:
        lines.append(
            f"other programs use this machine ({report['load']:.1f} running for each processor); a run alone is faster"
        )
    if report["metrics"]:
        shown = [f"{name} {value:.4g}" for name, value in report["metrics"].items() if isinstance(value, float)]
        lines.append(f"evaluation: {', '.join(shown)}")
    if report["loaded_step"] is not None:
        lines.append(f"a checkpoint was saved and loaded (step {report['loaded_step']})")
    lines += ["", report["speed_text"]]
    if report["sample"]:
        lines += ["", "one sample; the marked text is trained:", marked(report["sample"], sys.stdout.isatty())]
    return "\n".join([*lines, *(f"problem: {text}" for text in report["problems"])])


def marked(pieces: list[tuple[str, bool]], is_terminal: bool) -> str:
    """A sample with its trained text in colour, or in double brackets where there is none."""
    begin, end = (TRAINED, PLAIN) if is_terminal else ("[[", "]]")
    text, is_open = "", False
    for piece, trained in pieces:
        if trained != is_open:
            text += begin if trained else end
            is_open = trained
        text += piece
    return text + (end if is_open else "")


def size(count: int) -> str:
    """Bytes as MiB or GiB."""
    return f"{count / GIB:,.2f} GiB" if count >= GIB else f"{count / MIB:,.2f} MiB"


def duration(seconds: float) -> str:
    """Seconds as hours, minutes and seconds."""
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes:02d} min" if hours else f"{minutes} min {rest:02d} s"
