"""TensorBoard event files, written without importing TensorFlow or PyTorch."""

from __future__ import annotations

import importlib.util
import json
import os
import socket
import time
from pathlib import Path
from typing import Any, ClassVar, Protocol

from ..args.groups.tracking import tensorboard_folder
from ..core.checkpoint.schema import check_part, file_part, maybe, record, text
from ..errors import MissingPackage, NotAvailable
from .base import Numbers, Reporter, RunInfo
from .callback import ReporterCallback


class Writer(Protocol):
    """The methods used of a writer; `torch.utils.tensorboard.SummaryWriter` has them too."""

    def add_scalar(self, tag: str, scalar_value: Any, global_step: int) -> Any: ...
    def add_text(self, tag: str, text_string: str) -> Any: ...
    def flush(self) -> Any: ...
    def close(self) -> Any: ...


class EventFile:
    """One new event file in a folder.

    Uses TensorBoard's record writer and messages only: its usual writer imports TensorFlow if that is installed, which
    takes seconds and half a gigabyte.
    """

    def __init__(self, folder: str | os.PathLike[str], *, purge_step: int | None = None) -> None:
        from tensorboard.compat.proto import event_pb2
        from tensorboard.summary.writer.record_writer import RecordWriter

        Path(folder).mkdir(parents=True, exist_ok=True)
        self.path = Path(folder) / _event_file_name()
        self._writer = RecordWriter(self.path.open("xb"))
        self._add(file_version="brain.Event:2")
        if purge_step is not None:
            # Readers drop all values of earlier files in the folder from this step on.
            start = event_pb2.SessionLog(status=event_pb2.SessionLog.START)
            self._add(step=purge_step, session_log=start)
        self.flush()

    def add_scalar(self, tag: str, scalar_value: Any, global_step: int) -> None:
        from tensorboard.compat.proto import summary_pb2

        value = summary_pb2.Summary.Value(tag=tag, simple_value=float(scalar_value))
        self._add(step=global_step, summary=summary_pb2.Summary(value=[value]))

    def add_text(self, tag: str, text_string: str, global_step: int = 0) -> None:
        from tensorboard.compat.proto import summary_pb2, tensor_pb2, tensor_shape_pb2, types_pb2

        one = tensor_shape_pb2.TensorShapeProto(dim=[tensor_shape_pb2.TensorShapeProto.Dim(size=1)])
        tensor = tensor_pb2.TensorProto(dtype=types_pb2.DT_STRING, string_val=[text_string.encode()], tensor_shape=one)
        plugin = summary_pb2.SummaryMetadata.PluginData(plugin_name="text")
        metadata = summary_pb2.SummaryMetadata(plugin_data=plugin, data_class=summary_pb2.DATA_CLASS_TENSOR)
        value = summary_pb2.Summary.Value(tag=f"{tag}/text_summary", tensor=tensor, metadata=metadata)
        self._add(step=global_step, summary=summary_pb2.Summary(value=[value]))

    def flush(self) -> None:
        self._writer.flush()

    def close(self) -> None:
        self._writer.close()

    def _add(self, **fields: Any) -> None:
        from tensorboard.compat.proto import event_pb2

        self._writer.write(event_pb2.Event(wall_time=time.time(), **fields).SerializeToString())


class TensorBoardReporter(Reporter):
    """Scalars of every log, and the arguments and the model's configuration as text.

    The folder is `logging_dir`, else the environment's TENSORBOARD_LOGGING_DIR, else runs/<date>_<host> in the output
    folder. A resumed run continues in its folder; values after the step it resumes from are marked as outdated.
    """

    name: ClassVar[str] = "tensorboard"
    purges: ClassVar[bool] = True

    def __init__(self, writer: Writer | None = None) -> None:
        if writer is None and importlib.util.find_spec("tensorboard") is None:
            raise MissingPackage("tensorboard", needed_for='report_to="tensorboard"')
        self.writer = writer
        self.log_dir: str | None = None
        self._run_id: str | None = None
        self._is_users = writer is not None
        self._numbers = Numbers("TensorBoard")

    def start(self, run: RunInfo) -> None:
        is_new = run.run_id != self._run_id
        if not self._is_users:
            self.log_dir = choose_log_dir(run, before=None if is_new else self.log_dir)
            self.writer = EventFile(self.log_dir, purge_step=_purge_step(run))
        self._run_id = run.run_id
        if is_new:
            self._describe(run)

    def log(self, values: dict[str, Any], step: int) -> None:
        if self.writer is None:
            return
        for name, number in self._numbers.of(values).items():
            self.writer.add_scalar(name, number, step)
        self.writer.flush()

    def artifact(self, path: str | os.PathLike[str], name: str) -> None:
        if self.writer is not None:
            self.writer.add_text(f"artifact/{name}", os.fspath(path))

    def finish(self, status: str) -> None:
        if self.writer is None:
            return
        self.writer.flush()
        if not self._is_users:
            self.writer.close()
            self.writer = None

    def state_dict(self) -> dict[str, Any]:
        # The name only: the output folder may have moved when the run resumes.
        return {"run_id": self._run_id, "folder": os.path.basename(self.log_dir) if self.log_dir else None}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        check_part(state, record({"run_id": maybe(text), "folder": maybe(file_part)}))
        self._run_id, self.log_dir = state["run_id"], state["folder"]

    def as_callback(self) -> TensorBoardCallback:
        return TensorBoardCallback(reporter=self)

    def _describe(self, run: RunInfo) -> None:
        assert self.writer is not None
        for tag, values in {"args": run.config, "model_config": run.model_config}.items():
            if values:
                self.writer.add_text(tag, _as_code(json.dumps(values, indent=2, default=str)))
        self.writer.flush()


class TensorBoardCallback(ReporterCallback):
    """Reports to TensorBoard: through `tb_writer` if given (the caller closes it), else to its own event files."""

    def __init__(self, tb_writer: Writer | None = None, *, reporter: TensorBoardReporter | None = None) -> None:
        super().__init__(reporter or TensorBoardReporter(tb_writer))


def choose_log_dir(run: RunInfo, before: str | None = None) -> str:
    """The folder of a run's event files: the requested one, else the one used before, else a new one."""
    chosen = tensorboard_folder(run.logging_dir, run.output_dir or "")
    is_asked_for = run.logging_dir or os.environ.get("TENSORBOARD_LOGGING_DIR")
    if before and not is_asked_for:
        return os.path.join(os.path.dirname(chosen), os.path.basename(before))
    if "://" in chosen:
        raise NotAvailable(
            f"TensorBoard files cannot be written to {chosen!r}; only local folders are supported. Use a local "
            "folder, or pass a writer: callbacks=[TensorBoardCallback(tb_writer=...)]."
        )
    return chosen


def _purge_step(run: RunInfo) -> int | None:
    return None if run.resumed_from is None else run.resumed_from + 1


def _event_file_name() -> str:
    # Readers take the files of a folder in the order of their names, so a later file must sort later.
    seconds, nanoseconds = divmod(time.time_ns(), 10**9)
    return f"events.out.tfevents.{seconds:010d}.{nanoseconds:09d}.{socket.gethostname()}.{os.getpid()}"


def _as_code(text: str) -> str:
    # TensorBoard shows texts as Markdown, where an indented block keeps its shape.
    return "".join(f"    {line}\n" for line in text.splitlines())
