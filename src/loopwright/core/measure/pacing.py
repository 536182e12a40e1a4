"""Pacing: measures the speed of a run."""

from __future__ import annotations

from ..part import Part
from ..update import Update
from .throughput import ThroughputMeter


class Pacing(Part):
    """The throughput of a run, and the breakdown of the time of an update."""

    def make_meter(self) -> ThroughputMeter:
        """Create the meter of the run's throughput."""
        return ThroughputMeter()

    def live_numbers(self) -> dict[str, float]:
        """The throughput since the last log point."""
        return self.run.pace.read()

    def toggle_step_timing(self, update: Update) -> None:
        """Start or stop, after this update, the timer that breaks the time of an update into parts."""

    def close(self) -> None:
        """Remove the measuring hooks from the model."""
