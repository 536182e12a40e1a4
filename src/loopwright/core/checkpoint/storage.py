"""Where checkpoints live: a folder of this machine (local.py), or whatever fsspec can reach (remote.py)."""

from __future__ import annotations

import os
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Protocol

from ...args.paths import is_url, plain_path, working_folder
from .local import LocalStorage
from .manifest import Manifest
from .remote import FsspecStorage, folder_for, trimmed

Place = Path | str
"""Where a checkpoint is: a folder, or the URL of one."""


class Storage(Protocol):
    """What the manager of checkpoints needs; checkpoints go by the names of their folders."""

    @property
    def root(self) -> Place:
        """The folder or URL that holds the checkpoints."""

    def check_writable(self) -> None:
        """Raise OSError unless a file can be written here."""

    def place(self, name: str) -> Place:
        """The path or URL of a checkpoint, as it is shown to users and accepted from them."""

    def resolve(self, name: str) -> str | None:
        """The folder a user means by this name, or None if there is none."""

    def names(self) -> list[str]:
        """All folders that are named like checkpoints; of two with the same step, the one that counts comes later."""

    def manifest(self, name: str) -> Manifest | None:
        """A checkpoint's manifest, or None if there is none that can be read."""

    def holds(self, name: str, file: str) -> bool:
        """Whether a checkpoint has a file of this name."""

    def fetch(self, name: str, manifest: Manifest | None) -> tuple[Path, str | None]:
        """A folder of this machine with the checkpoint's files, and what is wrong with them, if anything."""

    def staging(self, step: int) -> AbstractContextManager[Path]:
        """A new folder of this machine to write a checkpoint into; afterwards it is gone."""

    def publish(self, staged: Path, step: int) -> None:
        """Make a staged folder, its manifest in it, the checkpoint of this step, instead of any earlier one."""

    def remove(self, name: str) -> None:
        """Delete a checkpoint; whatever interrupts that, it no longer counts."""

    def set_aside(self, name: str, reason: str) -> str:
        """Keep a damaged checkpoint's files but have it count no longer; says in a sentence where they are."""


def open_storage(place: str | os.PathLike[str] | None) -> Storage:
    """The storage of a folder, or of a URL with a protocol."""
    text = os.fspath(place or ".")
    return FsspecStorage(text, working=Path(working_folder(text))) if is_url(text) else LocalStorage(plain_path(text))


def split_place(place: str | os.PathLike[str]) -> tuple[str, str]:
    """The root and the name in a checkpoint's path or URL."""
    text = os.fspath(place)
    if not is_url(text):
        path = Path(plain_path(text))
        return str(path.parent), path.name
    name = trimmed(text).rpartition("/")[2]
    return trimmed(trimmed(text).removesuffix(name)), name


__all__ = ["FsspecStorage", "LocalStorage", "Place", "Storage", "folder_for", "open_storage", "split_place"]
