"""Which run an output folder belongs to: only its checkpoints are resumed, rotated and compared.

A fresh run gets a new id and records it before its first update; every manifest contains the id of its run. A run that
resumes keeps the id of its checkpoint.
"""

from __future__ import annotations

import json
import secrets
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime

from ....errors import CheckpointError
from ..manifest import Manifest
from ..storage import Storage

FILE = "current_run.json"
RUNNING, INTERRUPTED, FAILED, FINISHED = "running", "interrupted", "failed", "finished"
"""How a run has ended. One that was killed is recorded as running, but its folder has no owner."""


@dataclass(frozen=True)
class CurrentRun:
    """The run that a folder belongs to."""

    run: str | None
    """Its id; None for a run that began with another trainer, or with a version without ids."""
    job: str | None = None
    """The launcher's name of the job."""
    launch: str | None = None
    """Identifies the command that started the job; the same for all restarts by the launcher."""
    left: tuple[str, ...] = field(default=())
    """Checks of manifests with the run's id that do not lead to its state: it resumed from an earlier step."""
    status: str | None = None
    """How it has ended, or `RUNNING`; None for a version that did not record it."""
    command: tuple[str, ...] = field(default=())
    """The script and its arguments, without secrets; empty without a script."""
    call: int = 1
    """Which call of train() of its process, for this folder."""

    def holds(self, manifest: Manifest) -> bool:
        """Whether a checkpoint belongs to this run."""
        return manifest.run == self.run and (manifest.check is None or manifest.check not in self.left)

    @property
    def may_be_foreign(self) -> bool:
        """Whether checkpoints without a manifest may belong to this run."""
        return self.run is None


def new_id() -> str:
    """The id of a new run: readable, sorted by time, and unique."""
    return f"{datetime.now(UTC):%Y%m%d-%H%M%S}-{secrets.token_hex(4)}"


def read_current(storage: Storage) -> CurrentRun | None:
    """The run that a folder belongs to; None in a folder of another trainer, or of a version without ids."""
    content = storage.read(FILE)
    if content is None:
        return None
    try:
        values = json.loads(content)
        lists = {name: values.get(name, []) for name in ("left", "command")}
        found = CurrentRun(**{**values, **{name: tuple(each) for name, each in lists.items()}})
    except (ValueError, TypeError, AttributeError, RecursionError) as error:
        raise _damaged(storage) from error
    if not all(isinstance(each, list) for each in lists.values()):
        raise _damaged(storage)
    texts = (found.run, found.job, found.launch, found.status, *found.left, *found.command)
    if not all(each is None or type(each) is str for each in texts) or type(found.call) is not int:
        raise _damaged(storage)
    return found


def write_current(storage: Storage, current: CurrentRun) -> None:
    """Record the run that a folder belongs to, durably."""
    storage.write(FILE, (json.dumps(asdict(current), indent=1) + "\n").encode())


def _damaged(storage: Storage) -> CheckpointError:
    return CheckpointError(
        f"{storage.root}: {FILE} is damaged, so it is not known which checkpoints belong to its last run. Resume one "
        f"by its path, or delete {FILE} to consider all of them"
    )
