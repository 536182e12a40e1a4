"""A checkpoint in a folder of any name, outside the checkpoints of a run."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from ...args.paths import is_url
from ...errors import CheckpointError
from .folder import MANIFEST
from .local import replace_folder
from .manifest import describe
from .remote import folder_for


class OneFolder:
    """A folder or URL that holds one checkpoint; an earlier one in it is replaced."""

    def __init__(self, place: str) -> None:
        self.place = place

    @contextmanager
    def staging(self, step: int) -> Iterator[Path]:
        """A folder beside the final one, removed at exit; for a URL one that is uploaded."""
        if is_url(self.place):
            with folder_for(self.place) as folder:
                yield Path(folder)
            return
        final = Path(self.place).absolute()
        if final.exists() and not (final / MANIFEST).is_file() and any(final.iterdir()):
            raise CheckpointError(
                f"{self.place} has other files than those of a checkpoint, which would be lost; choose a new or an "
                "empty folder"
            )
        final.parent.mkdir(parents=True, exist_ok=True)
        staged = final.with_name(f".{final.name}.partial-{os.getpid()}")
        shutil.rmtree(staged, ignore_errors=True)
        staged.mkdir()
        try:
            yield staged
        finally:
            shutil.rmtree(staged, ignore_errors=True)

    def publish(self, staged: Path, step: int) -> None:
        """Give the staged folder its name."""
        if not is_url(self.place):
            replace_folder(staged, Path(self.place).absolute())

    def save(self, step: int, write: Callable[[Path], Any], *, format: str, run: str | None) -> None:
        """Write a checkpoint with a single process."""
        with self.staging(step) as folder:
            write(folder)
            describe(folder, step, format=format, run=run).write(folder)
            self.publish(folder, step)
