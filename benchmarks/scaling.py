"""What a second process brings, and what it costs on the wire: all arms in one run, CPU and gloo.

    python benchmarks/scaling.py [--models mlp llama] [--arms loop loopwright transformers] [--rounds 3] [--json FILE]

Every process does the same work per update however many there are (weak scaling), with one thread each. Efficiency is
samples per second of 2 processes over twice those of 1; on a busy machine only the processor time means something.
Bytes are read from the kernel's counters of each process's own
TCP connections (TCP_INFO), so other traffic of the machine does not count; the least that an all-reduce of P bytes can
send from each of n processes is 2 (n - 1) / n P.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import socket
import stat
import struct
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler

WARM, UPDATES = 5, 40
WORLDS = (1, 2)
BYTES_ACKED = 120
"""Where the kernel's tcp_info holds the bytes that the other side has received."""


class MLP(nn.Module):
    """Four wide layers: about 17 MB of gradients."""

    def __init__(self, width: int = 1024) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(nn.Sequential(nn.Linear(width, width), nn.ReLU()) for _ in range(4)))

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"loss": nn.functional.mse_loss(self.layers(x), labels)}


def llama() -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=1024, hidden_size=256, num_hidden_layers=4, num_attention_heads=4, num_key_value_heads=4,
        intermediate_size=512, max_position_embeddings=64, use_cache=False,
    )  # fmt: skip
    return LlamaForCausalLM(config)


def vectors(n: int) -> list[dict[str, torch.Tensor]]:
    return [{"x": torch.randn(1024), "labels": torch.randn(1024)} for _ in range(n)]


def tokens(n: int) -> list[dict[str, torch.Tensor]]:
    rows = [torch.randint(0, 1024, (64,)) for _ in range(n)]
    return [{"input_ids": row, "attention_mask": torch.ones_like(row), "labels": row} for row in rows]


MODELS: dict[str, tuple[Callable[[], nn.Module], Callable[[int], Any], int]] = {
    "mlp": (MLP, vectors, 64),
    "llama": (llama, tokens, 8),
}


# ---- one process of an arm ------------------------------------------------------------------------------------------


def bytes_sent() -> int:
    """Bytes that all TCP connections of this process have sent so far."""
    total = 0
    for name in os.listdir("/proc/self/fd"):
        try:
            descriptor = int(name)
            if not stat.S_ISSOCK(os.fstat(descriptor).st_mode):
                continue
            with socket.socket(fileno=os.dup(descriptor)) as connection:
                if connection.family in (socket.AF_INET, socket.AF_INET6) and connection.type == socket.SOCK_STREAM:
                    info = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 256)
                    total += struct.unpack_from("<Q", info, BYTES_ACKED)[0]
        except OSError:
            continue  # closed meanwhile
    return total


class Clock:
    """Time and traffic between the end of the warm-up and the last update."""

    def __init__(self) -> None:
        self.done = 0

    def tick(self) -> None:
        self.done += 1
        if self.done == WARM:
            self.start, self.worked, self.sent = time.perf_counter(), time.process_time(), bytes_sent()
        elif self.done == WARM + UPDATES:
            self.seconds = (time.perf_counter() - self.start) / UPDATES
            self.work = (time.process_time() - self.worked) / UPDATES
            self.bytes = (bytes_sent() - self.sent) / UPDATES


def hand_written(model: nn.Module, data: Any, batch: int, clock: Clock) -> None:
    """What a careful person writes with DDP."""
    import torch.distributed as dist

    world = int(os.environ["WORLD_SIZE"])
    sampler = None
    wrapped: nn.Module = model
    if world > 1:
        dist.init_process_group("gloo")
        wrapped = nn.parallel.DistributedDataParallel(model)
        sampler = DistributedSampler(data)
    parameters = list(wrapped.parameters())
    optimizer = torch.optim.AdamW(parameters, lr=1e-4, fused=True)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 - step / (WARM + UPDATES))

    def collate(samples: list[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
        return {name: torch.stack([sample[name] for sample in samples]) for name in samples[0]}

    for inputs in DataLoader(data, batch_size=batch, sampler=sampler, shuffle=sampler is None, collate_fn=collate):
        wrapped(**inputs)["loss"].backward()
        nn.utils.clip_grad_norm_(parameters, 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        clock.tick()
    if world > 1:
        dist.destroy_process_group()


def with_trainer(library: Any, model: nn.Module, data: Any, batch: int, clock: Clock) -> None:
    """The arguments both trainers share."""

    class Ticks(library.TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            clock.tick()

    args = library.TrainingArguments(
        output_dir=tempfile.mkdtemp(),
        per_device_train_batch_size=batch,
        num_train_epochs=1,
        learning_rate=1e-4,
        save_strategy="no",
        use_cpu=True,
        disable_tqdm=True,
        logging_steps=20,
        report_to="none",
    )
    library.Trainer(model, args, train_dataset=data, callbacks=[Ticks()]).train()


def with_loopwright(model: nn.Module, data: Any, batch: int, clock: Clock) -> None:
    import loopwright

    with_trainer(loopwright, model, data, batch, clock)


def with_transformers(model: nn.Module, data: Any, batch: int, clock: Clock) -> None:
    import transformers

    with_trainer(transformers, model, data, batch, clock)


ARMS: dict[str, Callable[[nn.Module, Any, int, Clock], None]] = {
    "loop": hand_written,
    "loopwright": with_loopwright,
    "transformers": with_transformers,
}


def child(arm: str, name: str, result: str) -> None:
    """One process: train, and let the first write down what all measured."""
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    torch.set_num_threads(1)
    torch.manual_seed(0)
    build, samples, batch = MODELS[name]
    world, rank = int(os.environ["WORLD_SIZE"]), int(os.environ["RANK"])
    model = build()
    clock = Clock()
    ARMS[arm](model, samples(batch * world * (WARM + UPDATES)), batch, clock)
    figures = {
        "seconds": clock.seconds,
        "work": clock.work,
        "bytes": clock.bytes,
        "samples": batch,
        "gradient_bytes": sum(p.numel() * p.element_size() for p in model.parameters()),
    }
    Path(f"{result}.{rank}").write_text(json.dumps(figures))


# ---- all of them ----------------------------------------------------------------------------------------------------


def run_once(arm: str, model: str, world: int) -> dict[str, float]:
    """One run on so many processes: the slowest process's time, the mean of their bytes."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={world}",
                   __file__, "--child", arm, model, f"{folder}/result"]  # fmt: skip
        variables = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
        done = subprocess.run(command, env=variables, capture_output=True, text=True, timeout=600)
        if done.returncode:
            raise RuntimeError(f"{arm} on {world} processes failed:\n{done.stderr[-3000:]}")
        ranks = [json.loads(Path(f"{folder}/result.{rank}").read_text()) for rank in range(world)]
    return {
        "seconds": max(each["seconds"] for each in ranks),
        "work": sum(each["work"] for each in ranks) / world,
        "bytes": sum(each["bytes"] for each in ranks) / world,
        "samples": sum(each["samples"] for each in ranks),
        "gradient_bytes": ranks[0]["gradient_bytes"],
    }


def measure(models: list[str], arms: list[str], rounds: int) -> dict[str, Any]:
    """Interleaved rounds, the best of each; other work on the machine only ever makes a run slower."""
    results: dict[str, Any] = {}
    for model in models:
        runs: dict[str, dict[int, list[dict[str, float]]]] = {arm: {world: [] for world in WORLDS} for arm in arms}
        for _ in range(rounds):
            for arm in arms:
                for world in WORLDS:
                    runs[arm][world].append(run_once(arm, model, world))
        results[model] = {arm: summary(runs[arm]) for arm in arms}
    return results


def summary(runs: dict[int, list[dict[str, float]]]) -> dict[str, float]:
    """Efficiency and traffic of one arm."""
    one, many = (min(runs[world], key=lambda run: run["seconds"]) for world in WORLDS)
    world = WORLDS[-1]
    least = 2 * (world - 1) / world * many["gradient_bytes"]
    return {
        "ms_1": one["seconds"] * 1e3,
        "ms_2": many["seconds"] * 1e3,
        "efficiency": many["samples"] / many["seconds"] / (world * one["samples"] / one["seconds"]),
        "cpu_ms_1": min(run["work"] for run in runs[1]) * 1e3,
        "cpu_ms_2": min(run["work"] for run in runs[world]) * 1e3,
        "bytes": many["bytes"],
        "least_bytes": least,
        "bytes_over_least": many["bytes"] / least,
        "bytes_alone": one["bytes"],
    }


def table(results: dict[str, Any]) -> str:
    heads = ("ms, 1", "ms, 2", "efficiency", "cpu ms, 1", "cpu ms, 2", "MB/update", "least", "ratio")
    lines = [f"{'model':<8}{'arm':<14}" + "".join(f"{head:>12}" for head in heads)]
    for model, arms in results.items():
        for arm, found in arms.items():
            lines.append(
                f"{model:<8}{arm:<14}{found['ms_1']:>12.1f}{found['ms_2']:>12.1f}{found['efficiency']:>12.1%}"
                f"{found['cpu_ms_1']:>12.1f}{found['cpu_ms_2']:>12.1f}"
                f"{found['bytes'] / 1e6:>12.3f}{found['least_bytes'] / 1e6:>12.3f}{found['bytes_over_least']:>12.4f}"
            )
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description="Efficiency of a second process and bytes moved per update.")
    parser.add_argument("--models", nargs="*", default=list(MODELS), choices=list(MODELS))
    parser.add_argument("--arms", nargs="*", default=list(ARMS), choices=list(ARMS))
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--child", nargs=3, metavar=("ARM", "MODEL", "RESULT"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        child(*options.child)
        return
    load = os.getloadavg()
    results = measure(options.models, options.arms, options.rounds)
    print(table(results))
    if options.json:
        from machine import described

        setup = {"backend": "gloo over loopback", "threads": 1, "updates": UPDATES, "rounds": options.rounds}
        setup |= {"load_before": load, "load_after": os.getloadavg()}
        options.json.parent.mkdir(parents=True, exist_ok=True)
        options.json.write_text(json.dumps({**described(), **setup, "results": results}, indent=1) + "\n")


if __name__ == "__main__":
    main()
