"""Only verified bytes are used, and a file that cannot be read now is not taken for a damaged one."""

from __future__ import annotations

import builtins
import errno
import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest

from loopwright.core.checkpoint import reading
from loopwright.core.checkpoint.folder import MANIFEST, STATE
from loopwright.core.checkpoint.manager import CheckpointManager
from loopwright.core.checkpoint.manifest import VERSION
from loopwright.errors import CheckpointError
from loopwright.notices import Notices

ERRORS = (errno.EIO, errno.ESTALE, errno.EACCES, errno.EMFILE)


def manager(folder: Path) -> CheckpointManager:
    return CheckpointManager(folder, notices=Notices())


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Three checkpoints."""
    monkeypatch.setattr(reading, "PAUSES", (0.0, 0.0))
    for step in (1, 2, 3):
        manager(tmp_path).save(step, lambda place, step=step: write(place, step))
    return tmp_path


def write(place: Path, step: int) -> None:
    (place / STATE).write_text(json.dumps({"global_step": step}))
    (place / "model.safetensors").write_bytes(b"\x02\0\0\0\0\0\0\0{}" + bytes([step]))


def failing(monkeypatch: pytest.MonkeyPatch, broken: Path, number: int, times: int = 10**9) -> list[int]:
    """Make the operating system refuse to read a file, so many times."""
    tries: list[int] = []

    def refuse(path: Any) -> None:
        if isinstance(path, (str, os.PathLike)) and Path(path) == broken and len(tries) < times:
            tries.append(1)
            raise OSError(number, os.strerror(number), str(path))

    original, opened = os.open, builtins.open

    def low(path: Any, *args: Any, **kwargs: Any) -> int:
        refuse(path)
        return original(path, *args, **kwargs)

    def high(path: Any, *args: Any, **kwargs: Any) -> Any:
        refuse(path)
        return opened(path, *args, **kwargs)

    monkeypatch.setattr(os, "open", low)
    monkeypatch.setattr(builtins, "open", high)
    return tries


@pytest.mark.parametrize("number", ERRORS)
def test_an_unreadable_manifest_stops_and_changes_nothing(
    number: int, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = sorted(path.name for path in folder.iterdir())
    tries = failing(monkeypatch, folder / "checkpoint-3" / MANIFEST, number)
    with pytest.raises(CheckpointError, match=r"checkpoint-3/manifest.json cannot be read .* Nothing was changed"):
        manager(folder).find("auto")
    assert len(tries) == 3 and sorted(path.name for path in folder.iterdir()) == before
    monkeypatch.undo()
    assert manager(folder).find("auto") == str(folder / "checkpoint-3")


@pytest.mark.parametrize("number", ERRORS)
@pytest.mark.parametrize("name", [MANIFEST, "model.safetensors"])
def test_an_error_that_passes_is_tried_again(
    name: str, number: int, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tries = failing(monkeypatch, folder / "checkpoint-3" / name, number, times=2)
    assert manager(folder).find("auto") == str(folder / "checkpoint-3") and len(tries) == 2


CALLS = ("stat", "listdir", "scandir")
PLACES = (".", "checkpoint-3", f"checkpoint-3/{MANIFEST}", "checkpoint-3/model.safetensors")


@pytest.mark.parametrize("number", ERRORS)
@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("call", CALLS)
def test_a_folder_that_cannot_be_listed_or_entered_stops_and_changes_nothing(
    call: str, place: str, number: int, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    original, broken, tries = getattr(os, call), folder / place, []

    def refuse(path: Any = ".", *args: Any, **kwargs: Any) -> Any:
        if isinstance(path, (str, os.PathLike)) and Path(path) == broken:
            tries.append(1)
            raise OSError(number, os.strerror(number), str(path))
        return original(path, *args, **kwargs)

    before = sorted(path.name for path in folder.iterdir())
    monkeypatch.setattr(os, call, refuse)
    for request in ("auto", True, str(folder / "checkpoint-3")):
        tries.clear()
        try:
            manager(folder).find(request)
        except CheckpointError as error:
            assert "cannot be read" in str(error)
        else:
            assert not tries, f"{request} was found although {place} could not be read"
    monkeypatch.undo()
    assert sorted(path.name for path in folder.iterdir()) == before


def test_a_bad_sector_falls_back_and_renames_nothing(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    failing(monkeypatch, folder / "checkpoint-3" / "model.safetensors", errno.EIO)
    assert manager(folder).find("auto") == str(folder / "checkpoint-2")
    assert (folder / "checkpoint-3").is_dir()


@pytest.mark.parametrize("number", [errno.EACCES, errno.ESTALE, errno.EMFILE])
def test_weights_that_cannot_be_read_now_stop_the_run(
    number: int, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    failing(monkeypatch, folder / "checkpoint-3" / "model.safetensors", number)
    with pytest.raises(CheckpointError, match="cannot be read"):
        manager(folder).find("auto")
    assert (folder / "checkpoint-3").is_dir()


def test_saving_goes_on_beside_an_unreadable_checkpoint(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    failing(monkeypatch, folder / "checkpoint-1" / MANIFEST, errno.EACCES)
    manager(folder).save(4, lambda place: write(place, 4), keep=2)
    assert {path.name for path in folder.iterdir()} == {"checkpoint-1", "checkpoint-3", "checkpoint-4"}


def test_an_explicit_path_with_a_damaged_manifest_is_refused(folder: Path) -> None:
    path = folder / "checkpoint-3" / MANIFEST
    for place in range(0, len(path.read_bytes()), 7):
        content = bytearray(path.read_bytes())
        content[place] ^= 1
        (copy := folder / f"copy-{place}").mkdir()
        shutil.copytree(folder / "checkpoint-3", copy / "checkpoint-3")
        (copy / "checkpoint-3" / MANIFEST).write_bytes(content)
        with pytest.raises(CheckpointError):
            manager(folder).find(str(copy / "checkpoint-3"))


def test_an_explicit_path_without_a_manifest_says_what_is_not_verified(
    folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (folder / "checkpoint-3" / MANIFEST).unlink()
    assert manager(folder).find(str(folder / "checkpoint-3")) == str(folder / "checkpoint-3")
    assert "used without verification" in caplog.text


@pytest.mark.parametrize(
    "name", ["model.safetensors.index.json", "ranks/0.json", "rng.json", "optimizer.safetensors"]
)
def test_a_file_that_was_added_later_is_refused_by_name(name: str, folder: Path) -> None:
    path = folder / "checkpoint-3" / name
    path.parent.mkdir(exist_ok=True)
    path.write_text("{}")
    for request in (str(folder / "checkpoint-3"), "auto"):
        with pytest.raises(CheckpointError, match=f"{name} is not listed in the manifest"):
            manager(folder).find(request)
    path.unlink()
    assert manager(folder).find("auto") == str(folder / "checkpoint-3"), "nothing was renamed"


def test_files_that_a_callback_adds_do_no_harm(folder: Path) -> None:
    """As those that save adapters, tokenizers or notes beside what the trainer has saved."""
    names = ("adapter_model.safetensors", "adapter/model.safetensors", "value_head.safetensors", "notes.txt", "x.json")
    for name in names:
        path = folder / "checkpoint-3" / name
        path.parent.mkdir(exist_ok=True)
        path.write_text("{}")
    assert manager(folder).find("auto") == manager(folder).find(str(folder / "checkpoint-3"))
    assert manager(folder).find("auto") == str(folder / "checkpoint-3")


@pytest.mark.parametrize("kind", ["pipe", "folder", "huge"])
def test_what_stands_in_the_place_of_a_manifest_is_not_read(kind: str, folder: Path) -> None:
    path = folder / "checkpoint-3" / MANIFEST
    path.unlink()
    if kind == "pipe":
        os.mkfifo(path)
    elif kind == "folder":
        path.mkdir()
    else:
        with open(path, "wb") as file:
            file.truncate(10 << 30)
    with pytest.raises(CheckpointError, match="was damaged after saving"):
        manager(folder).find(str(folder / "checkpoint-3"))
    assert manager(folder).find("auto") == str(folder / "checkpoint-2")


def changed(folder: Path, **values: Any) -> None:
    """A manifest with other values, and the check of these."""
    from loopwright.core.checkpoint.manifest import Manifest

    path = folder / "checkpoint-3" / MANIFEST
    Manifest(**{**json.loads(path.read_text()), **values}).write(path.parent)


def test_a_newer_manifest_is_refused_and_stays(folder: Path) -> None:
    changed(folder, version=VERSION + 1)
    for request in ("auto", str(folder / "checkpoint-3")):
        with pytest.raises(CheckpointError, match="newer version of loopwright"):
            manager(folder).find(request)
    assert (folder / "checkpoint-3").is_dir()


@pytest.mark.parametrize("name", ["/etc/hostname", "../checkpoint-2/model.safetensors", "a/../../b", "C:\\weights"])
def test_names_outside_of_the_folder_are_refused(name: str, folder: Path) -> None:
    changed(folder, files={name: {"size": 1, "sha256": "0"}})
    with pytest.raises(CheckpointError, match="not a checkpoint file"):
        manager(folder).find(str(folder / "checkpoint-3"))


@pytest.mark.parametrize(
    "values", [{"step": "3"}, {"files": []}, {"files": {"a": 1}}, {"files": {"a": {"size": "1"}}}, {"tensors": 1},
               {"version": None}]
)  # fmt: skip
def test_a_manifest_of_other_types_is_damaged(values: dict[str, Any], folder: Path) -> None:
    changed(folder, **values)
    with pytest.raises(CheckpointError, match="was damaged after saving"):
        manager(folder).find(str(folder / "checkpoint-3"))
