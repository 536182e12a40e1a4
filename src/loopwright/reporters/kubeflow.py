"""Kubeflow Trainer: progress and metrics of a TrainJob. Inside its pod only."""

from __future__ import annotations

import json
import os
import ssl
import time
import urllib.request
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, ClassVar

from ..errors import ArgumentsError
from .base import Reporter, RunInfo
from .callback import ReporterCallback
from .tensorboard import as_number

if TYPE_CHECKING:
    from ..args.base import BaseArguments

ADDRESS = "KUBEFLOW_TRAINER_SERVER_URL"
CERTIFICATE = "KUBEFLOW_TRAINER_SERVER_CA_CERT"
TOKEN = "KUBEFLOW_TRAINER_SERVER_TOKEN"
INTERVAL = 5.0
"""Seconds between two updates at least."""
TIMEOUT = 5.0


class KubeflowReporter(Reporter):
    """Sends the share of steps done, the time left and the newest metrics to the job's controller."""

    name: ClassVar[str] = "kubeflow"
    renames: ClassVar[bool] = False

    def __init__(self) -> None:
        if not os.environ.get(ADDRESS):
            raise ArgumentsError(
                f'report_to="kubeflow" works inside a TrainJob of Kubeflow only: {ADDRESS} is not set; leave it out'
            )
        self._metrics: dict[str, Any] = {}

    def start(self, run: RunInfo) -> None:
        self._metrics = {}

    def log(self, values: dict[str, Any], step: int) -> None:
        self._metrics.update({name: value for name, value in values.items() if as_number(value) is not None})

    def progress(self, percent: int, seconds_left: float | None, position: dict[str, Any]) -> None:
        """Send one update."""
        status: dict[str, Any] = {
            "lastUpdatedTime": datetime.now(UTC).isoformat(),
            "progressPercentage": max(0, min(100, percent)),
        }
        if seconds_left is not None:
            status["estimatedRemainingSeconds"] = max(0, int(seconds_left))
        metrics = {**self._metrics, **position}
        if metrics:
            status["metrics"] = [{"name": name, "value": str(value)} for name, value in metrics.items()]
        self._post({"trainerStatus": status})

    def _post(self, document: dict[str, Any]) -> None:
        with open(os.environ.get(TOKEN, ""), encoding="utf-8") as file:  # read again: Kubernetes renews it
            headers = {"Authorization": f"Bearer {file.read().strip()}", "Content-Type": "application/json"}
        data = json.dumps(document).encode()
        request = urllib.request.Request(os.environ[ADDRESS], data=data, headers=headers, method="POST")
        certificate = os.environ.get(CERTIFICATE)
        context = ssl.create_default_context(cafile=certificate) if certificate else None
        with urllib.request.urlopen(request, timeout=TIMEOUT, context=context):
            pass

    def as_callback(self) -> KubeflowCallback:
        return KubeflowCallback(reporter=self)


class KubeflowCallback(ReporterCallback):
    """Reports progress to Kubeflow Trainer, at most every five seconds."""

    reporter: KubeflowReporter

    def __init__(self, *, reporter: KubeflowReporter | None = None) -> None:
        super().__init__(reporter or KubeflowReporter())
        self._began = self._reported = 0.0
        self._first_step = 0

    def on_train_begin(self, args: BaseArguments, state: Any, control: Any, **kwargs: Any) -> None:
        super().on_train_begin(args, state, control, **kwargs)
        self._began, self._first_step = time.monotonic(), state.global_step
        percent = 100 * state.global_step // state.max_steps if state.max_steps else 0
        self._send(percent, None, {"total_steps": state.max_steps} if state.max_steps else {})

    def on_step_end(self, args: BaseArguments, state: Any, control: Any, **kwargs: Any) -> None:
        now = time.monotonic()
        if now - self._reported < INTERVAL or not state.max_steps:
            return
        done, left = state.global_step - self._first_step, state.max_steps - state.global_step
        position = {"current_step": state.global_step, "total_steps": state.max_steps}
        if state.epoch is not None:
            position["current_epoch"] = round(state.epoch, 2)
        percent = min(99, 100 * state.global_step // state.max_steps)  # 100 means that the run is complete
        self._send(percent, (now - self._began) / done * left if done else None, position)

    def on_train_end(self, args: BaseArguments, state: Any, control: Any, **kwargs: Any) -> None:
        is_complete = bool(state.max_steps) and state.global_step >= state.max_steps
        percent = 100 if is_complete else 100 * state.global_step // max(1, state.max_steps)
        self._send(percent, 0 if is_complete else None, {})
        super().on_train_end(args, state, control, **kwargs)

    def _send(self, percent: int, seconds_left: float | None, position: dict[str, Any]) -> None:
        self._reported = time.monotonic()
        if self._sender is not None:
            self._sender.call(lambda: self.reporter.progress(percent, seconds_left, position))
