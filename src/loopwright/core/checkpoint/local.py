"""Checkpoints in a local folder: written to a staging folder, flushed, and renamed atomically."""

from __future__ import annotations

import os
import secrets
import shutil
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path

from .folder import MANIFEST, REPLACED, folder_name, is_staging, staging_name, step_in_name
from .manifest import Manifest, damage, read_manifest, refuse_odd_files
from .ownership.lock_file import LockFile
from .reading import bounded_content, persistent
from .resharded import with_shards

MOST = 16 << 20
"""Bytes of the largest file beside the checkpoints that is read."""

Allow = Callable[[], None]
"""Called before a write; raises if this run may no longer write here."""


class LocalStorage:
    """Checkpoints in a local folder; see `Storage` for the methods."""

    def __init__(self, root: str | os.PathLike[str]) -> None:
        self.root = Path(root)
        self.allow: Allow = lambda: None

    def check_writable(self) -> None:
        self.root.mkdir(parents=True, exist_ok=True)
        probe = self.root / f".loopwright-write-test-{os.getpid()}"
        probe.write_bytes(b"")
        probe.unlink()

    def place(self, name: str) -> Path:
        return self.root / name

    def resolve(self, name: str) -> str | None:
        path = self.root / name
        return name if persistent(path.is_dir, path) else None

    def names(self) -> list[str]:
        # A replaced checkpoint comes before its successor, which takes precedence.
        return sorted(persistent(self._names, self.root), reverse=True)

    def _names(self) -> list[str]:
        if not self.root.is_dir():
            return []
        return [path.name for path in self.root.iterdir() if step_in_name(path) is not None and path.is_dir()]

    def manifest(self, name: str) -> Manifest | None:
        return read_manifest(self.root / name)

    def holds(self, name: str, file: str) -> bool:
        path = self.root / name / file
        # Anything in the place of a manifest counts as one, a named pipe too, so that it is not taken for missing.
        return os.path.lexists(path) if file == MANIFEST else path.is_file()

    def fetch(self, name: str, manifest: Manifest | None) -> tuple[Path, str | None]:
        path = self.root / name
        if manifest is None:
            refuse_odd_files(path)
            return path, None
        return path, damage(path, with_shards(path, manifest))

    def staging(self, step: int) -> AbstractContextManager[Path]:
        self.allow()
        self.root.mkdir(parents=True, exist_ok=True)
        self._remove_replaced()
        return staging_folder(self.root, step)

    def publish(self, staged: Path, step: int) -> None:
        for path in (*staged.rglob("*"), staged):
            if path.is_dir():
                _sync_folder(path)
        self.allow()
        replace_folder(staged, self.root / folder_name(step))
        _sync_folder(self.root)

    def remove(self, name: str) -> None:
        self.allow()
        # Under a staging name it is no longer a checkpoint, even after an interruption; the next save removes it.
        going = self.root / staging_name(step_in_name(Path(name)) or 0, f"removed-{os.getpid()}")
        shutil.rmtree(going, ignore_errors=True)
        os.rename(self.root / name, going)
        _sync_folder(self.root)
        shutil.rmtree(going, ignore_errors=True)

    def set_aside(self, name: str, reason: str) -> str:
        self.allow()
        aside, number = self.root / f"damaged-{name}", 1
        while aside.exists():
            number += 1
            aside = self.root / f"damaged-{name}-{number}"
        os.rename(self.root / name, aside)
        return f"It was renamed to {aside.name}"

    def lock(self) -> LockFile:
        return LockFile(self.root)

    def read(self, file: str) -> bytes | None:
        path = self.root / file
        content = bounded_content(path, MOST)
        return b"" if content is None and os.path.lexists(path) else content  # anything else than a file is not missing

    def write(self, file: str, content: bytes) -> None:
        self.allow()
        temporary = self.root / f".{file}.{secrets.token_hex(4)}"
        try:
            with open(temporary, "wb") as opened:
                opened.write(content)
                opened.flush()
                os.fsync(opened.fileno())
            os.replace(temporary, self.root / file)
        finally:
            temporary.unlink(missing_ok=True)
        _sync_folder(self.root)

    def recover(self) -> None:
        for name in self.names():
            original = self.root / name.removesuffix(REPLACED)
            if name.endswith(REPLACED) and not original.exists() and self.manifest(name) is not None:
                os.rename(self.root / name, original)
                _sync_folder(self.root)

    def _remove_replaced(self) -> None:
        """Remove replaced checkpoints whose successor exists."""
        for name in self.names():
            if name.endswith(REPLACED) and self.manifest(name.removesuffix(REPLACED)) is not None:
                shutil.rmtree(self.root / name, ignore_errors=True)


@contextmanager
def staging_folder(root: Path, step: int) -> Iterator[Path]:
    """Context manager: a staging folder, removed at exit; first removes those of crashed runs."""
    for path in list(root.iterdir()):
        if is_staging(path):
            shutil.rmtree(path, ignore_errors=True)
    staging = root / staging_name(step, str(os.getpid()))
    staging.mkdir()
    try:
        yield staging
    finally:
        shutil.rmtree(staging, ignore_errors=True)


def replace_folder(staging: Path, final: Path) -> None:
    """Rename the staging folder to its final name; an existing folder of that name is removed afterwards."""
    if not final.exists():
        os.rename(staging, final)
        return
    # Under its new name the old one is still a valid checkpoint, so one exists at every moment.
    old = final.with_name(final.name + REPLACED)
    shutil.rmtree(old, ignore_errors=True)
    os.rename(final, old)
    os.rename(staging, final)
    shutil.rmtree(old, ignore_errors=True)


def _sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
