"""Publishing checkpoints atomically, finding the newest complete one, removing old ones."""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

from ...errors import CheckpointError, OwnerError
from ...notices import Notices, logger
from .disk_errors import FULL, disk_error
from .finding import fetched, newest_foreign
from .folder import MANIFEST, PINNED, STATE, folder_name, step_in_name
from .manifest import Manifest, adopt_changes, describe, read_manifest
from .ownership.owner import Owner, Pause
from .ownership.run_id import CurrentRun, read_current, write_current
from .reading import Unreadable
from .rotation import to_delete
from .storage import Place, open_storage, split_place
from .writers import Crew, Keep, publish_together

Write = Callable[[Path], Any]
"""Writes the files of a checkpoint to the given folder."""


class CheckpointManager:
    """The checkpoints of one output folder or URL."""

    def __init__(self, folder: str | os.PathLike[str] | None, *, notices: Notices) -> None:
        self.storage = open_storage(folder)
        self.folder: Place = self.storage.root
        self._notices = notices
        self.owner: Owner | None = None
        """The right to write here; None if the folder is only read, or written without a run."""
        self.current: CurrentRun | None = None
        """The run whose checkpoints these are; None before a run has begun."""
        self._is_recorded = False
        """Whether this process has recorded the run in the folder."""
        self._thread: threading.Thread | None = None
        self.failure: BaseException | None = None
        """The error of a background save that was not raised yet."""
        self.published: deque[str] = deque()
        """Names of published checkpoints that the user has not been shown yet."""
        self.newest: int | None = None
        """The step of the checkpoint that was published last."""
        self.last_seconds = 0.0
        """Duration of the last save."""
        self.on_published: Callable[[int], None] = lambda step: None
        """Called with the step of a published checkpoint, by the rank that publishes, before old ones are removed."""
        self.was_skipped = False
        """Whether the last save published nothing because the disk is full."""

    # ---- the run ----------------------------------------------------------------------------------------------------

    def take(self, *, token: str | None = None, take_over: bool = False, pause: Pause = time.sleep) -> str:
        """Become the only run that writes here, until `release`; returns the token for the other ranks of this run."""
        self.owner = Owner(self.storage.lock(), str(self.folder), token=token)
        self.owner.on_loss = self._lose
        self.owner.take(take_over=take_over, pause=pause)
        self.storage.allow = self.owner.check
        self.storage.recover()
        return self.owner.claim.token

    def begin(self, current: CurrentRun, *, record: bool) -> None:
        """Make a run the one that the folder belongs to; only its checkpoints are seen from now on."""
        self.current, self._is_recorded = current, False
        if record:
            write_current(self.storage, current)
            self._is_recorded = True
        if self.owner is not None:
            self.owner.name_run(current.run)

    def end(self, status: str | None, *, of: CurrentRun | None = None) -> None:
        """Record how the run has ended, or `of` an earlier one, which the folder belongs to again."""
        if self.current is None or not self._is_recorded:
            return
        try:
            write_current(self.storage, replace(of or self.current, status=status))
        except OwnerError:  # the folder belongs to another run now
            pass
        except OSError as error:
            logger.warning(
                f"{self.folder}: it could not be recorded that this run is {status} ({error}). The same command may "
                "resume it; set resume_from_checkpoint=False to start over"
            )

    def release(self) -> None:
        """Let other runs use the folder."""
        if self.owner is not None:
            self.owner.release()

    def writing(self) -> AbstractContextManager[None]:
        """A context for writing files beside the checkpoints; raises `OwnerError` if the folder was taken over."""
        return nullcontext() if self.owner is None else self.owner.writing()

    def _lose(self, error: OwnerError) -> None:
        self.failure = error

    def resumed_run(self, checkpoint: str, *, is_chosen: bool) -> CurrentRun:
        """The run of a checkpoint. If the user chose it, later ones of that run do not lead to the state it has."""
        manifest, earlier = read_manifest(Path(checkpoint)), read_current(self.storage)
        run = None if manifest is None else manifest.run
        left = set(earlier.left) if earlier is not None and earlier.run == run else set()
        step = step_in_name(Path(checkpoint)) if manifest is None else manifest.step
        if is_chosen and step is not None:
            later = [each for _, each in self._all() if each.run == run and each.step > step]
            left |= {each.check for each in later if each.check is not None}
        return CurrentRun(run, left=tuple(sorted(left - {manifest and manifest.check})))

    def others(self) -> dict[str | None, list[int]]:
        """The steps of complete checkpoints that do not belong to this run, by the ids of their runs."""
        found: dict[str | None, list[int]] = {}
        for _, manifest in self._all():
            if self.current is not None and not self.current.holds(manifest):
                found.setdefault(manifest.run, []).append(manifest.step)
        return {run: sorted(steps) for run, steps in found.items()}

    def _own(self) -> CurrentRun | None:
        """The run whose checkpoints are seen; None to see all."""
        return read_current(self.storage) if self.current is None else self.current

    # ---- finding --------------------------------------------------------------------------------------------------

    def complete(self) -> dict[int, Place]:
        """Every published checkpoint of the run by the step in its manifest."""
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
            found = ", ".join(name for name, _ in self._complete().values()) if root == str(self.folder) else ""
            raise CheckpointError(
                f"Can't find a valid checkpoint at {asked_by}{str(place)!r}: no such folder"
                f"{f'; this folder has {found}' if found else ''}"
            )
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
        folder, reason = fetched(storage, name, manifest)
        if reason:
            raise CheckpointError(
                f"{name}: {reason}. Resume from an older checkpoint of {storage.root}; if you changed its files on "
                f"purpose, delete its {MANIFEST}, and they are used without verification"
            )
        return str(folder)

    def holds(self, place: str) -> bool:
        """Whether a path or URL is a checkpoint of this run."""
        root, asked = split_place(place)
        storage = self.storage if root == str(self.folder) else open_storage(root)
        name, own = storage.resolve(asked), self._own()
        manifest = None if name is None else storage.manifest(name)
        if manifest is None:
            return name is not None and (own is None or own.may_be_foreign)
        return own is None or own.holds(manifest)

    def _complete(self, *, readable_only: bool = True) -> dict[int, tuple[str, Manifest]]:
        """Name and manifest of every published checkpoint of the run by its step."""
        own = self._own()
        found = self._all(readable_only=readable_only)
        ours = {manifest.step: (name, manifest) for name, manifest in found if own is None or own.holds(manifest)}
        return dict(sorted(ours.items()))

    def _all(self, *, readable_only: bool = True) -> list[tuple[str, Manifest]]:
        """Name and manifest of every published checkpoint of any run; without those that cannot be read now."""
        found: list[tuple[str, Manifest]] = []
        for name in self.storage.names():
            try:
                manifest = self.storage.manifest(name)
            except CheckpointError as error:
                if not readable_only:
                    raise
                logger.warning(str(error))
                continue
            if manifest is not None:
                found.append((name, manifest))
        return found

    def _newest_intact(self, *, required: bool) -> str | None:
        self.wait()
        names = self.storage.names()
        for name in names:
            damaged = self.storage.manifest(name) is None and self.storage.holds(name, MANIFEST)
            if damaged and step_in_name(Path(name)) is not None:
                self._set_aside(name, f"{MANIFEST} was damaged after saving")
        for name, manifest in reversed(self._complete(readable_only=False).values()):
            folder, reason = fetched(self.storage, name, manifest)
            if reason is None:
                return str(folder)
            if self.storage.manifest(name) is None:  # not damaged: another run has removed it in the meantime
                return self._newest_intact(required=required)
            if isinstance(reason, Unreadable):
                logger.warning(f"{name}: {reason}, trying an older checkpoint.")
                continue
            self._set_aside(name, reason)
        if not set(names) <= set(self.storage.names()):  # removed during the search because a newer one exists
            return self._newest_intact(required=required)
        return self._foreign_or_none(required=required)

    def _set_aside(self, name: str, reason: str) -> None:
        """Rename a damaged checkpoint, unless another run has removed it in the meantime."""
        with contextlib.suppress(FileNotFoundError):
            where = self.storage.set_aside(name, reason)
            logger.warning(f"{name}: {reason}, trying an older checkpoint. {where}.")

    def _foreign_or_none(self, *, required: bool) -> str | None:
        """The newest folder of another trainer (a state file, no manifest), if there is one."""
        own = self._own()
        newest = newest_foreign(self.storage) if own is None or own.may_be_foreign else None
        if newest is not None:
            self._notices.warn_once(f"{newest} has no manifest: it was written by another trainer")
            return str(fetched(self.storage, newest, None)[0])
        if required:
            raise CheckpointError(
                f"No valid checkpoint found in output directory {self.folder} (resume_from_checkpoint=True); use "
                f'"auto" to start from scratch if there is none{self._advice(own)}'
            )
        return None

    def _advice(self, own: CurrentRun | None) -> str:
        steps = [str(step) for step in sorted(each.step for _, each in self._all() if own and not own.holds(each))]
        return f". Those of an earlier run (steps {', '.join(steps)}) are resumed by their path" if steps else ""

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
            with self.writing():
                self.was_skipped = not self._published(step, publish_it)
                if not self.was_skipped:
                    self.published.append(folder_name(step))
                    self.newest = step
                    self.last_seconds = time.monotonic() - started
                    if crew is None or crew.rank == crew.leader:
                        self.on_published(step)
                        self._rotate(keep, [step, *protect])

        if background:
            self._thread = threading.Thread(target=self._guarded(publish), name=f"save-{step}")
            self._thread.start()
        else:
            publish()
        return self.storage.place(folder_name(step))

    @property
    def is_saving(self) -> bool:
        """Whether the last save was left to the background."""
        return self._thread is not None

    def adopt_changes(self, step: int) -> None:
        """Update the manifest of a checkpoint after the user's code has changed, added or removed files of it."""
        folder = self.storage.place(folder_name(step))
        if isinstance(folder, Path):
            with self.writing():
                adopt_changes(folder)

    def wait(self) -> None:
        """Wait until no save is in progress."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None

    def raise_if_failed(self) -> None:
        """Raise the error of a background save."""
        if self.failure is not None:
            if isinstance(self.failure, OwnerError):  # from now on nothing can be saved
                raise OwnerError(str(self.failure))
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
                describe(folder, step, format=format, run=self.run_id).write(folder)
                self.storage.publish(folder, step)

        return publish

    def _with(self, crew: Crew, step: int, write: Write, format: str, records: Keep | None) -> Callable[[], None]:
        keep = records or (lambda folder, found: None)
        run = self.run_id
        return lambda: publish_together(self.storage, step, write, format=format, run=run, crew=crew, keep=keep)

    @property
    def run_id(self) -> str | None:
        """The id of the run that writes here."""
        return None if self.current is None else self.current.run

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
    """The path or URL of the newest complete checkpoint of a folder's last run, or None."""
    manager = CheckpointManager(folder, notices=Notices(quiet=True))
    complete = manager.complete()
    if complete:
        return str(complete[max(complete)])
    own = read_current(manager.storage)
    newest = newest_foreign(manager.storage) if own is None or own.may_be_foreign else None
    return None if newest is None else str(manager.storage.place(newest))


__all__ = ["CheckpointManager", "Manifest", "get_last_checkpoint"]
