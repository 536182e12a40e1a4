"""The base class of reporters, which send metrics to a tracker."""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar

if TYPE_CHECKING:
    from .callback import ReporterCallback


@dataclass(frozen=True)
class RunInfo:
    """Information about the run, passed to a reporter at the start.

    If `run_id` is that of an earlier run, that run is resumed. `resumed_from` is the step it resumes from; metrics of
    later steps will be sent again.
    """

    run_id: str
    run_name: str | None = None
    output_dir: str | None = None
    logging_dir: str | None = None
    config: dict[str, Any] = field(default_factory=dict)
    model_config: dict[str, Any] = field(default_factory=dict)
    resumed_from: int | None = None


class Reporter:
    """Base class of reporters: override the methods that your service supports.

    Reporters are started on rank 0 only. `start` may be called again after `finish` with the same run, for example for
    an evaluation after training.
    """

    name: ClassVar[str] = ""

    def start(self, run: RunInfo) -> None:
        """Called when the run starts or resumes."""

    def log(self, values: dict[str, Any], step: int) -> None:
        """Send the metrics of one step, with keys such as train/loss and eval/accuracy."""
        raise NotImplementedError(f"{type(self).__name__} must define log(values, step)")

    def artifact(self, path: str | os.PathLike[str], name: str) -> None:
        """Send a file or folder of the run."""

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
