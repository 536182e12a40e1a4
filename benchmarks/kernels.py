"""Where the device's time goes: kernels by kind and by name, idle time, launches, from a trace of a few updates."""

from __future__ import annotations

import json
import re
import tempfile
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from update_times import UpdateTimes

PROFILED = 5
SHOWN = 18
GAPS, LONG_MS = 12, 0.1
"""How many gaps are shown, the longest; milliseconds from which a gap is long."""
CASTS = "t|view|transpose|permute|clone"
"""What a compiled kernel that only casts may also do."""
KINDS = (
    ("optimizer", r"adam"),
    ("clipping", r"lpnorm|norm_kernel.*multi_tensor|multi_tensor_apply"),
    ("attention", r"flash|fmha|attention|attn|sdpa|_mha"),
    ("matmul", r"gemm|cutlass|nvjet|xmma|cublas|splitk|_mm_|addmm|matmul"),
    ("convolution", r"conv|wgrad|dgrad|implicit"),
    ("copies and casts", rf"^memcpy|copy_kernel|direct_copy|fused__to_copy(_({CASTS}))*_\d+$"),
    ("clearing", r"memset|fillfunctor"),
    ("compiled", r"triton"),
)
"""Kinds of kernels by their names; the first match counts."""
DEVICE = ("kernel", "gpu_memcpy", "gpu_memset")
LAUNCHES = re.compile(r"(cuda|cu)(LaunchKernel|LaunchKernelEx|Launch)\w*$")
GRAPHS = re.compile(r"(cuda|cu)GraphLaunch")


@dataclass
class Profiled(UpdateTimes):
    """Traces a few updates after the warm-up instead of timing them."""

    def __post_init__(self) -> None:
        self.profiler: Any = None
        self.updates = PROFILED

    def update_done(self) -> bool:
        over = super().update_done()
        if self.done == self.warmup:
            kinds = [torch.profiler.ProfilerActivity.CPU]
            if self.device == "cuda":
                kinds = [torch.profiler.ProfilerActivity.CUDA]
            self.profiler = torch.profiler.profile(activities=kinds)
            self.profiler.start()
        elif over:
            self.profiler.stop()
        return over

    def summary(self) -> dict[str, Any]:
        with tempfile.TemporaryDirectory() as folder:
            file = Path(folder, "trace.json")
            self.profiler.export_chrome_trace(str(file))
            events = json.loads(file.read_text())["traceEvents"]
        return summarized(events, self.done - self.warmup)


def kind_of(name: str) -> str:
    return next((kind for kind, pattern in KINDS if re.search(pattern, name, re.IGNORECASE)), "other")


def summarized(events: Iterable[dict[str, Any]], updates: int) -> dict[str, Any]:
    """Per update: milliseconds and counts by kind and by kernel, launches, and the share of idle time.

    Without a GPU, the operators of the host take the place of kernels.
    """
    whole = [event for event in events if event.get("ph") == "X"]
    kernels = [event for event in whole if event.get("cat") in DEVICE]
    on_device = bool(kernels)
    if not on_device:
        kernels = [event for event in whole if event.get("cat") == "cpu_op"]
    calls = [str(event["name"]) for event in whole if event.get("cat") in ("cuda_runtime", "cuda_driver")]
    span, busy = spans([(float(event["ts"]), float(event["ts"]) + float(event["dur"])) for event in kernels])
    return {
        "on": "device" if on_device else "host, nested operators counted more than once",
        "updates": updates,
        "ms_per_update": span / 1e3 / updates,
        "busy_ms": busy / 1e3 / updates,
        "idle_share": 1 - busy / span if span else None,
        "kernels": len(kernels) / updates,
        "launches": sum(bool(LAUNCHES.match(name)) for name in calls) / updates,
        "graph_launches": sum(bool(GRAPHS.match(name)) for name in calls) / updates,
        "kinds": summed(((kind_of(event["name"]), event["dur"]) for event in kernels), updates),
        "top": dict(list(summed(((event["name"], event["dur"]) for event in kernels), updates).items())[:SHOWN]),
        **(of_gaps(gaps(kernels, whole), updates) if on_device else {}),
    }


def of_gaps(found: list[dict[str, Any]], updates: int) -> dict[str, Any]:
    """The longest gaps, and the milliseconds per update in those longer than `LONG_MS` and in the others."""
    long = sum(gap["ms"] for gap in found if gap["ms"] > LONG_MS)
    return {
        "ms_in_long_gaps": long / updates,
        "ms_in_short_gaps": (sum(gap["ms"] for gap in found) - long) / updates,
        "gaps": found[:GAPS],
    }


def gaps(kernels: list[dict[str, Any]], whole: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The longest times in which nothing ran: when, between which kernels, and how long the next had been launched.

    A kernel that starts as soon as it is launched has waited for the host.
    """
    launched = {
        event["args"]["correlation"]: float(event["ts"])
        for event in whole
        if event.get("cat") in ("cuda_runtime", "cuda_driver") and "correlation" in event.get("args", {})
    }
    found, last = [], None
    begin = min(float(event["ts"]) for event in kernels)
    for event in sorted(kernels, key=lambda each: float(each["ts"])):
        start, name = float(event["ts"]), event["name"]
        if last is not None and start > last[0]:
            ahead = start - launched.get(event.get("args", {}).get("correlation"), start)
            numbers = {"ms": start - last[0], "at_ms": start - begin, "launched_ms_ahead": ahead}
            milliseconds = {name: value / 1e3 for name, value in numbers.items()}
            found.append({**milliseconds, "after": last[1], "before": name})
        end = start + float(event["dur"])
        last = (end, name) if last is None or end > last[0] else last
    return sorted(found, key=lambda gap: -gap["ms"])


def spans(intervals: list[tuple[float, float]]) -> tuple[float, float]:
    """From the first start to the last end, and how much of it something ran."""
    if not intervals:
        return 0.0, 0.0
    busy, end = 0.0, float("-inf")
    for start, stop in sorted(intervals):
        busy += max(stop - max(start, end), 0.0)
        end = max(end, stop)
    return end - min(intervals)[0], busy


def summed(pairs: Iterable[tuple[str, float]], updates: int) -> dict[str, dict[str, float]]:
    """Milliseconds and count per update, longest first."""
    times: dict[str, float] = defaultdict(float)
    counts: dict[str, int] = defaultdict(int)
    for name, microseconds in pairs:
        times[name] += float(microseconds)
        counts[name] += 1
    longest = sorted(times, key=times.__getitem__, reverse=True)
    return {name: {"ms": times[name] / 1e3 / updates, "count": counts[name] / updates} for name in longest}


def text(profile: dict[str, Any]) -> str:
    """The summary as lines."""
    idle = "-" if profile["idle_share"] is None else f"{profile['idle_share']:.1%}"
    heading = f"on the {profile['on']}, per update of {profile['updates']}: {profile['ms_per_update']:.2f} ms"
    launches = f"{profile['launches']:,.0f} launches, {profile['graph_launches']:.0f} graph launches"
    lines = [f"{heading}, idle {idle}, {profile['kernels']:,.0f} kernels, {launches}"]
    for title in ("kinds", "top"):
        lines += [f"  {title}", f"  {'ms':>9} {'count':>8}"]
        lines += [f"  {v['ms']:>9.3f} {v['count']:>8,.1f}  {name[:110]}" for name, v in profile[title].items()]
    if "gaps" in profile:
        long, short = profile["ms_in_long_gaps"], profile["ms_in_short_gaps"]
        lines.append(f"  idle in gaps of more than {LONG_MS} ms: {long:.2f} ms, in shorter ones: {short:.2f} ms")
    for gap in profile.get("gaps", []):
        place = f"{gap['ms']:.3f} at {gap['at_ms']:.1f}, launched {gap['launched_ms_ahead']:.3f} ahead"
        lines.append(f"  gap {place}: {gap['after'][:50]} > {gap['before'][:50]}")
    return "\n".join(lines)
