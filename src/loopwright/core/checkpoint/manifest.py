"""The manifest: the files of a checkpoint with sizes and hashes; written last, so that it marks a complete one."""

from __future__ import annotations

import hashlib
import json
import os
import struct
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from .folder import MANIFEST

VERSION = 1
CHUNK = 1 << 20

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
    check: str | None = None
    """The hash of all other fields, to detect damage to the manifest itself."""

    def write(self, folder: Path) -> None:
        values = {**asdict(self), "check": _check(asdict(self))}
        with open(folder / MANIFEST, "w", encoding="utf-8") as file:
            file.write(json.dumps(values, indent=1, sort_keys=True))
            file.flush()
            os.fsync(file.fileno())


def describe(folder: Path, step: int, *, format: str, known: dict[str, Entry] | None = None) -> Manifest:
    """The manifest of the files in the folder, each of them flushed to disk.

    Files in `known` were described, with their tensors, by the rank that wrote them.
    """
    files, tensors = dict(known or {}), {}
    for path in sorted(p for p in folder.rglob("*") if p.is_file() and p.name != MANIFEST):
        name = path.relative_to(folder).as_posix()
        if name in files:
            continue
        files[name] = file_entry(path)
        if path.suffix == ".safetensors":
            tensors.update(_boxes(path, name))
    return Manifest(step, files, tensors, format=format)


def file_entry(path: Path) -> Entry:
    """Flush a file to disk; returns its size and hash."""
    return {"size": path.stat().st_size, "sha256": _hash(path, sync=True)}


def read_manifest(folder: Path) -> Manifest | None:
    """The folder's manifest, or None if it is missing or unreadable."""
    try:
        return parsed((folder / MANIFEST).read_bytes())
    except OSError:
        return None


def parsed(content: bytes | str) -> Manifest | None:
    """The manifest in a file's content, or None if it is invalid or damaged."""
    try:
        values = json.loads(content)
        manifest = Manifest(**values)
    except (ValueError, TypeError):
        return None
    return manifest if manifest.check in (None, _check(values)) else None


def damage(folder: Path, manifest: Manifest, *, hashes: bool = True) -> str | None:
    """The problem of the first damaged file of the folder, or None if all are intact."""
    for name, expected in manifest.files.items():
        path = folder / name
        if not path.is_file():
            return f"{name} is missing"
        size = path.stat().st_size
        if size != expected["size"]:
            return f"{name} is {size:,} bytes, the manifest says {expected['size']:,}; it was damaged after saving"
        if hashes and _hash(path) != expected["sha256"]:
            return f"{name} does not match its checksum; it was damaged after saving"
    return None


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
        (size,) = struct.unpack("<Q", file.read(8))
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
