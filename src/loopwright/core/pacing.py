"""Pacing: how fast a run goes."""

from __future__ import annotations

from .part import Part
from .throughput import ThroughputMeter
from .update import Update


class Pacing(Part):
    """The throughput of a run, and where the time of an update goes."""

    def make_meter(self) -> ThroughputMeter:
        """What measures the throughput of a run."""
        return ThroughputMeter()

    def live_numbers(self) -> dict[str, float]:
        """The throughput since the last log point."""
        return self.run.pace.read()

    def toggle_step_timing(self, update: Update) -> None:
        """Start or stop, after this update, the timer that splits the time of an update into parts."""

    def close(self) -> None:
        """Take away what measuring put on the model."""
