"""The torchrun command line and environment of a launch, with defaults for what the user did not set."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass

from ..errors import ArgumentsError
from . import network
from .machine import Machine
from .request import LaunchRequest

LOGS = "loopwright-logs"
HOME = "127.0.0.1"
SHUTDOWN = 300
"""Seconds workers have to save after a signal; torchrun's own 30 are short for large models."""


@dataclass(frozen=True)
class Way:
    """How this machine is joined with the others."""

    host: str = HOME
    port: int = 0
    is_host: bool = True
    local: str | None = HOME
    interface: str | None = None


def find_way(request: LaunchRequest) -> Way:
    """The meeting point of the machines and how this one reaches it."""
    if request.nodes[1] == 1 and not request.own.host and "rdzv_endpoint" not in request.given:
        return Way(interface=request.own.interface or network.interface_of(HOME))
    if request.is_static:
        return Way(interface=request.own.interface, local=None)
    given = request.own.host or request.values.rdzv_endpoint
    if not given:
        raise ArgumentsError(
            f"--nnodes {request.values.nnodes} needs --host ADDRESS, the rendezvous node; use the same value on each "
            "node"
        )
    host, port = network.endpoint(given)
    local = network.address_towards(host, port)
    interface = request.own.interface or (network.interface_of(local) if local else None)
    # Of several agents on the meeting machine the first one hosts.
    hosts = network.is_here(host) and not network.is_taken(host, port)
    return Way(host, port, hosts, local, interface)


def words(request: LaunchRequest, machine: Machine, way: Way, *, knows: frozenset[str]) -> list[str]:
    """The words torchrun is started with; `knows` are the options this version of torchrun has."""
    defaults = {**_counts(request, machine), **_meeting(request, way), **_logs(request)}
    if "shutdown_timeout" in knows:
        defaults["shutdown_timeout"] = str(SHUTDOWN)
    if "signals_to_handle" in knows:
        defaults["signals_to_handle"] = "SIGTERM,SIGINT,SIGHUP,SIGQUIT,SIGUSR1"
    added = [f"--{name.replace('_', '-')}={value}" for name, value in defaults.items() if name not in request.given]
    return [*added, *_passed(request, way), *request.script]


def _counts(request: LaunchRequest, machine: Machine) -> dict[str, str]:
    counts = {"nproc_per_node": str(request.own.processes or machine.devices or 1)}
    if request.is_elastic:
        counts["max_restarts"] = "3"
    return counts


def processes(request: LaunchRequest, machine: Machine) -> int | None:
    """Processes on this machine; None when torchrun is to count them (`gpu`, `cpu`, `auto`)."""
    if "nproc_per_node" not in request.given:
        return int(request.own.processes or machine.devices or 1)
    given = str(request.values.nproc_per_node)
    return int(given) if given.isdigit() else None


def _meeting(request: LaunchRequest, way: Way) -> dict[str, str]:
    if request.is_static or request.values.standalone:
        return {}
    at_home = way.port == 0
    meeting = {"rdzv_backend": "c10d", "rdzv_endpoint": f"{way.host}:{way.port}"}
    if at_home:
        # Fresh for each launch, so that no run takes another one's checkpoints for its own.
        meeting["rdzv_id"] = f"{time.time_ns():x}"
    if way.local:
        meeting["local_addr"] = way.local
    if request.values.rdzv_backend in ("c10d", "static") and "rdzv_conf" not in request.given:
        # torchrun would guess by comparing host names, which fails where /etc/hosts maps ours to 127.0.1.1.
        meeting["rdzv_conf"] = f"is_host={str(way.is_host).lower()}"
    return meeting


def _logs(request: LaunchRequest) -> dict[str, str]:
    if request.own.no_log_files:
        return {}
    # Each rank's output goes to its files; the screen shows the first process of each machine.
    return {"log_dir": LOGS, "tee": "3", "local_ranks_filter": "0"}


def _passed(request: LaunchRequest, way: Way) -> list[str]:
    """The user's own options of torchrun; who hosts the meeting is added to rdzv-conf if it was left open."""
    passed = list(request.passed)
    conf = str(request.values.rdzv_conf or "")
    if "rdzv_conf" in request.given and "is_host" not in conf and not request.is_static:
        passed.append(f"--rdzv-conf={conf},is_host={str(way.is_host).lower()}")
    return passed


def environment(request: LaunchRequest, machine: Machine, way: Way, existing: Mapping[str, str]) -> dict[str, str]:
    """Variables the workers get in addition; what the user has set stays."""
    count = processes(request, machine) or machine.devices or machine.cores
    wanted = {
        "OMP_NUM_THREADS": str(request.own.threads or max(1, machine.cores // max(1, count))),
        "PYTHONUNBUFFERED": "1",  # a killed process should not take its last lines with it
        "PYTHONFAULTHANDLER": "1",
    }
    if way.interface:
        wanted["GLOO_SOCKET_IFNAME"] = way.interface
    if request.own.interface:
        wanted["NCCL_SOCKET_IFNAME"] = request.own.interface
    forced = {"OMP_NUM_THREADS"} if request.own.threads else set()
    return {name: value for name, value in wanted.items() if name in forced or name not in existing}
