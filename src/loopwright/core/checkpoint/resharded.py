"""Weights that the user has split into several files: accepted if they hold, byte for byte, what was saved.

The manifest has one hash for model.safetensors. The file is rebuilt from its shards while it is hashed, not on disk.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from ...notices import logger
from .folder import MODEL, WEIGHTS
from .manifest import CHUNK, LARGEST_HEADER, Manifest, describe, names_outside, refuse_link
from .reading import bounded_content

INDEX = f"{MODEL}.index.json"
ORDER = ("U64", "I64", "F64", "C64", "F32", "U32", "I32", "BF16", "F16", "U16", "I16", "F8_E4M3", "F8_E5M2", "I8", "U8",
         "BOOL")  # fmt: skip
"""The order of dtypes in a safetensors file; within a dtype, tensors are sorted by name."""
METADATA = ({"format": "pt"}, None)
"""Metadata of files that transformers and loopwright write."""


class Stored(NamedTuple):
    """A tensor in a shard."""

    file: Path
    start: int
    size: int
    dtype: str
    shape: list[int]


def with_shards(folder: Path, manifest: Manifest) -> Manifest:
    """The manifest with the shards in the place of model.safetensors, if they hold the same; else as it is.

    It is written to the folder.
    """
    if MODEL not in manifest.files or WEIGHTS in manifest.files or not _is_missing(folder / MODEL):
        return manifest
    tensors = _tensors_of_index(folder)
    if tensors is None or not _has_hash(tensors, manifest.files[MODEL]["sha256"]):
        return manifest
    others = {name: entry for name, entry in manifest.files.items() if name != MODEL}
    shards = {each.file.name for each in tensors.values()} | {INDEX}
    found = describe(folder, manifest.step, format=manifest.format, run=manifest.run, known=others)
    kept = {name: entry for name, entry in found.files.items() if name in others or name in shards}
    new = replace(manifest, files=kept, tensors=found.tensors)
    new.replace(folder)
    logger.warning(
        f"{folder.name}: {MODEL} was replaced by {len(shards) - 1} files after saving. They hold the same weights, so "
        "they are listed in the manifest from now on"
    )
    return new


def _is_missing(path: Path) -> bool:
    try:
        return not path.exists()
    except OSError:  # reported when the file is verified
        return False


def _tensors_of_index(folder: Path) -> dict[str, Stored] | None:
    """The tensors of the files that the index names; None if there is no index, or it is not one of this folder."""
    try:
        files: dict[str, str] = json.loads(bounded_content(folder / INDEX, LARGEST_HEADER) or b"{}")["weight_map"]
        if names_outside(files.values()):
            return None
        for name in {INDEX, *files.values()}:
            refuse_link(folder, name)
        shards = {name: _tensors_of(folder / name) for name in set(files.values())}
        return {name: shards[file][name] for name, file in files.items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None


def _tensors_of(path: Path) -> dict[str, Stored]:
    with open(path, "rb") as file:
        size = int.from_bytes(file.read(8), "little")
        if size > min(LARGEST_HEADER, path.stat().st_size):
            raise ValueError(f"{path.name} is not a safetensors file")
        header: dict[str, Any] = json.loads(file.read(size))
    header.pop("__metadata__", None)
    return {
        name: Stored(path, 8 + size + each["data_offsets"][0], each["data_offsets"][1] - each["data_offsets"][0],
                     each["dtype"], each["shape"])
        for name, each in header.items()
    }  # fmt: skip


def _has_hash(tensors: dict[str, Stored], expected: str) -> bool:
    """Whether a single file with these tensors would have this hash."""
    if not all(each.dtype in ORDER for each in tensors.values()):
        return False
    names = sorted(tensors, key=lambda name: (ORDER.index(tensors[name].dtype), name))
    found = [hashlib.sha256(_header(names, tensors, metadata)) for metadata in METADATA]
    for block in _contents(tensors[name] for name in names):
        for digest in found:
            digest.update(block)
    return any(digest.hexdigest() == expected for digest in found)


def _header(names: list[str], tensors: dict[str, Stored], metadata: dict[str, str] | None) -> bytes:
    entries: dict[str, Any] = {} if metadata is None else {"__metadata__": metadata}
    end = 0
    for name in names:
        each = tensors[name]
        entries[name] = {"dtype": each.dtype, "shape": each.shape, "data_offsets": [end, end + each.size]}
        end += each.size
    text = json.dumps(entries, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def _contents(tensors: Iterator[Stored]) -> Iterator[bytes]:
    for each in tensors:
        with open(each.file, "rb") as file:
            file.seek(each.start)
            left = each.size
            while left and (block := file.read(min(left, CHUNK))):
                left -= len(block)
                yield block
