"""The plan: which accelerations a run uses and why; it is made once, printed, and saved with the run."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any

COLLATED, GROUPED, UNMASKED, UNPADDED, FLAT = "collated", "grouped", "grouped without mask", "unpadded", "flat"
BIASED, PAIRED = "grouped with bias in rows", "flat pairs"
IN_GROUPS = (UNMASKED, BIASED, GROUPED)
IN_ROWS = (FLAT, UNPADDED, PAIRED)
ONE_ROW = (FLAT, PAIRED)
"""Layouts in which the model gets one row of tokens, as long as the samples of a micro-batch together."""
FOR_PAIRS = (PAIRED, BIASED, GROUPED)
"""Layouts for samples that have a source and a target."""
COMPILED = "compiled blocks"
GRAPHS = "micro-batches as CUDA graphs"
LAYOUTS = (*IN_ROWS, *IN_GROUPS)
"""Layouts in the order in which they are tried: the largest saving first, the fewest requirements last."""


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

    layout: str = COLLATED
    linear_loss: bool = False
    padded_head: bool = False
    """Whether the output layer is computed with a number of classes that has fast kernels."""
    compiled: bool = False
    short_rows: bool = False
    """Whether compiled blocks get rows both below and above a few thousand tokens."""
    region: str = ""
    """What is compiled as one region: "model", "trunk", or nothing."""
    joined: int = 1
    """How many of the collator's micro-batches are computed together."""
    widened: bool = False
    """Whether targets are padded to a few widths."""
    channels_last: bool = False
    """Whether images are computed with their channels as the last dimension in memory; only in graphs."""
    varied: bool = False
    """Whether the collator's micro-batches have many shapes, for which cuDNN's attention is not used."""
    graphed: bool = False
    """Whether forward and backward of a micro-batch are one CUDA graph."""
    budget: int = 0
    """Most tokens per micro-batch; 0 means as many as the collator's largest micro-batch."""
    overhead: int = 0
    """Cost of one more micro-batch, in tokens."""
    round_to: int = 1
    """Groups are as wide as a multiple of this."""
    fill: bool = False
    """Whether rows are extended, so that their lengths have few values."""
    activations: str = "none"
    """What is recomputed in the backward pass: none, selective, full."""
    made_for: str = ""
    """Device, versions and code for which the plan was proved; for others it is made again."""
    choices: list[AccelerationChoice] = field(default_factory=list)

    @property
    def changes_anything(self) -> bool:
        switches = (
            self.linear_loss, self.padded_head, self.compiled, bool(self.region), self.widened, self.varied,
            self.graphed, self.activations != "none",
        )  # fmt: skip
        return self.layout != COLLATED or self.joined > 1 or any(switches)

    @property
    def few_shapes(self) -> bool:
        """Whether rows or groups are padded to a few shapes, since each shape needs its own graph."""
        return self.graphed and self.layout != COLLATED

    def note(self, name: str, is_on: bool, reason: str, numbers: dict[str, float] | None = None) -> None:
        self.choices.append(AccelerationChoice(name, is_on, reason, numbers or {}))

    def take_back(self, name: str, reason: str) -> None:
        """Record that an enabled acceleration turned out to be impossible."""
        for choice in self.choices:
            if choice.name == name:
                choice.is_on, choice.reason = False, reason

    def add_numbers(self, name: str, numbers: dict[str, float]) -> None:
        """Add the results of a whole update to those of a few samples."""
        for choice in self.choices:
            if choice.name == name and choice.is_on:
                choice.numbers.update((f"update_{key}", value) for key, value in numbers.items())

    def number(self, name: str) -> float:
        """The largest number of this name among the proofs of what is on; 0 if there is none."""
        return max((choice.numbers.get(name, 0.0) for choice in self.choices if choice.is_on), default=0.0)

    def forget(self, name: str) -> None:
        """Remove an entry, so that it can be recorded again."""
        self.choices = [choice for choice in self.choices if choice.name != name]

    def lines(self) -> list[str]:
        """The plan as a few readable lines."""
        return [choice.line() for choice in self.choices]

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> SpeedPlan:
        known = {name: values[name] for name in cls.__dataclass_fields__ if name in values}
        if known.get("layout") not in LAYOUTS:
            known["layout"] = COLLATED  # including the name in older checkpoints
        known["choices"] = [AccelerationChoice(**each) for each in known.get("choices", [])]
        return cls(**known)


# ---- estimated benefit ----------------------------------------------------------------------------------------------

PER_SECOND = {"cpu": 5e10, "cuda": 3e14}
"""Estimated operations per second of a device. Not measured, because two runs must make the same plan."""
PER_MODULE = {"cpu": 6e-5, "cuda": 4e-4}
"""Estimated seconds for launching one module's forward and backward."""
PER_LAUNCH = {"cpu": 6e-5, "cuda": 1e-4}
"""Estimated seconds of the host alone for that, which is what a graph saves."""
UNCOMPILED = {"cpu": 5e10, "cuda": 2e14}
"""Estimated operations per second of a device that runs module by module."""
WORTH_SECONDS = {"cpu": 1.0, "cuda": 5.0}
"""Estimated seconds a run must save before anything is proved and enabled."""
WORTH_SHARE = 0.1
"""Fraction of the computed tokens that must be padding."""
SHORT_ROW = 8192
"""Tokens of an update below which its rows count as short for the compiler."""
ROW_TOKENS = 32_768
"""Row length beyond which gradient accumulation and weight casts are a small share, so longer rows gain little."""
GROUP_TOKENS = 14_336
"""Tokens of a group beyond which larger groups gain little; less than for a row, since an update has many groups."""


def _of(table: dict[str, float], device_type: str) -> float:
    return table.get(device_type, table["cuda"])


def seconds(operations: float, device_type: str) -> float:
    """Estimated seconds for this many operations."""
    return operations / _of(PER_SECOND, device_type)


def is_worth_it(saved_share: float, saved_operations: float, device_type: str) -> bool:
    """Whether removing padding saves more than proving that it can be removed costs."""
    return saved_share >= WORTH_SHARE and seconds(saved_operations, device_type) >= _of(WORTH_SECONDS, device_type)


def seconds_launching(modules: int, device_type: str) -> float:
    """Estimated seconds the host needs to launch the forward and backward of this many modules."""
    return modules * _of(PER_LAUNCH, device_type)


def pays_to_record(saved_seconds: float, device_type: str) -> bool:
    """Whether the launch time saved exceeds the cost of capturing and comparing graphs."""
    return saved_seconds >= _of(WORTH_SECONDS, device_type)


RECORDING_SECONDS = {"cpu": 0.0, "cuda": 10.0}
"""Estimated seconds for capturing rows of all lengths that occur."""


def pays_to_record_rows(saved_seconds: float, device_type: str) -> bool:
    """Whether the launch time saved exceeds the cost of graphs for rows of a few lengths, each of which is captured."""
    return pays_to_record(saved_seconds - _of(RECORDING_SECONDS, device_type), device_type)


def overhead_in_tokens(modules: int, operations_per_token: float, device_type: str) -> int:
    """Cost of one more micro-batch, expressed as a number of tokens."""
    launching = modules * _of(PER_MODULE, device_type) * _of(UNCOMPILED, device_type)
    return int(launching / max(operations_per_token, 1.0))
