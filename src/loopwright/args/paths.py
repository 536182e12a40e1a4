"""Paths of a run: output_dir is a folder, or a URL with a local working folder."""

from __future__ import annotations

import os
import re

_PROTOCOL = re.compile(r"^([a-zA-Z][a-zA-Z0-9+.-]+)://")
_LOCAL = ("file", "local")


def is_url(place: str | os.PathLike[str] | None) -> bool:
    """Whether a path is a URL with a protocol such as s3://; file:// counts as local."""
    found = _PROTOCOL.match(str(place or ""))
    return found is not None and found.group(1).lower() not in _LOCAL


def plain_path(place: str) -> str:
    """The path without the prefix file://."""
    found = _PROTOCOL.match(place)
    return place if found is None or is_url(place) else place[found.end() :] or "/"


def fixed_folder(place: str | os.PathLike[str] | None) -> str:
    """`working_folder` as an absolute path, for a run whose code may change the working directory."""
    return os.path.abspath(working_folder(place))


def working_folder(place: str | os.PathLike[str] | None) -> str:
    """The local folder for everything but checkpoints: for s3://bucket/run it is trainer_output/s3/bucket/run.

    It depends on the URL only, so a restarted run finds its files.
    """
    text = str(place or ".")
    if not is_url(text):
        return plain_path(text)
    parts = [part for part in re.split(r"[:/\\]+", text) if part not in ("", ".", "..")]
    return os.path.join("trainer_output", *parts)
