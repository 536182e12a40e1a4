"""The available reporters, by name."""

from __future__ import annotations

import importlib
from collections.abc import Iterable
from importlib.metadata import entry_points
from typing import Any

from ..args.groups.tracking import ENTRY_POINTS, REFUSED, named_trackers, third_party
from ..core.events import TrainerCallback
from ..errors import ArgumentsError
from .base import Reporter
from .callback import ReporterCallback

REPORTERS: dict[str, str] = {
    "azure_ml": "loopwright.reporters.azure_ml:AzureMLReporter",
    "clearml": "loopwright.reporters.clearml:ClearMLReporter",
    "codecarbon": "loopwright.reporters.codecarbon:CodeCarbonReporter",
    "comet_ml": "loopwright.reporters.comet_ml:CometReporter",
    "dagshub": "loopwright.reporters.dagshub:DagsHubReporter",
    "dvclive": "loopwright.reporters.dvclive:DVCLiveReporter",
    "flyte": "loopwright.reporters.flyte:FlyteReporter",
    "kubeflow": "loopwright.reporters.kubeflow:KubeflowReporter",
    "mlflow": "loopwright.reporters.mlflow:MLflowReporter",
    "swanlab": "loopwright.reporters.swanlab:SwanLabReporter",
    "tensorboard": "loopwright.reporters.tensorboard:TensorBoardReporter",
    "trackio": "loopwright.reporters.trackio:TrackioReporter",
    "wandb": "loopwright.reporters.wandb:WandbReporter",
}
"""Built-in reporters: name -> module:class. Other packages add reporters by entry points."""


def build_reporters(names: str | Iterable[str] | None) -> list[Reporter]:
    """The reporters of `report_to`: names, "all" or "none"."""
    wanted = list(dict.fromkeys(named_trackers(names)))
    others = [name for name in wanted if name not in REPORTERS]
    known = known_names() if others else []  # reading the entry points of all packages takes a while
    missing = [name for name in others if name not in known]
    if missing:
        raise _not_served(missing, known)
    return [reporter_class(name)() for name in wanted]


def reporter_callbacks(names: str | Iterable[str] | None) -> list[TrainerCallback]:
    """A callback for each reporter of `report_to`."""
    return [_callback_for(reporter) for reporter in build_reporters(names)]


def known_names() -> list[str]:
    """The names of all reporters, those of other packages included."""
    return sorted({*REPORTERS, *third_party()})


def reporter_class(name: str) -> Any:
    """The class (or function) that creates the reporter of this name."""
    if name in REPORTERS:
        module, _, attribute = REPORTERS[name].partition(":")
        return getattr(importlib.import_module(module), attribute)
    for point in entry_points(group=ENTRY_POINTS):
        if point.name == name:
            return point.load()
    raise _not_served([name], known_names())


def _callback_for(reporter: Any) -> TrainerCallback:
    # A reporter of another package need not inherit from Reporter; it needs the methods only.
    callback: TrainerCallback = (
        reporter.as_callback() if hasattr(reporter, "as_callback") else ReporterCallback(reporter)
    )
    return callback


def _not_served(missing: list[str], known: list[str]) -> Exception:
    names = ", ".join(known)
    where = f"A package can add one under the entry point group {ENTRY_POINTS!r}."
    return ArgumentsError(
        [
            f"report_to: {name!r} cannot be used: {REFUSED[name]}"
            if name in REFUSED
            else f"report_to={name!r} is not a known reporter (known: {names}, all, none). {where}"
            for name in missing
        ]
    )
