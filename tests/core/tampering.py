"""Ways in which a JSON document can be wrong, applied to every value of a document of a real checkpoint."""

from __future__ import annotations

import copy
import json
import os
import re
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest.mock import patch

from loopwright.core.checkpoint.folder import MANIFEST
from loopwright.core.checkpoint.manifest import describe, read_manifest
from loopwright.errors import CheckpointError

WHOLE: dict[str, Callable[[bytes], bytes]] = {
    "empty": lambda content: b"",
    "truncated": lambda content: content[: len(content) // 2],
    "not JSON": lambda content: b"{'a': 1}",
    "not UTF-8": lambda content: content[:-2] + b"\xff\xfe\n}",
    "binary": lambda content: bytes(range(256)),
    "null": lambda content: b"null",
    "a list": lambda content: b"[]",
    "a number": lambda content: b"7",
    "no names": lambda content: b"{}",
    "deep": lambda content: b'{"a":' * 3000 + b"1" + b"}" * 3000,
    "deeper": lambda content: b"[" * 200_000 + b"]" * 200_000,
    "long number": lambda content: b'{"global_step": ' + b"9" * 5000 + b"}",
}

PARTS = 8
"""Parts of a whole grid, each a test, so that several processes can share it and each ends in minutes."""
GONE = object()
VALUES: dict[str, Any] = {
    "missing": GONE, "null": None, "a string": "seven", "a list": [1], "an object": {"a": 1}, "true": True,
    "negative": -7, "huge": 10**40, "huge float": 1e300, "NaN": float("nan"), "infinite": float("inf"), "fraction": 2.5,
}  # fmt: skip


def paths_in(value: Any, above: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """The place of every value, of lists only that of the first and the last entry."""
    if above:
        yield above
    if isinstance(value, dict):
        for name, each in value.items():
            yield from paths_in(each, (*above, name))
    elif isinstance(value, list):
        for index in sorted({0, len(value) - 1} if value else set()):
            yield from paths_in(value[index], (*above, index))


def at(document: Any, path: tuple[Any, ...]) -> Any:
    for name in path:
        document = document[name]
    return document


def changed(document: Any, path: tuple[Any, ...], value: Any) -> bytes | None:
    """The document with another value at a place; None if it is the one that is there."""
    found = copy.deepcopy(document)
    above = at(found, path[:-1])
    if value is GONE:
        del above[path[-1]]
    elif type(above[path[-1]]) is type(value) and above[path[-1]] == value:
        return None
    else:
        above[path[-1]] = value
    return json.dumps(found).encode()


def tampered(folder: Path, name: str, content: bytes) -> None:
    """Replace a file of a checkpoint, and make its manifest say so, if it has one."""
    (folder / name).write_bytes(content)
    if (folder / MANIFEST).exists():
        sign(folder)


def sign(folder: Path) -> None:
    manifest = read_manifest(folder)
    assert manifest is not None
    (folder / MANIFEST).unlink()
    made = describe(folder, manifest.step, format=manifest.format)
    made.tensors.update(manifest.tensors)
    made.write(folder)


def cases(folder: Path, name: str) -> Iterator[tuple[str, bytes]]:
    """All ways to tamper with one document of a checkpoint, with their names."""
    content = (folder / name).read_bytes()
    for way, change in WHOLE.items():
        yield f"{name}: {way}", change(content)
    document = json.loads(content)
    for path in paths_in(document):
        for way, value in VALUES.items():
            new = changed(document, path, value)
            if new is not None:
                yield f"{name}: {'.'.join(map(str, path))} {way}", new


@dataclass(frozen=True)
class SavedRun:
    """A run with one checkpoint, and what it became; to be resumed after a document was changed."""

    folder: Path
    checkpoint: str
    expected: Any
    make: Callable[[Path], Any]
    computed: Callable[[Any], Any]
    free: re.Pattern[str]
    """Cases whose values are as good as those that were saved, or that are shown only: no shape distinguishes them."""

    def cases(self) -> list[tuple[str, str, bytes]]:
        """All ways to tamper with the documents of the checkpoint: document, name of the case, content."""
        folder = self.folder / self.checkpoint
        names = [path.name for path in sorted(folder.glob("*.json")) if path.name != MANIFEST]
        return [(name, *case) for name in names for case in cases(folder, name)]

    def wrong(self, place: Path, caplog: Any, *, first: int = 0, step: int = 1) -> dict[str, str]:
        """What is wrong with some of the cases: neither an error that names the document, nor the same run."""
        found = {}
        for name, case, content in self.cases()[first::step]:
            problem = self._problem(place, caplog, name, content)
            if problem is not None and (" silently" not in problem or not self.free.search(case)):
                found[case] = problem
        return found

    def _problem(self, place: Path, caplog: Any, name: str, content: bytes) -> str | None:
        shutil.rmtree(place, ignore_errors=True)
        shutil.copytree(self.folder, place)
        tampered(place / self.checkpoint, name, content)
        caplog.clear()
        trainer = self.make(place)
        try:
            with patch.object(os, "fsync"):  # no power fails here, and it is most of the time of these runs
                trainer.train(resume_from_checkpoint=str(place / self.checkpoint))
        except CheckpointError as error:
            return None if name in str(error) else f"the error does not name the file: {error}"
        except Exception as error:
            return f"{type(error).__name__}: {error}"
        same = json.dumps(self.computed(trainer), sort_keys=True) == json.dumps(self.expected, sort_keys=True)
        return None if same or self.checkpoint in caplog.text else "trained on silently, with other numbers"
