"""MLflow: a database, a folder or a tracking server."""

from __future__ import annotations

import json
import os
import re
import time
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

from ..notices import logger
from .base import Numbers, Reporter, Row, RunInfo, is_on, require, without_stored
from .callback import ReporterCallback
from .model_files import wait_for

if TYPE_CHECKING:
    from ..args.base import BaseArguments

LONGEST = 6000
"""Characters of a parameter's value that MLflow accepts."""
AT_ONCE = 100
"""Parameters of one request."""


class MLflowReporter(Reporter):
    """Metrics under their logged names (loss, eval_loss), and the arguments as parameters.

    A run that you started with `mlflow.start_run` is used, and not ended.
    """

    name: ClassVar[str] = "mlflow"
    renames: ClassVar[bool] = False

    def __init__(self) -> None:
        require("mlflow", self.name)
        self._client: Any = None
        self._run_id: str | None = None
        self._is_own = True
        self._numbers = Numbers(self.name)

    def attach(self) -> None:
        """Use the run that is active in the calling thread, if there is one."""
        import mlflow

        active = mlflow.active_run()
        if active is not None and not is_on("MLFLOW_NESTED_RUN"):
            self._run_id, self._is_own = active.info.run_id, False

    def start(self, run: RunInfo) -> None:
        import mlflow

        address = os.environ.get("MLFLOW_TRACKING_URI")
        if address and not mlflow.is_tracking_uri_set():
            mlflow.set_tracking_uri(address)
        self._client = mlflow.MlflowClient()
        known = self._run_id or os.environ.get("MLFLOW_RUN_ID")
        if known is None:
            self._run_id = self._create(run)
        else:
            self._run_id = known
            if self._is_own:
                self._client.update_run(known, status="RUNNING")
        if not run.is_continued:
            self._describe(run)

    def _create(self, run: RunInfo) -> str:
        import mlflow

        name = os.environ.get("MLFLOW_EXPERIMENT_NAME")
        if name:
            experiment = mlflow.set_experiment(name).experiment_id
        else:
            experiment = os.environ.get("MLFLOW_EXPERIMENT_ID") or "0"
        tags = {}
        parent = mlflow.active_run() if is_on("MLFLOW_NESTED_RUN") else None
        if parent is not None:
            tags["mlflow.parentRunId"] = parent.info.run_id
        created = self._client.create_run(experiment, tags=tags, run_name=run.run_name)
        return str(created.info.run_id)

    def _describe(self, run: RunInfo) -> None:
        from mlflow.entities import Param, RunTag

        values = run.hyper_parameters
        if is_on("MLFLOW_FLATTEN_PARAMS"):
            values = dict(_flat(values))
        if run.num_parameters is not None:
            values["model/num_parameters"] = run.num_parameters
        sent = self._client.get_run(self._run_id).data.params  # they cannot be changed
        values = {name: value for name, value in values.items() if _clean(name) not in sent}
        short = [(_clean(name), str(value)) for name, value in values.items() if len(str(value)) <= LONGEST]
        if len(short) < len(values):
            logger.info(
                f"{self.name}: {len(values) - len(short)} parameters longer than {LONGEST} characters are not sent; "
                "MLFLOW_FLATTEN_PARAMS=1 splits them"
            )
        limit = os.environ.get("MLFLOW_MAX_LOG_PARAMS", "")
        params = [Param(name, value) for name, value in short[: int(limit) if limit.isdigit() else None]]
        for first in range(0, len(params), AT_ONCE):
            self._client.log_batch(self._run_id, params=params[first : first + AT_ONCE])
        tags = [RunTag(name, str(value)) for name, value in json.loads(os.environ.get("MLFLOW_TAGS") or "{}").items()]
        if tags:
            self._client.log_batch(self._run_id, tags=tags)

    def log(self, values: dict[str, Any], step: int) -> None:
        from mlflow.entities import Metric

        now = int(time.time() * 1000)
        metrics = [Metric(_clean(name), value, now, step) for name, value in self._numbers.of(values).items()]
        self._client.log_batch(self._run_id, metrics=metrics)

    def artifact(self, path: str | os.PathLike[str], name: str) -> None:
        wait_for(path)
        if os.path.isdir(path):
            self._client.log_artifacts(self._run_id, os.fspath(path), artifact_path=name)
        else:
            self._client.log_artifact(self._run_id, os.fspath(path), artifact_path=name)

    def unstored(self, rows: Sequence[Row]) -> list[Row] | None:
        names = {name for row in rows for name in row.values}
        history = ((name, self._client.get_metric_history(self._run_id, _clean(name))) for name in names)
        return without_stored(rows, ((each.step, [name]) for name, metrics in history for each in metrics))

    def finish(self, status: str) -> None:
        if self._is_own:
            self._client.set_terminated(self._run_id, status="FINISHED" if status == "finished" else "KILLED")

    def state_dict(self) -> dict[str, Any]:
        return {"run_id": self._run_id}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._run_id = state["run_id"]

    def as_callback(self) -> MLflowCallback:
        return MLflowCallback(reporter=self)


class MLflowCallback(ReporterCallback):
    """Reports to MLflow."""

    reporter: MLflowReporter

    def __init__(self, *, reporter: MLflowReporter | None = None) -> None:
        super().__init__(reporter or MLflowReporter())
        self._log_artifacts = is_on("HF_MLFLOW_LOG_ARTIFACTS")

    def setup(self, args: BaseArguments, state: Any, model: Any, **kwargs: Any) -> None:
        if self.run_id is None:
            self.reporter.attach()
        super().setup(args, state, model, **kwargs)

    def on_save(self, args: BaseArguments, state: Any, control: Any, **kwargs: Any) -> None:
        if self._log_artifacts:
            self.send_checkpoint(args, state)


def _flat(values: dict[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    items: Iterable[tuple[str, Any]] = values.items()
    for name, value in items:
        if isinstance(value, dict) and value:
            yield from _flat(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value


def _clean(name: str) -> str:
    """The name without characters that MLflow refuses."""
    return re.sub(r"[^0-9A-Za-z_\-\.\ :/]", "_", name)
