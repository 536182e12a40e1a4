"""Comet, online or offline."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, ClassVar

from ..errors import ArgumentsError
from .base import Reporter, Row, RunInfo, is_on, require
from .callback import ReporterCallback
from .model_files import wait_for

if TYPE_CHECKING:
    from ..args.base import BaseArguments

MODES = ("get", "get_or_create", "create")


class CometReporter(Reporter):
    """Metrics of every step, and the arguments as parameters."""

    name: ClassVar[str] = "comet_ml"
    logs_predictions: ClassVar[bool] = True
    ends_with_training: ClassVar[bool] = False

    def __init__(self) -> None:
        require("comet_ml", "comet_ml")
        self._experiment: Any = None
        mode = os.environ.get("COMET_MODE", "").lower()
        if mode and mode not in MODES:
            raise ArgumentsError(f"COMET_MODE={mode!r} is not one of {', '.join(MODES)}; correct or unset it")
        self._mode = mode or None

    def start(self, run: RunInfo) -> None:
        import comet_ml

        self._experiment = comet_ml.start(
            mode="create" if run.trial_name else self._mode,
            experiment_key=os.environ.get("COMET_EXPERIMENT_KEY") or run.run_id,
            experiment_config=comet_ml.ExperimentConfig(name=run.run_name),
        )
        parameters: dict[str, Any] = {"args": run.config, "config": run.model_config}
        if run.num_parameters is not None:
            parameters["model/num_parameters"] = run.num_parameters
        self._experiment.log_parameters(parameters, nested_support=True)

    def log(self, values: dict[str, Any], step: int) -> None:
        self._experiment.log_metrics(values, step=step, epoch=_integer(values.get("train/epoch")))

    def artifact(self, path: str | os.PathLike[str], name: str) -> None:
        wait_for(path)
        if os.path.isdir(path):
            self._experiment.log_asset_folder(os.fspath(path), recursive=True, log_file_name=True)
        else:
            self._experiment.log_asset(os.fspath(path), file_name=name)

    def flush(self) -> bool:
        return not self._is_offline() and bool(self._experiment.flush())

    def unstored(self, rows: Sequence[Row]) -> list[Row] | None:
        # Comet writes the archive of an offline experiment at its end only.
        return list(rows) if self._is_offline() else None

    def finish(self, status: str) -> None:
        self._experiment.end()

    def as_callback(self) -> CometCallback:
        return CometCallback(reporter=self)

    def _is_offline(self) -> bool:
        return "Offline" in type(self._experiment).__name__


class CometCallback(ReporterCallback):
    """Reports to Comet; with COMET_LOG_ASSETS=1 the output folder is uploaded at the end."""

    def __init__(self, *, reporter: CometReporter | None = None) -> None:
        super().__init__(reporter or CometReporter())

    def on_train_end(self, args: BaseArguments, state: Any, control: Any, **kwargs: Any) -> None:
        if is_on("COMET_LOG_ASSETS") and state.is_world_process_zero:
            self.artifact(args.output_dir, "output")
        super().on_train_end(args, state, control, **kwargs)


def _integer(epoch: Any) -> int | None:
    return None if epoch is None else int(epoch)
