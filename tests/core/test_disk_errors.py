"""Errors of the disk, as any exception, on one rank and on two."""

from __future__ import annotations

import errno
import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from loopwright.core.checkpoint.disk_errors import FULL, disk_error
from loopwright.core.checkpoint.manager import CheckpointManager
from loopwright.core.checkpoint.manifest import damage, read_manifest
from loopwright.core.checkpoint.writers import Part
from loopwright.errors import CheckpointError
from loopwright.notices import Notices


def plain(number: int) -> Exception:
    return OSError(number, os.strerror(number))


def in_text(number: int) -> Exception:
    return RuntimeError(f"Error while serializing: I/O error: {os.strerror(number)} (os error {number})")


def of_hdf5(number: int) -> Exception:
    return RuntimeError(f"Can't write data (file write failed: errno = {number}, error message = '...')")


def in_words(number: int) -> Exception:
    return RuntimeError(f"file.cc:42 : failed to write: {os.strerror(number)}")


def handled(number: int) -> Exception:
    """As torch raises it: while the error of a write is handled, closing the file fails as well."""
    try:
        try:
            raise plain(number)
        except OSError:
            raise RuntimeError("[enforce fail] . unexpected pos 64 vs 0")  # noqa: B904
    except RuntimeError as error:
        return error


FORMS: list[Callable[[int], Exception]] = [plain, in_text, of_hdf5, in_words, handled]
ERRORS = (errno.ENOSPC, errno.EDQUOT, errno.EIO)


@pytest.mark.parametrize("form", FORMS, ids=lambda form: form.__name__)
@pytest.mark.parametrize("number", ERRORS)
def test_it_is_found_in_any_exception(number: int, form: Any) -> None:
    found = disk_error(form(number))
    assert found is not None and found.errno == number


@pytest.mark.parametrize(
    "error", [ValueError("28"), KeyError("errno"), FileNotFoundError(errno.ENOENT, "no"), RuntimeError("step 28"), None]
)
def test_other_errors_are_none(error: Any) -> None:
    assert disk_error(error) is None


class Meeting:
    """Values of two threads, as ranks exchange them."""

    def __init__(self) -> None:
        self.barrier, self.values = threading.Barrier(2, timeout=120), [None, None]

    def gather(self, rank: int, value: Any) -> list[Any]:
        self.values[rank] = value
        self.barrier.wait()
        found = list(self.values)
        self.barrier.wait()
        return found


class Crew:
    leader = 0

    def __init__(self, rank: int, meeting: Meeting) -> None:
        self.rank, self.gather = rank, lambda value: meeting.gather(rank, value)


def write(folder: Path, rank: int, text: str) -> Part:
    (folder / f"shard-{rank}").write_text(text)
    return Part([f"shard-{rank}"], record={"rank": rank})


def records(folder: Path, found: dict[int, Any]) -> None:
    (folder / "ranks").mkdir()
    for rank, each in found.items():
        (folder / "ranks" / f"{rank}.json").write_text(str(each))


def save(folder: Path, step: int, writers: list[Any], keep: Any = records, *, background: bool = False) -> list[Any]:
    """Save with two ranks; returns what each has raised."""
    meeting, raised = Meeting(), [None, None]

    def rank_saves(rank: int) -> None:
        manager = CheckpointManager(folder, notices=Notices(quiet=True))
        try:
            manager.save(step, writers[rank], crew=Crew(rank, meeting), records=keep, background=background)
            manager.wait()
            manager.raise_if_failed()
        except Exception as error:
            raised[rank] = error  # type: ignore[call-overload]

    threads = [threading.Thread(target=rank_saves, args=(rank,)) for rank in (0, 1)]
    for each in threads:
        each.start()
    for each in threads:
        each.join(120)
    return raised


def good(rank: int) -> Callable[[Path], Part]:
    return lambda folder: write(folder, rank, "good")


def failing(rank: int, error: Exception, *, half: bool) -> Callable[[Path], Part]:
    def fail(folder: Path) -> Part:
        if half:
            write(folder, rank, "ha")
        raise error

    return fail


@pytest.mark.parametrize("where", ["rank 0", "rank 1", "half of rank 1", "records"])
@pytest.mark.parametrize("form", FORMS, ids=lambda form: form.__name__)
@pytest.mark.parametrize("number", ERRORS)
@pytest.mark.parametrize("background", [False, True])
def test_two_ranks(background: bool, number: int, form: Any, where: str, tmp_path: Path) -> None:
    """A full disk costs the checkpoint on all ranks; another error stops all; neither harms what was there."""
    assert save(tmp_path, 1, [good(0), good(1)]) == [None, None]
    writers, keep = [good(0), good(1)], records
    if where == "records":

        def keep(folder: Path, found: Any) -> None:
            records(folder, found)
            raise form(number)

    else:
        rank = int(where[-1])
        writers[rank] = failing(rank, form(number), half=where.startswith("half"))
    raised = save(tmp_path, 2, writers, keep, background=background)
    if number in FULL:
        assert raised == [None, None]
    else:
        assert all(isinstance(each, CheckpointError) for each in raised), raised
        assert all("checkpoint-2 could not be written" in str(each) for each in raised)
        assert all("earlier checkpoints are intact" in str(each) for each in raised)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["checkpoint-1"]
    assert save(tmp_path, 3, [good(0), good(1)]) == [None, None]
    for step in (1, 3):
        manifest = read_manifest(tmp_path / f"checkpoint-{step}")
        assert manifest is not None and damage(tmp_path / f"checkpoint-{step}", manifest) is None
        assert set(manifest.files) == {"shard-0", "shard-1", "ranks/0.json", "ranks/1.json"}


def test_every_folder_of_a_checkpoint_is_flushed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The names of the files in them too, before the checkpoint is visible: those of ranks, and of tf.data."""
    if not Path("/proc/self/fd").is_dir():
        pytest.skip("needs /proc")
    events: list[str] = []
    fsync, rename = os.fsync, os.rename
    monkeypatch.setattr(os, "fsync", lambda fd: (events.append(os.readlink(f"/proc/self/fd/{fd}")), fsync(fd))[1])
    monkeypatch.setattr(os, "rename", lambda a, b: (events.append("rename"), rename(a, b))[1])

    def write_folders(folder: Path) -> None:
        for name in ("ranks", "tf_data/deep"):
            (folder / name).mkdir(parents=True)
            (folder / name / "file").write_text("x")

    CheckpointManager(tmp_path, notices=Notices()).save(1, write_folders)
    before = {path.split("/.checkpoint-1.partial-")[-1].partition("/")[2] for path in events[: events.index("rename")]}
    assert before == {"ranks/file", "tf_data/deep/file", "manifest.json", "ranks", "tf_data", "tf_data/deep", ""}


def test_a_checkpoint_that_cannot_be_removed_does_not_stop_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    manager = CheckpointManager(tmp_path, notices=Notices())
    for step in (1, 2):
        manager.save(step, lambda folder: (folder / "x").write_text("x"), keep=2)

    def refuse(name: str) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(manager.storage, "remove", refuse)
    manager.save(3, lambda folder: (folder / "x").write_text("x"), keep=2)
    assert "checkpoint-1 could not be removed" in caplog.text
    monkeypatch.undo()
    manager.save(4, lambda folder: (folder / "x").write_text("x"), keep=2)
    assert sorted(manager.complete()) == [3, 4]
