"""Finding checkpoints of other trainers, and fetching the files of any checkpoint."""

from __future__ import annotations

from pathlib import Path

from ...errors import CheckpointError
from .folder import PROGRESS, STATE, step_in_name
from .manifest import Manifest
from .storage import Storage


def fetched(storage: Storage, name: str, manifest: Manifest | None) -> tuple[Path, str | None]:
    """A local folder with a checkpoint's files, and their problem, if any."""
    try:
        return storage.fetch(name, manifest)
    except CheckpointError:
        raise
    except OSError as error:
        raise CheckpointError(f"{storage.place(name)} could not be read ({error})") from error


def newest_foreign(storage: Storage) -> str | None:
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
