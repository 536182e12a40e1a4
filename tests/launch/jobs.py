"""Starting `loopwright launch` (and whatever it starts) as real processes, with nothing left behind."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
LAUNCH = [sys.executable, "-m", "loopwright", "launch"]
SCRIPTS = Path(__file__).parent / "scripts"


def variables(more: Mapping[str, str] | None = None) -> dict[str, str]:
    """The environment of a job: this repository's sources, one thread, no variables of another job."""
    unwanted = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT", "LOOPWRIGHT_RESUME")
    kept = {
        name: value
        for name, value in os.environ.items()
        if name not in unwanted and not name.startswith(("TORCHELASTIC_", "PET_", "SLURM_"))
    }
    paths = os.pathsep.join([str(ROOT / "src"), str(ROOT)])
    return {**kept, "PYTHONPATH": paths, "OMP_NUM_THREADS": "1", **(more or {})}


class Job:
    """A process and all it started, with what they printed in a file."""

    def __init__(self, command: Sequence[str], folder: Path, name: str, more: Mapping[str, str] | None = None) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.output = folder / f"{name}.out"
        with open(self.output, "ab") as file:
            self.process = subprocess.Popen(
                list(command), cwd=folder, env=variables(more), stdin=subprocess.DEVNULL, stdout=file,
                stderr=subprocess.STDOUT, start_new_session=True,
            )  # fmt: skip

    def text(self) -> str:
        return self.output.read_text(errors="replace")

    def wait(self, seconds: float = 300) -> int:
        try:
            return self.process.wait(timeout=seconds)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"not over after {seconds} s; it printed:\n{self.text()[-6000:]}") from None

    def until(self, condition: Callable[[], bool], seconds: float = 240) -> None:
        """Until the condition holds; the job must not end before."""
        end = time.monotonic() + seconds
        while not condition():
            assert time.monotonic() < end, f"it did not come to pass in {seconds} s:\n{self.text()[-6000:]}"
            assert self.process.poll() is None, f"ended with {self.process.returncode}:\n{self.text()[-6000:]}"
            time.sleep(0.05)

    def workers(self) -> list[int]:
        """The processes that the agent started, in the order of their start."""
        return children(self.process.pid)

    def signal(self, number: int) -> None:
        os.kill(self.process.pid, number)

    def close(self) -> None:
        """End the process and everything below it."""
        for pid in [*descendants(self.process.pid), self.process.pid]:
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                pass
        self.process.wait()


def children(pid: int) -> list[int]:
    try:
        tasks = list(Path(f"/proc/{pid}/task").iterdir())
        return sorted({int(each) for task in tasks for each in (task / "children").read_text().split()})
    except (FileNotFoundError, ProcessLookupError):
        return []


def descendants(pid: int) -> list[int]:
    found = []
    for child in children(pid):
        found += [child, *descendants(child)]
    return found


@contextmanager
def job(
    words: Sequence[str], folder: Path, *, name: str = "job", more: Mapping[str, str] | None = None
) -> Iterator[Job]:
    """A job that is gone when the block ends."""
    started = Job(words, folder, name, more)
    try:
        yield started
    finally:
        started.close()


def launched(words: Sequence[str], folder: Path, *, seconds: float = 300, more: Mapping[str, str] | None = None):
    """Exit code and output of a launch that ends by itself."""
    with job([*LAUNCH, *words], folder, more=more) as started:
        return started.wait(seconds), started.text()


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
