"""Every moment between two file operations of a process, so that something can happen exactly there."""

from __future__ import annotations

import builtins
import errno
import io
import os
import signal
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

Reach = Callable[[str], None]
"""Told the label of each boundary as it is reached; may kill the process or raise."""

MANY_WRITES = 400
"""A file written in many small pieces has a boundary at the first and then at each such number of them."""


class Pieces:
    """A file whose writes stop half-way: some bytes are on the disk, the others are not."""

    def __init__(self, file: Any, name: str, reach: Reach) -> None:
        self._file, self._name, self._reach = file, name, reach
        self._writes = 0

    def write(self, data: Any) -> int:
        self._writes += 1
        if self._writes % MANY_WRITES != 1:
            return self._file.write(data)
        half = len(data) // 2
        self._file.write(data[:half])
        self._file.flush()
        self._reach(f"write {self._name}: half")
        self._file.write(data[half:])
        return len(data)

    def writelines(self, lines: Any) -> None:
        for line in lines:
            self.write(line)

    def close(self) -> None:
        if self._file.closed:
            return
        try:
            self._reach(f"write {self._name}: before closing")
        finally:
            self._file.close()
        self._reach(f"closed {self._name}")

    def __enter__(self) -> Pieces:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def __iter__(self) -> Any:
        return iter(self._file)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._file, name)


class Boundaries:
    """Wraps what writes, renames, syncs and removes below a folder; calls `reach` before and after each of them."""

    def __init__(self, root: str, reach: Reach) -> None:
        self.root, self._reach = os.path.abspath(root), reach

    def install(self) -> None:
        self._wrap_open()
        for name in ("rename", "replace"):
            self._wrap(name, lambda source, target: self._name(source) and f"{self._name(source)} -> {target}")
        for name in ("mkdir", "unlink", "remove", "rmdir", "truncate"):
            self._wrap(name, self._name_or_entry)
        self._wrap("fsync", self._file_of)
        self._wrap_tensors()

    def _name(self, path: Any) -> str | None:
        """The path below the folder, or None if it is elsewhere."""
        if not isinstance(path, (str, os.PathLike)):
            return None
        path = os.path.abspath(os.fspath(path))
        return os.path.relpath(path, self.root) if path.startswith(self.root + os.sep) else None

    def _file_of(self, descriptor: int) -> str:
        """The file behind a descriptor, where the system can tell."""
        try:
            path = os.readlink(f"/proc/self/fd/{descriptor}")
        except OSError:
            return f"descriptor {descriptor}"
        return self._name(path) or path

    def _name_or_entry(self, path: Any, *args: Any, dir_fd: Any = None, **kwargs: Any) -> str | None:
        return str(path) if dir_fd is not None else self._name(path)

    def _wrap(self, name: str, label: Callable[..., str | None]) -> None:
        original = getattr(os, name)

        def wrapped(*args: Any, **kwargs: Any) -> Any:
            about = label(*args, **kwargs)
            if about is None:
                return original(*args, **kwargs)
            self._reach(f"{name} {about}: before")
            result = original(*args, **kwargs)
            self._reach(f"{name} {about}: after")
            return result

        setattr(os, name, wrapped)

    def _wrap_open(self) -> None:
        original = builtins.open

        def opened(path: Any, mode: str = "r", *args: Any, **kwargs: Any) -> Any:
            name = self._name(path) if isinstance(mode, str) and set(mode) & set("wax+") else None
            if name is None:
                return original(path, mode, *args, **kwargs)
            self._reach(f"open {name}: before")
            return Pieces(original(path, mode, *args, **kwargs), name, self._reach)

        builtins.open = io.open = opened  # type: ignore[assignment]

    def _wrap_tensors(self) -> None:
        """safetensors writes outside Python's sight: before it does, half a file lies where the whole one will."""
        from loopwright.pt.checkpoint import tensors as checkpoint

        original = checkpoint.save_file

        def save_file(tensors: Any, filename: Any, metadata: Any = None) -> None:
            name = self._name(filename)
            self._reach(f"tensors {name}: before")
            original(tensors, filename, metadata)
            content = Path(filename).read_bytes()
            descriptor = os.open(filename, os.O_WRONLY | os.O_TRUNC)
            os.write(descriptor, content[: len(content) // 2])
            self._reach(f"tensors {name}: half")
            os.write(descriptor, content[len(content) // 2 :])
            os.close(descriptor)
            self._reach(f"tensors {name}: after")

        checkpoint.save_file = save_file


class Cut:
    """SIGKILL at the boundary with this number."""

    def __init__(self, number: int) -> None:
        self.left = number + 1

    def __call__(self, label: str) -> None:
        self.left -= 1
        if self.left == 0:
            os.kill(os.getpid(), signal.SIGKILL)


class Listed:
    """Writes the label of every boundary to a file, and changes nothing."""

    def __init__(self, path: str) -> None:
        self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        self._lock = threading.Lock()

    def __call__(self, label: str) -> None:
        with self._lock:
            os.write(self._file, f"{label}\n".encode())


GROWS = ("open", "write", "tensors", "mkdir", "fsync", "rename")
"""What a full disk refuses; closing and removing always work."""


def grows(label: str) -> bool:
    """Whether a full disk could refuse what happens at this boundary of a checkpoint."""
    what, _, about = label.partition(" ")
    return what in GROWS and "checkpoint-" in about and not about.endswith(": after")


class FullDisk:
    """No space left (or another error of the disk) at the n-th operation that needs some, once."""

    def __init__(self, number: int, trace: Callable[[str], None], error: int = errno.ENOSPC) -> None:
        self.left, self.trace, self.error = number + 1, trace, error

    def __call__(self, label: str) -> None:
        if not grows(label):
            return
        self.left -= 1
        if self.left == 0:
            self.trace(f"full {label}")
            if label.startswith("tensors"):
                from safetensors import SafetensorError

                text = f"{os.strerror(self.error)} (os error {self.error})"
                raise SafetensorError(f"Error while serializing: I/O error: {text}")
            raise OSError(self.error, os.strerror(self.error))


class At:
    """Does something once, when a label contains a text for the n-th time."""

    def __init__(self, text: str, number: int, act: Callable[[], None]) -> None:
        self.text, self.left, self.act = text, number, act

    def __call__(self, label: str) -> None:
        if self.text in label:
            self.left -= 1
            if self.left == 0:
                self.act()
