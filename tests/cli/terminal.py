"""A real terminal: a program on a pseudo-terminal, its keys and its output."""

from __future__ import annotations

import fcntl
import os
import re
import struct
import subprocess
import sys
import termios
import threading
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
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    @property
    def text(self) -> str:
        """What was shown so far, without escape sequences."""
        return ESCAPES.sub("", self.raw.decode(errors="replace"))

    def _read(self) -> None:
        """Read until the program closes its terminal: one that is not read would stop the program."""
        while True:
            try:
                found = os.read(self._master, 65536)
            except OSError:  # the last program on the terminal has ended
                return
            if not found:
                return
            self.raw += found

    def until(self, condition: Callable[[], bool], what: str) -> None:
        """Read until a condition holds."""
        limit = time.monotonic() + LIMIT
        while not condition():
            assert time.monotonic() < limit, f"no {what} within {LIMIT:.0f} seconds: {self.text[-3000:]}"
            assert self.process.poll() is None, f"ended before {what}: {self.text[-3000:]}"
            time.sleep(0.05)

    def press_ctrl_c(self) -> None:
        os.write(self._master, b"\x03")

    def wait(self) -> int:
        """The exit code, when the program has ended and its output was read."""
        try:
            code = self.process.wait(LIMIT)
        except subprocess.TimeoutExpired:
            self.close()
            raise AssertionError(f"still running: {self.text[-3000:]}") from None
        self._reader.join(LIMIT)
        os.close(self._master)
        return code

    def __enter__(self) -> Terminal:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def close(self) -> None:
        """End the program, if it still runs."""
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait()


def loopwright(folder: Path, *words: str) -> tuple[int, str]:
    """Run a command to its end on a terminal; returns its exit code and what it has shown."""
    terminal = Terminal(folder, *words)
    return terminal.wait(), terminal.text
