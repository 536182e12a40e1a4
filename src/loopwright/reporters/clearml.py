"""ClearML, online or offline."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from .base import END_OF_TRAINING, Numbers, Reporter, Row, RunInfo, is_on, require, without_stored
from .callback import ReporterCallback
from .model_files import wait_for

if TYPE_CHECKING:
    from ..args.base import BaseArguments


class ClearMLReporter(Reporter):
    """Metrics as scalars, the values of the end of training as single values, the arguments as hyper-parameters.

    A task that you started with `Task.init` is used, and not closed.
    """

    name: ClassVar[str] = "clearml"

    def __init__(self) -> None:
        require("clearml", "clearml")
        self._task: Any = None
        self._task_id: str | None = None
        self._folder: str | None = None
        self._is_own = True
        self._numbers = Numbers("ClearML")

    def start(self, run: RunInfo) -> None:
        from clearml import Task

        _report_in_this_process()
        current = Task.current_task()
        self._is_own = current is None
        before, self._before = self._task_id, self._folder
        self._task = current or Task.init(
            project_name=os.environ.get("CLEARML_PROJECT") or "HuggingFace Transformers",
            task_name=os.environ.get("CLEARML_TASK") or run.run_name or "Trainer",
            reuse_last_task_id=False,
            continue_last_task=before if before and not Task.is_offline() else False,
            auto_connect_frameworks={"tensorboard": False, "pytorch": False},
            output_uri=is_on("CLEARML_LOG_MODEL") or None,
        )
        if self._is_own and before:
            self._task.set_initial_iteration(0)  # ClearML would add the last iteration to every step
        self._task_id, self._folder = self._task.id, _offline_folder(self._task)
        self._task.update_parameters({f"Transformers/{name}": str(value) for name, value in run.config.items()})
        if run.num_parameters is not None:
            self._task.update_parameters({"Transformers/model/num_parameters": run.num_parameters})
        if run.model_config:
            self._task.set_configuration_object(name="Model Configuration", config_dict=run.model_config)

    def log(self, values: dict[str, Any], step: int) -> None:
        board = self._task.get_logger()
        for name, number in self._numbers.of(values).items():
            if name in END_OF_TRAINING:
                board.report_single_value(name=name.removeprefix("train/"), value=number)
            else:
                section, _, series = name.partition("/")
                board.report_scalar(title=section, series=series, value=number, iteration=step)

    def artifact(self, path: str | os.PathLike[str], name: str) -> None:
        from clearml import OutputModel

        wait_for(path)
        model = OutputModel(task=self._task, name=name)
        model.update_weights_package(weights_path=os.fspath(path), target_filename=name, auto_delete_file=False)

    def flush(self) -> bool:
        return bool(self._task.flush(wait_for_uploads=True))

    def unstored(self, rows: Sequence[Row]) -> list[Row] | None:
        if self._before is None:
            return None
        events = events_of(Path(self._before))
        return without_stored(rows, ((each["iter"], [f"{each['metric']}/{each['variant']}"]) for each in events))

    def finish(self, status: str) -> None:
        if self._is_own:
            self._task.close()

    def state_dict(self) -> dict[str, Any]:
        return {"task_id": self._task_id, "folder": self._folder}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._task_id, self._folder = state["task_id"], state["folder"]

    def as_callback(self) -> ClearMLCallback:
        return ClearMLCallback(reporter=self)


class ClearMLCallback(ReporterCallback):
    """Reports to ClearML; with CLEARML_LOG_MODEL=1 checkpoints are uploaded."""

    def __init__(self, *, reporter: ClearMLReporter | None = None) -> None:
        super().__init__(reporter or ClearMLReporter())

    def on_save(self, args: BaseArguments, state: Any, control: Any, **kwargs: Any) -> None:
        if is_on("CLEARML_LOG_MODEL"):
            self.send_checkpoint(args, state)


def _report_in_this_process() -> None:
    """By default ClearML forks the training process, and another thread that starts a program may then wait forever."""
    from clearml.config import config_obj

    config_obj.set_overrides({"sdk": {"development": {"report_use_subprocess": False}}})


def events_of(folder: Path) -> list[dict[str, Any]]:
    """The scalars in the folder of an offline session."""
    path = folder / "metrics.jsonl"
    if not path.exists():
        return []
    found: list[dict[str, Any]] = []
    for line in path.read_text(encoding="utf-8").splitlines():
        try:
            events = json.loads(line)
        except ValueError:  # the process was killed while it wrote the line
            continue
        found += [event for event in events if event.get("type") == "training_stats_scalar"]
    return found


def _offline_folder(task: Any) -> str | None:
    folder = task.get_offline_mode_folder()
    return None if folder is None else str(folder)
