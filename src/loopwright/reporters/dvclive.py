"""DVCLive: files in the folder dvclive, and experiments of DVC in a repository."""

from __future__ import annotations

import csv
import json
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from ..errors import ArgumentsError
from .base import Numbers, Reporter, Row, RunInfo, is_on, require, without_stored
from .callback import ReporterCallback
from .model_files import saved_model, wait_for

if TYPE_CHECKING:
    from ..args.base import BaseArguments


class DVCLiveReporter(Reporter):
    """Metrics under the step of the run, and the arguments as parameters."""

    name: ClassVar[str] = "dvclive"

    def __init__(self, live: Any = None, **options: Any) -> None:
        require("dvclive", "dvclive")
        self.live, self._options = live, options
        self._is_users = live is not None
        self._numbers = Numbers("DVCLive")

    def start(self, run: RunInfo) -> None:
        from dvclive import Live

        if not self._is_users:
            if run.is_continued:
                _repair(Path(self._options.get("dir", "dvclive")))
            self.live = Live(**{"resume": run.is_continued, **self._options})
        self.live.log_params(_plain(run.hyper_parameters))
        if run.num_parameters is not None:
            self.live.log_params({"model/num_parameters": run.num_parameters})

    def log(self, values: dict[str, Any], step: int) -> None:
        self.live.step = step
        for name, number in self._numbers.of(values).items():
            self.live.log_metric(name, number)
        self.live.make_summary()

    def artifact(self, path: str | os.PathLike[str], name: str) -> None:
        wait_for(path)
        self.live.log_artifact(os.fspath(path), name=name, type="model")

    def unstored(self, rows: Sequence[Row]) -> list[Row] | None:
        folder = Path(self.live.plots_dir) / "metrics"
        return without_stored(rows, (pair for file in folder.rglob("*.tsv") for pair in _steps_in(file, folder)))

    def finish(self, status: str) -> None:
        self.live.end()

    def as_callback(self) -> DVCLiveCallback:
        return DVCLiveCallback(reporter=self)


class DVCLiveCallback(ReporterCallback):
    """Reports to DVCLive.

    `log_model`: True adds the final model to the experiment, "all" every checkpoint; by default HF_DVCLIVE_LOG_MODEL.
    Other options are those of `dvclive.Live`.
    """

    def __init__(
        self,
        live: Any = None,
        log_model: Literal["all"] | bool | None = None,
        *,
        reporter: DVCLiveReporter | None = None,
        **kwargs: Any,
    ) -> None:
        if log_model not in (None, True, False, "all"):
            raise ArgumentsError(f"log_model={log_model!r}: use True, False or 'all'")
        super().__init__(reporter or DVCLiveReporter(live, **kwargs))
        named = os.environ.get("HF_DVCLIVE_LOG_MODEL", "")
        from_environment = "all" if named.lower() == "all" else is_on("HF_DVCLIVE_LOG_MODEL")
        self._log_model = from_environment if log_model is None else log_model

    @property
    def live(self) -> Any:
        """The `dvclive.Live` in use; None before the start."""
        return getattr(self.reporter, "live", None)

    def on_save(self, args: BaseArguments, state: Any, control: Any, **kwargs: Any) -> None:
        if self._log_model == "all":
            self.send_checkpoint(args, state)

    def on_train_end(self, args: BaseArguments, state: Any, control: Any, **kwargs: Any) -> None:
        if self._log_model is True and state.is_world_process_zero:
            folder = saved_model(kwargs.get("model"), kwargs.get("processing_class"))
            if folder is not None:
                self.artifact(folder, "best" if args.load_best_model_at_end else "last")
        super().on_train_end(args, state, control, **kwargs)


def _steps_in(file: Path, folder: Path) -> Iterator[tuple[int, list[str]]]:
    """The steps of a metric, each with its name."""
    name = file.relative_to(folder).with_suffix("").as_posix()
    for line in csv.DictReader(file.open(newline=""), delimiter="\t"):
        if (line.get("step") or "").isdigit():
            yield int(line["step"]), [name]


def _repair(folder: Path) -> None:
    """Remove what a process wrote in part when it was killed."""
    summary = folder / "metrics.json"
    try:
        json.loads(summary.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return
    except ValueError:
        summary.write_text('{"step": 0}', encoding="utf-8")
    for file in (folder / "plots" / "metrics").rglob("*.tsv"):
        text = file.read_bytes()
        if not text.endswith(b"\n"):
            os.truncate(file, text.rfind(b"\n") + 1)
        if not file.stat().st_size:
            file.unlink()


def _plain(value: Any) -> Any:
    """The value in types that YAML writes."""
    if isinstance(value, dict):
        return {str(name): _plain(each) for name, each in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(each) for each in value]
    return value if value is None or type(value) in (bool, int, float, str) else str(value)
