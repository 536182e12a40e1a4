"""Searches without a package: random values, grids, successive halving and populations, over a journal."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import replace
from pathlib import Path
from typing import Any

from ...args.field import nearest
from ...core.outputs import BestRun
from ...core.trial import CONTINUE, PAUSE
from ...errors import ArgumentsError, SearchError
from ...notices import logger
from ..coordinator import Decide, Listen
from ..journal import Entry, Journal, Task
from ..plans import Halving, Independent, Plan, Population, best_of
from ..session import BaseSearch, best_run
from ..space import Space
from ..trial_run import Job, Outcome
from ..trials import RandomTrial

INHERITED = "inherited"
"""Folder of a trial with the checkpoint of another one that it continues from."""


def random_plan(search: BaseSearch) -> Plan:
    """Independent random values."""
    return Independent(search.request.n_trials)


def grid_plan(search: BaseSearch) -> Plan:
    """Every combination of the values, or the first `n_trials` of them."""
    if not isinstance(search.space, Space):
        raise ArgumentsError("backend='grid' needs hp_space as a dict of arguments and lists of their values")
    points = search.space.grid()
    return Independent(min(len(points), search.request.n_trials), tuple(points))


def asha_plan(search: BaseSearch) -> Plan:
    """Successive halving; options `min_steps` and `reduction_factor`."""
    options = search.request.options
    factor, first = options.get("reduction_factor", 3), options.get("min_steps")
    _check_counts({"reduction_factor": (factor, 2), "min_steps": (first, 1)})
    search.check_pausing()
    return Halving(search.request.n_trials, search.direction, first, factor)


def population_plan(search: BaseSearch) -> Plan:
    """Population-based training; options `interval` and `quantile`."""
    options = search.request.options
    quantile, interval = options.get("quantile", 0.25), options.get("interval")
    _check_counts({"interval": (interval, 1)})
    if not isinstance(quantile, float) or not 0 < quantile <= 0.5:
        raise ArgumentsError(f"quantile={quantile!r}: must be a number above 0 and at most 0.5")
    if search.request.n_trials < 2:
        raise ArgumentsError("n_trials=1: a population has at least 2 trials")
    search.check_pausing()
    return Population(search.request.n_trials, search.direction, search.space, search.seed, interval, quantile)


PLANS: dict[str, tuple[Callable[[BaseSearch], Plan], tuple[str, ...]]] = {
    "random": (random_plan, ()),
    "grid": (grid_plan, ()),
    "asha": (asha_plan, ("min_steps", "reduction_factor")),
    "population": (population_plan, ("interval", "quantile")),
}
"""The plan of each backend, and its options."""
OF_ALL = ("n_jobs", "catch")


def _check_counts(given: dict[str, tuple[Any, int]]) -> None:
    problems = [
        f"{name}={value!r}: must be an integer of at least {least}"
        for name, (value, least) in given.items()
        if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < least)
    ]
    if problems:
        raise ArgumentsError(problems)


class OwnSearch:
    """Runs the tasks of a plan and records them."""

    listen: Listen | None = None
    """Receives each evaluation of a trial."""

    def __init__(self, search: BaseSearch, plan: str | None = None) -> None:
        self.search, request = search, search.request
        make_plan, options = PLANS[plan or request.backend]
        known = (*options, *OF_ALL)
        unknown = [name for name in request.options if name not in known and plan is None]
        if unknown:
            raise ArgumentsError(
                [f"backend={request.backend!r} has no option {name!r}{nearest(name, known)}" for name in unknown]
            )
        self.direction = search.direction
        self.jobs = request.options.get("n_jobs", 1)
        self.catch = request.options.get("catch", ())
        _check_counts({"n_jobs": (self.jobs, 1)})
        if self.jobs > 1 and not search.may_run_several:
            raise ArgumentsError(
                f"n_jobs={self.jobs}: several trials at a time need a process of one rank for each; use n_jobs=1"
            )
        self.plan = make_plan(search)
        self.journal = Journal(search.local_folder)
        self._check_journal()

    def _check_journal(self) -> None:
        head = {**self.search.fingerprint(), "backend": self.search.request.backend, "seed": str(self.search.seed)}
        if self.journal.head is None:
            self.journal.describe(head)
            return
        if self.journal.head.get("backend") != head["backend"]:
            raise ArgumentsError(
                f"{self.journal.path} belongs to a search with backend={self.journal.head.get('backend')!r}; choose "
                "another output_dir, or delete it to search from the beginning"
            )
        self.search.check_fingerprint(self.journal.head, str(self.journal.path))
        logger.warning(f"continuing the search in {self.search.folder}: {len(self.journal.entries)} trials have begun")

    def run(self) -> BestRun:
        """Run tasks until the plan has none; returns the best trial."""
        busy: dict[Future[None], int] = {}
        with ThreadPoolExecutor(self.jobs) as pool:
            while True:
                task = self.plan.next(self.journal.entries, {*busy.values()}) if len(busy) < self.jobs else None
                if task is None and not busy:
                    break
                if task is not None and self.jobs == 1:  # in the main thread, which receives signals
                    self._run(*self._begin(task))
                    continue
                if task is not None:
                    busy[pool.submit(self._run, *self._begin(task))] = task.number
                    continue
                for done in wait(busy, return_when=FIRST_COMPLETED).done:
                    del busy[done]
                    done.result()
        return self._best()

    def _begin(self, task: Task) -> tuple[Task, Job, RandomTrial]:
        entries = self.journal.entries
        before = entries.get(task.number)
        trial = RandomTrial(task.number, self.search.seed, task.params)
        job = self.search.job(task.number, trial, name=None if before is None else before.name)
        origin = self._origin(task, job, before)
        # The checkpoint's own values: of the other trial, or of this one when the search was killed meanwhile.
        held = entries[task.source].values if task.source is not None else None
        if before is not None and before.task == task:
            resume: str | bool = before.begun_from or "auto"
            origin = before.begun_from
        else:
            resume = origin or False
            self.journal.begin(task, job, origin)
        differing = {
            name: (held[name], value)
            for name, value in job.values.items()
            if held is not None and name in held and held[name] != value
        }
        return task, replace(job, resume=resume, changed=differing), trial

    def _origin(self, task: Task, job: Job, before: Entry | None) -> str | None:
        """The checkpoint that a task continues from; another trial's is copied, because that trial may remove it."""
        if before is None or before.task == task:
            return None
        if task.source is None:
            return before.checkpoint
        found = self.journal.entries[task.source].checkpoint
        assert found is not None  # a paused trial has saved
        copy = Path(job.folder) / INHERITED / Path(found).name
        shutil.rmtree(copy.parent, ignore_errors=True)
        shutil.copytree(found, copy)
        return os.fspath(copy)

    def _run(self, task: Task, job: Job, trial: RandomTrial) -> None:
        outcome: Outcome | None = None
        try:
            outcome = self.search.run(job, trial, pausing(task.until), self.listen)
        except self.catch as error:
            logger.warning(f"trial {task.number} failed: {error}")
        except Exception:  # of the user's; recorded, and raised
            self.journal.end(task.number, None)
            raise
        self.journal.end(task.number, outcome)
        if outcome is not None:
            self.search.tell(job, outcome)

    def _best(self) -> BestRun:
        best = best_of(self.journal.entries, self.direction)
        if best is None:
            raise SearchError(
                f"no trial of {self.search.folder} was completed, so there is no best one; see the messages of its "
                "trials"
            )
        summary = list(self.journal.entries.values())
        return best_run(str(best.number), best.objective, best.params, summary, best.checkpoint)


def pausing(until: int | None) -> Decide:
    """Pause at the first evaluation at or after a step."""
    return lambda step, objective: PAUSE if until is not None and step >= until else CONTINUE
