"""Downloading a pushed checkpoint: the files that its manifest lists, of one commit, verified by their hashes."""

from __future__ import annotations

import re
import shutil
from dataclasses import dataclass, replace
from pathlib import Path

from ..core.checkpoint.folder import MANIFEST
from ..core.checkpoint.manifest import damage, names_outside, read_manifest
from ..errors import CheckpointError, HubError, LoopwrightError
from ..notices import logger
from .failures import explained
from .repository import Repository

LAST = "last-checkpoint"
"""The folder on the Hub that holds the newest checkpoint."""
FOLDER = "from-hub"
"""The folder in the output folder for downloaded checkpoints."""
PLACE = re.compile(r"^hf://(?:models/)?(?P<name>[^/@]+/[^/@]+)(?:@(?P<revision>[^/]+))?(?:/(?P<folder>.+?))?/*$")
ATTEMPTS = 2
"""Downloads of a file whose content is wrong, before it counts as damaged."""


@dataclass(frozen=True)
class PushedCheckpoint:
    """A checkpoint on the Hub."""

    repository: Repository
    folder: str

    @classmethod
    def parsed(cls, request: str, token: str | None) -> PushedCheckpoint | None:
        """The checkpoint that `hf://owner/name[@revision][/folder]` names; None if it is something else."""
        if not request.startswith("hf://"):
            return None
        found = PLACE.match(request)
        if found is None:
            raise CheckpointError(
                f"resume_from_checkpoint={request!r} is not a place on the Hub; write hf://owner/name/{LAST}, with "
                "@revision after the name for a branch or a commit"
            )
        revision = found["revision"] and found["revision"].replace("%2F", "/").replace("%2f", "/")
        return cls(Repository(found["name"], revision, token), (found["folder"] or LAST).strip("/"))

    def __str__(self) -> str:
        revision = f"@{self.repository.revision}" if self.repository.revision else ""
        return f"hf://{self.repository.name}{revision}/{self.folder}"

    def downloaded(self, output_dir: Path) -> Path:
        """The folder with its files, below the output folder; an earlier download of the same commit is reused."""
        try:
            return self._downloaded(output_dir)
        except LoopwrightError:
            raise
        except Exception as error:  # huggingface_hub passes on errors of three packages
            reason = explained(error, self.repository.token)
            raise HubError(f"{self} could not be downloaded: {reason}") from error

    def _downloaded(self, output_dir: Path) -> Path:
        commit = self.repository.head()
        at_commit = replace(self.repository, revision=commit)
        root = output_dir / FOLDER / commit[:12]
        folder = root / self.folder
        logger.info(f"downloading {self} (commit {commit[:12]}) to {folder}")
        available = set(at_commit.files_in(self.folder))
        if f"{self.folder}/{MANIFEST}" not in available:
            raise CheckpointError(
                f"{self} has no {MANIFEST}, so it is not a complete checkpoint of loopwright; "
                'those are pushed with hub_strategy="checkpoint" or "all_checkpoints"'
            )
        at_commit.download(f"{self.folder}/{MANIFEST}", root)
        manifest = read_manifest(folder)
        problem = f"{MANIFEST} is damaged" if manifest is None else names_outside(manifest.files)
        if manifest is None or problem:
            raise CheckpointError(f"{self}: {problem}; resume from another commit or checkpoint")
        missing = sorted(name for name in manifest.files if f"{self.folder}/{name}" not in available)
        if missing:
            raise CheckpointError(
                f"{self} lacks {', '.join(missing[:3])}, so it cannot be resumed. Pickles are not pushed: save with "
                'checkpoint_format="native" to push complete checkpoints'
            )
        for attempt in range(ATTEMPTS):
            for name in sorted(manifest.files):
                at_commit.download(f"{self.folder}/{name}", root)
            problem = damage(folder, manifest)
            if problem is None:
                return folder
            shutil.rmtree(root, ignore_errors=True)
            if attempt + 1 < ATTEMPTS:
                at_commit.download(f"{self.folder}/{MANIFEST}", root)
        raise CheckpointError(f"{self}: {problem}; resume from another commit or checkpoint")
