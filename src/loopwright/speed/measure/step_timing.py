"""Where the time of an update is spent, sampled in a few updates: data, forward, backward, optimizer, other.

A sampled update records marks: events on the device's timeline, or host times on a CPU. Nothing waits for them: they
are read at the next log point.
"""

from __future__ import annotations

import time
from typing import Any

import torch
from torch import nn

FIRST, SECOND, EVERY = 11, 61, 200
"""Updates after which the next one is sampled; not round numbers, at which runs log, evaluate and save."""
PARTS = ("data", "forward", "backward", "compute", "optimizer", "other")
"""`compute` is forward and backward together, if they cannot be separated."""


def next_sample(step: int) -> int:
    """The next update after which one is sampled, once `step` updates are done."""
    if step < FIRST:
        return FIRST
    if step < SECOND:
        return SECOND
    return SECOND + ((step - SECOND) // EVERY + 1) * EVERY


class Marks:
    """Named points in time on the device's timeline."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._made: list[tuple[str, Any]] = []

    def add(self, name: str) -> None:
        if self._device.type == "cpu":
            self._made.append((name, time.perf_counter()))
            return
        if self._device.type == "cuda" and torch.cuda.is_current_stream_capturing():
            return  # an event inside a graph being captured would never complete
        event = torch.Event(self._device, enable_timing=True)
        event.record()
        self._made.append((name, event))

    def clear(self) -> None:
        self._made = []

    def names(self) -> list[str]:
        return [name for name, _ in self._made]

    def are_known(self) -> bool:
        """Whether the device has completed all marks."""
        return self._device.type == "cpu" or all(mark.query() for _, mark in self._made)

    def seconds(self) -> list[tuple[str, float]]:
        """Each mark but the last, and the seconds from it to the next."""
        pairs = zip(self._made, self._made[1:], strict=False)
        return [(name, self._between(first, second)) for (name, first), (_, second) in pairs]

    def _between(self, first: Any, second: Any) -> float:
        if self._device.type == "cpu":
            return float(second - first)
        return float(first.elapsed_time(second)) / 1000


class StepTimer:
    """One sampled update, from the end of the one before it to its own end."""

    def __init__(self, device: torch.device, model: nn.Module) -> None:
        self.marks = Marks(device)
        self.marks.add("begin")
        self._micro_batches, self._waited = 0, 0.0
        self._is_computing = False
        self._hooks: list[Any] = []
        if not is_compiled(model):
            # Hooks on a compiled module would trigger another compilation.
            self._hooks = [
                model.register_forward_pre_hook(lambda *_: self._mark("forward")),
                model.register_forward_hook(lambda *_: self._mark("backward")),
            ]

    def _mark(self, name: str) -> None:
        if self._is_computing:  # not in an evaluation before the update
            self.marks.add(name)

    def restart(self) -> None:
        """Start again from now: earlier time is not part of an update."""
        self.marks.clear()
        self.marks.add("begin")

    def data_is_there(self) -> None:
        self._is_computing = True
        self.marks.add("compute")

    def gradients_are_done(self) -> None:
        self._is_computing = False
        self.marks.add("optimizer")

    def end(self, *, micro_batches: int, waited: float) -> None:
        """End the update; `waited` is how long the loop waited for its batches."""
        self.marks.add("end")
        self._micro_batches, self._waited = micro_batches, waited
        self.detach()

    def detach(self) -> None:
        for hook in self._hooks:
            hook.remove()
        self._hooks = []

    def parts(self) -> dict[str, float] | None:
        """Seconds by part; None if the marks are incomplete, as after an update that was undone."""
        names = self.marks.names()
        if any(names.count(name) != 1 for name in ("begin", "compute", "optimizer", "end")):
            return None
        found = dict.fromkeys(PARTS, 0.0)
        for name, seconds in self.marks.seconds():
            found["other" if name == "begin" else name] += seconds
        if names.count("forward") == self._micro_batches:
            found["other"] += found["compute"]  # time before the first forward: copies to the device
            found["compute"] = 0.0
        else:  # the model is called differently or several times, so the start of its backward is unknown
            found["compute"] += found["forward"] + found["backward"]
            found["forward"] = found["backward"] = 0.0
        # Waiting for data may overlap with earlier work of the device: only a gap is lost time.
        found["data"] = min(self._waited, found["other"])
        found["other"] -= found["data"]
        return found


class TimeSplit:
    """The mean time of each part of an update, over the sampled updates that the device has finished."""

    def __init__(self) -> None:
        self._open: list[StepTimer] = []
        self._sums: dict[str, float] = {}
        self.updates = 0

    def add(self, timer: StepTimer) -> None:
        self._open.append(timer)

    def read(self) -> None:
        """Add the sampled updates that the device has completed by now."""
        waiting = []
        for timer in self._open:
            if not timer.marks.are_known():
                waiting.append(timer)
            elif (parts := timer.parts()) is not None:
                self._take(parts)
        self._open = waiting

    def _take(self, parts: dict[str, float]) -> None:
        self.updates += 1
        for name, seconds in parts.items():
            self._sums[name] = self._sums.get(name, 0.0) + seconds

    def shares(self) -> dict[str, float]:
        """The share of each part with a non-zero time, in the order of PARTS."""
        whole = sum(self._sums.values())
        return {name: self._sums[name] / whole for name in PARTS if self._sums.get(name)} if whole else {}

    def seconds(self) -> float:
        """The mean duration of a sampled update."""
        return sum(self._sums.values()) / self.updates if self.updates else 0.0


def is_compiled(model: nn.Module) -> bool:
    """Whether calling the model runs compiled code as a whole, not only in its blocks."""
    return getattr(model, "_compiled_call_impl", None) is not None or hasattr(model, "_orig_mod")
