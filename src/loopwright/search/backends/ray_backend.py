"""Searching with Ray Tune: its workers train the trials, its schedulers and searchers choose."""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from ...args.base import BaseArguments
from ...args.field import nearest
from ...core.events import TrainerCallback
from ...core.outputs import BestRun
from ...core.trial import Reply, folder_name
from ...errors import ArgumentsError, MissingPackage, SearchError
from ..coordinator import checked
from ..recipe import Recipe
from ..session import Search, best_run
from ..space import Choice, Interval, Space
from ..trial_run import Job, run_trial

OBJECTIVE, CHECKPOINT = "objective", "loopwright_checkpoint"
SCOPE = "RAY_SCOPE"
"""Variable that transformers reads: which result of a trial counts, by default the last."""


@dataclass(frozen=True)
class Shared:
    """What every worker of Ray gets."""

    recipe: Recipe
    folder: str
    compute_objective: Callable[[dict[str, float]], Any]
    hp_name: Callable[[Any], str] | None


class RaySearch:
    """A search that Ray Tune runs."""

    def __init__(self, search: Search) -> None:
        try:
            from ray import tune
        except ImportError:
            raise MissingPackage("ray", needed_for="backend='ray'", install="'ray[tune]'") from None
        self.tune, self.search, self.mode = tune, search, search.direction[:3]
        if search.trainer._loopwright.strategy.world_size > 1:
            raise ArgumentsError(
                "backend='ray' starts the processes of its trials itself; start the script without a launcher"
            )
        self.options = dict(search.request.options)
        known = {*inspect.signature(tune.run).parameters} - {"run_or_experiment", "config", "num_samples"}
        unknown = [name for name in self.options if name not in known]
        if unknown:
            raise ArgumentsError([f"{name} is not an option of ray.tune.run{nearest(name, known)}" for name in unknown])

    def run(self) -> BestRun:
        """Run the trials and return the best one."""
        search, folder = self.search, os.path.abspath(self.search.folder)
        shared = Shared(search.recipe, folder, search.compute_objective, search.request.hp_name)
        analysis = self.tune.run(
            self.tune.with_parameters(train_on_ray, shared=shared),
            config=self._distributions(),
            num_samples=search.request.n_trials,
            **{**self._defaults(folder), **self.options},
        )
        best = analysis.get_best_trial(metric=OBJECTIVE, mode=self.mode, scope=os.environ.get(SCOPE, "last"))
        if best is None:
            raise SearchError(f"no trial of {search.folder} has reported an objective; see the messages of its trials")
        result = best.last_result
        return best_run(best.trial_id, result[OBJECTIVE], best.config, analysis, result.get(CHECKPOINT) or None)

    def _defaults(self, folder: str) -> dict[str, Any]:
        """Options that the user may replace: one worker for each trial, and Ray's files in the output folder."""
        gpus = getattr(self.search.trainer.args, "n_gpu", 0)
        return {
            "resources_per_trial": {"cpu": 1, **({"gpu": 1} if gpus else {})},
            "storage_path": os.path.join(folder, "ray"),
            "name": "search",
            "resume": "AUTO",
            "reuse_actors": False,
            "verbose": 1,
        }

    def _distributions(self) -> dict[str, Any]:
        space = self.search.space
        if isinstance(space, Space):
            return {name: self._part(part) for name, part in space.parts.items()}
        found = space(None)
        if not isinstance(found, dict):
            raise ArgumentsError(
                "with backend='ray', hp_space receives None and returns a dict of arguments and distributions of "
                f"ray.tune; it returned {type(found).__name__}"
            )
        return found

    def _part(self, part: Choice | Interval) -> Any:
        if isinstance(part, Choice):
            return self.tune.choice(list(part.values))
        if part.integer:  # Ray's upper bounds are not included
            make = self.tune.lograndint if part.log else self.tune.randint
            return make(int(part.low), int(part.high) + 1)
        return (self.tune.loguniform if part.log else self.tune.uniform)(part.low, part.high)


class RayReports(TrainerCallback):
    """Reports each evaluation to Ray once the checkpoint of its step is saved, and with it."""

    def __init__(self, compute_objective: Callable[[dict[str, float]], Any]) -> None:
        self._compute = compute_objective
        self._pending: dict[str, Any] | None = None
        self._sent: str | None = None
        self.trainer: Any = None

    def report(self, step: int, metrics: dict[str, float]) -> Reply:
        """Keep an evaluation until the next event."""
        objective = checked(self._compute(dict(metrics)))
        self._pending = {**metrics, OBJECTIVE: objective, "step": step}
        return Reply(objective)

    def send(self) -> None:
        """Report the evaluation; Ray may end this process here."""
        from ray import tune

        if self._pending is None:
            return
        manager = self.trainer._loopwright.run.checkpoints
        manager.wait()
        saved = manager.complete()
        newest = str(saved[max(saved)]) if saved else None
        best = self.trainer.state.best_model_checkpoint or newest
        metrics, self._pending = {**self._pending, CHECKPOINT: best or ""}, None
        is_new, self._sent = newest is not None and newest != self._sent, newest
        tune.report(metrics, checkpoint=tune.Checkpoint.from_directory(newest) if is_new and newest else None)

    def on_step_begin(self, args: BaseArguments, state: Any, control: Any, **kwargs: Any) -> None:
        self.send()

    def on_epoch_end(self, args: BaseArguments, state: Any, control: Any, **kwargs: Any) -> None:
        self.send()

    def on_train_end(self, args: BaseArguments, state: Any, control: Any, **kwargs: Any) -> None:
        self.send()


def train_on_ray(config: dict[str, Any], shared: Shared) -> None:
    """One trial, in a worker of Ray."""
    from ray import tune

    values = {name: value for name, value in config.items() if name != "wandb"}
    trial_id = tune.get_context().get_trial_id()
    name = None if shared.hp_name is None else folder_name(shared.hp_name(config))
    checkpoint = tune.get_checkpoint()
    reports = RayReports(shared.compute_objective)
    resume: str | bool = False
    if checkpoint is not None:
        # A folder of this machine: Ray downloads it if its storage is elsewhere.
        resume = checkpoint.to_directory()
    job = Job(0, values, values, os.path.join(shared.folder, name or f"run-{trial_id}"), name, resume)
    run_trial(shared.recipe, job, values, reports, [reports])
    reports.send()
