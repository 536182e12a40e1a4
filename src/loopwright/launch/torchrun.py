"""The torchrun command line and environment of a launch, with defaults for what the user did not set."""

from __future__ import annotations

import signal
import time
from collections.abc import Mapping
from dataclasses import dataclass

from ..core.shutdown.signals import survives_terminal
from ..errors import ArgumentsError
from . import network
from .machine import Machine
from .network import HOME
from .request import LaunchRequest

LOGS = "loopwright-logs"
HANDLED = ("SIGTERM", "SIGINT", "SIGHUP", "SIGQUIT", "SIGUSR1")
SHUTDOWN = 300
"""Seconds for workers to save after a signal; torchrun's default of 30 is too short for large models."""


@dataclass(frozen=True)
class Way:
    """How this node joins the rendezvous."""

    host: str = HOME
    port: int = 0
    is_host: bool = True
    local: str | None = HOME
    interface: str | None = None
    is_alone: bool = False
    """Whether this is the only node."""

    @property
    def has_port(self) -> bool:
        """Whether the user has chosen where the nodes meet."""
        return self.port != 0


def find_way(request: LaunchRequest) -> Way:
    """The rendezvous endpoint, and how this node reaches it."""
    chosen, is_alone = request.own.interface, request.nodes[1] == 1
    chosen_address = _address_of(chosen)
    if is_alone and not request.own.host and "rdzv_endpoint" not in request.given:
        return Way(interface=chosen or network.interface_of(HOME), local=chosen_address or HOME, is_alone=True)
    if request.is_static:
        return Way(interface=chosen, local=None)
    given = request.own.host or request.values.rdzv_endpoint
    if not given:
        raise ArgumentsError(
            f"--nnodes {request.values.nnodes} needs --host ADDRESS, the rendezvous node; use the same value on each "
            "node"
        )
    host, port = network.endpoint(given)
    local = chosen_address or network.address_towards(host, port)
    interface = chosen or (network.interface_of(local) if local else None)
    # Of several agents on the rendezvous node the first one hosts it.
    hosts = network.is_here(host) and not network.is_taken(host, port)
    return Way(host, port, hosts, local, interface, is_alone)


def _address_of(interface: str | None) -> str | None:
    """The address of an interface, or of the first of several that are separated by commas."""
    names = interface.split(",") if interface else []
    unknown = [name for name in names if name not in network.interfaces()]
    if unknown:
        raise ArgumentsError(
            f"--interface {interface}: there is no {unknown[0]!r}; this machine has {', '.join(network.interfaces())}"
        )
    return network.address_of(names[0]) if names else None


def words(request: LaunchRequest, machine: Machine, way: Way, *, knows: frozenset[str]) -> list[str]:
    """The command line of torchrun; `knows` are the options of the installed version."""
    defaults = {**_counts(request, machine), **_meeting(request, way), **_logs(request)}
    if "shutdown_timeout" in knows:
        defaults["shutdown_timeout"] = str(SHUTDOWN)
    if "signals_to_handle" in knows:
        handled = [name for name in HANDLED if not survives_terminal(signal.Signals[name])]
        defaults["signals_to_handle"] = ",".join(handled)
    added = [f"--{name.replace('_', '-')}={value}" for name, value in defaults.items() if name not in request.given]
    return [*added, *_passed(request, way), *request.script]


def _counts(request: LaunchRequest, machine: Machine) -> dict[str, str]:
    counts = {"nproc_per_node": str(request.own.processes or machine.devices or 1)}
    if request.is_elastic:
        counts["max_restarts"] = "3"
    return counts


def processes(request: LaunchRequest, machine: Machine) -> int | None:
    """Processes on this node; None if torchrun counts them (`gpu`, `cpu`, `auto`)."""
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
        # Unique for each launch, so that a run never resumes from another run's checkpoints.
        meeting["rdzv_id"] = f"{time.time_ns():x}"
    if way.local:
        meeting["local_addr"] = way.local
    if request.values.rdzv_backend in ("c10d", "static") and "rdzv_conf" not in request.given:
        # torchrun would compare host names, which fails if /etc/hosts maps this host to 127.0.1.1.
        meeting["rdzv_conf"] = f"is_host={str(way.is_host).lower()}"
    return meeting


def _logs(request: LaunchRequest) -> dict[str, str]:
    if request.own.no_log_files:
        return {}
    # Each rank's output is written to its files; the console shows the first rank of each node.
    return {"log_dir": LOGS, "tee": "3", "local_ranks_filter": "0"}


def _passed(request: LaunchRequest, way: Way) -> list[str]:
    """The user's options of torchrun; is_host is added to rdzv-conf if it is not set."""
    passed = list(request.passed)
    conf = str(request.values.rdzv_conf or "")
    if "rdzv_conf" in request.given and "is_host" not in conf and not request.is_static:
        passed.append(f"--rdzv-conf={conf},is_host={str(way.is_host).lower()}")
    return passed


def environment(request: LaunchRequest, machine: Machine, way: Way, existing: Mapping[str, str]) -> dict[str, str]:
    """Environment variables added for the workers; those set by the user are kept."""
    count = processes(request, machine) or machine.devices or machine.cores
    wanted = {
        "OMP_NUM_THREADS": str(request.own.threads or max(1, machine.cores // max(1, count))),
        "PYTHONUNBUFFERED": "1",  # so that a killed process does not lose its last lines
        "PYTHONFAULTHANDLER": "1",
    }
    if way.interface:
        wanted["GLOO_SOCKET_IFNAME"] = way.interface
    if request.own.interface:
        wanted["NCCL_SOCKET_IFNAME"] = request.own.interface
    elif way.interface and way.local == HOME:
        wanted["NCCL_SOCKET_IFNAME"] = f"={way.interface}"  # NCCL matches prefixes otherwise
    forced = {"OMP_NUM_THREADS"} if request.own.threads else set()
    return {name: value for name, value in wanted.items() if name in forced or name not in existing}
