"""report.html in the output folder, up to date while a run trains."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..args.paths import fixed_folder
from ..core.events import TrainerCallback
from .facts import facts_of
from .writer import ReportWriter

if TYPE_CHECKING:
    from ..args.base import BaseArguments

MOST_NOTES = 8


class ReportCallback(TrainerCallback):
    """Writes report.html and report.data.js into the output folder; `html_report=False` turns it off."""

    def __init__(self) -> None:
        self._writer: ReportWriter | None = None
        self._notes: list[str] = []
        self._is_training = False

    def on_train_begin(self, args: BaseArguments, state: Any, control: Any, **kwargs: Any) -> None:
        if not state.is_world_process_zero or not getattr(args, "html_report", True):
            return
        self.left()
        folder = Path(fixed_folder(args.output_dir))
        folder.mkdir(parents=True, exist_ok=True)
        self._notes = []
        self._writer, self._is_training = ReportWriter(folder, {**facts_of(args), "notes": self._notes}), True

    def note_line(self, line: str) -> None:
        """Keep the lines about the run's data, model, device, early stop and best model."""
        if self._is_training and len(self._notes) < MOST_NOTES and not line.startswith("saved "):
            self._notes.append(line)

    def on_log(self, args: BaseArguments, state: Any, control: Any, **kwargs: Any) -> None:
        if self._writer is None:
            return
        if self._is_training:
            self._writer.wake()
        else:
            self._writer.write()  # an evaluation after training

    def on_save(self, args: BaseArguments, state: Any, control: Any, **kwargs: Any) -> None:
        if self._writer is not None and self._is_training:
            self._writer.wake()

    def left(self) -> None:
        """Called when training has ended, even if on_train_end was not called."""
        if self._writer is not None and self._is_training:
            self._is_training = False
            self._writer.finish()
