"""The callbacks every trainer starts with."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..args.groups.logging import LoggingArgs
from ..core.events import TrainerCallback
from ..report.callback import ReportCallback
from ..reporters.registry import reporter_callbacks
from .flow import DefaultFlowCallback
from .metrics_file import MetricsFileCallback
from .notebook import NotebookProgressCallback, in_notebook
from .printer import PrinterCallback
from .progress import ProgressCallback

if TYPE_CHECKING:
    from ..args.base import BaseArguments


def default_callbacks(args: BaseArguments) -> list[TrainerCallback]:
    """The flow callback, a progress display, metrics.jsonl, report.html and the reporters named in `report_to`."""
    return [
        DefaultFlowCallback(),
        progress_class(args)(),
        MetricsFileCallback(),
        *([ReportCallback()] if getattr(args, "html_report", True) else []),
        *reporter_callbacks(getattr(args, "report_to", None)),
    ]


def progress_class(args: LoggingArgs) -> type[TrainerCallback]:
    """The progress display: a printer if bars are disabled, a table in a notebook, else a live line."""
    if getattr(args, "disable_tqdm", False):
        return PrinterCallback
    return NotebookProgressCallback if in_notebook() else ProgressCallback
