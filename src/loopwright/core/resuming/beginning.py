"""The beginning of a run: it takes its output folder, finds its checkpoint and becomes the folder's current run."""

from __future__ import annotations

import os
import time
from dataclasses import replace
from typing import TYPE_CHECKING

from ...args.paths import working_folder
from ...args.problems import short
from ...errors import CheckpointError, LoopwrightError, OutputError, OwnerError
from ...notices import logger
from ..checkpoint.manager import CheckpointManager
from ..checkpoint.ownership.run_id import FINISHED, RUNNING, CurrentRun, new_id, read_current
from ..shutdown.interruption import is_interactive
from ..shutdown.signals import Interrupted
from .continuation import count_call, interrupted_checkpoint, own_command
from .run_record import is_restart, is_started_again, is_take_over, job_id, launch_id, write_record

if TYPE_CHECKING:
    from ..internals import Internals

Request = str | bool | None
"""The value of resume_from_checkpoint."""

FEW = 8
"""Steps that are listed in a message; of more, only the first and the last."""


def begin_run(internals: Internals, request: Request) -> str | None:
    """Take the output folder and make this run its current one; returns the checkpoint to resume from."""
    _check_request(request)
    internals.check_output_dir()
    _take_folder(internals)
    args, call = internals.args, count_call(internals.args.output_dir)
    checkpoint, current = _agree(internals, request, call)
    internals.run.resumes_by_command = request in (None, True, "auto") and call == 1 and not is_interactive()
    try:
        internals.run.checkpoints.begin(current, record=args.should_save)
    except OSError as error:
        if args.save_strategy != "no":
            raise OutputError(
                f"{args.output_dir}: the id of this run could not be written ({error}); free some space or choose "
                "another output_dir"
            ) from error
    if args.should_save:
        write_record(working_folder(args.output_dir))
        _tell_others(internals, is_fresh=checkpoint is None)
    return checkpoint


def _check_request(request: object) -> None:
    is_path = isinstance(request, str) or (isinstance(request, os.PathLike) and isinstance(os.fspath(request), str))
    if request is not None and not isinstance(request, bool) and not (is_path and os.fspath(request)):  # type: ignore[call-overload]
        raise CheckpointError(
            f"resume_from_checkpoint={short(request)} is not a checkpoint; use its folder or URL, True, False or 'auto'"
        )


def _take_folder(internals: Internals) -> None:
    """Lock the output folder: rank 0 first, then the other ranks that publish checkpoints, all as one run."""
    strategy, saves = internals.strategy, internals.args.should_save
    mine = _taken(internals, None) if saves and strategy.rank == 0 else (None, None)
    token, problem = strategy.broadcast(mine)
    if saves and strategy.rank != 0 and problem is None:
        _, problem = _taken(internals, token)
    if strategy.any_rank(problem is not None):
        raise problem or OwnerError(f"{internals.args.output_dir} is in use on another node, whose rank names the run")


def _taken(internals: Internals, token: str | None) -> tuple[str | None, OwnerError | None]:
    """The token of this run after it has taken the folder, or the reason why it cannot."""

    def pause(seconds: float) -> None:
        time.sleep(seconds)
        if internals.wants_to_leave:
            raise Interrupted

    try:
        return internals.run.checkpoints.take(token=token, take_over=_may_take_over(internals), pause=pause), None
    except OwnerError as error:
        return None, error


def _may_take_over(internals: Internals) -> bool:
    """Whether this run may take the folder of a living one. A restart may not: the other run may have taken it."""
    wanted = internals.args.take_over or is_take_over()
    if wanted and is_started_again():
        logger.warning("take_over has no effect when a launcher restarts a run")
        return False
    return wanted


def _agree(internals: Internals, request: Request, call: int) -> tuple[str | None, CurrentRun]:
    """The checkpoint to resume from and the run it belongs to. Rank 0 decides, so that all ranks use the same."""
    strategy, earlier = internals.strategy, _recorded(internals.run.checkpoints)
    restarted = request is not False and strategy.any_rank(is_restart(earlier))
    internals.run.before = earlier
    if internals.is_alone:
        return _choose(internals, request, earlier, call, restarted=restarted)
    found: str | None = None
    current = CurrentRun(None)
    problem: Exception | None = None
    if strategy.rank == 0:
        try:
            found, current = _choose(internals, request, earlier, call, restarted=restarted)
        except LoopwrightError as error:
            problem = error
    found, current, problem = strategy.broadcast((found, current, problem))
    if problem is not None:
        raise problem
    if strategy.any_rank(found is not None and not os.path.isdir(found)):
        raise CheckpointError(f"{found} does not exist on every node; resume from a shared folder")
    return found, current


def _choose(
    internals: Internals, request: Request, earlier: CurrentRun | None, call: int, *, restarted: bool
) -> tuple[str | None, CurrentRun]:
    """The requested checkpoint; for a run that its launcher or the user starts again, the newest one it has saved."""
    manager = internals.run.checkpoints
    found = manager.find("auto") if restarted else None
    if found is not None:
        logger.warning(f"restarted by the launcher, resuming from {found}")
    elif request is None and earlier is not None:
        found = interrupted_checkpoint(internals, earlier, call)
    is_chosen = found is None and request not in (None, True, False, "auto")
    if is_chosen and isinstance(request, str):
        request = internals.pushing.local_checkpoint(request)
    found = manager.find(request) if found is None else found
    current = CurrentRun(new_id()) if found is None else manager.resumed_run(found, is_chosen=is_chosen)
    return found, replace(current, job=job_id(), launch=launch_id(), status=RUNNING, command=own_command(), call=call)


def _recorded(manager: CheckpointManager) -> CurrentRun | None:
    """The run that the folder belonged to, if that is known."""
    try:
        return read_current(manager.storage)
    except CheckpointError:  # reported when checkpoints are searched; a fresh run writes a new one
        return None


def _tell_others(internals: Internals, *, is_fresh: bool) -> None:
    """Report the checkpoints of earlier runs, which this run neither resumes nor removes."""
    others = internals.run.checkpoints.others()
    if not others:
        return
    count = sum(map(len, others.values()))
    runs = "; ".join(f"{run or 'without id'}, {_shown(steps)}" for run, steps in others.items())
    word = "checkpoint" if count == 1 else "checkpoints"
    before = internals.run.before
    has_finished = before is not None and before.status == FINISHED and set(others) == {before.run}
    earlier = "a finished run" if has_finished else "an earlier run"
    begins = "this run starts over; they are " if is_fresh else ""
    text = (
        f"{internals.args.output_dir} holds {count} {word} of {earlier} ({runs}): {begins}left in place until this run "
        "saves the same step; resume one by its path"
    )
    if is_fresh:
        internals.notices.warn_once(text)
    else:
        logger.warning(text)


def _shown(steps: list[int]) -> str:
    if len(steps) == 1:
        return f"step {steps[0]}"
    return f"steps {steps[0]} to {steps[-1]}" if len(steps) > FEW else f"steps {', '.join(map(str, steps))}"
