"""Kubeflow Trainer: progress and metrics of a TrainJob. Inside its pod only."""

from __future__ import annotations

import json
import os
import ssl
import time
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, ClassVar

from ..core.events import TrainerCallback
from ..errors import ArgumentsError
from ..notices import logger
from .base import Reporter, as_number

if TYPE_CHECKING:
    from ..args.base import BaseArguments

ADDRESS = "KUBEFLOW_TRAINER_SERVER_URL"
CERTIFICATE = "KUBEFLOW_TRAINER_SERVER_CA_CERT"
TOKEN = "KUBEFLOW_TRAINER_SERVER_TOKEN"
INTERVAL = 5.0
"""Seconds between two updates at least."""
TIMEOUT = 5.0
TOKEN_SECONDS = 300.0
"""How long a token is used before its file is read again: Kubernetes renews it."""


class KubeflowReporter(Reporter):
    """Progress of a TrainJob, which its callback reports."""

    name: ClassVar[str] = "kubeflow"

    def as_callback(self) -> Any:
        return KubeflowCallback()

    def __init__(self) -> None:
        if not os.environ.get(ADDRESS):
            raise ArgumentsError(
                f'report_to="kubeflow" works inside a TrainJob of Kubeflow only: {ADDRESS} is not set; leave it out'
            )


class KubeflowCallback(TrainerCallback):
    """Sends the share of steps done, the time left and the newest metrics to the job's controller.

    At most every five seconds, and from a thread, so that a slow controller delays no step. Attributes and methods have
    the names of transformers' callback, so that subclasses of it work.
    """

    _first_step: int = 0
    _thread: ThreadPoolExecutor | None = None
    _has_failed: bool = False

    def __init__(self) -> None:
        KubeflowReporter()  # raises outside a TrainJob
        self._initialized = False
        self._metrics: dict[str, Any] = {}
        self._start_time: float | None = None
        self._last_update_time = 0.0
        self._cached_token: str | None = None
        self._token_read_time = 0.0

    def on_train_begin(self, args: BaseArguments, state: Any, control: Any, **kwargs: Any) -> None:
        if not state.is_world_process_zero:
            return
        self._initialized, self._metrics = True, {}
        self._start_time, self._first_step = time.time(), state.global_step
        percent = 100 * state.global_step // state.max_steps if state.max_steps else 0
        metrics = {"total_steps": state.max_steps} if state.max_steps else None
        self._update_status(progress_percent=percent, metrics=metrics, force=True)

    def on_log(
        self, args: BaseArguments, state: Any, control: Any, logs: dict[str, Any] | None = None, **kwargs: Any
    ) -> None:
        if self._initialized and state.is_world_process_zero:
            self._metrics.update({name: value for name, value in (logs or {}).items() if as_number(value) is not None})

    def on_step_end(self, args: BaseArguments, state: Any, control: Any, **kwargs: Any) -> None:
        if not self._initialized or not state.is_world_process_zero or not state.max_steps:
            return
        metrics = {**self._metrics, "current_step": state.global_step, "total_steps": state.max_steps}
        if state.epoch is not None:
            metrics["current_epoch"] = round(state.epoch, 2)
        self._update_status(
            progress_percent=min(99, 100 * state.global_step // state.max_steps),  # 100 means that the run is complete
            estimated_time_remaining=self._seconds_left(state),
            metrics=metrics,
        )

    def on_train_end(self, args: BaseArguments, state: Any, control: Any, **kwargs: Any) -> None:
        if not self._initialized or not state.is_world_process_zero:
            return
        self._update_status(progress_percent=100, estimated_time_remaining=0, metrics=self._metrics, force=True)
        if self._thread is not None:
            self._thread.shutdown()
            self._thread = None

    def _seconds_left(self, state: Any) -> float | None:
        """The time left, from the steps of this process: a resumed run has done others before."""
        done = state.global_step - self._first_step
        if self._start_time is None or done <= 0:
            return None
        return (time.time() - self._start_time) / done * (state.max_steps - state.global_step)  # type: ignore[no-any-return]

    def _update_status(
        self,
        progress_percent: int | None = None,
        estimated_time_remaining: float | None = None,
        metrics: dict[str, Any] | None = None,
        force: bool = False,
    ) -> bool:
        """Send an update from the thread; False if it is too early, or the job's address or token is missing."""
        now = time.monotonic()
        if not os.environ.get(ADDRESS) or (not force and now - self._last_update_time < INTERVAL):
            return False
        self._last_update_time = now
        token = self._get_token()
        if not token:
            return False
        status: dict[str, Any] = {"lastUpdatedTime": datetime.now(UTC).isoformat()}
        if progress_percent is not None:
            status["progressPercentage"] = max(0, min(100, progress_percent))
        if estimated_time_remaining is not None:
            status["estimatedRemainingSeconds"] = max(0, int(estimated_time_remaining))
        if metrics:
            status["metrics"] = [{"name": str(name), "value": str(value)} for name, value in metrics.items()]
        if self._thread is None:
            self._thread = ThreadPoolExecutor(1, thread_name_prefix="reporter-kubeflow")
        self._thread.submit(self._send, {"trainerStatus": status}, token)  # ends before the next: TIMEOUT <= INTERVAL
        return True

    def _send(self, document: dict[str, Any], token: str) -> None:
        headers = {"Authorization": f"Bearer {token}", "Content-Type": "application/json"}
        try:
            data, certificate = json.dumps(document).encode(), os.environ.get(CERTIFICATE)
            context = ssl.create_default_context(cafile=certificate) if certificate else None
            request = urllib.request.Request(os.environ[ADDRESS], data=data, headers=headers, method="POST")
            with urllib.request.urlopen(request, timeout=TIMEOUT, context=context):
                pass
        except Exception as error:  # of the network or the server; training must not end because of it
            self._report(f"{type(error).__name__}: {error}")

    def _get_token(self) -> str | None:
        """The token of the job, or None if its file cannot be read."""
        now = time.monotonic()
        if not self._cached_token or now - self._token_read_time >= TOKEN_SECONDS:
            try:
                with open(os.environ.get(TOKEN, ""), encoding="utf-8") as file:
                    self._cached_token, self._token_read_time = file.read().strip(), now
            except OSError as error:
                self._report(f"the file of {TOKEN} cannot be read: {error}")
                return None
        return self._cached_token

    def _report(self, problem: str) -> None:
        if not self._has_failed:
            self._has_failed = True
            logger.warning(
                f"kubeflow: the progress was not sent ({problem}). Training continues, metrics.jsonl has all values, "
                "and further errors of this tracker are not reported."
            )
