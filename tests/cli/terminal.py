"""A real terminal: a program on a pseudo-terminal, its keys and its output."""

from __future__ import annotations

import fcntl
import os
import re
import select
import struct
import subprocess
import sys
import termios
import time
from collections.abc import Callable
from pathlib import Path

LIMIT = 240.0
"""Seconds to wait for anything: a busy machine is not a failure."""
ESCAPES = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]|\x1b\][^\x07]*\x07|\r")


class Terminal:
    """A `loopwright` command on a terminal of 100 columns."""

    def __init__(self, folder: Path, *words: str) -> None:
        self._master, slave = os.openpty()
        fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", 40, 100, 0, 0))

        def own_terminal() -> None:
            os.setsid()
            fcntl.ioctl(0, termios.TIOCSCTTY, 0)

        self.process = subprocess.Popen(
            [sys.executable, "-m", "loopwright", *words],
            cwd=folder,
            stdin=slave,
            stdout=slave,
            stderr=slave,
            env={**os.environ, "TERM": "xterm-256color"},
            preexec_fn=own_terminal,
        )
        os.close(slave)
        self.raw = b""

    @property
    def text(self) -> str:
        """What was shown so far, without escape sequences."""
        return ESCAPES.sub("", self.raw.decode(errors="replace"))

    def _read(self, seconds: float) -> None:
        ready, _, _ = select.select([self._master], [], [], seconds)
        if ready:
            try:
                self.raw += os.read(self._master, 65536)
            except OSError:  # the program has closed its terminal
                time.sleep(0.01)

    def until(self, condition: Callable[[], bool], what: str) -> None:
        """Read until a condition holds."""
        limit = time.monotonic() + LIMIT
        while not condition():
            assert time.monotonic() < limit, f"no {what} within {LIMIT:.0f} seconds: {self.text[-3000:]}"
            assert self.process.poll() is None, f"ended before {what}: {self.text[-3000:]}"
            self._read(0.05)

    def press_ctrl_c(self) -> None:
        os.write(self._master, b"\x03")

    def wait(self) -> int:
        """The exit code, when the program has ended and its output was read."""
        limit = time.monotonic() + LIMIT
        while self.process.poll() is None:
            if time.monotonic() > limit:
                self.close()
                raise AssertionError(f"still running: {self.text[-3000:]}")
            self._read(0.05)
        while select.select([self._master], [], [], 0)[0]:
            before = len(self.raw)
            self._read(0)
            if len(self.raw) == before:
                break
        os.close(self._master)
        return self.process.returncode

    def close(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait()


def loopwright(folder: Path, *words: str) -> tuple[int, str]:
    """Run a command to its end on a terminal; returns its exit code and what it has shown."""
    terminal = Terminal(folder, *words)
    return terminal.wait(), terminal.text
