"""The speed report: which accelerations were enabled and why, and the measurements of the run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple


class Choice(NamedTuple):
    """An acceleration, whether it is on, and why."""

    name: str
    on: bool
    reason: str


@dataclass(frozen=True)
class SpeedReport:
    """The result of `trainer.speed_report()`: `str()` is a short table, `as_dict()` the data."""

    choices: Sequence[Choice] = ()
    probe: Mapping[str, Any] = field(default_factory=dict)
    """Results of the comparison with the normal path, by name."""
    numbers: Mapping[str, float] = field(default_factory=dict)
    """Speeds and shares as in metrics.jsonl, over the run without its first log interval."""
    split: Mapping[str, float] = field(default_factory=dict)
    """Shares of an update's time, from sampled updates."""
    checks: Mapping[str, int] = field(default_factory=dict)
    """How many later updates were computed both ways, proved again, or kept the collator's batches."""
    sampled_updates: int = 0
    update_seconds: float | None = None
    device: str | None = None
    number_format: str | None = None

    def as_dict(self) -> dict[str, Any]:
        """The report in JSON types."""
        return {
            "device": self.device,
            "number_format": self.number_format,
            "choices": [{"name": name, "on": on, "reason": reason} for name, on, reason in self.choices],
            "probe": dict(self.probe),
            "checks": dict(self.checks),
            "numbers": dict(self.numbers),
            "time_split": dict(self.split),
            "sampled_updates": self.sampled_updates,
            "update_seconds": self.update_seconds,
        }

    def __str__(self) -> str:
        place = ", ".join(filter(None, [self.device, self.number_format]))
        lines = [f"speed report ({place})" if place else "speed report"]
        lines += _choice_lines(self.choices)
        lines += _rows({name: _short(value) for name, value in self.probe.items()}, "proof")
        lines += _rows({name: f"{count:,}" for name, count in self.checks.items()}, "steps")
        lines += _rows(_number_texts(self.numbers), "measured") or ["  measured: no log point yet"]
        lines += self._split_lines()
        return "\n".join(lines)

    def _split_lines(self) -> list[str]:
        if not self.split:
            return []
        parts = ", ".join(f"{name} {share:.0%}" for name, share in self.split.items())
        seconds = "" if self.update_seconds is None else f" of {1000 * self.update_seconds:.1f} ms"
        count = "1 sampled step" if self.sampled_updates == 1 else f"{self.sampled_updates} sampled steps"
        return [f"  time per step ({count}{seconds}): {parts}"]


def report_of(plan: Mapping[str, Any] | None, **measured: Any) -> SpeedReport:
    """A report from a plan (`choices`: rows of name, on, reason; `probe`: numbers by name) and measurements."""
    plan = plan or {}
    choices = [row if isinstance(row, Choice) else _choice(row) for row in plan.get("choices", ())]
    rows = [row for row in plan.get("choices", ()) if isinstance(row, Mapping)]
    proofs = [row.get("numbers", {}) for row in rows if row.get("is_on")]
    probe = dict(plan.get("probe", {})) or _worst(proofs)
    return SpeedReport(choices=choices, probe=probe, **measured)


def _worst(proofs: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """The largest error of each test, over all proofs."""
    found: dict[str, float] = {}
    for numbers in proofs:
        for name, value in numbers.items():
            found[name] = max(value, found.get(name, value))
    return found


def _choice(row: Any) -> Choice:
    if isinstance(row, Mapping):
        return Choice(str(row["name"]), bool(row.get("is_on", row.get("on"))), str(row.get("reason") or ""))
    name, on, reason = row
    return Choice(str(name), bool(on), str(reason or ""))


def _choice_lines(choices: Sequence[Choice]) -> list[str]:
    width = max((len(name) for name, _, _ in choices), default=0)
    ordered = sorted(choices, key=lambda choice: not choice.on)  # enabled ones first
    return [f"  {'on ' if on else 'off'}  {name:<{width}}  {reason}".rstrip() for name, on, reason in ordered]


def _rows(values: Mapping[str, str], title: str) -> list[str]:
    return [f"  {title}: {', '.join(f'{name} {text}' for name, text in values.items())}"] if values else []


_TEXTS = {
    "tokens_per_second": ("tokens/s", "{:,.0f}"),
    "computed_tokens_per_second": ("computed tokens/s", "{:,.0f}"),
    "samples_per_second": ("samples/s", "{:,.4g}"),
    "steps_per_second": ("steps/s", "{:.4g}"),
    "useful_token_share": ("useful tokens", "{:.1%}"),
    "mfu": ("MFU", "{:.1%}"),
    "mfu_of_matmul": ("MFU of the measured matmul", "{:.1%}"),
    "data_wait_share": ("waiting for data", "{:.1%}"),
    "peak_memory_gib": ("peak memory", "{:.2f} GiB"),
    "recompiles": ("recompiles", "{:.0f}"),
}
"""Titles and formats of the numbers in the printed report."""


def _number_texts(numbers: Mapping[str, float]) -> dict[str, str]:
    return {title: text.format(numbers[name]) for name, (title, text) in _TEXTS.items() if name in numbers}


def _short(value: Any) -> str:
    return f"{value:.3g}" if isinstance(value, float) else str(value)
