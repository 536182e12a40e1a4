"""Publishing checkpoints atomically, finding the newest complete one, removing old ones."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from ...errors import CheckpointError
from ...notices import Notices, logger
from .disk_errors import FULL, disk_error
from .folder import MANIFEST, PINNED, PROGRESS, STATE, folder_name, step_in_name
from .manifest import Manifest, describe
from .reading import Unreadable
from .rotation import to_delete
from .storage import Place, Storage, open_storage, split_place
from .writers import Crew, Keep, publish_together

Write = Callable[[Path], Any]
"""Writes the files of a checkpoint to the given folder."""


class CheckpointManager:
    """The checkpoints of one output folder or URL."""

    def __init__(self, folder: str | os.PathLike[str] | None, *, notices: Notices) -> None:
        self.storage = open_storage(folder)
        self.folder: Place = self.storage.root
        self._notices = notices
        self._thread: threading.Thread | None = None
        self.failure: BaseException | None = None
        """The error of a background save that was not raised yet."""
        self.last_seconds = 0.0
        """Duration of the last save."""

    # ---- finding --------------------------------------------------------------------------------------------------

    def complete(self) -> dict[int, Place]:
        """Every published checkpoint by the step in its manifest."""
        return {step: self.storage.place(name) for step, (name, _) in self._complete().items()}

    def find(self, request: str | os.PathLike[str] | bool | None) -> str | None:
        """The folder to resume from: None to start fresh, otherwise a checkpoint whose files are intact.

        It is a local folder; a remote checkpoint is downloaded and kept until the next save.
        """
        if request is None or request is False:
            return None
        if request is True or request == "auto":
            return self._newest_intact(required=request is True)
        return self.local(request, asked_by="resume_from_checkpoint=")

    def local(self, place: str | os.PathLike[str], *, asked_by: str = "") -> str:
        """A local folder with the files of the checkpoint at a path or URL, all of them intact."""
        root, asked = split_place(place)
        storage = self.storage if root == str(self.folder) else open_storage(root)
        name = storage.resolve(asked)
        if name is None:
            raise CheckpointError(f"{asked_by}{str(place)!r}: no such folder")
        manifest = storage.manifest(name)
        if manifest is None and storage.holds(name, MANIFEST):
            raise CheckpointError(
                f"{place}: {MANIFEST} was damaged after saving, so its files cannot be verified. Resume from an older "
                f"checkpoint of {storage.root}"
            )
        # A checkpoint of another trainer has no manifest.
        if manifest is None and not storage.holds(name, STATE):
            raise CheckpointError(f"{place}: no manifest and no {STATE}, so this is not a complete checkpoint")
        if manifest is None:
            self._notices.warn_once(f"{place} has no {MANIFEST}: its files are used without verification")
        folder, reason = _fetched(storage, name, manifest)
        if reason:
            raise CheckpointError(f"{name}: {reason}. Resume from an older checkpoint of {storage.root}")
        return str(folder)

    def _complete(self, *, readable_only: bool = True) -> dict[int, tuple[str, Manifest]]:
        """Name and manifest of every published checkpoint by its step; without those that cannot be read now."""
        found: dict[int, tuple[str, Manifest]] = {}
        for name in self.storage.names():
            try:
                manifest = self.storage.manifest(name)
            except CheckpointError as error:
                if not readable_only:
                    raise
                logger.warning(str(error))
                continue
            if manifest is not None:
                found[manifest.step] = (name, manifest)
        return dict(sorted(found.items()))

    def _newest_intact(self, *, required: bool) -> str | None:
        self.wait()
        names = self.storage.names()
        for name in names:
            damaged = self.storage.manifest(name) is None and self.storage.holds(name, MANIFEST)
            if damaged and step_in_name(Path(name)) is not None:
                where = self.storage.set_aside(name, f"{MANIFEST} is damaged")
                logger.warning(f"{name}: {MANIFEST} was damaged after saving, trying an older checkpoint. {where}.")
        for name, manifest in reversed(self._complete(readable_only=False).values()):
            folder, reason = _fetched(self.storage, name, manifest)
            if reason is None:
                return str(folder)
            if self.storage.manifest(name) is None:  # not damaged: another run has removed it in the meantime
                return self._newest_intact(required=required)
            if isinstance(reason, Unreadable):
                logger.warning(f"{name}: {reason}, trying an older checkpoint.")
                continue
            where = self.storage.set_aside(name, reason)
            logger.warning(f"{name}: {reason}, trying an older checkpoint. {where}.")
        if not set(names) <= set(self.storage.names()):  # removed during the search because a newer one exists
            return self._newest_intact(required=required)
        return self._foreign_or_none(required=required)

    def _foreign_or_none(self, *, required: bool) -> str | None:
        """The newest folder of another trainer (a state file, no manifest), if there is one."""
        newest = _newest_foreign(self.storage)
        if newest is not None:
            self._notices.warn_once(f"{newest} has no manifest: it was written by another trainer")
            return str(_fetched(self.storage, newest, None)[0])
        if required:
            raise CheckpointError(
                f'resume_from_checkpoint=True, but {self.folder} holds no complete checkpoint; use "auto" to start '
                "from scratch if there is none"
            )
        return None

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
        crew: Crew | None = None,
        records: Keep | None = None,
    ) -> Place:
        """Publish a checkpoint, then remove those beyond the limit; at most one save is in progress.

        With a crew, every rank calls this and writes its shard.
        """
        self.wait()
        self.raise_if_failed()

        def publish() -> None:
            started = time.monotonic()
            publish_it = (
                self._alone(step, write, format) if crew is None else self._with(crew, step, write, format, records)
            )
            if self._published(step, publish_it):
                self.last_seconds = time.monotonic() - started
                if crew is None or crew.rank == crew.leader:
                    self._rotate(keep, [step, *protect])  # an older run may have left checkpoints of higher steps

        if background:
            self._thread = threading.Thread(target=self._guarded(publish), name=f"save-{step}")
            self._thread.start()
        else:
            publish()
        return self.storage.place(folder_name(step))

    def wait(self) -> None:
        """Wait until no save is in progress."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None

    def raise_if_failed(self) -> None:
        """Raise the error of a background save."""
        if self.failure is not None:
            failure, self.failure = self.failure, None
            raise CheckpointError(f"saving a checkpoint in the background failed: {failure}") from failure

    def _guarded(self, publish: Callable[[], None]) -> Callable[[], None]:
        def run() -> None:
            try:
                publish()
            except BaseException as error:  # raised at the next step
                self.failure = error

        return run

    def _published(self, step: int, publish: Callable[[], None]) -> bool:
        """Publish; with a full disk the checkpoint is skipped and the run continues."""
        try:
            self._publish(step, publish)
        except CheckpointError as error:
            if getattr(error.__cause__, "errno", None) not in FULL:
                raise
            logger.error(f"the disk is full: {folder_name(step)} was not saved; training continues. {error}")
            return False
        return True

    def _alone(self, step: int, write: Write, format: str) -> Callable[[], None]:
        def publish() -> None:
            with self.storage.staging(step) as folder:
                write(folder)
                describe(folder, step, format=format).write(folder)
                self.storage.publish(folder, step)

        return publish

    def _with(self, crew: Crew, step: int, write: Write, format: str, records: Keep | None) -> Callable[[], None]:
        keep = records or (lambda folder, found: None)
        return lambda: publish_together(self.storage, step, write, format=format, crew=crew, keep=keep)

    def _publish(self, step: int, publish: Callable[[], None]) -> None:
        try:
            publish()
        except Exception as error:  # libraries that write files raise errors of their own
            found = disk_error(error) or (error if isinstance(error, OSError) else None)
            if found is None:
                raise
            is_full = found.errno in FULL
            advice = "Free some space" if is_full else "Check the disk and its permissions"
            raise CheckpointError(
                f"{self.storage.place(folder_name(step))} could not be written ({found}); earlier checkpoints are "
                f"intact. {advice} or choose another output_dir, and resume from the last one"
            ) from found

    def _rotate(self, keep: int | None, protect: list[int | None]) -> None:
        if not keep or keep < 0:
            return
        complete = self._complete()
        # A checkpoint with a file named `pinned` is kept and does not count towards the limit.
        ours = [step for step, (name, *_) in complete.items() if not self.storage.holds(name, PINNED)]
        for step in to_delete(ours, keep=keep, protect=protect):
            try:
                self.storage.remove(complete[step][0])
            except OSError as error:
                logger.error(f"{complete[step][0]} could not be removed ({error}); it is tried again at the next save")


def get_last_checkpoint(folder: str | os.PathLike[str]) -> str | None:
    """The path or URL of the newest complete checkpoint in a folder, or None."""
    manager = CheckpointManager(folder, notices=Notices(quiet=True))
    complete = manager.complete()
    if complete:
        return str(complete[max(complete)])
    newest = _newest_foreign(manager.storage)
    return None if newest is None else str(manager.storage.place(newest))


def _fetched(storage: Storage, name: str, manifest: Manifest | None) -> tuple[Path, str | None]:
    """A local folder with a checkpoint's files, and their problem, if any."""
    try:
        return storage.fetch(name, manifest)
    except CheckpointError:
        raise
    except OSError as error:
        raise CheckpointError(f"{storage.place(name)} could not be read ({error})") from error


def _newest_foreign(storage: Storage) -> str | None:
    """The newest checkpoint of another trainer: it has a state file and no manifest."""
    # Names of remote publications have no step here: without a manifest they are leftovers.
    steps = {name: step for name in storage.names() if (step := step_in_name(Path(name))) is not None}
    foreign = [
        name
        for name in steps
        # Checkpoints written by loopwright are complete only with a manifest.
        if storage.manifest(name) is None and storage.holds(name, STATE) and not storage.holds(name, PROGRESS)
    ]
    return max(foreign, key=lambda name: steps[name], default=None)


__all__ = ["CheckpointManager", "Manifest", "get_last_checkpoint"]
