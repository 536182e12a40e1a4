"""What a reporter is: somewhere numbers are sent."""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar

if TYPE_CHECKING:
    from .callback import ReporterCallback


@dataclass(frozen=True)
class RunInfo:
    """What a reporter receives about the run when it starts.

    The same `run_id` as before means: resume that run. `resumed_from` is the step it resumes from; metrics of later
    steps will be sent again.
    """

    run_id: str
    run_name: str | None = None
    output_dir: str | None = None
    logging_dir: str | None = None
    config: dict[str, Any] = field(default_factory=dict)
    model_config: dict[str, Any] = field(default_factory=dict)
    resumed_from: int | None = None


class Reporter:
    """Base class of reporters: override what your service can do.

    Only the first process of a run has a reporter that is started. `start` may be called again after `finish`, with
    the same run: an evaluation after training still belongs to it.
    """

    name: ClassVar[str] = ""

    def start(self, run: RunInfo) -> None:
        """The run starts, or goes on."""

    def log(self, values: dict[str, Any], step: int) -> None:
        """Numbers of one step, with keys such as train/loss and eval/accuracy."""
        raise NotImplementedError(f"{type(self).__name__} must define log(values, step)")

    def artifact(self, path: str | os.PathLike[str], name: str) -> None:
        """A file or folder that belongs to the run."""

    def finish(self, status: str) -> None:
        """The run ended: "finished", or "interrupted" when training did not come to its end."""

    def state_dict(self) -> dict[str, Any]:
        """What a restarted run needs to find its place again, in JSON's types."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take back what `state_dict` gave, before `start`."""

    def as_callback(self) -> ReporterCallback:
        """The callback that feeds this reporter."""
        from .callback import ReporterCallback

        return ReporterCallback(self)
