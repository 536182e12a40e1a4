"""SwanLab, in the cloud or offline."""

from __future__ import annotations

import inspect
import os
from collections.abc import Iterator, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any, ClassVar

from ..notices import logger
from .base import END_OF_TRAINING, Reporter, Row, RunInfo, require, without_stored
from .callback import ReporterCallback

STEP = "train/global_step"
LENGTH_OF_ID = 21


class SwanLabReporter(Reporter):
    """Metrics of every step, and the arguments as configuration.

    A run that you started with `swanlab.init` is used, and not finished.
    """

    name: ClassVar[str] = "swanlab"
    logs_predictions: ClassVar[bool] = True
    ends_with_training: ClassVar[bool] = False

    def __init__(self) -> None:
        require("swanlab", "swanlab")
        self._swanlab = import_module("swanlab")
        self._run: Any = None
        self._is_own = False

    def start(self, run: RunInfo) -> None:
        swanlab, self._run = self._swanlab, _current(self._swanlab)
        self._is_own = self._run is None
        if self._is_own:
            self._run = _started(swanlab, run)
        swanlab.config.update({"FRAMEWORK": "loopwright", **run.hyper_parameters})
        if run.num_parameters is not None:
            swanlab.config.update({"model_num_parameters": run.num_parameters})

    def log(self, values: dict[str, Any], step: int) -> None:
        ends = [name for name in values if name in END_OF_TRAINING]
        once = {name.replace("train/", "single_value/", 1): values[name] for name in ends}
        charted = {name: value for name, value in values.items() if name not in END_OF_TRAINING}
        self._run.log({**charted, **once, STEP: step}, step=step)

    def flush(self) -> bool:
        return False  # SwanLab keeps records in memory, and has no call that writes them

    def unstored(self, rows: Sequence[Row]) -> list[Row] | None:
        if self._run.mode != "offline":
            return None
        files = Path(self._run.dir).parent.glob(f"run-*-{self._run.id}/*.swanlab")
        return without_stored(rows, ((step, [name]) for file in files for name, step in scalars_of(file)))

    def finish(self, status: str) -> None:
        if self._is_own and self._run.alive:
            if status == "finished":
                self._run.finish()
            else:
                self._run.finish(state="aborted")

    def as_callback(self) -> SwanLabCallback:
        return SwanLabCallback(reporter=self)


class SwanLabCallback(ReporterCallback):
    """Reports to SwanLab."""

    def __init__(self, *, reporter: SwanLabReporter | None = None) -> None:
        super().__init__(reporter or SwanLabReporter())
        if os.environ.get("SWANLAB_LOG_MODEL"):
            logger.warning("SWANLAB_LOG_MODEL has no effect: SwanLab does not store models")


def scalars_of(path: Path) -> Iterator[tuple[str, int]]:
    """Name and step of every scalar in the file of an offline run; ends where a killed process stopped writing."""
    from swanlab.proto.swanlab.record.v1.record_pb2 import Record
    from swanlab.sdk.internal.core_python.store import DataStoreReader

    reader = DataStoreReader()
    try:
        reader.open(path)
        while (data := reader.scan()) is not None:
            record = Record.FromString(data)
            if record.HasField("scalar"):
                yield record.scalar.key.replace("single_value/", "train/"), record.scalar.step
    except Exception:  # an incomplete record: what comes before it is stored
        return


def _current(swanlab: Any) -> Any:
    """The run that the user has started, or None."""
    try:
        return swanlab.get_run()
    except RuntimeError:  # newer versions raise without a run, older ones return None
        return None


def _started(swanlab: Any, run: RunInfo) -> Any:
    # Older versions call the name of a run experiment_name.
    name = "name" if "name" in inspect.signature(swanlab.init).parameters else "experiment_name"
    trial = run.trial_name and getattr(run.arguments, "run_name", None)
    return swanlab.init(
        project=os.environ.get("SWANLAB_PROJECT"),
        id=os.environ.get("SWANLAB_RUN_ID") or run.run_id[:LENGTH_OF_ID],
        resume=os.environ.get("SWANLAB_RESUME") or "allow",
        **{name: f"{trial}-{run.trial_name}" if trial else run.run_name},
    )
