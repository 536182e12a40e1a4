"""Two "machines": network namespaces with host names of their own, joined by a veth pair."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass


@dataclass(frozen=True)
class Machine:
    """A network namespace with one interface."""

    space: str
    host: str
    address: str
    interface: str

    def words(self, *command: str) -> list[str]:
        """A command as it is run on this machine, under its own host name."""
        named = f'hostname {self.host} && exec "$@"'
        return ["ip", "netns", "exec", self.space, "unshare", "--uts", "bash", "-c", named, "bash", *command]

    def unplug(self) -> None:
        run("ip", "-n", self.space, "link", "set", self.interface, "down")

    def plug_in(self) -> None:
        run("ip", "-n", self.space, "link", "set", self.interface, "up")


def run(*words: str) -> None:
    done = subprocess.run(words, capture_output=True, text=True, timeout=20)
    if done.returncode:
        raise OSError(f"{' '.join(words)}: {done.stderr.strip() or done.returncode}")


def why_not() -> str | None:
    """Why this system does not let us make machines; None when it does."""
    if os.geteuid() != 0:
        return "network namespaces need root"
    missing = [name for name in ("ip", "unshare", "hostname") if shutil.which(name) is None]
    if missing:
        return f"there is no command {missing[0]!r}"
    try:
        with two_machines():
            return None
    except OSError as error:
        return f"network namespaces are not allowed here ({error})"


@contextmanager
def two_machines() -> Iterator[tuple[Machine, Machine]]:
    """Machines that reach each other and nobody else; gone when the block ends."""
    tag = f"lw{os.getpid() % 100000}"
    pair = tuple(
        Machine(f"{tag}{letter}", f"machine-{letter}", f"10.77.0.{number}", f"{tag}v{letter}")
        for number, letter in ((1, "a"), (2, "b"))
    )
    try:
        for each in pair:
            run("ip", "netns", "add", each.space)
        run("ip", "link", "add", pair[0].interface, "type", "veth", "peer", "name", pair[1].interface)
        for each in pair:
            run("ip", "link", "set", each.interface, "netns", each.space)
            run("ip", "-n", each.space, "addr", "add", f"{each.address}/24", "dev", each.interface)
            run("ip", "-n", each.space, "link", "set", "lo", "up")
            each.plug_in()
        run(*pair[0].words("true"))
        yield pair[0], pair[1]
    finally:
        for each in pair:
            subprocess.run(["ip", "netns", "del", each.space], capture_output=True)
        subprocess.run(["ip", "link", "del", pair[0].interface], capture_output=True)
