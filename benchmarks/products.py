"""How long the matrix products of an update take by themselves: the least that an update can take.

    python benchmarks/products.py sft-64 lora whisper [--seconds 3] [--to FILE]

The products of an update run back to back for some seconds, so that the device is as warm as in training: forward,
gradients of the inputs and, unless weights are frozen, gradients of the weights. Twice: each layer by itself, as it is
written, and layers of the same input (queries, keys and values; gate and up) joined into one product.
"""

from __future__ import annotations

import argparse
import json
import time
from dataclasses import dataclass
from datetime import date
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from watch import matmul_rate

CHUNK = 4096
"""Rows of the output layer that are computed at a time."""


@dataclass(frozen=True)
class Layers:
    """Linear layers of one input."""

    rows: int
    inputs: int
    outputs: tuple[int, ...]
    times: int
    frozen: bool = False

    @property
    def operations(self) -> float:
        return (4.0 if self.frozen else 6.0) * self.rows * self.inputs * sum(self.outputs) * self.times

    def joined(self) -> Layers:
        return Layers(self.rows, self.inputs, (sum(self.outputs),), self.times, self.frozen)


def llama(
    rows: int, width: int, inner: int, keys: int, layers: int, classes: int, *, frozen: bool = False
) -> list[Layers]:
    return [
        Layers(rows, width, (width, keys, keys), layers, frozen),
        Layers(rows, width, (width,), layers, frozen),
        Layers(rows, width, (inner, inner), layers, frozen),
        Layers(rows, inner, (width,), layers, frozen),
        *[Layers(min(CHUNK, rows - start), width, (classes,), 1, frozen) for start in range(0, rows, CHUNK)],
    ]


def whisper(samples: int, width: int, layers: int, positions: int, targets: int, classes: int) -> list[Layers]:
    heard, said = samples * positions, samples * targets
    return [
        Layers(heard, width, (width, width, width), layers),
        Layers(heard, width, (width,), layers),
        Layers(heard, width, (4 * width,), layers),
        Layers(heard, 4 * width, (width,), layers),
        Layers(heard, width, (width,) * (2 * layers), 1),  # keys and values of all layers of the decoder
        Layers(said, width, (width, width, width), layers),
        Layers(said, width, (width,), 3 * layers),
        Layers(said, width, (4 * width,), layers),
        Layers(said, 4 * width, (width,), layers),
        Layers(said, width, (classes,), 1),
        Layers(2 * heard, 3 * 80, (width,), 1),
        Layers(heard, 3 * width, (width,), 1),
    ]


TASKS = {
    "sft-64": llama(20_867, 2048, 8192, 512, 16, 128_256),
    "lora": llama(4_815, 4096, 14_336, 1024, 32, 128_256, frozen=True),
    "whisper": whisper(16, 768, 12, 1500, 256, 51_872),
}
"""With the tokens of the median update, and the width to which most targets of Whisper are padded."""


class Products:
    """The matrix products of an update, on matrices that layers of the same shape share."""

    def __init__(self, all_layers: list[Layers], device: str) -> None:
        self._all, self._device = all_layers, device
        self._made: dict[tuple[int, int], Tensor] = {}

    def run(self) -> None:
        for layers in self._all:
            for _ in range(layers.times):
                self._run(layers)

    def _run(self, layers: Layers) -> None:
        given = self._matrix(layers.rows, layers.inputs)
        gradient: Tensor | None = None
        for outputs in layers.outputs:
            weight, change = self._matrix(outputs, layers.inputs), self._matrix(layers.rows, outputs)
            torch.mm(given, weight.T)
            if gradient is None:
                gradient = torch.mm(change, weight)
            else:
                gradient.addmm_(change, weight)
            if not layers.frozen:
                torch.mm(change.T, given)

    def _matrix(self, rows: int, columns: int) -> Tensor:
        if (rows, columns) not in self._made:
            made = torch.randn(rows, columns, device=self._device, dtype=torch.bfloat16) * 0.02
            self._made[rows, columns] = made
        return self._made[rows, columns]


def milliseconds(all_layers: list[Layers], seconds: float, device: str) -> float:
    """Of one update, in the second half of these seconds."""
    products, times, begun = Products(all_layers, device), [], time.perf_counter()
    while not times or time.perf_counter() < begun + seconds:
        started = time.perf_counter()
        products.run()
        if device == "cuda":
            torch.cuda.synchronize()
        times.append(1e3 * (time.perf_counter() - started))
    late = times[len(times) // 2 :]
    return sum(late) / len(late)


def measured(task: str, seconds: float, device: str) -> dict[str, Any]:
    layers = TASKS[task] if device == "cuda" else [Layers(64, 32, (32, 16), 2)]
    operations = sum(each.operations for each in layers)
    apart = milliseconds(layers, seconds, device)
    joined = milliseconds([each.joined() for each in layers], seconds, device)
    return {
        "ms": apart, "ms_joined": joined, "tflop": operations / 1e12, "tflops": operations / apart / 1e9,
        "tflops_joined": operations / joined / 1e9,
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description="The matrix products of an update by themselves.")
    parser.add_argument("tasks", nargs="+", choices=TASKS, metavar="TASK", help=", ".join(TASKS))
    parser.add_argument("--seconds", type=float, default=3.0)
    parser.add_argument("--to", type=Path)
    options = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    rate = matmul_rate(device)
    found: dict[str, Any] = {
        "date": date.today().isoformat(),
        "device": torch.cuda.get_device_name() if device == "cuda" else "cpu",
        "torch": torch.__version__,
        "matmul_tflops": None if rate is None else rate / 1e12,
        "tasks": {},
    }
    for task in options.tasks:
        found["tasks"][task] = made = measured(task, options.seconds, device)
        joined = f"joined {made['ms_joined']:.1f} ms"
        print(f"{task}: {made['ms']:.1f} ms, {made['tflops']:.0f} TFLOP/s; {joined}", flush=True)
        if device == "cuda":
            torch.cuda.empty_cache()
        if options.to is not None:
            options.to.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
