"""Processes and listening sockets as /proc lists them."""

from __future__ import annotations

import os
import re
import socket
import time
from collections.abc import Iterable
from pathlib import Path

from loopwright.launch import guard

from .jobs import descendants


def family(launcher: int) -> dict[int, str]:
    """A launcher, its guard and everything below it: process ids with their start times, since ids are used again."""
    start = f"{launcher}.{guard.started(launcher)}:".encode()
    words = {int(path.parent.name): _read(path).split(b"\0") for path in Path("/proc").glob("[0-9]*/cmdline")}
    marks = {pid: word.decode() for pid, each in words.items() for word in each if word.startswith(start)}
    marked = [pid for mark in set(marks.values()) for pid in guard.members(mark)]
    pids = [launcher, *marks, *descendants(launcher), *marked]
    return {pid: since for pid in pids if (since := guard.started(pid)) is not None}


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError:
        return b""


def alive(known: dict[int, str]) -> list[int]:
    return [pid for pid, since in known.items() if guard.started(pid) == since]


def wait_until_gone(known: dict[int, str], seconds: float = 60) -> None:
    deadline = time.monotonic() + seconds
    while left := alive(known):
        assert time.monotonic() < deadline, {pid: _read(Path(f"/proc/{pid}/cmdline")) for pid in left}
        time.sleep(0.05)


def listening(pids: Iterable[int]) -> set[str]:
    """The addresses on which these processes listen for TCP connections."""
    addresses = {}
    for family_, name in ((socket.AF_INET, "tcp"), (socket.AF_INET6, "tcp6")):
        for line in Path(f"/proc/net/{name}").read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == "0A":
                addresses[fields[9]] = _address(family_, fields[1].split(":")[0])
    found = set()
    for pid in pids:
        for link in Path(f"/proc/{pid}/fd").glob("*"):
            try:
                inode = re.fullmatch(r"socket:\[(\d+)\]", os.readlink(link))
            except OSError:
                continue
            if inode and inode[1] in addresses:
                found.add(addresses[inode[1]])
    return found


def _address(family_: int, digits: str) -> str:
    """The kernel prints words of 32 bits in the order of the machine."""
    words = [bytes.fromhex(digits[start : start + 8])[::-1] for start in range(0, len(digits), 8)]
    return socket.inet_ntop(family_, b"".join(words))
