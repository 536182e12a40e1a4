"""Searching with sweeps of Weights & Biases: its server chooses the values; without it, an agent of this machine does.

Offline (`WANDB_MODE=offline` or `disabled`) no server is contacted: methods `random` and `grid` are carried out here,
each trial is an offline run of W&B in the sweep's group, and the search is continued like others. The method `bayes`
exists on the server only.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable
from typing import Any

from ...core.outputs import BestRun
from ...core.trial import folder_name
from ...errors import ArgumentsError, MissingPackage, SearchError
from ..coordinator import better, never
from ..journal import Task
from ..session import Search, best_run
from ..space import DEFAULT, Choice, Interval, Space
from ..trial_run import Job
from ..trials import RandomTrial
from .own_backend import OwnSearch

OPTIONS = ("sweep_id", "project", "name", "entity", "metric")
"""The options that transformers has for sweeps."""
LOCAL_METHODS = ("random", "grid")
INTERVALS: dict[str, Callable[[float, float], Interval]] = {
    "uniform": Interval,
    "int_uniform": lambda low, high: Interval(low, high, integer=True),
    "log_uniform_values": lambda low, high: Interval(low, high, log=True),
    "log_uniform": lambda low, high: Interval(math.exp(low), math.exp(high), log=True),  # its bounds are exponents
}


def is_offline() -> bool:
    """Whether W&B is set to contact no server."""
    return os.environ.get("WANDB_MODE", "").lower() in ("offline", "disabled", "dryrun")


class SweepSearch:
    """A search whose values come from a sweep."""

    def __init__(self, search: Search) -> None:
        try:
            import wandb
        except ImportError:
            raise MissingPackage("wandb", needed_for="backend='wandb'") from None
        self.wandb, self.search = wandb, search
        self.direction = search.direction
        if not search.runner.is_alone:
            raise ArgumentsError("backend='wandb' runs trials of one rank; use backend='optuna' with several ranks")
        unknown = [name for name in search.request.options if name not in OPTIONS]
        if unknown:
            raise ArgumentsError(
                [f"{name} is not an option of a sweep; there are {', '.join(OPTIONS)}" for name in unknown]
            )
        self.options: dict[str, Any] = {name: search.request.options.get(name) for name in OPTIONS}
        self.metric = self.options["metric"] or "objective"
        self.best: BestRun | None = None

    def config(self) -> dict[str, Any]:
        """The configuration of the sweep."""
        space = self.search.space
        config = sweep_of(space) if isinstance(space, Space) else dict(space(None))
        if not isinstance(config.get("parameters"), dict):
            raise ArgumentsError("with backend='wandb', hp_space returns a sweep with the key 'parameters'")
        name = {"name": self.options["name"]} if self.options["name"] else {}
        return {**config, **name, "metric": {"name": self.metric, "goal": self.direction}}

    def run(self) -> BestRun:
        """Run the trials and return the best one."""
        config = self.config()
        if is_offline():
            return LocalSweep(self.search, config, self.options, self.wandb).run()
        place = {name: self.options[name] for name in ("project", "entity") if self.options[name]}
        sweep = self.options["sweep_id"] or self.wandb.sweep(config, **place)
        self.wandb.agent(sweep, function=self._trial, count=self.search.request.n_trials, **place)
        if self.best is None:
            raise SearchError(f"no trial of the sweep {sweep} was completed; see the messages of its agent")
        return best_run(self.best.run_id, self.best.objective, self.best.hyperparameters, sweep, self.best.checkpoint)

    def _trial(self) -> None:
        """One trial; called by the agent of W&B."""
        run = self.wandb.run or self.wandb.init()
        values, make_name = dict(run.config), self.search.request.hp_name
        name = None if make_name is None else folder_name(make_name(values))
        folder = os.path.join(self.search.folder, name or f"run-{run.id}")
        job = Job(0, values, values, folder, name, has_dict=True)
        outcome = self.search.run(job, values, never, lambda *given: log_to(run, *given))
        run.finish()
        if self.best is None or better(outcome.objective, self.best.objective, self.direction):  # type: ignore[arg-type]
            self.best = best_run(run.id, outcome.objective, values, None, outcome.checkpoint)


class LocalSweep(OwnSearch):
    """A sweep without a server."""

    def __init__(self, search: Search, config: dict[str, Any], options: dict[str, Any], wandb: Any) -> None:
        method = config.get("method", "random")
        if method not in LOCAL_METHODS or options["sweep_id"]:
            raise ArgumentsError(
                f"method={method!r}, sweep_id={options['sweep_id']!r}: without a server of W&B there are new sweeps "
                f"with the methods {' and '.join(LOCAL_METHODS)}; set WANDB_MODE=online for others"
            )
        search.space = space_of(config["parameters"])
        self._wandb, self._options = wandb, options
        super().__init__(search, method)

    def _run(self, task: Task, job: Job, trial: RandomTrial) -> None:
        run = self._wandb.init(
            mode="offline" if os.environ.get("WANDB_MODE") != "disabled" else "disabled",
            project=self._options["project"] or os.environ.get("WANDB_PROJECT", "huggingface"),
            group=self._options["name"] or "sweep",
            name=job.name or f"run-{task.number}",
            config=job.values,
            dir=self.search.local_folder,
            reinit="finish_previous",
        )
        self.listen = lambda *given: log_to(run, *given)
        try:
            super()._run(task, job, trial)
        finally:
            run.finish()


def log_to(run: Any, step: int, metrics: dict[str, float], objective: Any) -> None:
    """Log an evaluation to a run of W&B, under the names that its tracker has."""
    named = {f"eval/{name.removeprefix('eval_')}" if name.startswith("eval_") else name: value
             for name, value in metrics.items()}  # fmt: skip
    run.log({**named, "objective": objective}, step=step)


def sweep_of(space: Space) -> dict[str, Any]:
    """The sweep that a space describes."""
    parameters: dict[str, Any] = {}
    for name, part in space.parts.items():
        if isinstance(part, Choice):
            parameters[name] = {"values": list(part.values)}
        elif part.integer:
            parameters[name] = {"distribution": "int_uniform", "min": int(part.low), "max": int(part.high)}
        else:
            kind = "log_uniform_values" if part.log else "uniform"
            parameters[name] = {"distribution": kind, "min": part.low, "max": part.high}
    return {"method": "random" if space is DEFAULT or space.size is None else "grid", "parameters": parameters}


def space_of(parameters: dict[str, Any]) -> Space:
    """The space that the parameters of a sweep describe."""
    parts: dict[str, Choice | Interval] = {}
    problems = []
    for name, given in parameters.items():
        if "values" in given or "value" in given:
            parts[name] = Choice(tuple(given["values"] if "values" in given else [given["value"]]))
            continue
        low, high = given.get("min"), given.get("max")
        are_integers = isinstance(low, int) and isinstance(high, int)
        kind = given.get("distribution") or ("int_uniform" if are_integers else "uniform")
        if kind not in INTERVALS or low is None or high is None:
            problems.append(f"{name}: {given} is not available without a server; use {', '.join(INTERVALS)} or values")
            continue
        parts[name] = INTERVALS[kind](low, high)
    if problems:
        raise ArgumentsError(problems)
    return Space(parts)
