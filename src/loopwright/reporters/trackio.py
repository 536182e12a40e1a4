"""Trackio: a local database, or a Space on the Hub."""

from __future__ import annotations

import re
import secrets
from collections.abc import Sequence
from typing import Any, ClassVar

from ..notices import logger
from .base import Reporter, Row, RunInfo, require, without_stored
from .callback import ReporterCallback


class TrackioReporter(Reporter):
    """Metrics of every step, and the arguments as configuration.

    `project`, `run_name`, `trackio_space_id`, `trackio_bucket_id`, `trackio_static_space_id` and `hub_private_repo` of
    the arguments are used.
    """

    name: ClassVar[str] = "trackio"
    logs_predictions: ClassVar[bool] = True

    def __init__(self) -> None:
        require("trackio", "trackio")
        self._run: Any = None
        self._name: str | None = None
        self._info: RunInfo | None = None

    def start(self, run: RunInfo) -> None:
        import trackio

        args, self._info = run.arguments, run
        continues = run.is_continued and self._name is not None
        self._run = trackio.init(
            project=getattr(args, "project", None) or "huggingface",
            # Two runs may have the same name: "never" starts another run beside the first.
            name=self._name if continues else run.run_name,
            space_id=getattr(args, "trackio_space_id", None),
            resume="allow" if continues else "never",
            private=getattr(args, "hub_private_repo", None),
            bucket_id=getattr(args, "trackio_bucket_id", None),
        )
        self._name = self._run.name
        self._run.config.update(run.hyper_parameters)
        if run.num_parameters is not None:
            self._run.config["model/num_parameters"] = run.num_parameters

    def adopt(self) -> None:
        """Make the run current in the calling thread, so that your own calls of `trackio.log` find it."""
        import trackio

        if self._run is not None and self._info is not None:
            trackio.context_vars.current_run.set(self._run)
            trackio.context_vars.current_project.set(self._run.project)

    def log(self, values: dict[str, Any], step: int) -> None:
        self._run.log({**values, "train/global_step": step}, step=step)

    def flush(self) -> bool:
        return False  # Trackio writes twice a second, and has no call that waits for it

    def unstored(self, rows: Sequence[Row]) -> list[Row] | None:
        from trackio.sqlite_storage import SQLiteStorage

        if getattr(self._info and self._info.arguments, "trackio_space_id", None):
            return None
        items = SQLiteStorage.get_logs(self._run.project, self._run.name)
        return without_stored(rows, ((item["step"], item) for item in items))

    def finish(self, status: str) -> None:
        import trackio

        space = trackio.context_vars.current_space_id.get()
        trackio.finish()
        args = self._info and self._info.arguments
        static = getattr(args, "trackio_static_space_id", None)
        if space and static is not False and status == "finished":
            project = self._run.project
            trackio.freeze(
                space_id=space,
                project=project,
                new_space_id=static or _static_name(project),
                private=getattr(args, "hub_private_repo", None),
            )

    def state_dict(self) -> dict[str, Any]:
        return {"name": self._name}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._name = state["name"]

    def as_callback(self) -> TrackioCallback:
        return TrackioCallback(reporter=self)


class TrackioCallback(ReporterCallback):
    """Reports to Trackio."""

    reporter: TrackioReporter

    def __init__(self, *, reporter: TrackioReporter | None = None) -> None:
        super().__init__(reporter or TrackioReporter())

    def setup(self, args: Any, state: Any, model: Any, **kwargs: Any) -> None:
        super().setup(args, state, model, **kwargs)
        try:
            self.reporter.adopt()
        except (AttributeError, LookupError) as error:  # another version of the package
            logger.info(f"trackio.log in your own code needs trackio.init first ({error})")


def _static_name(project: str) -> str:
    """A name of a Space, from the project and a random suffix."""
    base = re.sub(r"[^a-z0-9._-]+", "-", project.strip().lower()).strip("-_.")[:81] or "trackio-project"
    return f"{base}-static-{secrets.token_hex(3)}"
