"""Searching with Optuna: its samplers and pruners, over a study that is kept in a file and continued."""

from __future__ import annotations

import inspect
import os
from dataclasses import replace
from typing import Any

from ...core.outputs import BestRun
from ...core.shutdown.signals import Interrupted
from ...core.trial import CONTINUE, PRUNE
from ...errors import ArgumentsError, MissingPackage, SearchError
from ...notices import logger
from ..coordinator import Decide
from ..session import BaseSearch, best_run
from ..trial_run import Job, Outcome

STUDY, FILE = "search", "study.log"
FINGERPRINT, FOLDER, NAME, CHECKPOINT, STEP = (
    "loopwright:search", "loopwright:folder", "loopwright:name", "checkpoint", "step",
)  # fmt: skip
"""Attributes of studies and trials."""
OF_OPTIMIZE = ("timeout", "n_jobs", "catch", "callbacks", "gc_after_trial", "show_progress_bar")


class OptunaSearch:
    """A search whose values Optuna chooses."""

    def __init__(self, search: BaseSearch) -> None:
        try:
            import optuna
        except ImportError:
            raise MissingPackage("optuna", needed_for="backend='optuna'", install="'loopwright[search]'") from None
        self.optuna, self.search = optuna, search
        options = dict(search.request.options)
        self.how = {name: options.pop(name) for name in OF_OPTIMIZE if name in options}
        self._check(options)
        self.storage = self._storage(options.pop("storage", None))
        self.study = self._study(options)
        self.is_multi = len(search.request.directions) > 1

    def _check(self, options: dict[str, Any]) -> None:
        known = {*inspect.signature(self.optuna.create_study).parameters} - {"direction", "directions"}
        unknown = [name for name in options if name not in known]
        problems = [
            f"{name} is not an option of a search with Optuna; there are {', '.join(sorted([*known, *OF_OPTIMIZE]))}"
            for name in unknown
        ]
        if self.how.get("n_jobs", 1) != 1 and not self.search.may_run_several:
            problems.append(
                f"n_jobs={self.how['n_jobs']}: several trials at a time need a process of one rank for each; use "
                "n_jobs=1"
            )
        if problems:
            raise ArgumentsError(problems)

    def _storage(self, given: Any) -> Any:
        if given is not None:
            return self.optuna.storages.get_storage(given)
        journal = self.optuna.storages.journal
        return self.optuna.storages.JournalStorage(
            journal.JournalFileBackend(os.path.join(self.search.local_folder, FILE))
        )

    def _study(self, options: dict[str, Any]) -> Any:
        name = options.pop("study_name", None) or STUDY
        options.setdefault("load_if_exists", True)
        directions = self.search.request.directions
        study = self.optuna.create_study(storage=self.storage, study_name=name, directions=directions, **options)
        earlier = study.user_attrs.get(FINGERPRINT)
        if earlier is None:
            study.set_user_attr(FINGERPRINT, self.search.fingerprint())
        else:
            self.search.check_fingerprint(earlier, f"the study {name!r} of {self.search.folder}")
        return study

    def _run(self) -> BestRun | list[BestRun]:
        """Continue interrupted trials, then run new ones until there are as many as requested."""
        states = self.optuna.trial.TrialState
        earlier = self.study.get_trials(deepcopy=False)
        mine = [each for each in earlier if str(each.user_attrs.get(FOLDER, "")).startswith(self._own_prefix())]
        interrupted = [each for each in mine if each.state == states.RUNNING]
        ended = [each for each in earlier if each.state.is_finished() and not self._is_void(each)]
        left = self.search.request.n_trials - len(ended) - len(interrupted)
        if earlier:
            logger.warning(
                f"continuing the study in {self.search.folder}: {len(ended)} trials have ended, {len(interrupted)} "
                f"are resumed, {max(left, 0)} are new"
            )
        for each in interrupted:
            self._resume(each.number)
        for each in earlier:
            if each.state == states.RUNNING and self._is_void(each):
                self.study.tell(each.number, state=states.FAIL)
        if left > 0:
            self.study.optimize(self._objective, n_trials=left, **self.how)
        return self._best()

    def run(self) -> BestRun | list[BestRun]:
        """Run the trials and return the best one, or the best ones of several objectives."""
        try:
            return self._run()
        except Interrupted:
            raise KeyboardInterrupt from None

    def _own_prefix(self) -> str:
        return os.path.join(os.path.abspath(self.search.folder), "")

    def _is_void(self, trial: Any) -> bool:
        """Whether a trial was interrupted before it had a folder: it has no values yet, and another one replaces it."""
        has_ended = trial.state in (self.optuna.trial.TrialState.COMPLETE, self.optuna.trial.TrialState.PRUNED)
        return not has_ended and FOLDER not in trial.user_attrs and "storage" not in self.search.request.options

    def _objective(self, trial: Any) -> Any:
        job = self.search.job(trial.number, trial)
        trial.set_user_attr(NAME, job.name)
        trial.set_user_attr(FOLDER, os.path.abspath(job.folder))
        return self._result(trial, job)

    def _result(self, trial: Any, job: Job) -> Any:
        try:
            outcome = self.search.run(job, trial, self._decide(trial))
        except KeyboardInterrupt:  # Optuna would record a failed trial, which is not resumed
            raise Interrupted from None
        self._note(trial, outcome)
        self.search.tell(job, outcome)
        if outcome.decision == PRUNE:
            raise self.optuna.TrialPruned
        return outcome.objective

    def _decide(self, trial: Any) -> Decide:
        def decide(step: int, objective: Any) -> str:
            if self.is_multi:  # Optuna does not prune these
                return CONTINUE
            trial.report(objective, step)
            return PRUNE if trial.should_prune() else CONTINUE

        return decide

    def _note(self, trial: Any, outcome: Outcome) -> None:
        trial.set_user_attr(CHECKPOINT, outcome.checkpoint)
        trial.set_user_attr(STEP, outcome.step)

    def _resume(self, number: int) -> None:
        """Continue a trial whose search was interrupted, from its newest checkpoint."""
        study = self.storage.get_study_id_from_name(self.study.study_name)
        trial = self.optuna.trial.Trial(self.study, self.storage.get_trial_id_from_study_id_trial_number(study, number))
        job = self.search.job(number, trial, name=trial.user_attrs.get(NAME))
        states, catch = self.optuna.trial.TrialState, self.how.get("catch", ())
        try:
            objective = self._result(trial, replace(job, resume="auto"))
        except self.optuna.TrialPruned:
            self.study.tell(number, state=states.PRUNED)
        except Exception as error:  # of the user's; recorded as Optuna does
            self.study.tell(number, state=states.FAIL)
            if not isinstance(error, catch):
                raise
            logger.warning(f"trial {number} failed: {error}")
        else:
            self.study.tell(number, objective)

    def _best(self) -> BestRun | list[BestRun]:
        complete = [each for each in self.study.get_trials(deepcopy=False) if each.state.name == "COMPLETE"]
        if not complete:
            raise SearchError(
                f"no trial of {self.search.folder} was completed, so there is no best one; see the messages of its "
                "trials"
            )
        if self.is_multi:
            return [self._found(each, each.values) for each in self.study.best_trials]
        return self._found(self.study.best_trial, self.study.best_value)

    def _found(self, trial: Any, objective: Any) -> BestRun:
        attributes = trial.user_attrs
        return best_run(str(trial.number), objective, dict(trial.params), self.study, attributes.get(CHECKPOINT))
