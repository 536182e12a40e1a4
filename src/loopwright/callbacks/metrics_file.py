"""metrics.jsonl: every logged metric, each step exactly once even after crashes and resumes."""

from __future__ import annotations

import json
import math
import os
import stat
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..args.groups.duration import DurationArgs
from ..args.paths import fixed_folder
from ..core.checkpoint.disk_errors import FULL
from ..core.checkpoint.reading import kind_of_file
from ..core.events import TrainerCallback
from ..errors import OutputError
from ..notices import logger

if TYPE_CHECKING:
    from ..args.base import BaseArguments

FILE_NAME = "metrics.jsonl"
NON_FINITE = {"NaN": math.nan, "Infinity": math.inf, "-Infinity": -math.inf}
"""JSON has no such numbers: they are written as these strings and parsed as floats."""
_POSITION = frozenset({"step", "epoch", "time"})


class MetricsFileCallback(TrainerCallback):
    """Appends each log to metrics.jsonl in the output folder as {"step", "epoch", "time", **logs}.

    A training row also contains its throughput, as {"pace": {"tokens_per_second", ...}}.
    A resumed run first drops the rows after the step it resumes from; a row logged again for that step replaces the
    old one. A new run renames the file of the previous run to metrics.<n>.jsonl.
    """

    def __init__(self, *, clock: Callable[[], float] = time.time) -> None:
        self._clock = clock
        self._is_training = False
        self._is_off = False
        self._has_begun = False
        self._place: Path | None = None
        """The file while a run trains: the working directory may change meanwhile."""
        self._mended: Path | None = None
        self._unwritten: list[dict[str, Any]] = []
        self._own_from = 0
        self._inherited: set[tuple[int, str]] = set()

    def on_train_begin(self, args: BaseArguments, state: Any, control: Any, **kwargs: Any) -> None:
        if not state.is_world_process_zero:
            return
        self._is_training, self._is_off = True, False
        path = self._place = _path(args)
        try:
            _refuse_other_kinds(path)
            if state.global_step:
                self._resume(path, state.global_step)
            else:
                self._start_anew(path)
        except OSError as error:
            raise _cannot_write(path, error) from error
        self._has_begun = True

    def on_log(
        self,
        args: BaseArguments,
        state: Any,
        control: Any,
        logs: dict[str, Any] | None = None,
        pace: dict[str, float] | None = None,
        **kwargs: Any,
    ) -> None:
        if state.is_world_process_zero and logs and not self._is_off:
            self._keep(self._place or _path(args), state, {**logs, "pace": pace} if pace and "loss" in logs else logs)

    def on_predict(
        self, args: BaseArguments, state: Any, control: Any, metrics: dict[str, Any] | None = None, **kwargs: Any
    ) -> None:
        # Metrics of predictions are not logged; they are only passed to this event.
        self.on_log(args, state, control, logs=metrics)

    def on_save(self, args: BaseArguments, state: Any, control: Any, **kwargs: Any) -> None:
        # The rows before a checkpoint are never logged again, so they must be as durable as the checkpoint.
        path = self._place or _path(args)
        if state.is_world_process_zero and path.exists():
            try:
                with open(path, "rb+") as file:
                    os.fsync(file.fileno())
            except OSError as error:
                if error.errno not in FULL:
                    raise _cannot_write(path, error) from error
                logger.warning(f"the disk is full; the latest rows of {path} may be lost if the machine fails")

    def left(self) -> None:
        """Called when training has ended, even if on_train_end was not called."""
        self._is_training, self._place = False, None

    def rewind(self, args: BaseArguments, state: Any) -> None:
        """Drop the rows of steps that were undone."""
        if state.is_world_process_zero:
            self._resume(self._place or _path(args), state.global_step)

    def on_train_end(self, args: BaseArguments, state: Any, control: Any, **kwargs: Any) -> None:
        self._is_training = False

    def _keep(self, path: Path, state: Any, logs: dict[str, Any]) -> None:
        row = {"step": state.global_step, "epoch": state.epoch, "time": self._clock(), **logs}
        row["step"] = state.global_step
        self._unwritten.append(row)
        try:
            while self._unwritten:
                self._write(path, self._unwritten[0])
                del self._unwritten[0]
        except OSError as error:
            self._mended = None  # the last line may be incomplete
            if error.errno in FULL:
                logger.warning(
                    f"the disk is full; {len(self._unwritten)} rows of {path} will be written when there is space"
                )
                return
            if self._is_training:
                raise _cannot_write(path, error) from error
            # An evaluation without training must not fail because this file cannot be written.
            self._is_off = True
            logger.warning(
                f"{path} cannot be written ({error}); the metrics of this evaluation are not recorded there."
            )

    def _resume(self, path: Path, step: int) -> None:
        rows = _rows_of(path) if path.exists() else []
        kept = [row for row in rows if row["step"] <= step]
        if path.exists():
            _replace(path, kept)
        self._inherited = {(step, kind_of(row)) for row in kept if row["step"] == step}

    def _start_anew(self, path: Path) -> None:
        """Start with the rows this process wrote before training; older rows are moved to metrics.<n>.jsonl."""
        is_own = self._mended == path and not self._has_begun
        foreign = self._own_from if is_own else _size(path)
        if foreign:
            own = path.read_bytes()[foreign:]
            temporary = _temporary(path)
            temporary.write_bytes(own)
            os.truncate(path, foreign)
            os.replace(path, _free_name(path))
            os.replace(temporary, path)
        self._inherited = set()

    def _write(self, path: Path, row: dict[str, Any]) -> None:
        if self._mended != path:
            self._mend(path)
        place = (row["step"], kind_of(row))
        if place in self._inherited:
            self._inherited.discard(place)
            _replace(path, [each for each in _rows_of(path) if (each["step"], kind_of(each)) != place])
        with open(path, "a", encoding="utf-8") as file:
            file.write(_line(row))

    def _mend(self, path: Path) -> None:
        """Remove an incomplete last line left by a crash: the next row would be appended to it."""
        path.parent.mkdir(parents=True, exist_ok=True)
        if _size(path):
            content = path.read_bytes()
            if not content.endswith(b"\n"):
                _replace(path, _rows_of(path))
        self._mended, self._own_from = path, _size(path)


def read_metrics(path: str | os.PathLike[str]) -> list[dict[str, Any]]:
    """The rows of a metrics.jsonl (or of the one in a folder), with NaN and infinities as floats."""
    path = Path(path)
    return [restored(row) for row in _rows_of(path / FILE_NAME if path.is_dir() else path)]


def kind_of(row: dict[str, Any]) -> str:
    """The kind of a row; of two rows with the same step and kind, one is a duplicate."""
    if "loss" in row:
        return "training"
    for name in row:
        if name.endswith("_runtime"):
            return name.removesuffix("_runtime")
    return " ".join(sorted(row.keys() - _POSITION))


def _rows_of(path: Path) -> list[dict[str, Any]]:
    """All complete rows; an incomplete line (after a crash) is skipped with a warning."""
    rows = []
    for number, line in enumerate(path.read_bytes().split(b"\n"), start=1):
        if not line:
            continue
        row = parsed_row(line)
        if row is None:
            logger.warning(f"{path}, line {number} is not a complete row and is skipped.")
        else:
            rows.append(row)
    return rows


def parsed_row(line: bytes) -> dict[str, Any] | None:
    """The row of a line; None if it is not a complete one."""
    try:
        row = json.loads(line, parse_constant=str)  # other programs write NaN as it is
    except (ValueError, RecursionError):
        return None
    return row if isinstance(row, dict) and type(row.get("step")) is int else None


def _line(row: dict[str, Any]) -> str:
    return json.dumps(_plain(row), allow_nan=False) + "\n"


def non_finite_name(value: float) -> str:
    """NaN or an infinity as JSON text."""
    return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"


def _plain(value: Any) -> Any:
    """The value in JSON's own types."""
    if isinstance(value, dict):
        return {str(name): _plain(each) for name, each in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(each) for each in value]
    if isinstance(value, float) and not math.isfinite(value):
        return non_finite_name(value)
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    # Arrays, tensors and their scalars convert themselves to Python types.
    tolist = getattr(value, "tolist", None)
    return _plain(tolist()) if tolist is not None else str(value)


def restored(value: Any) -> Any:
    """A row with NaN and infinities as floats."""
    if isinstance(value, dict):
        return {name: restored(each) for name, each in value.items()}
    if isinstance(value, list):
        return [restored(each) for each in value]
    return NON_FINITE.get(value, value) if isinstance(value, str) else value


def _replace(path: Path, rows: Iterable[dict[str, Any]]) -> None:
    """Replace the file's contents with these rows atomically."""
    temporary = _temporary(path)
    with open(temporary, "w", encoding="utf-8") as file:
        file.writelines(map(_line, rows))
        file.flush()
        os.fsync(file.fileno())
    os.replace(temporary, path)


def _path(args: DurationArgs) -> Path:
    return Path(fixed_folder(args.output_dir)) / FILE_NAME


def _refuse_other_kinds(path: Path) -> None:
    """Raise an error for a folder, or a named pipe, whose reader or writer would be waited for."""
    mode = path.stat().st_mode if path.exists() else stat.S_IFREG
    if not stat.S_ISREG(mode):
        raise OSError(f"it is {kind_of_file(mode)}, not a file")


def _temporary(path: Path) -> Path:
    return path.with_name(f".{path.name}.new")


def _size(path: Path) -> int:
    return path.stat().st_size if path.exists() else 0


def _free_name(path: Path) -> Path:
    number = 1
    while (free := path.with_name(f"{path.stem}.{number}{path.suffix}")).exists():
        number += 1
    return free


def _cannot_write(path: Path, error: OSError) -> OutputError:
    if not path.parent.is_dir():
        return OutputError(
            f"{path} cannot be written: the folder {path.parent} was removed, or its disk disconnected, while the run "
            "trained. Start the run again, from a checkpoint elsewhere if there is one, with an output_dir that stays"
        )
    return OutputError(f"{path} cannot be written ({error}). Choose an output_dir that this process can write to.")
