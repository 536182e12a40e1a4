"""Publishing checkpoints in one step, finding the newest complete one, removing old ones."""

from __future__ import annotations

import errno
import os
import shutil
import threading
import time
from collections.abc import Callable, Iterable
from pathlib import Path

from ...errors import CheckpointError
from ...notices import Notices, logger
from .layout import REPLACED, STATE, folder_name, is_staging, staging_name, step_in_name
from .manifest import Manifest, damage, describe, read_manifest
from .rotation import to_delete

FULL = (errno.ENOSPC, errno.EDQUOT)

Write = Callable[[Path], None]
"""Writes the files of a checkpoint into the folder it is given."""


class CheckpointManager:
    """The checkpoints of one output folder."""

    def __init__(self, folder: str | os.PathLike[str] | None, *, notices: Notices) -> None:
        self.folder = Path(folder or ".")
        self._notices = notices
        self._thread: threading.Thread | None = None
        self.failure: BaseException | None = None
        """What went wrong in a background save and nobody has heard of yet."""
        self.last_seconds = 0.0
        """How long the last save took to reach the disk."""

    # ---- finding --------------------------------------------------------------------------------------------------

    def complete(self) -> dict[int, Path]:
        """Every published checkpoint by the step its manifest names."""
        found: dict[int, Path] = {}
        for path in sorted(self._candidates(), reverse=True):  # a replaced one before its successor, which then counts
            manifest = read_manifest(path)
            if manifest is not None:
                found[manifest.step] = path
        return dict(sorted(found.items()))

    def find(self, request: str | os.PathLike[str] | bool | None) -> str | None:
        """The folder to resume from: None to start fresh, otherwise a checkpoint whose files are intact."""
        if request is None or request is False:
            return None
        if request is True or request == "auto":
            return self._newest_intact(required=request is True)
        path = Path(request)
        if not path.is_dir():
            raise CheckpointError(f"resume_from_checkpoint={str(path)!r}: there is no such folder")
        self._check_named(path)
        return str(path)

    def _check_named(self, path: Path) -> None:
        manifest = read_manifest(path)
        if manifest is None:
            if (path / STATE).is_file():
                return  # a checkpoint of another trainer, which has no manifest
            raise CheckpointError(f"{path}: no manifest and no {STATE}, so this is not a complete checkpoint")
        reason = damage(path, manifest)
        if reason:
            raise CheckpointError(f"{path.name}: {reason}. Resume from an older checkpoint of {path.parent}")

    def _newest_intact(self, *, required: bool) -> str | None:
        self.wait()
        complete = self.complete()
        for step in sorted(complete, reverse=True):
            path = complete[step]
            manifest = read_manifest(path)
            reason = damage(path, manifest) if manifest else "its manifest cannot be read"
            if reason is None:
                return str(path)
            self._set_aside(path, reason)
        return self._foreign_or_none(required=required)

    def _foreign_or_none(self, *, required: bool) -> str | None:
        """The newest folder of another trainer (a state file, no manifest), if there is one."""
        foreign = [path for path in self._candidates() if (path / STATE).is_file() and not read_manifest(path)]
        if foreign:
            newest = max(foreign, key=lambda path: step_in_name(path) or 0)
            self._notices.tell_once(f"{newest.name} has no manifest: it was written by another trainer")
            return str(newest)
        if required:
            raise CheckpointError(
                f"resume_from_checkpoint=True, but {self.folder} holds no complete checkpoint; "
                'use "auto" to start fresh when there is nothing yet'
            )
        return None

    def _set_aside(self, path: Path, reason: str) -> None:
        aside = path.with_name(f"damaged-{path.name}")
        number = 1
        while aside.exists():
            number += 1
            aside = path.with_name(f"damaged-{path.name}-{number}")
        os.rename(path, aside)
        logger.warning(f"{path.name}: {reason}. It is now {aside.name}; an older checkpoint is tried.")

    def _candidates(self) -> list[Path]:
        if not self.folder.is_dir():
            return []
        return [path for path in self.folder.iterdir() if path.is_dir() and step_in_name(path) is not None]

    # ---- publishing -------------------------------------------------------------------------------------------------

    def save(
        self,
        step: int,
        write: Write,
        *,
        format: str = "native",
        keep: int | None = None,
        protect: Iterable[int | None] = (),
        background: bool = False,
    ) -> Path:
        """Publish a checkpoint, then remove what the limit says; at most one save is in flight."""
        self.wait()
        self.raise_if_failed()

        def publish() -> None:
            started = time.monotonic()
            if self._published(step, write, format):
                self.last_seconds = time.monotonic() - started
                self._rotate(keep, list(protect))

        if background:
            self._thread = threading.Thread(target=self._guarded(publish), name=f"save-{step}")
            self._thread.start()
        else:
            publish()
        return self.folder / folder_name(step)

    def wait(self) -> None:
        """Until no save is in flight."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None

    def raise_if_failed(self) -> None:
        """Raise what went wrong in a background save."""
        if self.failure is not None:
            failure, self.failure = self.failure, None
            raise CheckpointError(f"saving a checkpoint in the background failed: {failure}") from failure

    def _guarded(self, publish: Callable[[], None]) -> Callable[[], None]:
        def run() -> None:
            try:
                publish()
            except BaseException as error:  # it surfaces at the next step
                self.failure = error

        return run

    def _published(self, step: int, write: Write, format: str) -> bool:
        """Publish; a full disk costs this checkpoint, not the run."""
        try:
            self._publish(step, write, format)
        except CheckpointError as error:
            if getattr(error.__cause__, "errno", None) not in FULL:
                raise
            logger.error(f"the disk is full: {folder_name(step)} was not saved; training goes on. {error}")
            return False
        return True

    def _publish(self, step: int, write: Write, format: str) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        self._remove_leftovers()
        staging = self.folder / staging_name(step, str(os.getpid()))
        final = self.folder / folder_name(step)
        try:
            staging.mkdir()
            write(staging)
            describe(staging, step, format=format).write(staging)
            _sync_folder(staging)
            _replace(staging, final)
            _sync_folder(self.folder)
        except OSError as error:
            shutil.rmtree(staging, ignore_errors=True)
            raise CheckpointError(
                f"{final} could not be written ({error}); earlier checkpoints are intact. "
                "Make room or choose another output_dir, and resume from the last one"
            ) from error
        except BaseException:
            shutil.rmtree(staging, ignore_errors=True)
            raise

    def _rotate(self, keep: int | None, protect: list[int | None]) -> None:
        complete = self.complete()
        for step in to_delete(complete, keep=keep, protect=protect):
            # Without its manifest the folder no longer counts, whatever interrupts the rest.
            (complete[step] / "manifest.json").unlink()
            shutil.rmtree(complete[step], ignore_errors=True)

    def _remove_leftovers(self) -> None:
        """Staging folders of runs that died, and replaced checkpoints whose successor is there."""
        for path in list(self.folder.iterdir()):
            successor = path.with_name(path.name.removesuffix(REPLACED))
            if is_staging(path) or (path.name.endswith(REPLACED) and read_manifest(successor) is not None):
                shutil.rmtree(path, ignore_errors=True)


def _replace(staging: Path, final: Path) -> None:
    """Give the staged folder its name; a folder of the same name from before goes away afterwards."""
    if not final.exists():
        os.rename(staging, final)
        return
    # Under its new name the old one still counts, so that there is a complete checkpoint at every moment.
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


def get_last_checkpoint(folder: str | os.PathLike[str]) -> str | None:
    """The newest complete checkpoint in a folder, or None."""
    manager = CheckpointManager(folder, notices=Notices(quiet=True))
    complete = manager.complete()
    if complete:
        return str(complete[max(complete)])
    foreign = [path for path in manager._candidates() if (path / STATE).is_file()]
    return str(max(foreign, key=lambda path: step_in_name(path) or 0)) if foreign else None


__all__ = ["CheckpointManager", "Manifest", "get_last_checkpoint"]
