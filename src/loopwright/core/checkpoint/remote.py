"""Checkpoints anywhere fsspec can reach, with the guarantees of a local folder.

Object stores have no rename, so the manifest makes a save atomic: it is uploaded last and deleted first, and a folder
without one is not a checkpoint. Each publication of step N gets a new folder, checkpoint-N.1, checkpoint-N.2 and so
on; the highest complete one is the checkpoint. Saving a step again overwrites nothing, and the earlier one is removed
only when the new one is complete. Users see all of them as checkpoint-N.
"""

from __future__ import annotations

import atexit
import errno
import json
import os
import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict
from importlib import import_module
from pathlib import Path, PurePosixPath
from tempfile import TemporaryDirectory, mkdtemp
from typing import Any

from ...args.paths import is_url, plain_path
from ...errors import MissingPackage, OutputError
from .folder import MANIFEST, PREFIX, folder_name
from .local import Allow, staging_folder
from .manifest import Manifest, damage, names_outside, parsed
from .ownership.lock_object import LockObject

DAMAGED = "damaged.json"
"""Replaces the manifest of a damaged checkpoint and contains the reason."""

ATTEMPTS = 2
"""Download attempts before a mismatch counts as damage: the first may have failed because of the connection."""

_FSSPEC = "fsspec"
_NAME = re.compile(rf"^{PREFIX}-(\d+)(?:\.([1-9]\d*))?$")


class FsspecStorage:
    """Checkpoints under a URL; see `Storage` for the methods.

    Staging and downloads use a local working folder. A download is kept until the next save, or until the process
    ends.
    """

    def __init__(self, url: str, *, working: Path) -> None:
        self.root = trimmed(url)
        self._fs, self._path = _open(url)
        self._working = working
        self._downloads: Path | None = None
        self._is_tidy = False
        self.allow: Allow = lambda: None

    def check_writable(self) -> None:
        probe = self._inside(f".loopwright-write-test-{os.getpid()}")
        try:
            self._fs.pipe_file(probe, b"loopwright")
            self._fs.rm_file(probe)
        except NotImplementedError as error:
            raise OSError(errno.EROFS, "this protocol can only be read") from error

    def place(self, name: str) -> str:
        version = _version(name)
        separator = "" if self.root.endswith("/") else "/"
        return f"{self.root}{separator}{folder_name(version[0]) if version else name}"

    def resolve(self, name: str) -> str | None:
        step, number = _version(name) or (-1, 0)
        candidates = [name] if number else reversed(self._publications(step).values())
        for each in candidates:
            if self.manifest(each) is not None:
                return each
        # A folder with a publication number was written by loopwright, and is a checkpoint only with its manifest.
        return name if not number and self._fresh().isdir(self._inside(name)) else None

    def names(self) -> list[str]:
        return list(self._versions().values())

    def manifest(self, name: str) -> Manifest | None:
        # None only if it does not exist: a failed connection must not look like a missing checkpoint.
        try:
            return parsed(self._fs.cat_file(self._inside(name, MANIFEST)))
        except FileNotFoundError:
            return None

    def holds(self, name: str, file: str) -> bool:
        return bool(self._fresh().isfile(self._inside(name, file)))

    def fetch(self, name: str, manifest: Manifest | None) -> tuple[Path, str | None]:
        folder = self._download_folder() / PurePosixPath(self.place(name)).name
        files = list(self._sizes(name) if manifest is None else manifest.files)
        reason = names_outside(files)
        for _ in range(0 if reason else ATTEMPTS):
            self._download(name, files, folder)
            reason = damage(folder, manifest) if manifest else None
            if reason is None:
                break
        if manifest is not None and reason is None:
            manifest.write(folder)
        return folder, reason

    def recover(self) -> None:
        """Nothing to undo: a publication has a name of its own, and is complete with its manifest."""

    @contextmanager
    def staging(self, step: int) -> Iterator[Path]:
        if self._downloads is not None:  # already loaded; a second copy uses disk space
            shutil.rmtree(self._downloads, ignore_errors=True)
            self._downloads = None
        self._working.mkdir(parents=True, exist_ok=True)
        with staging_folder(self._working, step) as folder:
            yield folder

    def publish(self, staged: Path, step: int) -> None:
        self.allow()
        self._remove_leftovers()
        earlier = self._publications(step)
        name = f"{folder_name(step)}.{1 + max(earlier, default=0)}"
        try:
            self._upload(staged, name)
        except Exception:
            with suppress(Exception):  # the next run removes it as a leftover
                self.remove(name)
            raise
        for each in earlier.values():
            if self.manifest(each) is not None:
                self.remove(each)

    def remove(self, name: str) -> None:
        self.allow()
        with suppress(FileNotFoundError):
            self._fs.rm_file(self._inside(name, MANIFEST))
        with suppress(OSError):
            self._fs.rm(self._inside(name), recursive=True)

    def set_aside(self, name: str, reason: str) -> str:
        self.allow()
        # Moving would copy everything; replacing the manifest has the same effect.
        manifest = self.manifest(name)
        note = {"reason": reason, "manifest": manifest and asdict(manifest)}
        self._fs.pipe_file(self._inside(name, DAMAGED), json.dumps(note, indent=1).encode())
        self._fs.rm_file(self._inside(name, MANIFEST))
        return f"It is kept there, with {DAMAGED} in place of its manifest"

    def lock(self) -> LockObject:
        return LockObject(self._fs, self._path)

    def read(self, file: str) -> bytes | None:
        try:
            return bytes(self._fs.cat_file(self._inside(file)))
        except FileNotFoundError:
            return None

    def write(self, file: str, content: bytes) -> None:
        self.allow()
        self._fs.pipe_file(self._inside(file), content)

    # ---- names and listings -----------------------------------------------------------------------------------------

    def _inside(self, *names: str) -> str:
        return "/".join([self._path.rstrip("/"), *names])

    def _fresh(self) -> Any:
        """The file system, with its cache of listings cleared."""
        self._fs.invalidate_cache()
        return self._fs

    def _versions(self) -> dict[tuple[int, int], str]:
        """All folders named like checkpoints by step and number of publication, in this order."""
        try:
            listed = self._fresh().ls(self._path, detail=True)
        except FileNotFoundError:
            return {}
        names = [PurePosixPath(entry["name"]).name for entry in listed if entry["type"] == "directory"]
        return dict(sorted((version, name) for name in names if (version := _version(name))))

    def _publications(self, step: int) -> dict[int, str]:
        """The folders of one step by number, the latest last."""
        return {number: name for (each, number), name in self._versions().items() if each == step}

    def _sizes(self, name: str) -> dict[str, int]:
        """The files of a checkpoint and their sizes."""
        root = self._inside(name)
        found = self._fresh().find(root, detail=True)
        return {str(PurePosixPath(path).relative_to(root)): entry["size"] for path, entry in found.items()}

    def _remove_leftovers(self) -> None:
        """Remove leftovers of crashed runs: incomplete uploads and removals, and checkpoints with a complete successor.

        A folder without a publication number was not written by loopwright, and a damaged one is kept for the user.
        """
        if self._is_tidy:
            return
        complete: set[int] = set()
        for (step, number), name in reversed(self._versions().items()):
            if self.manifest(name) is not None:
                if step in complete:
                    self.remove(name)
                complete.add(step)
            elif number and not self.holds(name, MANIFEST) and not self.holds(name, DAMAGED):
                self._fs.rm(self._inside(name), recursive=True)
        self._is_tidy = True

    # ---- transfer ---------------------------------------------------------------------------------------------------

    def _upload(self, staged: Path, name: str) -> None:
        files = [each for each in _files_in(staged) if each != MANIFEST]
        for file in files:
            self._fs.put_file(str(staged / file), self._inside(name, file))
        arrived = self._sizes(name)
        for file in files:
            size = (staged / file).stat().st_size
            if arrived.get(file) != size:
                raise OSError(f"{file} has {size:,} bytes, but {arrived.get(file, 0):,} arrived at {self.place(name)}")
        self.allow()
        self._fs.put_file(str(staged / MANIFEST), self._inside(name, MANIFEST))

    def _download(self, name: str, files: list[str], folder: Path) -> None:
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        for file in files:
            (folder / file).parent.mkdir(parents=True, exist_ok=True)
            try:
                self._fs.get_file(self._inside(name, file), str(folder / file))
            except FileNotFoundError:
                (folder / file).unlink(missing_ok=True)  # the comparison with the manifest reports it as missing

    def _download_folder(self) -> Path:
        if self._downloads is None:
            self._working.mkdir(parents=True, exist_ok=True)
            self._downloads = Path(mkdtemp(prefix=".fetched-", dir=self._working))
            # Not when this object is deleted: the files belong to the caller.
            atexit.register(shutil.rmtree, self._downloads.absolute(), ignore_errors=True)
        return self._downloads


@contextmanager
def folder_for(place: str | os.PathLike[str]) -> Iterator[str]:
    """Context manager: the folder itself, or for a URL a local folder whose files are uploaded at exit."""
    if not is_url(place):
        yield plain_path(os.fspath(place))
        return
    files, path = _open(os.fspath(place))
    with TemporaryDirectory(prefix="loopwright-") as folder:
        yield folder
        for each in _files_in(Path(folder)):
            files.put_file(os.path.join(folder, each), f"{path.rstrip('/')}/{each}")


def trimmed(url: str) -> str:
    """The URL without trailing slashes, except those of the protocol."""
    bare = url.rstrip("/")
    return f"{bare}//" if bare.endswith(":") else bare


def _open(url: str) -> tuple[Any, str]:
    """The file system of a URL, and the path in it.

    fsspec is the only third-party package besides numpy in core; it is imported only for URLs.
    """
    try:
        core = import_module(f"{_FSSPEC}.core")
    except ImportError:
        raise MissingPackage(_FSSPEC, needed_for=f"the location {url!r}") from None
    try:
        files, path = core.url_to_fs(url)
    except ImportError as error:
        package = getattr(error.__cause__, "name", None) or url.partition(":")[0]
        raise MissingPackage(package, needed_for=f"the location {url!r}") from error
    except ValueError as error:
        raise OutputError(f"{url!r} cannot be opened ({error}); choose another output_dir") from error
    return files, str(path)


def _version(name: str) -> tuple[int, int] | None:
    """Step and publication number in a folder's name; 0 for a folder that was not published by loopwright."""
    match = _NAME.match(name)
    return (int(match.group(1)), int(match.group(2) or 0)) if match else None


def _files_in(folder: Path) -> list[str]:
    return sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file())
