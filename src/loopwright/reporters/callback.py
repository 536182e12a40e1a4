"""The callback that calls a reporter on the events of a run."""

from __future__ import annotations

import atexit
import json
import logging
import uuid
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from ..core.events import TrainerCallback
from .base import Reporter, RunInfo

if TYPE_CHECKING:
    from ..args.base import BaseArguments

logger = logging.getLogger("loopwright")

SECTIONS = {"eval_": "eval/", "test_": "test/"}
"""Prefix of a logged name -> section of the reported name; other names are in train/."""


class ReporterCallback(TrainerCallback):
    """Starts one reporter, sends metrics to it and finishes it, on rank 0 only.

    The run id and the reporter's state are saved in checkpoints, so that a resumed run continues in the same tracker
    run.
    """

    def __init__(self, reporter: Reporter) -> None:
        self.reporter = reporter
        self.run_id: str | None = None
        self._is_running = False
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
        self._start(args, state, kwargs.get("model"), resumed_from=state.global_step or None)

    def on_log(
        self, args: BaseArguments, state: Any, control: Any, logs: dict[str, Any] | None = None, **kwargs: Any
    ) -> None:
        if not state.is_world_process_zero or not logs:
            return
        if not self._is_running:
            self._start(args, state, kwargs.get("model"))
        self.reporter.log(reported_names(logs), state.global_step)

    def on_train_end(self, args: BaseArguments, state: Any, control: Any, **kwargs: Any) -> None:
        self._is_training = False
        self._finish("finished")

    def artifact(self, path: Any, name: str) -> None:
        """Pass a file or folder to the reporter, if it is started."""
        if self._is_running:
            self.reporter.artifact(path, name)

    def state_dict(self) -> dict[str, Any]:
        state_dict = getattr(self.reporter, "state_dict", dict)
        return {"reporter": self._name(), "run_id": self.run_id, "state": state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if state.get("reporter") != self._name():
            logger.warning(
                f"The checkpoint was reported to {state.get('reporter')!r}; {self._name()!r} starts a new run instead."
            )
            return
        if self._is_running:
            self._finish("finished")
        self.run_id = state["run_id"]
        if state["state"]:
            self.reporter.load_state_dict(state["state"])

    def _start(self, args: BaseArguments, state: Any, model: Any, resumed_from: int | None = None) -> None:
        if self._is_running and resumed_from is None:
            return
        if self._is_running:
            # Started by an evaluation before training; the reporter needs the step at which the run resumes.
            self._finish("finished")
        self.run_id = self.run_id or uuid.uuid4().hex
        self.reporter.start(run_info(args, state, model, run_id=self.run_id, resumed_from=resumed_from))
        self._is_running = True
        atexit.register(self._at_exit)

    def _finish(self, status: str) -> None:
        if not self._is_running:
            return
        self._is_running = False
        atexit.unregister(self._at_exit)
        self.reporter.finish(status)

    def _at_exit(self) -> None:
        self._finish("interrupted" if self._is_training else "finished")

    def _name(self) -> str:
        return getattr(self.reporter, "name", "") or type(self.reporter).__name__


def reported_names(logs: Mapping[str, Any]) -> dict[str, Any]:
    """The logs with tracker names: eval_x is eval/x, test_x is test/x, any other x is train/x."""
    return {_reported_name(name): value for name, value in logs.items()}


def _reported_name(name: str) -> str:
    for prefix, section in SECTIONS.items():
        if name.startswith(prefix):
            return section + name.removeprefix(prefix)
    return f"train/{name}"


def run_info(args: BaseArguments, state: Any, model: Any, *, run_id: str, resumed_from: int | None = None) -> RunInfo:
    """The RunInfo of this run."""
    trial_name = getattr(state, "trial_name", None)
    output_dir, logging_dir = getattr(args, "output_dir", None), getattr(args, "logging_dir", None)
    return RunInfo(
        run_id=run_id,
        run_name=trial_name or getattr(args, "run_name", None),
        output_dir=None if output_dir is None else str(output_dir),
        logging_dir=None if logging_dir is None else str(logging_dir),
        config=_config_of(args),
        model_config=_model_config_of(model),
        resumed_from=resumed_from,
    )


def _config_of(args: BaseArguments) -> dict[str, Any]:
    for name in ("to_sanitized_dict", "to_dict"):
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
