"""Searches: what a user has requested, and how one trial is run."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from types import FrameType
from typing import Any

from ..args.paths import working_folder
from ..core.checkpoint.manager import CheckpointManager
from ..core.distributed.description import described
from ..core.outputs import BestRun
from ..core.resuming.continuation import WITHOUT_EFFECT
from ..core.trial import CONTINUE, PAUSE, PRUNE, default_objective, folder_name
from ..errors import ArgumentsError
from ..notices import Notices, logger
from .coordinator import Decide, Listen, TrialCoordinator
from .recipe import Recipe
from .runner import Runner
from .space import DEFAULT, read_space
from .stopping import Running, stopped_by_signals
from .trial_run import Job, Outcome

DIRECTIONS = ("minimize", "maximize")


@dataclass
class Request:
    """The arguments of `hyperparameter_search`."""

    hp_space: Any = None
    compute_objective: Callable[[dict[str, float]], Any] | None = None
    n_trials: int = 20
    direction: str | list[str] = "minimize"
    backend: str = "optuna"
    hp_name: Callable[[Any], str] | None = None
    options: dict[str, Any] = field(default_factory=dict)
    """Further options, for the backend."""

    def check(self) -> None:
        """Raise one error with all problems."""
        problems = []
        for each in self.directions:
            if each not in DIRECTIONS:
                problems.append(f"direction={each!r}: must be one of {', '.join(DIRECTIONS)}")
        if not self.directions:
            problems.append("direction=[]: name at least one direction")
        if isinstance(self.n_trials, bool) or not isinstance(self.n_trials, int) or self.n_trials < 1:
            problems.append(f"n_trials={self.n_trials!r}: must be an integer above 0")
        if self.hp_space is not None and not callable(self.hp_space) and not isinstance(self.hp_space, Mapping):
            problems.append("hp_space must be a function of the trial, or a dict of arguments and their values")
        for name in ("compute_objective", "hp_name"):
            if getattr(self, name) is not None and not callable(getattr(self, name)):
                problems.append(f"{name} must be a function")
        if problems:
            raise ArgumentsError(problems)

    @property
    def directions(self) -> list[str]:
        """The direction of each objective."""
        return [self.direction] if isinstance(self.direction, str) else list(self.direction)


class BaseSearch:
    """What all backends use: the request, the folder, and running one trial."""

    def __init__(self, request: Request, folder: str, seed: int, notices: Notices) -> None:
        self.request, self.folder, self.seed, self.notices = request, folder, seed, notices
        space = DEFAULT if request.hp_space is None else request.hp_space
        self.space: Callable[[Any], dict[str, Any]] = read_space(space) if isinstance(space, Mapping) else space
        self.compute_objective = request.compute_objective or default_objective
        self._named: dict[str, int] = {}
        self.running = Running()

    @property
    def direction(self) -> str:
        """The direction of a search with one objective."""
        if len(self.request.directions) > 1:
            raise ArgumentsError(
                f"backend={self.request.backend!r} has one objective; use backend='optuna' for several directions"
            )
        return self.request.directions[0]

    @property
    def local_folder(self) -> str:
        """The folder of this machine for the study."""
        return str(working_folder(self.folder))

    @property
    def may_run_several(self) -> bool:
        """Whether several trials may run at the same time."""
        raise NotImplementedError

    def check_pausing(self) -> None:
        """Raise if trials cannot be paused at evaluations and resumed."""

    def arguments(self) -> dict[str, Any]:
        """The values that all trials share."""
        raise NotImplementedError

    def run(self, job: Job, trial: Any, decide: Decide, listen: Listen | None = None) -> Outcome:
        """Run a trial; `decide` and `listen` are called after each evaluation."""
        raise NotImplementedError

    def job(self, number: int, trial: Any, *, name: str | None = None) -> Job:
        """The job of a trial: its values by `hp_space`, and its folder."""
        values = self.space(trial)
        if name is None and self.request.hp_name is not None:
            name = folder_name(self.request.hp_name(trial))
        other = self._named.setdefault(name or f"run-{number}", number)
        if other != number:
            raise ArgumentsError(
                f"hp_name returned {name!r} for trial {other} and for trial {number}; return another name for each"
            )
        folder = os.path.join(self.folder, name or f"run-{number}")
        return Job(number, dict(values), dict(getattr(trial, "params", values)), folder, name)

    def fingerprint(self) -> dict[str, str]:
        """What must be the same when a search continues, as short texts."""
        args = self.arguments()
        return {
            "direction": ", ".join(self.request.directions),
            "space": described(self.request.hp_space),
            "arguments": described({name: args[name] for name in sorted(args) if name not in WITHOUT_EFFECT}),
        }

    def check_fingerprint(self, earlier: Mapping[str, str], place: str) -> None:
        """Raise if the study in a file is that of another search."""
        now = self.fingerprint()
        changed = [name for name, text in now.items() if name in earlier and earlier[name] != text]
        if changed:
            raise ArgumentsError(
                f"{place} belongs to a search that differs in {' and '.join(changed)}; choose another output_dir, or "
                "delete it to search from the beginning"
            )

    @contextmanager
    def owned(self) -> Iterator[None]:
        """A context in which no other search uses the output folder, and SIGTERM lets trials save."""
        manager = CheckpointManager(self.folder, notices=self.notices)
        os.makedirs(self.local_folder, exist_ok=True)
        manager.take()
        try:
            with stopped_by_signals(self.running):
                yield
        finally:
            manager.release()

    def tell(self, job: Job, outcome: Outcome) -> None:
        """Log the end of a trial."""
        values = ", ".join(f"{name}={_short(value)}" for name, value in job.params.items())
        state = {CONTINUE: "", PRUNE: " (pruned)", PAUSE: " (paused)"}[outcome.decision]
        logger.info(f"trial {job.number}: {values} -> {_short(outcome.objective)} after step {outcome.step}{state}")


class Search(BaseSearch):
    """A search over the arguments of a trainer."""

    def __init__(self, trainer: Any, request: Request, *, in_process: bool, frame: FrameType | None) -> None:
        args, notices = trainer.args, trainer._loopwright.notices
        super().__init__(request, str(args.output_dir), int(args.seed), notices)
        self.trainer, self.recipe = trainer, Recipe.of(trainer, request.backend)
        self._in_process, self._frame = in_process, frame

    @cached_property
    def runner(self) -> Runner:
        """Runs trials; made by all ranks at their first use of it."""
        strategy = self.trainer._loopwright.strategy
        return Runner(self.recipe, strategy, self.notices, self.running, in_process=self._in_process, frame=self._frame)

    @property
    def may_run_several(self) -> bool:
        return self.runner.is_alone and not self.runner.in_process

    def check_pausing(self) -> None:
        args, name = self.trainer.args, self.request.backend
        if args.eval_strategy == "no":
            raise ArgumentsError(f"backend={name!r} compares trials at evaluations; set eval_strategy")
        if args.save_only_model:
            raise ArgumentsError(f"backend={name!r} resumes trials; set save_only_model=False")

    def arguments(self) -> dict[str, Any]:
        found: dict[str, Any] = self.trainer.args.to_dict()
        return found

    def run(self, job: Job, trial: Any, decide: Decide, listen: Listen | None = None) -> Outcome:
        return self.runner.run(job, trial, TrialCoordinator(trial, self.compute_objective, decide, listen))


def best_run(
    run_id: str, objective: float | list[float], values: dict[str, Any], summary: Any, checkpoint: str | None
) -> BestRun:
    """The result of a search."""
    best = BestRun(run_id, objective, values, summary)
    best.checkpoint = checkpoint
    return best


def _short(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)
