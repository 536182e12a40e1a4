"""`hyperparameter_search`: the backends, and the way from the trainer's method to one of them."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from importlib.util import find_spec
from types import FrameType
from typing import Any

from ..args.field import nearest
from ..core.outputs import BestRun
from ..errors import ArgumentsError, BusyError, MissingPackage
from .session import BaseSearch, Request, Search

Result = BestRun | list[BestRun]


def _optuna(search: BaseSearch) -> Result:
    from .backends.optuna_backend import OptunaSearch

    return OptunaSearch(search).run()


def _own(search: BaseSearch) -> Result:
    from .backends.own_backend import OwnSearch

    return OwnSearch(search).run()


def _ray(search: Search) -> Result:
    from .backends.ray_backend import RaySearch

    return RaySearch(search).run()


def _wandb(search: Search) -> Result:
    from .backends.wandb_backend import SweepSearch

    return SweepSearch(search).run()


BACKENDS: dict[str, Callable[[Any], Result]] = {
    "optuna": _optuna,
    "ray": _ray,
    "wandb": _wandb,
    **dict.fromkeys(("random", "grid", "asha", "population"), _own),
}
PREFERRED = ("optuna", "ray", "wandb")
"""The backend without `backend=`: the first that is installed."""


def hyperparameter_search(trainer: Any, request: Request, frame: FrameType | None) -> Result | None:
    """Search, and return the best trial; with several ranks, None on all but rank 0, as transformers does."""
    internals = trainer._loopwright
    request.check()
    request.backend = chosen_backend(request.backend)
    if trainer.model_init is None:
        raise ArgumentsError(
            "a hyper-parameter search creates a new model for each trial; pass model_init to the trainer, a function "
            "that returns the model"
        )
    if internals.is_training:
        raise BusyError("hyperparameter_search() was called while this trainer is training; wait until it returns")
    in_process = bool(request.options.pop("in_process", False))
    search = Search(trainer, request, in_process=in_process, frame=frame)
    if internals.strategy.rank != 0:
        search.runner.follow()
        return None
    problem: str | None = "it failed"
    try:
        with search.owned():
            found = BACKENDS[request.backend](search)
        problem = None
        return found
    except BaseException as error:  # the other ranks stop with the same reason
        problem = f"{type(error).__name__}: {error}"
        raise
    finally:
        if internals.strategy.world_size > 1:
            with suppress(Exception):  # ranks that have ended by themselves
                search.runner.end(problem)


def chosen_backend(backend: Any, *, otherwise: str | None = None) -> str:
    """The name of a backend; without one, the first that is installed."""
    if backend is None:
        installed = [name for name in PREFERRED if find_spec(name) is not None]
        if otherwise is not None:
            return "optuna" if "optuna" in installed else otherwise
        if not installed:
            raise MissingPackage("optuna", needed_for="hyperparameter_search", install="'loopwright[search]'")
        return installed[0]
    name = str(getattr(backend, "value", backend))
    if name not in BACKENDS:
        raise ArgumentsError(f"backend={name!r}: not one of {', '.join(BACKENDS)}{nearest(name, BACKENDS)}")
    return name
