"""`loopwright launch`: run a script on several processes with torchrun or Ray, or write a Slurm or Kubernetes job."""

from __future__ import annotations

import argparse
import os
import secrets
import shlex
import sys
from pathlib import Path

from ...core.resuming.run_record import LAUNCH, RESUME, TAKE_OVER
from ...errors import ArgumentsError
from ...launch import kubernetes, slurm, torchrun
from ...launch.machine import this_machine
from ...launch.request import LaunchRequest, read

DESCRIPTION = """\
Run a script on several processes: `loopwright launch --processes 8 train.py --lr 1e-4`.

All options of torchrun are accepted and passed on (`torchrun --help` lists them). Defaults: one process per
accelerator, CPU threads divided between processes, a free port, log files per rank. Exit codes are those of the
script: 75 means that every rank saved and stopped, and that the same command resumes from there.
"""


def parser() -> argparse.ArgumentParser:
    """The parser of loopwright's options; torchrun's options have their own parser."""
    own = argparse.ArgumentParser(
        "loopwright launch",
        usage="loopwright launch [options] [torchrun's options] train.py [the script's options]",
        description=DESCRIPTION,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    add = own.add_argument
    add("--processes", "-n", type=int, help="processes per node (default: one per accelerator, or 1)")
    add(
        "--threads",
        type=int,
        help="threads per process (default: cores divided by processes; OMP_NUM_THREADS is honoured)",
    )
    add("--host", help="ADDRESS[:PORT] of the rendezvous node; the same value on every node")
    add(
        "--interface",
        help="network interface of all connections (default: loopback; on several nodes that of the route to --host)",
    )
    add("--rejoin", type=float, help="seconds to wait for lost nodes to return (default: 600, or 0 on one node)")
    add("--take-over", action="store_true", help="take output_dir from a run that is using it; that run stops")
    add("--no-log-files", action="store_true", help="do not write log files per rank")
    add("--dry-run", action="store_true", help="print the command and its environment without running it")
    _add_slurm(own.add_argument_group("a Slurm script"))
    _add_kubernetes(own.add_argument_group("a Kubernetes manifest"))
    _add_ray(own.add_argument_group("on Ray"))
    return own


def _add_slurm(group: argparse._ArgumentGroup) -> None:
    add = group.add_argument
    add("--slurm", metavar="FILE", help="write an sbatch script that requeues itself ('-': to stdout)")
    add("--time", default="24:00:00", help="time limit (default: %(default)s)")
    add("--signal-before", type=int, default=300, help="seconds before the limit to save and requeue (default: 300)")
    add("--gpus", type=int, help="accelerators per node (default: --processes)")
    add("--cpus", type=int, help="CPUs per node")
    add(
        "--sbatch",
        action="append",
        default=[],
        metavar="OPTION=VALUE",
        help="additional #SBATCH line; may be repeated",
    )
    add(
        "--before",
        action="append",
        default=[],
        metavar="COMMAND",
        help="shell line to run before the script; may be repeated",
    )


def _add_kubernetes(group: argparse._ArgumentGroup) -> None:
    add = group.add_argument
    add("--kubernetes", metavar="FILE", help="write a manifest ('-': to stdout)")
    add("--kind", choices=tuple(kubernetes.KINDS), default="PyTorchJob", help="kind of resource (default: %(default)s)")
    add("--image", help="container image; required with --kubernetes")
    add("--name", help="name of the job (default: the script's)")
    add("--namespace", help="namespace of the job")
    add("--memory", help="memory per node, such as 64Gi")
    add("--claim", action="append", default=[], metavar="CLAIM:PATH", help="mount a volume claim; may be repeated")
    add("--variable", action="append", default=[], metavar="NAME=VALUE", help="environment variable; may be repeated")


def _add_ray(group: argparse._ArgumentGroup) -> None:
    add = group.add_argument
    add("--ray", metavar="WORKERS", help="run on Ray Train workers: a number, or MIN:MAX for an elastic run")
    add("--ray-address", help="cluster to join (default: RAY_ADDRESS, or a new one on this machine)")
    add("--ray-storage", help="folder that all workers can write to (default: Ray's own)")


def run(words: list[str]) -> int:
    """Run `loopwright launch` with these arguments; returns the exit code."""
    from torch.distributed.run import get_args_parser

    own, torchrun_parser = parser(), get_args_parser()
    if not words or {"-h", "--help"} & {*words[:1]}:
        own.print_help()
        return 0 if words else 2
    request = read(words, own, torchrun_parser, os.environ)
    _check(request)
    knows = frozenset(action.dest for action in torchrun_parser._actions)
    for option, act in (("slurm", _write_slurm), ("kubernetes", _write_kubernetes), ("ray", _run_on_ray)):
        if getattr(request.own, option):
            return act(request)
    return _run_here(request, knows)


def _check(request: LaunchRequest) -> None:
    problems = [
        f"--{name} {value}: must be a number above 0"
        for name in ("processes", "threads")
        if (value := getattr(request.own, name)) is not None and value < 1
    ]
    chosen = [name for name in ("slurm", "kubernetes", "ray") if getattr(request.own, name)]
    if chosen and request.own.take_over:
        problems.append(
            f"--take-over with --{chosen[0]}: not available, since every restart would take over; stop the other run "
            "first"
        )
    if len(chosen) > 1:
        problems.append(f"--{' and --'.join(chosen)} are mutually exclusive")
    if request.own.processes is not None and "nproc_per_node" in request.given:
        problems.append("--processes and --nproc-per-node are the same; use only one of them")
    if request.own.host and "rdzv_endpoint" in request.given:
        problems.append("--host and --rdzv-endpoint are the same; use only one of them")
    if problems:
        raise ArgumentsError(problems)


def _run_here(request: LaunchRequest, knows: frozenset[str]) -> int:
    machine = this_machine()

    def words() -> list[str]:
        return torchrun.words(request, machine, torchrun.find_way(request), knows=knows)

    way = torchrun.find_way(request)
    added = torchrun.environment(request, machine, way, os.environ)
    if request.own.take_over:
        added[TAKE_OVER] = "1"
    if request.own.dry_run:
        shown = [f"{name}={shlex.quote(value)}" for name, value in added.items()]
        print(" ".join([*shown, "torchrun", *map(shlex.quote, words())]))
        return 0
    from ...launch import agent

    os.environ.update({**added, **_identity(request)})
    patience = request.own.rejoin
    if patience is None:
        patience = 600.0 if request.nodes[1] > 1 and not request.is_static else 0.0
    return agent.run(words, way, elastic=request.is_elastic, patience=patience)


def _identity(request: LaunchRequest) -> dict[str, str]:
    """A variable that distinguishes this launch, with all its restarts, from others into the same folder."""
    # On several nodes each has its own agent, and a scheduler may have started the same job before.
    is_known = request.nodes[1] == 1 and RESUME not in os.environ
    return {LAUNCH: secrets.token_hex(8)} if is_known else {}


def _write_slurm(request: LaunchRequest) -> int:
    return _write(slurm.script(request), request.own.slurm, "submit it with: sbatch {}")


def _write_kubernetes(request: LaunchRequest) -> int:
    return _write(kubernetes.manifest(request), request.own.kubernetes, "start it with: kubectl create -f {}")


def _write(text: str, place: str, advice: str) -> int:
    if place == "-":
        print(text, end="")
        return 0
    Path(place).parent.mkdir(parents=True, exist_ok=True)
    Path(place).write_text(text, encoding="utf-8")
    print(f"{place} is written; {advice.format(shlex.quote(place))}", file=sys.stderr)
    return 0


def _run_on_ray(request: LaunchRequest) -> int:
    from ...launch.on_ray import run_on_ray

    return run_on_ray(request, this_machine())
