"""The checks of `loopwright doctor` on each rank: rendezvous, all-reduce, bandwidth and latency.

    torchrun ... -m loopwright.launch.checkup

All ranks report to rank 0 through the store, so that missing ranks can be named.
"""

from __future__ import annotations

import json
import os
import socket
import statistics
import sys
import time
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from ..errors import LoopwrightError

MEGABYTE = 1e6
ROUNDS = 5
MOST_PAIRS = 8
"""Up to this many ranks every pair is measured; above it, each rank and the next."""


def device_of(local_rank: int) -> torch.device:
    """The accelerator of this process, or the CPU."""
    if os.environ.get("LOOPWRIGHT_DOCTOR_CPU") or not torch.accelerator.is_available():
        return torch.device("cpu")
    kind = torch.accelerator.current_accelerator()
    assert kind is not None
    return torch.device(kind.type, local_rank % torch.accelerator.device_count())


def pairs(world: int) -> list[tuple[int, int]]:
    """The pairs of ranks between which bandwidth is measured."""
    if world <= MOST_PAIRS:
        return [(one, other) for one in range(world) for other in range(one + 1, world)]
    return [(rank, (rank + 1) % world) for rank in range(world)]


def bus_share(world: int) -> float:
    """Bytes each rank moves in an all-reduce, as a fraction of the tensor: 2 (n - 1) / n."""
    return 2 * (world - 1) / world


def meet(store: Any, rank: int, world: int, seconds: float) -> list[str]:
    """Wait for all ranks; returns the host of every rank, or raises with the ranks missing after the timeout."""
    store.set(f"here/{rank}", f"{socket.gethostname()} (process {os.getpid()})")
    hosts: dict[int, str] = {}
    deadline = time.monotonic() + seconds
    while len(hosts) < world:
        for other in set(range(world)) - set(hosts):
            if store.check([f"here/{other}"]):
                hosts[other] = store.get(f"here/{other}").decode()
        if time.monotonic() > deadline:
            raise LoopwrightError(missing(hosts, world, seconds))
        time.sleep(0.05)
    return [hosts[other] for other in range(world)]


def missing(hosts: dict[int, str], world: int, seconds: float) -> str:
    """The error message with the missing ranks."""
    absent = [str(rank) for rank in range(world) if rank not in hosts]
    present = "; ".join(f"rank {rank} on {hosts[rank]}" for rank in sorted(hosts))
    return (
        f"{len(absent)} of {world} ranks did not join within {seconds:g} s: {', '.join(absent)} (joined: {present}). "
        "Check that the missing ones are started and that no firewall blocks the ports"
    )


def wait(device: torch.device) -> None:
    """Wait until the device has finished."""
    if device.type != "cpu":
        torch.accelerator.synchronize()


def timed(action: Any, device: torch.device) -> float:
    """The median time of some rounds, in seconds."""
    action()
    times = []
    for _ in range(ROUNDS):
        dist.barrier()
        wait(device)
        start = time.perf_counter()
        action()
        wait(device)
        times.append(time.perf_counter() - start)
    return statistics.median(times)


def check_sum(rank: int, world: int, device: torch.device) -> float:
    """The all-reduced sum of one number per rank; raises if it is wrong."""
    value = torch.full((1000,), float(rank + 1), device=device)
    dist.all_reduce(value)
    expected = world * (world + 1) / 2
    if not bool((value == expected).all()):
        raise LoopwrightError(f"all-reduce returned {value[0].item()} instead of {expected}: the backend is broken")
    return expected


def measure(rank: int, world: int, device: torch.device, megabytes: float) -> dict[str, Any]:
    """Latency of a small all-reduce, bandwidth of a large one, and bandwidth between pairs."""
    small = torch.zeros(1, device=device)
    large = torch.zeros(max(1, int(megabytes * MEGABYTE / 4)), device=device)
    size = large.numel() * 4 / MEGABYTE
    latency = timed(lambda: dist.all_reduce(small), device)
    seconds = timed(lambda: dist.all_reduce(large), device)
    speeds = {}
    for one, other in pairs(world):
        taken = timed(lambda one=one, other=other: _there_and_back(large, rank, one, other), device)  # type: ignore[misc]
        speeds[f"{one}-{other}"] = 2 * size / taken
    return {
        "latency_us": latency * 1e6,
        "megabytes": size,
        "seconds": seconds,
        "bandwidth_mb_s": size / seconds,
        "bus_mb_s": size * bus_share(world) / seconds,
        "pairs_mb_s": _from_those_who_ran(speeds, rank, device),
    }


def _there_and_back(tensor: torch.Tensor, rank: int, one: int, other: int) -> None:
    if rank == one:
        dist.send(tensor, other)
        dist.recv(tensor, other)
    elif rank == other:
        dist.recv(tensor, one)
        dist.send(tensor, one)


def _from_those_who_ran(speeds: dict[str, float], rank: int, device: torch.device) -> dict[str, float]:
    """The measurements of the two ranks of a pair; the other ranks were idle and have none."""
    mine = [speed if str(rank) in name.split("-") else float("inf") for name, speed in speeds.items()]
    table = torch.tensor(mine, dtype=torch.float32, device=device)
    dist.all_reduce(table, op=dist.ReduceOp.MIN)
    return dict(zip(speeds, table.tolist(), strict=True))


def checkup(megabytes: float, seconds: float) -> dict[str, Any]:
    """The whole check; every rank returns the same results."""
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    device = device_of(int(os.environ.get("LOCAL_RANK", "0")))
    if device.type != "cpu":
        torch.accelerator.set_device_index(device.index)
    store = dist.TCPStore(
        os.environ["MASTER_ADDR"],
        int(os.environ["MASTER_PORT"]),
        is_master=rank == 0 and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True",
        timeout=timedelta(seconds=seconds),
    )
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    hosts = meet(dist.PrefixStore(f"doctor/{attempt}", store), rank, world, seconds)
    backend = dist.get_default_backend_for_device(device)
    dist.init_process_group(
        backend,
        store=dist.PrefixStore(f"doctor/{attempt}/group", store),
        rank=rank,
        world_size=world,
        timeout=timedelta(seconds=seconds),
    )
    try:
        total = check_sum(rank, world, device)
        figures = measure(rank, world, device, megabytes)
        dist.barrier()
    finally:
        dist.destroy_process_group()
    return {"world": world, "backend": backend, "device": str(device), "hosts": hosts, "sum": total, **figures}


def main() -> int:
    """Run the check; rank 0 writes the results as JSON to the file named in the environment."""
    options = json.loads(os.environ.get("LOOPWRIGHT_DOCTOR", "{}"))
    try:
        figures = checkup(options.get("megabytes", 64.0), options.get("seconds", 60.0))
    except (LoopwrightError, RuntimeError) as error:
        print(f"rank {os.environ['RANK']} on {socket.gethostname()}: {error}", file=sys.stderr, flush=True)
        return 1
    if os.environ["RANK"] == "0" and options.get("file"):
        with open(options["file"], "w", encoding="utf-8") as file:
            json.dump(figures, file)
    return 0


if __name__ == "__main__":
    sys.exit(main())
