"""A model repository on the Hub, through the public methods of huggingface_hub, which is imported when it is used."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from ..errors import HubError, MissingPackage

FEATURE = "pushing to the Hub"
MOST_FILES = 25_000
"""Files that one commit may add."""
LARGE = 1 << 20
"""Bytes from which a file is always sent by itself, as weights are."""
FEW = 100
"""Files up to which each one is sent by itself: a push can be abandoned between two of them, and needs no threads,
which cannot be started while the process ends."""
WEIGHTS = re.compile(r"^(model(-\d{5}-of-\d{5})?\.safetensors|model\.safetensors\.index\.json)$")
"""Files of whole models that one push writes together: those of an earlier one are removed."""

Content = Path | bytes


@dataclass
class Change:
    """What one commit changes."""

    files: dict[str, Content]
    """Path in the repository -> a local file, or its content."""
    folders: list[str] = field(default_factory=list)
    """Folders of the repository that hold nothing else afterwards."""


class Abandoned(Exception):
    """A push that was stopped before its commit, so that nothing of it is visible."""


@dataclass(frozen=True)
class Repository:
    """One branch of a model repository."""

    name: str
    """`owner/name`, or a name without an owner for the owner of the token."""
    revision: str | None = None
    token: str | None = field(default=None, repr=False)

    def created(self, *, private: bool | None) -> Repository:
        """The repository with its full name, created if it does not exist, as its branch is."""
        api = self._api()
        name = api.create_repo(self.name, private=private, exist_ok=True, token=self.token).repo_id
        if self.revision is not None and not self.revision.startswith("refs/"):
            api.create_branch(name, branch=self.revision, exist_ok=True, token=self.token)
        return replace(self, name=name)

    def commit(self, change: Change, message: str, *, is_stopped: Callable[[], bool] = lambda: False) -> Any:
        """Apply a change in one commit, after all large files are stored; returns huggingface_hub's CommitInfo."""
        if len(change.files) > MOST_FILES:
            raise HubError(
                f"{len(change.files):,} files are too many for one commit, which the Hub limits to {MOST_FILES:,}; "
                "save with fewer ranks, or remove files from the folder"
            )
        hub, api = hub_package(), self._api()
        additions = {
            path: hub.CommitOperationAdd(path, str(content) if isinstance(content, Path) else content)
            for path, content in sorted(change.files.items())
        }
        for group in _groups(change.files):
            if is_stopped():
                raise Abandoned
            # An empty gitignore: one in the repository must not leave files out of a checkpoint.
            api.preupload_lfs_files(
                self.name,
                [additions[path] for path in group],
                revision=self.revision,
                token=self.token,
                free_memory=False,
                gitignore_content="",
            )
        if is_stopped():
            raise Abandoned
        removed = [hub.CommitOperationDelete(path) for path in self._stale(api, change)]
        return api.create_commit(
            self.name,
            [*removed, *additions.values()],
            commit_message=message,
            revision=self.revision,
            token=self.token,
        )

    def head(self) -> str:
        """The id of the newest commit of the branch, or of the revision."""
        return str(self._api().model_info(self.name, revision=self.revision, token=self.token).sha)

    def license(self) -> str | None:
        """The license that the card of the repository states."""
        tags = self._api().model_info(self.name, token=self.token).tags or []
        return next((tag.removeprefix("license:") for tag in tags if tag.startswith("license:")), None)

    def files_in(self, folder: str) -> list[str]:
        """The files in a folder of the branch; empty if the folder does not exist."""
        return list(self._listed(self._api(), folder, recursive=True))

    def download(self, path: str, target: Path) -> Path:
        """Download a file to the same path below a local folder."""
        return Path(
            self._api().hf_hub_download(
                self.name, path, revision=self.revision, local_dir=str(target), token=self.token
            )
        )

    def _stale(self, api: Any, change: Change) -> Iterator[str]:
        """Files of the branch that are not part of the new contents."""
        for folder in change.folders:
            yield from (path for path in self._listed(api, folder, recursive=True) if path not in change.files)
        if any(WEIGHTS.match(path) for path in change.files):
            found = self._listed(api, "", recursive=False)
            yield from (path for path in found if WEIGHTS.match(path) and path not in change.files)

    def _listed(self, api: Any, folder: str, *, recursive: bool) -> Iterator[str]:
        hub = hub_package()
        try:
            entries = list(
                api.list_repo_tree(
                    self.name, folder or None, recursive=recursive, revision=self.revision, token=self.token
                )
            )
        except hub.errors.EntryNotFoundError:
            return
        yield from (entry.path for entry in entries if hasattr(entry, "size"))

    def _api(self) -> Any:
        return hub_package().HfApi()


def hub_package() -> Any:
    """The package huggingface_hub."""
    try:
        import huggingface_hub
        import huggingface_hub.errors
    except ImportError as error:
        raise MissingPackage("huggingface_hub", needed_for=FEATURE) from error
    return huggingface_hub


def _groups(files: dict[str, Content]) -> list[list[str]]:
    """Files that are sent together; the second of two equal ones is found to be stored already, and is not sent."""
    alone = [path for path, content in sorted(files.items()) if len(files) <= FEW or _is_large(path, content)]
    others = sorted(files.keys() - set(alone))
    return [*([path] for path in alone), *([others] if others else [])]


def _is_large(path: str, content: Content) -> bool:
    return path.endswith(".safetensors") or _size(content) >= LARGE


def _size(content: Content) -> int:
    return content.stat().st_size if isinstance(content, Path) else len(content)
