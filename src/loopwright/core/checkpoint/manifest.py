"""The manifest: the files of a checkpoint with sizes and hashes; written last, so that it marks a complete one."""

from __future__ import annotations

import errno
import hashlib
import json
import os
import re
import stat
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field, fields, replace
from functools import partial
from pathlib import Path, PurePosixPath
from typing import Any

from ...errors import CheckpointError
from .folder import MANIFEST
from .reading import Unreadable, bounded_content, kind_of_file, link_problem, paths_below, persistent
from .schema import count, list_of, maybe, named, record, text

VERSION = 2
"""2: the id of the run was added. Manifests of version 1 are read."""
MOST = 256 << 20
"""Bytes of the largest manifest that is read; one of 100,000 tensors has about 30 MB."""
READ = re.compile(
    r"^(ranks/.*|model\.safetensors(\.index\.json)?|(module|optimizer)\.safetensors"
    r"|(progress|trainer_state|arguments|scheduler|scaler|rng|weights|optimizer)\.json)$"
)
"""Names of files that change what is loaded by being there; a callback may add others to a checkpoint."""
CHUNK = 1 << 20
LARGEST_HEADER = 100_000_000
"""Bytes of the largest header of a safetensors file; the library reads no larger ones either."""

BOX = record({"file": text, "key": text, "offset": list_of(count()), "size": list_of(count())})
TENSOR = record({"dtype": text, "shape": list_of(count()), "boxes": list_of(BOX)})
SHAPE = record(
    {"step": count(), "files": named(record({"size": count(), "sha256": text}))},
    {"tensors": named(TENSOR), "format": text, "version": count(), "run": maybe(text), "check": maybe(text)},
)
"""The contents of a manifest."""

Entry = dict[str, Any]
"""The entry of a file or a tensor in a manifest."""


@dataclass
class Manifest:
    """The contents of a complete checkpoint."""

    step: int
    files: dict[str, dict[str, Any]]
    """Relative path -> size and sha256."""
    tensors: dict[str, dict[str, Any]] = field(default_factory=dict)
    """File/key -> dtype, global shape and the boxes (index ranges) of its shards."""
    format: str = "native"
    version: int = VERSION
    run: str | None = None
    """The id of the run; None for one that began with another trainer, or with a version without ids."""
    check: str | None = None
    """The hash of all other fields, to detect damage to the manifest itself."""

    def write(self, folder: Path, name: str = MANIFEST) -> None:
        values = {**asdict(self), "check": _check(asdict(self))}
        with open(folder / name, "w", encoding="utf-8") as file:
            file.write(json.dumps(values, indent=1, sort_keys=True))
            file.flush()
            os.fsync(file.fileno())

    def replace(self, folder: Path) -> None:
        """Write the manifest of a published checkpoint again; at every moment there is one."""
        temporary = f".{MANIFEST}"
        self.write(folder, temporary)
        os.replace(folder / temporary, folder / MANIFEST)


def describe(
    folder: Path, step: int, *, format: str, run: str | None = None, known: dict[str, Entry] | None = None
) -> Manifest:
    """The manifest of the files in the folder, each of them flushed to disk.

    Files in `known` were described, with their tensors, by the rank that wrote them.
    """
    files, tensors = dict(known or {}), {}
    for path in (each for each in paths_below(folder) if each.is_file() and each.name != MANIFEST):
        name = path.relative_to(folder).as_posix()
        if name in files:
            continue
        files[name] = file_entry(path)
        if path.suffix == ".safetensors":
            tensors.update(_boxes(path, name))
    return Manifest(step, files, tensors, format=format, run=run)


def adopt_changes(folder: Path) -> None:
    """Bring the manifest up to date with changed and removed files, and with new ones that change what is loaded.

    Other new files are not listed: they may change, or be removed, later.
    """
    manifest = read_manifest(folder)
    if manifest is None:
        return
    written = _changed_at(folder / MANIFEST)
    files = {path.relative_to(folder).as_posix(): path for path in paths_below(folder) if path.is_file()}
    files = {name: path for name, path in files.items() if name != MANIFEST and not link_problem(folder, name)}
    known = {name: entry for name, entry in manifest.files.items() if name in files}
    for name, path in files.items():
        # The clock of a file system is coarse, so a file of the same moment is compared too.
        if READ.search(name) if name not in known else _changed_at(path) >= written:
            known[name] = file_entry(path)
    changed = {name for name in known.keys() | manifest.files.keys() if known.get(name) != manifest.files.get(name)}
    if not changed:
        return
    tensors = {name: each for name, each in manifest.tensors.items() if not _files_of(each) & changed}
    for name in sorted(changed & known.keys()):
        if name.endswith(".safetensors"):
            tensors.update(_boxes(files[name], name))
    replace(manifest, files=known, tensors=tensors).replace(folder)


def _files_of(tensor: Entry) -> set[str]:
    return {box["file"] for box in tensor["boxes"]}


def _changed_at(path: Path) -> int:
    """When a file was changed, or put in the place of another one, in nanoseconds."""
    status = path.stat()
    return max(status.st_mtime_ns, status.st_ctime_ns)


def file_entry(path: Path) -> Entry:
    """Flush a file to disk; returns its size and hash."""
    return {"size": path.stat().st_size, "sha256": _hash(path, sync=True)}


def read_manifest(folder: Path) -> Manifest | None:
    """The folder's manifest, or None if it is missing or damaged; raises `CheckpointError` if it cannot be read."""
    content = bounded_content(folder / MANIFEST, MOST)
    return None if content is None else parsed(content)


def parsed(content: bytes | str) -> Manifest | None:
    """The manifest in a file's content, or None if it is invalid or damaged."""
    try:
        values = json.loads(content)
        is_whole = type(values) is dict and values.get("check") in (None, _check(values))
    except (ValueError, RecursionError):
        return None
    if not is_whole:
        return None
    if type(values.get("version")) is int and values["version"] > VERSION:
        raise CheckpointError(
            f"the checkpoint of step {values.get('step')} was written by a newer version of loopwright (manifest "
            f"version {values['version']}, this one reads {VERSION}); update loopwright"
        )
    known = {each.name for each in fields(Manifest)}
    return Manifest(**values) if values.keys() <= known and SHAPE(values, MANIFEST) is None else None


def damage(folder: Path, manifest: Manifest) -> str | None:
    """The problem of the first damaged file of the folder, or None if all are intact."""
    outside = names_outside(manifest.files)
    if outside is not None:
        return outside
    for name, expected in manifest.files.items():
        path = folder / name
        refuse_link(folder, name)
        size = _size(path)
        if isinstance(size, str):
            return f"{name} is {size}"
        if size != expected["size"]:
            return f"{name} is {size:,} bytes, the manifest says {expected['size']:,}; it was damaged after saving"
        try:
            found = persistent(partial(_hash, path), path)
        except FileNotFoundError:  # another process has removed the checkpoint in the meantime
            return f"{name} is missing"
        except CheckpointError as error:
            if error.errno != errno.EIO:
                raise
            return Unreadable(f"{name} cannot be read (the disk reports an error)")
        if found != expected["sha256"]:
            return f"{name} does not match its checksum; it was damaged after saving"
    try:
        refuse_unlisted(folder, manifest)
    except FileNotFoundError as error:  # another process has removed the checkpoint in the meantime
        return f"{error.filename} is missing"
    return None


def _size(path: Path) -> int | str:
    """The size of a regular file, or the problem of anything else."""
    try:
        status = persistent(path.stat, path)
    except (FileNotFoundError, NotADirectoryError):
        return "missing"
    return status.st_size if stat.S_ISREG(status.st_mode) else f"{kind_of_file(status.st_mode)}, not a file"


def refuse_link(folder: Path, name: str) -> None:
    """Raise `CheckpointError` for a file that is a link to another place."""
    problem = persistent(partial(link_problem, folder, name), folder / name)
    if problem is not None:
        raise CheckpointError(f"{folder.name}: {name} {problem}")


def refuse_odd_files(folder: Path) -> None:
    """Raise `CheckpointError` for anything in a folder without a manifest that is not a file of its own."""
    for path in paths_below(folder):
        name = path.relative_to(folder).as_posix()
        refuse_link(folder, name)
        size = _size(path)
        if isinstance(size, str) and not path.is_dir():
            raise CheckpointError(f"{folder.name}: {name} is {size}")
        if path.is_dir() and READ.search(name):
            raise CheckpointError(f"{folder.name}: {name} is a folder, not a file")


def names_outside(names: Iterable[str]) -> str | None:
    """The problem of a file name that leads out of the checkpoint, or None."""
    for name in names:
        if name.startswith(("/", "\\")) or ".." in PurePosixPath(name).parts or ":" in name or "\\" in name:
            return f"its manifest names {name}, which is not a checkpoint file"
    return None


def refuse_unlisted(folder: Path, manifest: Manifest) -> None:
    """Raise `CheckpointError` for a file that would change what is loaded and that the manifest does not list."""
    for path in paths_below(folder):
        name = path.relative_to(folder).as_posix()
        if name != MANIFEST and name not in manifest.files and READ.search(name) and not path.is_dir():
            raise CheckpointError(
                f"{folder.name}: {name} is not listed in the manifest, so it was added after saving; remove it and run "
                "again"
            )


def _check(values: dict[str, Any]) -> str:
    others = {name: value for name, value in values.items() if name != "check"}
    return hashlib.sha256(json.dumps(others, sort_keys=True).encode()).hexdigest()


def _hash(path: Path, *, sync: bool = False) -> str:
    digest = hashlib.sha256()
    with open(path, "rb") as file:
        while block := file.read(CHUNK):
            digest.update(block)
        if sync:
            os.fsync(file.fileno())
    return digest.hexdigest()


def _boxes(path: Path, name: str) -> dict[str, dict[str, Any]]:
    """Every tensor of a safetensors file as one box that covers its whole shape."""
    with open(path, "rb") as file:
        start = file.read(8)
        size = int.from_bytes(start, "little")
        if len(start) < 8 or size > min(LARGEST_HEADER, path.stat().st_size):
            raise CheckpointError(f"{name} is not a safetensors file: its header has {size:,} bytes")
        header = json.loads(file.read(size))
    header.pop("__metadata__", None)
    return {
        f"{name}/{key}": {
            "dtype": entry["dtype"],
            "shape": entry["shape"],
            "boxes": [{"file": name, "key": key, "offset": [0] * len(entry["shape"]), "size": entry["shape"]}],
        }
        for key, entry in header.items()
    }
