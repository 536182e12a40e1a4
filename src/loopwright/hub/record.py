"""pushes.json: which checkpoints of a run have arrived on the Hub, so that a resumed run pushes the missing ones."""

from __future__ import annotations

import json

from ..core.checkpoint.schema import list_of, named, record, text
from ..core.checkpoint.storage import Storage
from ..notices import logger

FILE = "pushes.json"
SHAPE = record({"pushed": named(list_of(text))})
MOST = 10_000
"""Checkpoints that are kept in the record of a repository; the oldest ones are dropped."""


class PushRecord:
    """The checkpoints that were pushed to one branch of a repository, by the checks of their manifests."""

    def __init__(self, storage: Storage, target: str) -> None:
        self._storage, self._target = storage, target

    def holds(self, check: str) -> bool:
        return check in self._read().get(self._target, [])

    def add(self, check: str) -> None:
        """Record a push; if that fails, the checkpoint may be pushed once more."""
        found = self._read()
        known = [each for each in found.get(self._target, []) if each != check]
        found[self._target] = [*known, check][-MOST:]
        try:
            self._storage.write(FILE, (json.dumps({"pushed": found}, indent=1) + "\n").encode())
        except OSError as error:
            logger.warning(f"{FILE} could not be written ({error}); a resumed run may push a checkpoint again")

    def _read(self) -> dict[str, list[str]]:
        try:
            values = json.loads(self._storage.read(FILE) or b'{"pushed": {}}')
        except (OSError, ValueError):  # as if nothing was pushed: a push of the same files changes nothing
            return {}
        return values["pushed"] if SHAPE(values, FILE) is None else {}
