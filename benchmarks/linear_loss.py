"""The fused loss against torch's own forms of it: forward and backward, time and peak memory.

    python benchmarks/linear_loss.py [--tokens 2048] [--width 512] [--classes 32768] [--targets 0.6] [--json FILE]

Forms: ours; `linear_cross_entropy` of torch (2.13 and later) in chunks; logits, then `cross_entropy`. They take turns;
times are medians. A form whose loss or gradients are not those of the logits' is void. Memory is what a process of its
own took more than before, on a GPU the allocator's peak.
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from arms import default_file, write_json
from machine import described
from torch import Tensor

FORMS = ("ours", "torch", "logits")
ALLOWED = {"float32": 1e-4, "bfloat16": 3e-2}


def form(name: str, options: argparse.Namespace) -> Callable[..., Tensor]:
    if name == "ours":
        from loopwright.speed.fused_loss.cross_entropy import linear_cross_entropy

        count = options.counted
        return lambda hidden, weight, targets: linear_cross_entropy(hidden, weight, None, targets, count=count)
    if name == "torch":
        chunks = torch.nn.LinearCrossEntropyOptions()
        return lambda hidden, weight, targets: F.linear_cross_entropy(
            hidden, weight, targets, ignore_index=-100, options=chunks
        )
    return lambda hidden, weight, targets: F.cross_entropy(F.linear(hidden, weight).float(), targets)


def inputs(options: argparse.Namespace) -> tuple[Tensor, Tensor, Tensor]:
    torch.manual_seed(0)
    dtype, device = getattr(torch, options.dtype), options.device
    hidden = torch.randn(options.tokens, options.width, device=device, dtype=dtype, requires_grad=True)
    weight = torch.randn(options.classes, options.width, device=device, dtype=dtype) * 0.02
    targets = torch.randint(options.classes, (options.tokens,), device=device)
    unsupervised = torch.arange(options.tokens, device=device) >= int(options.targets * options.tokens)
    options.counted = int(options.targets * options.tokens)
    return hidden, weight.requires_grad_(), targets.masked_fill(unsupervised, -100)


def once(run: Callable[..., Tensor], hidden: Tensor, weight: Tensor, targets: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    hidden.grad = weight.grad = None
    loss = run(hidden, weight, targets)
    loss.backward()
    assert hidden.grad is not None and weight.grad is not None
    if hidden.is_cuda:
        torch.cuda.synchronize()
    return loss.detach(), hidden.grad, weight.grad


def memory(name: str, options: argparse.Namespace) -> float:
    """MiB taken at most, beyond the inputs; in this process, which does nothing else."""
    given = inputs(options)
    if options.device == "cuda":
        before = torch.cuda.memory_allocated()
        once(form(name, options), *given)
        return (torch.cuda.max_memory_allocated() - before) / 2**20
    before = peak_kib()
    once(form(name, options), *given)
    return (peak_kib() - before) / 2**10


def peak_kib() -> int:
    """The most memory this process has had, on Linux; what a process starts with is not its parent's."""
    status = Path("/proc/self/status").read_text()
    return next(int(line.split()[1]) for line in status.splitlines() if line.startswith("VmHWM"))


def distance(mine: Tensor, exact: Tensor) -> float:
    return float((mine.double() - exact.double()).norm() / exact.double().norm())


def measure(options: argparse.Namespace) -> dict[str, Any]:
    given = inputs(options)
    forms = {name: form(name, options) for name in FORMS if name != "torch" or hasattr(F, "linear_cross_entropy")}
    exact = [each.clone() for each in once(forms["logits"], *given)]
    results: dict[str, Any] = {}
    for name, run in forms.items():
        found = once(run, *given)
        apart = max(distance(a, b) for a, b in zip(found, exact, strict=True))
        results[name] = {"status": "ok" if apart <= ALLOWED[options.dtype] else "void", "apart": apart, "ms": []}
    for _ in range(options.rounds):
        for name, run in forms.items():
            start = time.perf_counter()
            once(run, *given)
            results[name]["ms"].append(1e3 * (time.perf_counter() - start))
    for name, result in results.items():
        words = [sys.executable, __file__, *sys.argv[1:], "--memory-of", name]
        told = subprocess.run(words, capture_output=True, text=True, check=True, timeout=300).stdout
        result.update(ms=statistics.median(result["ms"]), mib=float(told.split()[-1]))
    return results


def main() -> None:
    parser = argparse.ArgumentParser(description="The fused loss against torch's own forms of it.")
    for name, value in {"tokens": 2048, "width": 512, "classes": 32_768, "rounds": 7}.items():
        parser.add_argument(f"--{name}", type=int, default=value)
    parser.add_argument("--targets", type=float, default=0.6, help="the share of tokens that have one")
    parser.add_argument("--dtype", choices=ALLOWED, default="float32")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--memory-of", choices=FORMS, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.memory_of:
        print(memory(options.memory_of, options))
        return
    results = measure(options)
    for name, found in results.items():
        print(f"{name:<8}{found['ms']:9.1f} ms {found['mib']:9.0f} MiB   {found['apart']:.1g} apart  {found['status']}")
    told = {name: value for name, value in vars(options).items() if name not in ("json", "memory_of")}
    content = {**described(), "benchmark": "linear-loss", "options": told, "results": results}
    write_json(options.json or default_file(f"linear-loss-{options.dtype}"), content)


if __name__ == "__main__":
    main()
