"""Formatting of numbers and times for display."""

from __future__ import annotations

import numbers
from collections.abc import Mapping
from typing import Any

NOT_SHOWN = frozenset({"total_flos"})
"""Logged values that are not displayed; the log history and files contain them."""

LARGE, LARGEST = 10_000, 1e15
"""Numbers in this range are shown with separators, beyond it as powers of ten."""


def short(value: Any, max_len: int | None = None) -> Any:
    """A float with four significant digits, a large number with separators, a long string truncated."""
    if isinstance(value, numbers.Real) and LARGE <= abs(float(value)) < LARGEST:
        return f"{round(float(value)):,}"
    if isinstance(value, numbers.Real) and not isinstance(value, numbers.Integral):
        return f"{float(value):.4g}"
    if max_len is not None and isinstance(value, str) and len(value) > max_len:
        return f"{value[:max_len]}... ({len(value)} characters, max_str_len={max_len})"
    return value


def shown(logs: Mapping[str, Any], max_len: int | None = None) -> dict[str, Any]:
    """A copy of the logs for display."""
    return {name: short(value, max_len) for name, value in logs.items() if name not in NOT_SHOWN}


def log_line(logs: Mapping[str, Any], max_len: int | None = None) -> str:
    """The logs as one line of `name value` pairs."""
    return "  ".join(f"{name} {value}" for name, value in shown(logs, max_len).items())


def clock_time(seconds: float) -> str:
    """Seconds as H:MM:SS, with days if there are any."""
    minutes, second = divmod(int(seconds), 60)
    hours, minute = divmod(minutes, 60)
    days, hour = divmod(hours, 24)
    return (f"{days}d " if days else "") + f"{hour}:{minute:02}:{second:02}"


def rate(per_second: float, unit: str = "steps") -> str:
    """A speed, per second or in seconds each, whichever is readable."""
    if per_second <= 0:
        return f"- {unit}/s"
    one = unit.removesuffix("es") if unit.endswith("ches") else unit.removesuffix("s")
    if per_second < 0.1:
        return f"{1 / per_second:,.1f} s/{one}"
    return f"{per_second:.3g} {unit}/s" if per_second < 1000 else f"{per_second:,.0f} {unit}/s"


def work_line(pace: Mapping[str, float]) -> str:
    """Tokens per second and device utilization, where known; shown before a speed."""
    found = []
    if "tokens_per_second" in pace:
        found.append(f"{_thousands(pace['tokens_per_second'])} tokens/s")
    if "mfu" in pace:
        found.append(f"MFU {pace['mfu']:.1%}")
    if "mfu_of_matmul" in pace:
        found.append(f"{pace['mfu_of_matmul']:.1%} of the measured matmul")
    return "".join(f"{each}, " for each in found)


def _thousands(value: float) -> str:
    return f"{value / 1000:.3g}k" if 1000 <= value < 1e6 else f"{value / 1e6:.3g}M" if value >= 1e6 else f"{value:.3g}"
