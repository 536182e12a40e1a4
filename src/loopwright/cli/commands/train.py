"""`loopwright train CONFIG`: train what a configuration describes; the same command resumes an interrupted run."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from ...report.page import FILE
from ..command import INTERRUPTED, STOPPED, Result, Usage, Words, run_command
from ..early_signals import StoppedEarly, stopped_early
from ..model_errors import model_errors

if TYPE_CHECKING:
    from ...config import Config
    from ...pt.trainer import Trainer

USAGE = Usage(
    "train",
    "CONFIG",
    "Train what a YAML, JSON or TOML file describes. After an interruption, the same command resumes.",
    takes_overrides=True,
)


def run(words: list[str]) -> int:
    """Train; returns the exit code."""
    return run_command(USAGE, words, _train)


def _train(words: Words) -> Result:
    try:
        with stopped_early():
            config, trainer, resume = _built(words)
    except StoppedEarly:
        return Result({"status": "interrupted", "step": 0, "checkpoint": None}, code=STOPPED)
    internals = trainer._loopwright
    try:
        with model_errors(config, words, lambda: trainer.state.global_step):
            output = trainer.train(resume_from_checkpoint=resume)
    except KeyboardInterrupt:
        return _stopped(trainer, STOPPED if _can_resume(trainer) else INTERRUPTED)
    except SystemExit as stop:
        return _stopped(trainer, int(stop.code or 0))
    finally:
        words.is_input = not internals.run.has_begun
    data = {"status": "finished", **_place(trainer), "metrics": output.metrics}
    report = Path(str(trainer.args.output_dir), FILE)
    place = f"open {report} in a browser" if report.is_file() else f"the run is in {trainer.args.output_dir}"
    return Result(data, f"finished after {output.global_step:,} step{'s' * (output.global_step != 1)}; {place}")


def _built(words: Words) -> tuple[Config, Trainer, bool | None]:
    """The configuration with its trainer, and whether it may resume."""
    from ...config import build_trainer, load_config
    from ...config.continuing import may_continue

    config = load_config(words.first("a configuration file"), words.overrides)
    trainer = build_trainer(config)
    return config, trainer, may_continue(config)  # said only of a run whose model and data can be loaded


def _stopped(trainer: Trainer, code: int) -> Result:
    return Result({"status": "interrupted", **_place(trainer)}, code=code)


def _can_resume(trainer: Trainer) -> bool:
    run = trainer._loopwright.run
    return run.resumes_by_command and run.checkpoints.current is not None and bool(run.checkpoints.complete())


def _place(trainer: Trainer) -> dict[str, Any]:
    saved = trainer.checkpoints.complete() if trainer.checkpoints.current is not None else {}
    newest = str(saved[max(saved)]) if saved else None
    return {"output_dir": str(trainer.args.output_dir), "step": trainer.state.global_step, "checkpoint": newest}
