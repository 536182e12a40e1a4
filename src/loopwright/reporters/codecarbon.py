"""CodeCarbon: energy and emissions of the run, in emissions.csv of the output folder."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from typing import Any, ClassVar

from ..args.paths import working_folder
from .base import Reporter, Row, RunInfo, require
from .callback import ReporterCallback

COUNTRY = "CODECARBON_COUNTRY_ISO_CODE"
INTERVAL = 60.0
"""Seconds between two writings of emissions.csv while training runs."""


class CodeCarbonReporter(Reporter):
    """Measures the whole run, and writes one row for every process that trained it.

    With CODECARBON_COUNTRY_ISO_CODE nothing is contacted; without it CodeCarbon finds the country by a web service.
    """

    name: ClassVar[str] = "codecarbon"

    def __init__(self) -> None:
        require("codecarbon", "codecarbon")
        self.tracker: Any = None
        self._written = 0.0

    def start(self, run: RunInfo) -> None:
        import codecarbon

        folder = working_folder(run.output_dir)
        os.makedirs(folder, exist_ok=True)
        options = {"output_dir": folder, "on_csv_write": "update"}
        offline = bool(os.environ.get(COUNTRY))
        self.tracker = (codecarbon.OfflineEmissionsTracker if offline else codecarbon.EmissionsTracker)(**options)
        self.tracker.start()
        self._write()

    def log(self, values: dict[str, Any], step: int) -> None:
        """Nothing is logged; what was measured so far is written now and then, for a run that is killed."""
        if time.monotonic() - self._written > INTERVAL:
            self._write()

    def _write(self) -> None:
        self.tracker.flush()
        self._written = time.monotonic()

    def unstored(self, rows: Sequence[Row]) -> list[Row] | None:
        """No row is stored, so none can be missing."""
        return []

    def finish(self, status: str) -> None:
        self.tracker.stop()

    def as_callback(self) -> CodeCarbonCallback:
        return CodeCarbonCallback(reporter=self)


class CodeCarbonCallback(ReporterCallback):
    """Measures emissions with CodeCarbon."""

    def __init__(self, *, reporter: CodeCarbonReporter | None = None) -> None:
        super().__init__(reporter or CodeCarbonReporter())
