"""The base class of reporters, which send metrics to a tracker."""

from __future__ import annotations

import numbers
import os
import sys
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any, ClassVar

from ..errors import MissingPackage
from ..notices import logger

if TYPE_CHECKING:
    from ..args.base import BaseArguments
    from .callback import ReporterCallback


@dataclass(frozen=True)
class RunInfo:
    """Information about the run, passed to a reporter at the start.

    If `run_id` is that of an earlier run, that run is resumed. `resumed_from` is the step it resumes from.
    """

    run_id: str
    run_name: str | None = None
    output_dir: str | None = None
    logging_dir: str | None = None
    config: dict[str, Any] = field(default_factory=dict)
    model_config: dict[str, Any] = field(default_factory=dict)
    resumed_from: int | None = None
    is_continued: bool = False
    """Whether this run was started before, in this process or in an earlier one."""
    num_parameters: int | None = None
    trial_name: str | None = None
    arguments: BaseArguments | None = None
    model: Any = None

    @property
    def hyper_parameters(self) -> dict[str, Any]:
        """The model's configuration and the arguments, as one dict."""
        return {**self.model_config, **self.config}


@dataclass(frozen=True)
class Row:
    """One logged row."""

    step: int
    kind: str
    """What distinguishes the rows of one step: training, an evaluation, the end of training."""
    values: dict[str, Any]


class Reporter:
    """Base class of reporters: override the methods that your service supports.

    All methods are called on rank 0 only, and in a thread of this reporter: they may take long, and an error in one of
    them is reported and does not end the run. `start` may be called again after `finish` with the same run, for example
    for an evaluation after training.
    """

    name: ClassVar[str] = ""
    renames: ClassVar[bool] = True
    """Whether `log` receives names such as train/loss and eval/loss; otherwise those of the log history."""
    purges: ClassVar[bool] = False
    """Whether a run that starts with `resumed_from` discards the values of later steps, so that they are sent again."""
    logs_predictions: ClassVar[bool] = False
    """Whether the metrics of `predict` are sent too."""
    ends_with_training: ClassVar[bool] = True
    """Whether the end of training finishes the tracker's run; otherwise the end of the process does."""

    def start(self, run: RunInfo) -> None:
        """Called when the run starts or resumes."""

    def log(self, values: dict[str, Any], step: int) -> None:
        """Send the metrics of one step, with keys such as train/loss and eval/accuracy."""
        raise NotImplementedError(f"{type(self).__name__} must define log(values, step)")

    def artifact(self, path: str | os.PathLike[str], name: str) -> None:
        """Send a file or folder of the run."""

    def flush(self) -> bool:
        """Wait until the rows sent so far would survive a crash; False if this is not certain."""
        return True

    def unstored(self, rows: Sequence[Row]) -> list[Row] | None:
        """Those of these rows and values that the tracker does not have; None if it cannot be found out.

        Called after `start` in a resumed run, with the rows that an earlier process sent before it was killed; they
        contain names without values.
        """
        return None

    def finish(self, status: str) -> None:
        """Called when the run ends: "finished", or "interrupted" if training did not complete."""

    def state_dict(self) -> dict[str, Any]:
        """State for resuming the run, as JSON types."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the value of `state_dict`; called before `start`."""

    def as_callback(self) -> ReporterCallback:
        """A callback that sends the run's metrics to this reporter."""
        from .callback import ReporterCallback

        return ReporterCallback(self)


END_OF_TRAINING = frozenset(
    f"train/{name}"
    for name in ("train_runtime", "train_samples_per_second", "train_steps_per_second", "train_loss", "total_flos")
)
"""Values that a run has once, which some trackers show without a chart."""


IN_EVERY_ROW = frozenset({"epoch", "train/epoch", "num_input_tokens_seen", "train/num_input_tokens_seen"})
"""Values that do not distinguish the rows of one step."""


def require(package: str, tracker: str, install: str | None = None) -> None:
    """Raise if the package of a tracker is not installed."""
    if package not in sys.modules and find_spec(package) is None:
        raise MissingPackage(package, needed_for=f'report_to="{tracker}"', install=install)


def is_on(variable: str) -> bool:
    """Whether an environment variable is set to a true value, as transformers reads them."""
    return os.environ.get(variable, "").upper() in {"1", "ON", "YES", "TRUE"}


def as_number(value: Any) -> float | None:
    """The value as a float, or None when it is not one number."""
    if isinstance(value, numbers.Real):
        return float(value)
    # One-element arrays and tensors; item() raises for longer ones.
    item = getattr(value, "item", None)
    if item is None:
        return None
    try:
        return as_number(item())
    except (TypeError, ValueError, RuntimeError):
        return None


class Numbers:
    """For a service that accepts numbers only: other values are reported, once for each name."""

    def __init__(self, service: str) -> None:
        self._service = service
        self._others: set[str] = set()

    def of(self, values: Mapping[str, Any]) -> dict[str, float]:
        """The values that are numbers."""
        found = {}
        for name, value in values.items():
            number = as_number(value)
            if number is not None:
                found[name] = number
            elif name not in self._others:
                self._others.add(name)
                logger.warning(f"{self._service} accepts numbers only; {name}={value!r} is not logged there.")
        return found


def without_stored(rows: Sequence[Row], stored: Iterable[tuple[int, Iterable[str]]]) -> list[Row]:
    """The rows with the values that are not stored, given steps and names of stored values.

    A row of which nothing is stored is complete: values that every row of a step has, such as the epoch, may be stored
    with another row.
    """
    names: dict[int, set[str]] = defaultdict(set)
    for step, found in stored:
        names[step].update(found)
    missing = []
    for row in rows:
        known = names[row.step]
        left = set(row.values) - known
        if left and not known & (set(row.values) - IN_EVERY_ROW):
            left = set(row.values)
        if left - IN_EVERY_ROW:
            missing.append(Row(row.step, row.kind, dict.fromkeys(name for name in row.values if name in left)))
    return missing
