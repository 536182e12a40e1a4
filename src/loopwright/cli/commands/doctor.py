"""`loopwright doctor`: devices, backends and versions, and the communication between ranks."""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

from ...errors import LoopwrightError
from . import env

DESCRIPTION = """\
Show devices, backends and versions, then run an all-reduce over all ranks and measure bandwidth and latency.

Without a launcher it starts its own processes on this machine. To check several nodes, start it on each with the
launcher:
  loopwright launch --nnodes 2 --host node1 -m loopwright doctor
"""


def run(words: list[str]) -> int:
    """Print devices and versions and run the check; 0 if all ranks can communicate."""
    parser = argparse.ArgumentParser(
        "loopwright doctor", description=DESCRIPTION, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--processes", "-n", type=int, help="number of processes to start (default: one per accelerator; 2 on CPU)"
    )
    parser.add_argument(
        "--megabytes", type=float, default=64.0, help="size of the large all-reduce in MB (default: 64)"
    )
    parser.add_argument("--timeout", type=float, default=60.0, help="timeout in seconds (default: 60)")
    parser.add_argument("--cpu", action="store_true", help="check the CPU backend, not the accelerators")
    parser.add_argument("--json", action="store_true", help="print JSON")
    options = parser.parse_args(words)
    if options.cpu:
        os.environ["LOOPWRIGHT_DOCTOR_CPU"] = "1"
    if "RANK" in os.environ and "WORLD_SIZE" in os.environ:
        return _as_one_of_many(options)
    report = {**_what_there_is(), "connection": _among_own_processes(options)}
    _show(report, options)
    return 0


def _what_there_is() -> dict[str, Any]:
    rows = [*env.machine(), *env.packages(), *env.devices()]
    return {"environment": dict(rows), "backends": backends()}


def backends() -> dict[str, str]:
    """Torch's communication backends, and whether this build has them."""
    import torch
    import torch.distributed as dist

    if not dist.is_available():
        return {"torch.distributed": "not in this build of torch"}
    known = {"gloo": dist.is_gloo_available, "nccl": dist.is_nccl_available, "mpi": dist.is_mpi_available,
             "ucc": dist.is_ucc_available, "xccl": dist.is_xccl_available}  # fmt: skip
    found = {name: "available" if there() else "not in this build of torch" for name, there in known.items()}
    if known["nccl"]() and torch.cuda.is_available():
        found["nccl"] = "available, version " + ".".join(map(str, torch.cuda.nccl.version()))
    return found


def _as_one_of_many(options: argparse.Namespace) -> int:
    """Run the check as one rank of a launched job."""
    from ...launch.checkup import checkup

    try:
        figures = checkup(options.megabytes, options.timeout)
    except (LoopwrightError, RuntimeError) as error:
        raise LoopwrightError(f"rank {os.environ['RANK']}: {error}") from error
    if os.environ["RANK"] == "0":
        _show({**_what_there_is(), "connection": figures}, options)
    return 0


def _among_own_processes(options: argparse.Namespace) -> dict[str, Any]:
    """Start processes on this machine that run the check."""
    import subprocess

    from ...launch.machine import this_machine

    # Two processes cannot share an accelerator; CPUs are shared anyway.
    count = options.processes or (0 if options.cpu else this_machine().devices) or 2
    with tempfile.TemporaryDirectory() as folder:
        result = Path(folder) / "figures.json"
        wanted = {"megabytes": options.megabytes, "seconds": options.timeout, "file": str(result)}
        command = [sys.executable, "-m", "loopwright", "launch", "--processes", str(count), "--no-log-files",
                   "-m", "loopwright.launch.checkup"]  # fmt: skip
        variables = {**os.environ, "LOOPWRIGHT_DOCTOR": json.dumps(wanted)}
        try:
            ended = subprocess.run(
                command, env=variables, cwd=folder, capture_output=True, text=True, timeout=60 + 5 * options.timeout
            )
        except subprocess.TimeoutExpired as error:
            raise LoopwrightError(f"{count} ranks did not finish the check in {error.timeout:g} s") from error
        if ended.returncode or not result.is_file():
            lines = [line for line in ended.stderr.splitlines() if line.startswith("rank ")] or [ended.stderr[-2000:]]
            raise LoopwrightError(f"{count} ranks cannot communicate:\n  " + "\n  ".join(lines))
        found: dict[str, Any] = json.loads(result.read_text(encoding="utf-8"))
        return found


def _show(report: dict[str, Any], options: argparse.Namespace) -> None:
    if options.json:
        print(json.dumps(report, indent=1))
        return
    rows = [*report["environment"].items(), *report["backends"].items(), *connection_rows(report["connection"])]
    width = max(len(name) for name, _ in rows)
    print("\n".join(f"{name:<{width}}  {value}" for name, value in rows))


def connection_rows(figures: dict[str, Any]) -> list[tuple[str, str]]:
    """The results of the check as rows of text."""
    rows = [
        ("processes", f"{figures['world']} through {figures['backend']} on {figures['device'].split(':')[0]}"),
        *((f"  rank {rank}", host) for rank, host in enumerate(figures["hosts"])),
        ("all-reduce", f"correct (sum {figures['sum']:g}), {figures['latency_us']:,.0f} us for one number"),
        ("bandwidth", f"{figures['bandwidth_mb_s']:,.0f} MB/s, all-reduce of {figures['megabytes']:.0f} MB"),
        ("", f"{figures['bus_mb_s']:,.0f} MB/s in and out of each rank"),
    ]
    slowest = min(figures["pairs_mb_s"].values(), default=0.0)
    for pair, speed in figures["pairs_mb_s"].items():
        slow = "  <- the slowest" if speed == slowest and len(figures["pairs_mb_s"]) > 1 else ""
        rows.append((f"  ranks {pair}", f"{speed:,.0f} MB/s{slow}"))
    return rows
