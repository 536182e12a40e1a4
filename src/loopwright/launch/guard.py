"""The processes of a launch, and the guard that ends them when the launcher is gone.

Every process of a launch inherits an environment variable that names the launcher and its temporary folder, which the
launcher removes when it ends. The guard is a separate process: this file, run as a script. It waits for the end of a
pipe that only the launcher holds open, which works for kill -9 too. This file imports only the standard library, so
that the guard starts quickly and needs little memory.
"""

from __future__ import annotations

import os
import select
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Collection, Iterable
from contextlib import suppress
from typing import Any

MARK = "LOOPWRIGHT_LAUNCHER"
"""The environment variable: process id, start time and temporary folder of the launcher."""
TIME_TO_DIE = 5.0
"""Seconds to wait for killed processes; one in an uninterruptible system call may stay longer."""
DONE = b"done"
PAUSE = 0.05
PROC = "/proc"


# ---- finding processes -----------------------------------------------------------------------------------------------


def has_proc() -> bool:
    """Whether all processes can be listed, as on Linux; elsewhere only the ranks are known."""
    return os.path.isdir(f"{PROC}/self")


def started(process: int | str) -> str | None:
    """When a process was started, in clock ticks since boot; None if it has ended."""
    fields = _fields(process)
    return None if fields is None or fields[0] in "ZX" else fields[19]


def _fields(process: int | str) -> list[str] | None:
    """The fields of /proc/PID/stat from the state on."""
    try:
        with open(f"{PROC}/{process}/stat", encoding="utf-8", errors="replace") as file:
            return file.read().rpartition(")")[2].split()
    except OSError:
        return None


def mark_of_this_process(folder: str) -> str:
    """The value of MARK in all processes that this one launches."""
    return f"{os.getpid()}.{started(os.getpid()) or 0}:{folder}"


def folder_in(mark: str) -> str:
    """The temporary folder of the launcher with this mark."""
    return mark.partition(":")[2]


def members(mark: str, ranks: Collection[int] = ()) -> list[int]:
    """Living processes of a launch: those with its mark, and those in the session of a rank."""
    if not has_proc():
        return [rank for rank in ranks if is_alive(rank)]
    return [pid for pid, found, session in _processes() if found == mark or session in ranks]


def orphans() -> dict[int, str]:
    """Living processes of this user whose launcher was killed, and their marks.

    If a launcher ended by itself, its folder is gone, and what its ranks left running was meant to stay.
    """
    marked = {pid: mark for pid, mark, _ in _processes() if mark}
    dead = {mark for mark in set(marked.values()) if not _is_running(mark) and os.path.isdir(folder_in(mark))}
    return {pid: mark for pid, mark in marked.items() if mark in dead}


def _is_running(mark: str) -> bool:
    launcher, _, since = mark.partition(":")[0].partition(".")
    return started(launcher) == since


def _processes() -> Iterable[tuple[int, str, int]]:
    """Id, mark and session of the living processes that this user may inspect, except this one."""
    try:
        names = [name for name in os.listdir(PROC) if name.isdigit()]
        space = os.readlink(f"{PROC}/self/ns/pid")
    except OSError:
        return
    for name in names:
        fields = _fields(name)
        if fields is None or fields[0] in "ZX" or int(name) == os.getpid():
            continue
        with suppress(OSError):
            # Process ids of another container, as in a mark, would mean other processes here.
            if os.readlink(f"{PROC}/{name}/ns/pid") == space:
                yield int(name), _mark_in(name), int(fields[3])


def _mark_in(name: str) -> str:
    with open(f"{PROC}/{name}/environ", "rb") as file:
        lines = file.read().split(b"\0")
    start = f"{MARK}=".encode()
    return next((line[len(start) :].decode() for line in lines if line.startswith(start)), "")


# ---- ending processes ------------------------------------------------------------------------------------------------


def end(mark: str, ranks: Collection[int], seconds: float) -> None:
    """Send SIGTERM to the leading processes of a launch, wait for them, and kill what is left after `seconds`."""
    leading = [pid for pid in members(mark, ranks) if _is_leader(pid)]
    for pid in leading:
        send(pid, signal.SIGTERM)
    wait_for(leading, seconds)
    kill(mark, ranks)


def kill(mark: str, ranks: Collection[int]) -> None:
    """Kill every process of a launch, also those started meanwhile."""
    deadline = time.monotonic() + TIME_TO_DIE
    while (left := members(mark, ranks)) and time.monotonic() < deadline:
        for pid in left:
            send(pid, signal.SIGKILL)
        time.sleep(PAUSE)


def wait_for(processes: Iterable[int], seconds: float) -> list[int]:
    """Wait until the processes have ended; returns those that are left after `seconds`."""
    deadline, left = time.monotonic() + seconds, list(processes)
    while left := [pid for pid in left if is_alive(pid)]:
        if time.monotonic() > deadline:
            return left
        time.sleep(PAUSE)
    return []


def _is_leader(pid: int) -> bool:
    try:
        return os.getsid(pid) == pid
    except OSError:
        return False


def is_alive(pid: int) -> bool:
    """Whether a process exists and is not a zombie."""
    if has_proc():
        return started(pid) is not None
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        pass
    return True


def send(pid: int, number: int) -> None:
    """Send a signal to a process that may have ended; where processes cannot be listed, to the group it leads."""
    with suppress(OSError):
        (os.kill if has_proc() else os.killpg)(pid, number)


# ---- the launcher's side ---------------------------------------------------------------------------------------------


class Guard:
    """While entered, a separate process ends the ranks of this launch if this process dies."""

    def __init__(self, folder: str, time_to_save: float) -> None:
        self.mark, self._time_to_save = mark_of_this_process(folder), time_to_save
        self.ranks: list[int] = []

    def __enter__(self) -> Guard:
        reading, self._to_guard = os.pipe()
        self._from_guard, writing = os.pipe()
        variables = {name: value for name, value in os.environ.items() if name != MARK}
        try:
            subprocess.run(
                [sys.executable, "-I", "-S", __file__, self.mark, str(self._time_to_save)],
                stdin=reading, stdout=writing, env=variables, cwd="/", check=True,
            )  # fmt: skip
        finally:
            os.close(reading)
            os.close(writing)
        os.environ[MARK] = self.mark
        return self

    def watch(self, ranks: Iterable[int]) -> None:
        """Send the process ids of the ranks to the guard; each leads a session."""
        self.ranks = list(ranks)
        with suppress(BrokenPipeError):  # the guard was killed
            os.write(self._to_guard, f"{' '.join(map(str, self.ranks))}\n".encode())

    def clean_up(self) -> None:
        """End all processes of the launch: what ranks have started outlives a killed rank."""
        end(self.mark, self.ranks, 0.0)

    def __exit__(self, *error: Any) -> None:
        os.environ.pop(MARK, None)
        with suppress(BrokenPipeError):
            os.write(self._to_guard, DONE + b"\n")
        os.close(self._to_guard)
        select.select([self._from_guard], [], [], TIME_TO_DIE)  # readable when the guard has ended
        os.close(self._from_guard)


# ---- the guard -------------------------------------------------------------------------------------------------------


def stand_guard(mark: str, time_to_save: float) -> None:
    """Read process ids of ranks until the launcher closes the pipe, and end them unless it said that it is done."""
    lines = sys.stdin.buffer.read().splitlines()
    if lines[-1:] == [DONE]:
        return
    ranks = [int(word) for word in lines[-1].split()] if lines else []
    if members(mark, ranks):
        _report(mark, time_to_save)
        end(mark, ranks, time_to_save)
    shutil.rmtree(folder_in(mark), ignore_errors=True)


def _report(mark: str, time_to_save: float) -> None:
    with suppress(OSError):  # the terminal may be gone
        sys.stderr.write(
            f"loopwright: the launcher (process {mark.partition('.')[0]}) has died; its ranks save and exit, and are "
            f"killed after {time_to_save:.0f} s\n"
        )
        sys.stderr.flush()


def main() -> None:
    """Become a process in a session of its own, out of reach of Ctrl-C and of a closed terminal."""
    if os.fork() != 0:
        os._exit(0)
    os.setsid()
    stand_guard(sys.argv[1], float(sys.argv[2]))


if __name__ == "__main__":
    main()
