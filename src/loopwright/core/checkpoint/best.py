"""The best checkpoint that a saved state names: only one of the run itself, also after the run was moved."""

from __future__ import annotations

import os
import re
from pathlib import Path

from ...args.paths import is_url
from .folder import step_in_name


def name_of(place: str) -> str:
    """The last part of a path or URL, of any operating system."""
    return re.split(r"[/\\]", place.rstrip("/\\"))[-1]


def own_checkpoint(place: str, *, output_dir: str, resumed: Path) -> str | None:
    """The checkpoint of this name in the output folder, or next to the one the run resumes from; None if it is neither.

    A run that was moved has the paths of another folder in its state, so the name is what counts.
    """
    name = name_of(place)
    if step_in_name(Path(name)) is None:
        return None
    own, beside = os.path.join(output_dir, name), str(resumed.parent / name)
    if is_url(own):
        return own
    if _is_in(own, output_dir) and (_is_same(place, own) or os.path.isdir(own)):
        return own
    return beside if _is_same(place, beside) and _is_in(beside, str(resumed.parent)) else None


def _is_in(path: str, folder: str) -> bool:
    """Whether a path is directly inside a folder, and not a link to another place."""
    return os.path.dirname(os.path.realpath(path)) == os.path.realpath(folder)


def _is_same(one: str, other: str) -> bool:
    return not is_url(one) and os.path.abspath(one) == os.path.abspath(other)
