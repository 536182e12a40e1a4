"""Which files are pushed: from a checkpoint, and from the output folder. Files with pickles are left out."""

from __future__ import annotations

import os
import re
import shutil
import zipfile
from collections.abc import Iterator
from pathlib import Path

from ..core.checkpoint.folder import MANIFEST, MODULE, PINNED, PROGRESS, RNG, SCALER, SCHEDULER, STATE, WEIGHTS

CARD = "README.md"
RUN_STATE = re.compile(
    r"^(optimizer.*\.(json|safetensors)|(ranks|tf_data|deepspeed)/.*|"
    + "|".join(re.escape(name) for name in (MANIFEST, STATE, PROGRESS, SCHEDULER, SCALER, RNG, WEIGHTS, PINNED))
    + ")$"
)
"""Files of a checkpoint that belong to the run and not to its model."""
OF_THE_RUN = re.compile(
    r"^(_.*|(?!\.eval_results(/|$))\..*|(checkpoint|damaged-checkpoint|incident-step)-.*|compile_cache(/.*)?|from-hub/.*|"
    r"run\.(json|lock)|current_run\.json|speed_plan\.json|pushes\.json)$"
)
"""Files of an output folder that are not pushed: checkpoints, reports on samples, and records of this machine."""
PICKLED = (".pkl", ".pickle", ".joblib", ".pt", ".pth", ".ckpt", ".dill")
"""Endings of files that are pickles, or may be."""
PREFIX = ".push-"
"""Prefix of folders with the files of a push that has not ended."""


def model_files(folder: Path) -> dict[str, Path]:
    """The files of a checkpoint that make up its model, as they are named at the root of a repository."""
    found = {name: path for name, path in files_in(folder).items() if not RUN_STATE.match(name)}
    weights = [name for name in found if name.endswith((".safetensors", ".keras", ".h5"))]
    if weights != [MODULE]:  # otherwise the only weights
        found.pop(MODULE, None)
    return found


def output_files(folder: Path) -> dict[str, Path]:
    """The files of an output folder that are pushed at the end: the model, its card, results and logs."""
    return {name: path for name, path in files_in(folder).items() if not OF_THE_RUN.match(name)}


def files_in(folder: Path) -> dict[str, Path]:
    """All regular files below a folder, by relative path; links are not followed."""
    found = {}
    for root, folders, names in os.walk(folder):
        folders.sort()
        for name in sorted(names):
            path = Path(root) / name
            if path.is_file() and not path.is_symlink():
                found[path.relative_to(folder).as_posix()] = path
    return found


def without_pickles(files: dict[str, Path]) -> tuple[dict[str, Path], list[str]]:
    """The files that are pushed, and the names of those that are left out because loading them could run code."""
    pickles = [name for name, path in files.items() if is_pickle(path)]
    return {name: path for name, path in files.items() if name not in pickles}, pickles


def is_pickle(path: Path) -> bool:
    """Whether a file is a pickle, or an archive that contains one: by its name, or by its content."""
    if path.name == "training_args.bin" or path.name.endswith(PICKLED):
        return True
    with open(path, "rb") as file:
        start = file.read(4096)
    if start[:1] == b"\x80" and start[1:2] in (b"\x02", b"\x03", b"\x04", b"\x05"):
        return True
    if start.startswith(b"\x93NUMPY"):
        return b"|O" in start
    return start.startswith(b"PK\x03\x04") and _holds_pickle(path)


def _holds_pickle(path: Path) -> bool:
    try:
        with zipfile.ZipFile(path) as archive:
            return any(name.endswith((".pkl", ".pickle")) for name in archive.namelist())
    except zipfile.BadZipFile:
        return False


def linked_copy(folder: Path, target: Path) -> Path:
    """A copy of a checkpoint that needs no space: hard links, so that its files exist until they are pushed.

    They are copied where the file system has no hard links.
    """
    shutil.rmtree(target, ignore_errors=True)
    try:
        for name, path in files_in(folder).items():
            place = target / name
            place.parent.mkdir(parents=True, exist_ok=True)
            try:
                os.link(path, place)
            except OSError:
                shutil.copyfile(path, place)
    except OSError:
        shutil.rmtree(target, ignore_errors=True)
        raise
    return target


def leftovers(folder: Path) -> Iterator[Path]:
    """Folders of pushes that were interrupted."""
    if folder.is_dir():
        yield from (path for path in folder.iterdir() if path.name.startswith(PREFIX) and path.is_dir())
