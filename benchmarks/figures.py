"""The numbers of an arm whose updates were timed one by one."""

from __future__ import annotations

from typing import Any

import torch
from trainers import KEPT_LOSSES, Task, seen_work
from watch import peak_gib

from loopwright.speed.measure.peaks import device_peak

GIB = 2**30


def figures(task: Task, matmul: float | None) -> dict[str, Any]:
    """Time, work, memory and losses; `matmul` are the operations per second of a matrix product measured here."""
    watch = task.watch
    tokens, operations, _ = seen_work("", task, None)
    opened, elapsed = watch.opened, watch.elapsed
    timed = watch.done - opened
    # Of the median: the mean of so few updates would be that of the ones that are computed both ways.
    rate = 1e3 / watch.median()
    per_second = sum(operations[opened:]) / timed * rate
    sheet = device_peak(torch.device(task.device), "bf16" if task.bf16 else "fp32")
    return {
        "rate": rate,
        "ms_per_update": watch.median(),
        "ms_per_update_mean": 1e3 * elapsed / timed,
        "samples_per_s": rate * task.samples,
        "tokens_per_s": sum(tokens[opened:]) / timed * rate if task.data.kind in ("causal", "class", "pair") else None,
        "tflops": per_second / 1e12,
        "mfu": None if sheet is None else per_second / sheet,
        "mfu_matmul": None if matmul is None else per_second / matmul,
        "matmul_tflops": None if matmul is None else matmul / 1e12,
        "peak_gib": peak_gib(task.device),
        "reserved_gib": torch.cuda.max_memory_reserved() / GIB if task.device == "cuda" else None,
        "first_update_s": watch.first - watch.begun,
        # What came on top of the updates of the warm-up: building, proving, compiling.
        "ready_s": max(watch.borders[0][1] - watch.begun - opened * elapsed / timed, 0.0),
        "updates": {"warmup": opened, "timed": timed},
        "milliseconds": [round(each, 3) for each in watch.milliseconds()[:KEPT_LOSSES]],
        "micro_batch": f"{task.micro} x {task.accumulation}",
        "autocast": "bf16" if task.bf16 else None,
        "losses": list(watch.losses)[: min(watch.done, KEPT_LOSSES)],
    }
