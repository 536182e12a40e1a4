"""The callback that calls a reporter on the events of a run."""

from __future__ import annotations

import atexit
import json
import os
import uuid
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from ..args.base import without_secrets
from ..args.paths import working_folder
from ..callbacks.metrics_file import kind_of
from ..core.checkpoint.folder import STATE, folder_name
from ..core.checkpoint.schema import anything, check_part, file_part, maybe, named, record, restoring
from ..core.events import TrainerCallback
from ..notices import logger
from .base import Reporter, Row, RunInfo
from .journal import Journal
from .sender import FINISH_SECONDS, Sender

if TYPE_CHECKING:
    from ..args.base import BaseArguments

SECTIONS = {"eval_": "eval/", "test_": "test/"}
"""Prefix of a logged name -> section of the reported name; other names are in train/."""
SAVED = record({"run_id": maybe(file_part), "state": named(anything)})
"""The state of a callback in a checkpoint; the run id is part of the name of a file."""


class ReporterCallback(TrainerCallback):
    """Starts one reporter, sends metrics to it and finishes it, on rank 0 only.

    The reporter works in a thread of its own. The run id and the reporter's state are saved in checkpoints, so that a
    resumed run continues in the same tracker run.
    """

    start_seconds: ClassVar[float] = 30.0
    """How long the start of training waits for the tracker, so that your own calls of it find its run."""
    finish_seconds: ClassVar[float] = FINISH_SECONDS
    """How long the end of training waits for the tracker."""

    def __init__(self, reporter: Reporter) -> None:
        self.reporter = reporter
        self.run_id: str | None = None
        self._sender: Sender | None = None
        self._ids_started: set[str] = set()
        self._restored: dict[str, Any] | None = None
        self._is_training = False
        self._has_trained = False

    def on_train_begin(self, args: BaseArguments, state: Any, control: Any, **kwargs: Any) -> None:
        if not state.is_world_process_zero:
            return
        if state.global_step == 0 and self._has_trained:
            # The same trainer trains again from scratch: that is a new run.
            self._finish("finished")
            self.run_id = None
        self._is_training = self._has_trained = True
        if state.global_step and self._sender is not None:
            # Started by an evaluation before training; the reporter needs the step at which the run resumes.
            self._finish("finished")
        if self._sender is None:
            self.setup(args, state, kwargs.get("model"))

    def setup(self, args: BaseArguments, state: Any, model: Any, **kwargs: Any) -> None:
        """Start the reporter; an override may start the tracker's run itself before it calls this method."""
        resumed_from = state.global_step if self._is_training and state.global_step else None
        self._start(args, state, model, resumed_from)

    def on_log(
        self, args: BaseArguments, state: Any, control: Any, logs: dict[str, Any] | None = None, **kwargs: Any
    ) -> None:
        if not state.is_world_process_zero or not logs:
            return
        if self._sender is None:
            self.setup(args, state, kwargs.get("model"))
        if self._sender is not None:
            self._sender.send(self._row(logs, state.global_step))

    def on_predict(
        self, args: BaseArguments, state: Any, control: Any, metrics: dict[str, Any] | None = None, **kwargs: Any
    ) -> None:
        if self._flag("logs_predictions"):
            ReporterCallback.on_log(self, args, state, control, logs=metrics, **kwargs)

    def on_train_end(self, args: BaseArguments, state: Any, control: Any, **kwargs: Any) -> None:
        self._is_training = False
        if self._flag("ends_with_training", default=True):
            self._finish("finished")
        else:
            self.settle()

    def left(self) -> None:
        """Called when training has ended, even if on_train_end was not called: then it was interrupted."""
        if self._is_training and self._flag("ends_with_training", default=True):
            self._is_training = False
            self._finish("interrupted")

    def rewind(self, args: BaseArguments, state: Any) -> None:
        """Called when steps were undone."""
        if self._sender is None:
            return
        if self._flag("purges"):
            self._finish("finished")
            self.setup(args, state, None)
        else:
            self._sender.set_back(state.global_step)

    def settle(self) -> None:
        """Wait for the reporter, for a limited time, until everything logged so far is sent."""
        if self._sender is not None:
            self._sender.settle(self.finish_seconds)

    def artifact(self, path: Any, name: str) -> None:
        """Pass a file or folder to the reporter, if it is started."""
        if self._sender is not None:
            self._sender.call(lambda: self.reporter.artifact(path, name))

    def send_checkpoint(self, args: BaseArguments, state: Any) -> None:
        """Pass the checkpoint of the current step to the reporter."""
        if state.is_world_process_zero:
            folder = checkpoint_of(args, state)
            self.artifact(folder, folder.name)

    def state_dict(self) -> dict[str, Any]:
        state_dict = getattr(self.reporter, "state_dict", dict)
        return {"reporter": self._name(), "run_id": self.run_id, "state": state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if state.get("reporter") != self._name():
            logger.warning(
                f"The checkpoint was reported to {state.get('reporter')!r}; {self._name()!r} starts a new run instead."
            )
            return
        check_part(state, SAVED)
        self._finish("finished")
        self.run_id, self._restored = state["run_id"], state["state"]

    def _start(self, args: BaseArguments, state: Any, model: Any, resumed_from: int | None) -> None:
        folder = None if getattr(args, "output_dir", None) is None else os.path.abspath(working_folder(args.output_dir))
        self._continue(folder)
        self.run_id = self.run_id or uuid.uuid4().hex
        run = run_info(
            args,
            state,
            model,
            run_id=self.run_id,
            resumed_from=resumed_from,
            is_continued=self.run_id in self._ids_started,
        )
        self._ids_started.add(self.run_id)
        rows = list(getattr(state, "log_history", ())) if resumed_from is not None else []
        history = [self._row({**row}, row["step"]) for row in rows if isinstance(row.get("step"), int)]
        self._sender = Sender(self.reporter)
        self._sender.begin(run, history, folder)
        self._sender.wait_started(self.start_seconds)
        atexit.register(self._at_exit)

    def _continue(self, folder: str | None) -> None:
        """Adopt the restored run, unless it was reported from another folder: then a tracker has steps after it."""
        state, self._restored = self._restored, None
        if self.run_id is None or state is None:
            return
        if not self._flag("purges") and Journal(folder, self._name(), self.run_id).read() is None:
            logger.info(f"{self._name()}: {folder} has no record of run {self.run_id}, so a new one is started there")
            self.run_id = None
            return
        self._ids_started.add(self.run_id)
        if state:
            with restoring(Path(STATE), f"the state of {self._name()}"):
                self.reporter.load_state_dict(state)

    def _row(self, logs: Mapping[str, Any], step: int) -> Row:
        values = {name: value for name, value in logs.items() if name != "step"}
        named = reported_names(values) if self._flag("renames", default=True) else values
        return Row(step, kind_of(values), named)

    def _finish(self, status: str) -> None:
        if self._sender is None:
            return
        sender, self._sender = self._sender, None
        atexit.unregister(self._at_exit)
        sender.finish(status, self.finish_seconds)

    def _at_exit(self) -> None:
        self._finish("interrupted" if self._is_training else "finished")

    def _flag(self, name: str, default: bool = False) -> bool:
        # A reporter of another package need not inherit from Reporter.
        return bool(getattr(self.reporter, name, default))

    def _name(self) -> str:
        return getattr(self.reporter, "name", "") or type(self.reporter).__name__


def reported_names(logs: Mapping[str, Any]) -> dict[str, Any]:
    """The logs with tracker names: eval_x is eval/x, test_x is test/x, any other x is train/x."""
    return {_reported_name(name): value for name, value in logs.items()}


def checkpoint_of(args: BaseArguments, state: Any) -> Path:
    """The folder of the checkpoint of the current step."""
    return Path(working_folder(str(args.output_dir))) / folder_name(state.global_step)


def _reported_name(name: str) -> str:
    for prefix, section in SECTIONS.items():
        if name.startswith(prefix):
            return section + name.removeprefix(prefix)
    return f"train/{name}"


def run_info(
    args: BaseArguments | None,
    state: Any,
    model: Any,
    *,
    run_id: str,
    resumed_from: int | None = None,
    is_continued: bool = False,
) -> RunInfo:
    """The RunInfo of this run."""
    trial_name = getattr(state, "trial_name", None)
    output_dir, logging_dir = getattr(args, "output_dir", None), getattr(args, "logging_dir", None)
    return RunInfo(
        run_id=run_id,
        run_name=trial_name or without_secrets(getattr(args, "run_name", None)),
        output_dir=None if output_dir is None else os.fspath(output_dir),
        logging_dir=None if logging_dir is None else str(logging_dir),
        config=without_secrets(_config_of(args)),
        model_config=without_secrets(_model_config_of(model)),
        resumed_from=resumed_from,
        is_continued=is_continued,
        num_parameters=_size_of(model),
        trial_name=trial_name,
        arguments=args,
        model=model,
    )


def _config_of(args: BaseArguments | None) -> dict[str, Any]:
    for name in ("to_dict", "to_sanitized_dict"):
        convert = getattr(args, name, None)
        if convert is not None:
            return dict(convert())
    return {}


def _model_config_of(model: Any) -> dict[str, Any]:
    config = getattr(model, "config", None)
    if isinstance(config, Mapping):
        return dict(config)
    # Through JSON text if available: a configuration's to_dict may contain values that JSON does not support.
    to_json = getattr(config, "to_json_string", None)
    if to_json is not None:
        return dict(json.loads(to_json()))
    to_dict = getattr(config, "to_dict", None)
    return dict(to_dict()) if to_dict is not None else {}


def _size_of(model: Any) -> int | None:
    """The number of parameters, as the model or its framework counts them."""
    try:
        for name in ("num_parameters", "count_params"):
            if callable(getattr(model, name, None)):
                return int(getattr(model, name)())
        return sum(each.numel() for each in model.parameters())
    except (AttributeError, TypeError, ValueError):  # not built yet, or no model of these frameworks
        return None
