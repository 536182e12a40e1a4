"""What is switched on for a run and why: decided once, printed once, kept with the run."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any

AS_MADE, GROUPED, UNMASKED, UNPADDED, FLAT = "collated", "grouped", "grouped without mask", "unpadded", "flat"
BIASED = "grouped with bias in rows"
IN_GROUPS = (UNMASKED, BIASED, GROUPED)
IN_ROWS = (FLAT, UNPADDED)
LAYOUTS = (*IN_ROWS, *IN_GROUPS)
"""Layouts from the one that saves most to the one that asks least of a model."""


@dataclass
class AccelerationChoice:
    """One acceleration: on or off, and the reason."""

    name: str
    is_on: bool
    reason: str
    numbers: dict[str, float] = field(default_factory=dict)

    def line(self) -> str:
        return f"{'on ' if self.is_on else 'off'}  {self.name}: {self.reason}"


@dataclass
class SpeedPlan:
    """The accelerations of a run."""

    layout: str = AS_MADE
    linear_loss: bool = False
    compiled: bool = False
    short_rows: bool = False
    """Whether compiled blocks see rows on both sides of a few thousand tokens."""
    graphed: bool = False
    """Whether forward and backward of a micro-batch are one CUDA graph."""
    budget: int = 0
    """Tokens a micro-batch may have; 0 means as many as the largest micro-batch the collator made."""
    overhead: int = 0
    round_to: int = 1
    fill: bool = False
    activations: str = "none"
    """What is recomputed in the backward pass: none, selective, full."""
    made_for: str = ""
    """Device and versions the plan was proved on; on others it is proved again."""
    choices: list[AccelerationChoice] = field(default_factory=list)

    @property
    def changes_anything(self) -> bool:
        switches = (self.linear_loss, self.compiled, self.graphed, self.activations != "none")
        return self.layout != AS_MADE or any(switches)

    @property
    def few_shapes(self) -> bool:
        """Whether rows are filled up to a few lengths, since each is a graph."""
        return self.graphed and self.layout in IN_ROWS

    def note(self, name: str, is_on: bool, reason: str, numbers: dict[str, float] | None = None) -> None:
        self.choices.append(AccelerationChoice(name, is_on, reason, numbers or {}))

    def take_back(self, name: str, reason: str) -> None:
        """Note that something that was on turned out to be impossible."""
        for choice in self.choices:
            if choice.name == name:
                choice.is_on, choice.reason = False, reason

    def add_numbers(self, name: str, numbers: dict[str, float]) -> None:
        """Keep what a whole update has shown beside what a few samples did."""
        for choice in self.choices:
            if choice.name == name and choice.is_on:
                choice.numbers.update((f"update_{key}", value) for key, value in numbers.items())

    def forget(self, name: str) -> None:
        """Leave out what was noted, to note it anew."""
        self.choices = [choice for choice in self.choices if choice.name != name]

    def lines(self) -> list[str]:
        """The plan in a few lines, for people."""
        return [choice.line() for choice in self.choices]

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> SpeedPlan:
        known = {name: values[name] for name in cls.__dataclass_fields__ if name in values}
        if known.get("layout") not in LAYOUTS:
            known["layout"] = AS_MADE  # also what older checkpoints call it
        known["choices"] = [AccelerationChoice(**each) for each in known.get("choices", [])]
        return cls(**known)


# ---- when it pays ---------------------------------------------------------------------------------------------------

PER_SECOND = {"cpu": 5e10, "cuda": 3e14}
"""Operations a device is reckoned to do in a second. Never measured: two runs must come to the same plan."""
PER_MODULE = {"cpu": 6e-5, "cuda": 4e-4}
"""Seconds that launching one module's forward and backward is reckoned to take."""
PER_LAUNCH = {"cpu": 6e-5, "cuda": 1e-4}
"""The same for the host alone, which is all that a graph saves."""
UNCOMPILED = {"cpu": 5e10, "cuda": 2e14}
"""Operations a device is reckoned to do in a second while it launches module by module."""
WORTH_SECONDS = {"cpu": 1.0, "cuda": 5.0}
"""Seconds a run must be reckoned to save before anything is proved and switched on."""
WORTH_SHARE = 0.1
"""Part of the computed tokens that must be padding."""
COMPILE_SECONDS = 60.0
"""Seconds of computing a run must have left before compiling pays."""
SHORT_ROW = 8192
"""Tokens of an update below which its rows are short for a compiler."""
ROW_TOKENS = 32_768
"""Tokens after which a longer row is hardly faster: adding up gradients and casting weights is little then."""
GROUP_TOKENS = 14_336
"""The same for groups, which are many anyway."""


def _of(table: dict[str, float], device_type: str) -> float:
    return table.get(device_type, table["cuda"])


def seconds(operations: float, device_type: str) -> float:
    """How long so many operations are reckoned to take."""
    return operations / _of(PER_SECOND, device_type)


def is_worth_it(saved_share: float, saved_operations: float, device_type: str) -> bool:
    """Whether leaving padding out pays for proving that it can be left out."""
    return saved_share >= WORTH_SHARE and seconds(saved_operations, device_type) >= _of(WORTH_SECONDS, device_type)


def pays_to_compile(operations: float, device_type: str) -> bool:
    """Whether so much computing is left that compiling is soon made up for."""
    return device_type != "cpu" and seconds(operations, device_type) >= COMPILE_SECONDS


def seconds_launching(modules: int, device_type: str) -> float:
    """How long the host is reckoned to need for launching the forward and backward of so many modules."""
    return modules * _of(PER_LAUNCH, device_type)


def pays_to_record(saved_seconds: float, device_type: str) -> bool:
    """Whether so much launching is saved that recording graphs and comparing them is soon made up for."""
    return saved_seconds >= _of(WORTH_SECONDS, device_type)


RECORDING_SECONDS = {"cpu": 0.0, "cuda": 10.0}
"""Seconds it is reckoned to take to record rows of all the lengths that occur."""


def pays_to_record_rows(saved_seconds: float, device_type: str) -> bool:
    """The same for rows of a few lengths."""
    return pays_to_record(saved_seconds - _of(RECORDING_SECONDS, device_type), device_type)


def overhead_in_tokens(modules: int, operations_per_token: float, device_type: str) -> int:
    """What one more micro-batch costs, in tokens of computing."""
    launching = modules * _of(PER_MODULE, device_type) * _of(UNCOMPILED, device_type)
    return int(launching / max(operations_per_token, 1.0))
