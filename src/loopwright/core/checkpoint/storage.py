"""Storage of checkpoints: a local folder (local.py), or any URL that fsspec supports (remote.py)."""

from __future__ import annotations

import os
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Protocol

from ...args.paths import fixed_folder, is_url, plain_path
from .local import Allow, LocalStorage
from .manifest import Manifest
from .ownership.lock_file import Lock
from .remote import FsspecStorage, folder_for, trimmed

Place = Path | str
"""The location of a checkpoint: a folder or a URL."""


class Storage(Protocol):
    """The operations that CheckpointManager needs; checkpoints are identified by folder names."""

    allow: Allow
    """Called before anything is written or removed; raises if this run may no longer do that."""

    @property
    def root(self) -> Place:
        """The folder or URL that contains the checkpoints."""

    def check_writable(self) -> None:
        """Raise OSError unless a file can be written here."""

    def place(self, name: str) -> Place:
        """The path or URL of a checkpoint, as it is shown to users and accepted from them."""

    def resolve(self, name: str) -> str | None:
        """The folder for a name given by the user, or None if it does not exist."""

    def names(self) -> list[str]:
        """All folders with names of checkpoints; of two with the same step, the valid one is later."""

    def manifest(self, name: str) -> Manifest | None:
        """A checkpoint's manifest, or None if it is missing or unreadable."""

    def holds(self, name: str, file: str) -> bool:
        """Whether a checkpoint has a file of this name."""

    def fetch(self, name: str, manifest: Manifest | None) -> tuple[Path, str | None]:
        """A local folder with the checkpoint's files, and their problem, if any."""

    def staging(self, step: int) -> AbstractContextManager[Path]:
        """Context manager: a new local folder to write a checkpoint to, removed at exit."""

    def recover(self) -> None:
        """Undo an interrupted publication: give a replaced checkpoint without a successor its name back."""

    def publish(self, staged: Path, step: int) -> None:
        """Publish a staging folder with its manifest as the checkpoint of this step, replacing an earlier one."""

    def remove(self, name: str) -> None:
        """Delete a checkpoint; if interrupted, what is left is not a checkpoint."""

    def set_aside(self, name: str, reason: str) -> str:
        """Keep the files of a damaged checkpoint, but not as a checkpoint; returns a sentence with their location."""

    def lock(self) -> Lock:
        """The lock that names the run which uses this storage."""

    def read(self, file: str) -> bytes | None:
        """The content of a small file beside the checkpoints, or None if it does not exist."""

    def write(self, file: str, content: bytes) -> None:
        """Write a small file beside the checkpoints, atomically and durably."""


def open_storage(place: str | os.PathLike[str] | None) -> Storage:
    """The storage of a folder, or of a URL with a protocol."""
    text = os.fspath(place or ".")
    return FsspecStorage(text, working=Path(fixed_folder(text))) if is_url(text) else LocalStorage(plain_path(text))


def split_place(place: str | os.PathLike[str]) -> tuple[str, str]:
    """The root and the name in a checkpoint's path or URL."""
    text = os.fspath(place)
    if not is_url(text):
        path = Path(plain_path(text))
        return str(path.parent), path.name
    name = trimmed(text).rpartition("/")[2]
    return trimmed(trimmed(text).removesuffix(name)), name


__all__ = ["FsspecStorage", "LocalStorage", "Place", "Storage", "folder_for", "open_storage", "split_place"]
