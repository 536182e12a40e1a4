"""The record of who uses an output folder: a process, described so that another one can find out whether it lives."""

from __future__ import annotations

import json
import os
import socket
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path

LARGEST_PID = 2**31 - 1
BOOT = Path("/proc/sys/kernel/random/boot_id")


@dataclass(frozen=True)
class Claim:
    """The owner of an output folder."""

    token: str
    """Unique for each run; all ranks of a run use the same one."""
    host: str
    pid: int
    since: str
    boot: str | None = None
    """Identifies the running system: the same for all containers of a machine, another one after a reboot."""
    space: str | None = None
    """The namespace in which the process has this number."""
    born: str | None = None
    """The start time of the process, since numbers are used again."""
    run: str | None = None
    """Not used; in the files of older versions."""

    def encoded(self) -> bytes:
        return (json.dumps(asdict(self), indent=1) + "\n").encode()

    @property
    def name(self) -> str:
        return f"process {self.pid} on {self.host}"

    def is_here(self) -> bool:
        """Whether the owner runs, or ran, on this machine since it was started."""
        boot = _boot()
        return self.boot == boot if self.boot and boot else self.host == socket.gethostname()

    def has_ended(self) -> bool | None:
        """Whether the process has ended; None if that cannot be determined from this process."""
        if os.name != "posix" or not self.is_here() or self.space != _namespace():
            return None
        try:
            os.kill(self.pid, 0)
        except ProcessLookupError:
            return True
        except OSError:
            return False  # it belongs to another user
        state, born = _status_of(self.pid)
        return state in ("Z", "X") or (self.born is not None and born is not None and born != self.born)


def own_claim(token: str) -> Claim:
    """The claim of this process."""
    now = datetime.now(UTC).astimezone().isoformat(sep=" ", timespec="seconds")
    return Claim(token, socket.gethostname(), os.getpid(), now, _boot(), _namespace(), _status_of(os.getpid())[1])


def decoded(content: bytes) -> Claim | None:
    """The claim in a file's content, or None if it is not one: the file may be incomplete after a power failure."""
    try:
        claim = Claim(**json.loads(content))
    except (ValueError, TypeError, RecursionError):
        return None
    texts, more = (claim.token, claim.host, claim.since), (claim.boot, claim.space, claim.born, claim.run)
    is_valid = all(type(each) is str for each in texts) and all(each is None or type(each) is str for each in more)
    return claim if is_valid and type(claim.pid) is int and 0 < claim.pid <= LARGEST_PID else None


def _boot() -> str | None:
    try:
        return BOOT.read_text(encoding="ascii").strip() or None
    except OSError:
        return None


def _namespace() -> str | None:
    try:
        return os.readlink("/proc/self/ns/pid")
    except OSError:
        return None


def _status_of(pid: int) -> tuple[str | None, str | None]:
    """State and start time of a process, where the system shows them."""
    try:
        # The name of the program is in parentheses and may contain spaces.
        fields = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()
        return fields[0], fields[19]
    except (OSError, IndexError):
        return None, None
