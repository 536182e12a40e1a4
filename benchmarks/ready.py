"""Where the time before full speed and the peak memory go: stacks of the main thread, sampled from `train()` on.

    python benchmarks/ready.py sft-64 [--updates 3] [--cache FOLDER] [--tiny]

Prints the functions of loopwright as a tree with the seconds spent in each, the end of every update, and on a GPU every
new peak of its memory with the function that ran then. Without `--cache` nothing was compiled before; a second run with
the same folder shows a warm start.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType

from processes import HERE, environment

INTERVAL = 0.01
LEAST_SECONDS = 0.1
LEAST_GIB = 0.05
"""By how much a peak must exceed the one before to be shown."""
INNERMOST = 6
"""Functions of a stack that are shown for a peak."""
OURS = f"{os.sep}loopwright{os.sep}"


@dataclass
class Node:
    """A function and those it called."""

    seconds: float = 0.0
    callees: dict[str, Node] = field(default_factory=dict)

    def add(self, names: list[str], seconds: float) -> None:
        self.seconds += seconds
        if names:
            self.callees.setdefault(names[0], Node()).add(names[1:], seconds)

    def lines(self, depth: int = 0) -> list[str]:
        found = []
        for name, node in sorted(self.callees.items(), key=lambda pair: -pair[1].seconds):
            if node.seconds >= LEAST_SECONDS:
                found += [f"{node.seconds:7.2f}  {'  ' * depth}{name}", *node.lines(depth + 1)]
        return found


@dataclass
class Peaks:
    """New peaks of a device's memory, with the functions that ran when they were seen."""

    peak_gib: Callable[[], float | None]
    lines: list[str] = field(default_factory=list)
    _highest: float = 0.0
    _began: float = field(default_factory=time.perf_counter)

    def look(self, names: list[str]) -> None:
        now = self.peak_gib()
        if now is not None and now >= self._highest + LEAST_GIB:
            self._highest = now
            seconds = time.perf_counter() - self._began
            self.lines.append(f"{now:7.2f}  after {seconds:5.1f} s  {' > '.join(names[-INNERMOST:])}")


class Sampler(threading.Thread):
    """Adds the stack of a thread to a tree, a hundred times per second."""

    def __init__(self, peak_gib: Callable[[], float | None]) -> None:
        super().__init__(daemon=True)
        self.tree, self.peaks, self._of, self._ended = Node(), Peaks(peak_gib), threading.get_ident(), threading.Event()

    def run(self) -> None:
        last = time.perf_counter()
        while not self._ended.wait(INTERVAL):
            names, now = names_in(sys._current_frames().get(self._of)), time.perf_counter()
            self.tree.add(names, now - last)
            self.peaks.look(names)
            last = now

    def stop(self) -> None:
        self._ended.set()
        self.join()


def names_in(frame: FrameType | None) -> list[str]:
    """Functions of loopwright from the outermost to the innermost, and what the innermost of them calls."""
    found: list[str] = []
    inner = None
    while frame is not None:
        code = frame.f_code
        if OURS in code.co_filename:
            found.append(f"{code.co_filename.rsplit(OURS, 1)[1]}:{code.co_qualname}")
        elif not found:
            inner = f"[{code.co_filename.rsplit('site-packages', 1)[-1]}:{code.co_qualname}]"
        frame = frame.f_back
    return [*reversed(found), *([inner] if inner and found else [])]


def main() -> None:
    parser = argparse.ArgumentParser(description="Where the time before full speed goes.")
    parser.add_argument("task")
    parser.add_argument("--updates", type=int, default=3)
    parser.add_argument("--planned", type=int, default=100_000, help="updates the run is planned for: max_steps")
    parser.add_argument("--cache", type=Path, help="a folder for compiled code, kept between runs; cold if not set")
    parser.add_argument("--tiny", action="store_true")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        os.environ.update(environment(folder, options.cache))
        tempfile.tempdir = folder
        sys.path.insert(0, str(HERE.parent / "src"))
        measure(options)


def measure(options: argparse.Namespace) -> None:
    from everyday import PLANS
    from trainers import with_loopwright
    from watch import Watch, peak_gib
    from workloads import WORKLOADS

    device = "cpu" if options.tiny else PLANS[options.task].device or "cuda"
    ends: list[float] = []

    class Ends(Watch):
        def update_done(self) -> bool:
            self.wait()
            ends.append(time.perf_counter())
            return super().update_done()

    watch = Ends(device, warmup=1, updates=options.updates - 1)
    task = WORKLOADS[options.task](watch, options.tiny)
    task.bf16 = task.bf16 and device == "cuda"
    sampler, started = Sampler(lambda: peak_gib(device)), time.perf_counter()
    sampler.start()
    found = with_loopwright(task, max_steps=options.planned)
    sampler.stop()
    print(f"{options.task}: model built after {watch.begun - started:.1f} s")
    print("seconds from train() to the end of each update:", [round(each - watch.begun, 2) for each in ends])
    print(*sampler.tree.lines(), sep="\n")
    if sampler.peaks.lines:
        print("peak memory, GiB:", *sampler.peaks.lines, sep="\n")
    print(found.get("note"))


if __name__ == "__main__":
    main()
