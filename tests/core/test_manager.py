"""Checkpoints on this machine and in a store: published, found, damaged, rotated, and cut off at every operation."""

from __future__ import annotations

import errno
import json
import os
import threading
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from loopwright.core.checkpoint.folder import MANIFEST, STATE
from loopwright.core.checkpoint.manager import CheckpointManager, get_last_checkpoint
from loopwright.errors import CheckpointError
from loopwright.notices import Notices

fsspec = pytest.importorskip("fsspec")
FILES = ["model.bin", "parts/optimizer.bin", STATE]
WRITING = ("put_file", "pipe_file", "rm_file", "rm")
READING = ("cat_file", "get_file", "ls", "find", "isfile", "isdir")


class Killed(BaseException):
    """The process is gone: from here on nothing it does has an effect."""


class Home:
    """A place for checkpoints, and a way to its files that does not lead through the manager."""

    def __init__(self, root: str, fs: Any, path: str) -> None:
        self.root, self.fs, self.path = root, fs, path

    def manager(self) -> CheckpointManager:
        return CheckpointManager(self.root, notices=Notices(quiet=True))

    def place(self, step: int) -> str:
        return f"{self.root}/checkpoint-{step}"

    def names(self) -> list[str]:
        if not self.fs.isdir(self.path):
            return []
        return sorted(entry["name"].rpartition("/")[2] for entry in self.fs.ls(self.path, detail=True))

    def file(self, step: int, name: str) -> str:
        """The path of a file in the newest folder of a step."""
        folders = [each for each in self.names() if each.startswith(f"checkpoint-{step}")]
        return f"{self.path}/{folders[-1]}/{name}"


class Local(Home):
    is_remote = False

    def killed_at(self, number: int, monkeypatch: Any, *, torn: bool) -> Counter:
        """A manager's process ends before this operation."""
        counter = Counter(number)
        for name in ("rename", "mkdir", "fsync", "unlink", "rmdir"):
            monkeypatch.setattr(os, name, counter.guarded(getattr(os, name)))
        return counter


class Memory(Home):
    is_remote = True

    def killed_at(self, number: int, monkeypatch: Any, *, torn: bool) -> Counter:
        counter = Counter(number)
        for name in WRITING + READING:
            half = getattr(self, f"_half_{name}", None) if torn else None
            monkeypatch.setattr(self.fs, name, counter.guarded(getattr(self.fs, name), half))
        return counter

    def _half_put_file(self, source: str, target: str, **options: Any) -> None:
        """A store that shows what it has of a file before it has all of it."""
        content = Path(source).read_bytes()
        type(self.fs).pipe_file(self.fs, target, content[: len(content) // 2])

    def _half_rm(self, path: str, **options: Any) -> None:
        files = sorted(type(self.fs).find(self.fs, path))
        for each in files[: len(files) // 2]:
            type(self.fs)._rm(self.fs, each)


class Counter:
    """Counts operations, and raises before the one it was told and at all that come after it."""

    def __init__(self, number: int) -> None:
        self.number, self.count = number, 0

    @property
    def struck(self) -> bool:
        return self.count > self.number

    def guarded(self, operation: Callable[..., Any], half: Callable[..., Any] | None = None) -> Callable[..., Any]:
        inside = threading.local()

        def run(*args: Any, **options: Any) -> Any:
            if getattr(inside, "busy", False):  # an operation made of others is one
                return operation(*args, **options)
            self.count += 1
            if self.count > self.number:
                if half and self.count == self.number + 1:
                    half(*args, **options)
                raise Killed
            inside.busy = True
            try:
                return operation(*args, **options)
            finally:
                inside.busy = False

        return run


@pytest.fixture(params=["local", "memory"])
def home(request: Any, tmp_path: Path, monkeypatch: Any) -> Iterator[Any]:
    monkeypatch.chdir(tmp_path)
    if request.param == "local":
        yield Local(str(tmp_path / "run"), fsspec.filesystem("file"), str(tmp_path / "run"))
        return
    fs = fsspec.filesystem("memory")
    name = uuid.uuid4().hex
    yield Memory(f"memory://{name}/run", fs, f"/{name}/run")
    if fs.isdir(f"/{name}"):
        fs.rm(f"/{name}", recursive=True)


@pytest.fixture
def local(tmp_path: Path) -> Local:
    return Local(str(tmp_path / "run"), fsspec.filesystem("file"), str(tmp_path / "run"))


def content(step: int, word: str = "") -> Callable[[Path], None]:
    """Writes a checkpoint that can be told from others."""

    def write(folder: Path) -> None:
        (folder / "parts").mkdir()
        for name in FILES:
            (folder / name).write_text(json.dumps({"file": name, "step": step, "word": word}))

    return write


def save(manager: CheckpointManager, *steps: int, word: str = "", **options: Any) -> None:
    for step in steps:
        manager.save(step, content(step, word), **options)


def found_in(folder: str | None) -> tuple[int, str]:
    """Step and word of a checkpoint, whose files all belong together."""
    assert folder is not None
    values = [json.loads((Path(folder) / name).read_text()) for name in FILES]
    assert [each["file"] for each in values] == FILES
    assert len({(each["step"], each["word"]) for each in values}) == 1
    return values[0]["step"], values[0]["word"]


# ---- publishing and finding -----------------------------------------------------------------------------------------


def test_what_is_saved_is_found(home: Any) -> None:
    manager = home.manager()
    place = manager.save(3, content(3, "a"))
    assert str(place) == home.place(3)
    assert {step: str(path) for step, path in manager.complete().items()} == {3: home.place(3)}
    assert found_in(home.manager().find(True)) == (3, "a")
    assert found_in(home.manager().find(home.place(3))) == (3, "a")
    assert found_in(home.manager().local(home.place(3) + "/")) == (3, "a")
    assert get_last_checkpoint(home.root) == home.place(3)


def test_what_is_found_is_a_complete_checkpoint_of_this_machine(home: Any) -> None:
    save(home.manager(), 12)
    folder = Path(home.manager().find("auto") or "")
    assert folder.name == "checkpoint-12"
    files = [path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()]
    assert sorted(files) == sorted([*FILES, MANIFEST])


def test_the_newest_is_the_one_with_the_highest_step(home: Any) -> None:
    save(home.manager(), 100, 9, 20)
    assert list(home.manager().complete()) == [9, 20, 100]
    assert found_in(home.manager().find(True)) == (100, "")


def test_nothing_asked_for_is_nothing_found(home: Any) -> None:
    save(home.manager(), 3)
    assert home.manager().find(None) is None
    assert home.manager().find(False) is None


def test_auto_starts_fresh_where_there_is_nothing_and_true_does_not(home: Any) -> None:
    assert home.manager().find("auto") is None
    assert get_last_checkpoint(home.root) is None
    with pytest.raises(CheckpointError, match='No valid checkpoint found .*; use "auto"'):
        home.manager().find(True)


def test_a_named_checkpoint_that_is_not_there_is_an_error(home: Any) -> None:
    save(home.manager(), 3)
    words = "resume_from_checkpoint=.*checkpoint-4.*no such folder; this folder has checkpoint-3"
    with pytest.raises(CheckpointError, match=words):
        home.manager().find(home.place(4))


def test_a_folder_without_manifest_and_state_is_no_checkpoint(home: Any) -> None:
    home.fs.makedirs(f"{home.path}/checkpoint-3", exist_ok=True)
    home.fs.pipe_file(f"{home.path}/checkpoint-3/model.bin", b"x")
    assert home.manager().find("auto") is None
    with pytest.raises(CheckpointError, match="no manifest and no trainer_state.json"):
        home.manager().find(home.place(3))


def test_a_checkpoint_of_another_trainer_is_found_when_there_is_no_own(home: Any) -> None:
    for step in (5, 10):
        home.fs.makedirs(f"{home.path}/checkpoint-{step}", exist_ok=True)
        home.fs.pipe_file(f"{home.path}/checkpoint-{step}/{STATE}", str(step).encode())
    manager = home.manager()
    assert (Path(manager.find(True) or "") / STATE).read_text() == "10"
    assert manager._notices.told == ["checkpoint-10 has no manifest: it was written by another trainer"]
    assert (Path(manager.find(home.place(5)) or "") / STATE).read_text() == "5"
    assert get_last_checkpoint(home.root) == home.place(10)
    save(manager, 7)
    assert found_in(manager.find(True)) == (7, "")
    assert home.fs.isfile(f"{home.path}/checkpoint-10/{STATE}")


def test_a_checkpoint_of_another_place_can_be_named(home: Any, tmp_path: Path) -> None:
    save(home.manager(), 3)
    elsewhere = CheckpointManager(tmp_path / "elsewhere", notices=Notices(quiet=True))
    assert found_in(elsewhere.find(home.place(3))) == (3, "")


def test_the_format_is_in_the_manifest(home: Any) -> None:
    home.manager().save(3, content(3), format="transformers")
    assert json.loads(home.fs.cat_file(home.file(3, MANIFEST)))["format"] == "transformers"


def test_saving_a_step_again_replaces_it(home: Any) -> None:
    manager = home.manager()
    for word in ("first", "second", "third"):
        save(manager, 3, word=word)
        assert found_in(home.manager().find(True)) == (3, word)
        assert list(manager.complete()) == [3]
        assert len(home.names()) == 1


def test_a_copied_folder_counts_by_its_manifest(local: Local) -> None:
    save(local.manager(), 3, 6)
    os.rename(Path(local.root) / "checkpoint-3", Path(local.root) / "checkpoint-9")
    assert {step: Path(path).name for step, path in local.manager().complete().items()} == {
        3: "checkpoint-9", 6: "checkpoint-6"
    }  # fmt: skip
    assert found_in(local.manager().find(True)) == (6, "")


# ---- rotation -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("keep", "protect", "expected"),
    [
        (None, [], [1, 2, 3, 4]), (0, [], [1, 2, 3, 4]), (9, [], [1, 2, 3, 4]),
        (1, [], [4]), (2, [], [3, 4]), (2, [1], [1, 4]),
    ],
)  # fmt: skip
def test_rotation_keeps_the_newest_and_the_protected(home: Any, keep: Any, protect: Any, expected: list[int]) -> None:
    manager = home.manager()
    save(manager, 1, 2, 3, 4, keep=keep, protect=protect)
    assert list(manager.complete()) == expected
    assert len(home.names()) == len(expected)


def test_rotation_goes_by_steps_and_not_by_the_order_of_saving(home: Any) -> None:
    save(home.manager(), 10, 9, 100)
    save(home.manager(), 11, keep=2)
    assert list(home.manager().complete()) == [11, 100]


# ---- damage ---------------------------------------------------------------------------------------------------------


def truncate(home: Any, path: str) -> None:
    home.fs.pipe_file(path, home.fs.cat_file(path)[:-3])


def flip(home: Any, path: str) -> None:
    data = bytearray(home.fs.cat_file(path))
    data[len(data) // 2] ^= 1
    home.fs.pipe_file(path, bytes(data))


def delete(home: Any, path: str) -> None:
    home.fs.rm_file(path)


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize(
    ("harm", "words"),
    [(truncate, "bytes, the manifest says"), (flip, "does not match its checksum"), (delete, "is missing")],
)
def test_a_damaged_checkpoint_is_set_aside_and_an_older_one_used(
    home: Any, harm: Any, words: str, name: str, caplog: Any
) -> None:
    save(home.manager(), 1, 2, 3)
    harm(home, home.file(3, name))
    with pytest.raises(CheckpointError, match=f"{name} .*{words}.*older checkpoint of"):
        home.manager().find(home.place(3))
    assert found_in(home.manager().find(True)) == (2, "")
    assert name in caplog.text and words in caplog.text and "damaged" in caplog.text
    assert list(home.manager().complete()) == [1, 2]
    assert get_last_checkpoint(home.root) == home.place(2)
    kept = len(home.names())
    save(home.manager(), 3, word="again")
    assert found_in(home.manager().find(True)) == (3, "again")
    assert len(home.names()) == kept + 1, "what was set aside is kept"


@pytest.mark.parametrize("harm", [truncate, flip, delete])
def test_a_checkpoint_with_a_damaged_manifest_does_not_exist(home: Any, harm: Any) -> None:
    save(home.manager(), 1, 2)
    harm(home, home.file(2, MANIFEST))
    assert list(home.manager().complete()) == [1]
    assert found_in(home.manager().find(True)) == (1, "")


def test_two_damaged_checkpoints_of_one_step_are_both_kept(home: Any) -> None:
    save(home.manager(), 1)
    for count in (1, 2):
        save(home.manager(), 2)
        flip(home, home.file(2, "model.bin"))
        assert found_in(home.manager().find(True)) == (1, "")
        assert len(home.names()) == 1 + count


def test_when_all_are_damaged_nothing_is_found(home: Any) -> None:
    save(home.manager(), 1, 2)
    for step in (1, 2):
        delete(home, home.file(step, "model.bin"))
        delete(home, home.file(step, STATE))
    assert home.manager().find("auto") is None


# ---- failures -------------------------------------------------------------------------------------------------------


def full(folder: Path) -> None:
    (folder / "model.bin").write_bytes(b"half")
    raise OSError(errno.ENOSPC, "No space left on device")


def test_a_full_disk_costs_one_checkpoint(home: Any, caplog: Any) -> None:
    manager = home.manager()
    save(manager, 1)
    manager.save(2, full)
    assert "the disk is full: checkpoint-2 was not saved; training continues" in caplog.text
    assert list(manager.complete()) == [1] and len(home.names()) == 1
    manager.save(2, full, background=True)
    manager.wait()
    manager.raise_if_failed()
    save(manager, 3)
    assert found_in(manager.find(True)) == (3, "")


def test_a_full_disk_removes_nothing(home: Any) -> None:
    manager = home.manager()
    save(manager, 1, 2)
    manager.save(3, full, keep=1)
    assert list(manager.complete()) == [1, 2]


def broken(folder: Path) -> None:
    raise OSError(errno.EIO, "Input/output error")


def test_a_failed_save_says_so(home: Any) -> None:
    manager = home.manager()
    with pytest.raises(CheckpointError, match="checkpoint-2 could not be written.*Input/output error.*intact"):
        manager.save(2, broken)
    assert home.names() == []


def test_a_failed_save_in_the_background_surfaces_once(home: Any) -> None:
    manager = home.manager()
    manager.save(2, broken, background=True)
    manager.wait()
    assert manager.failure is not None
    with pytest.raises(CheckpointError, match="in the background failed.*Input/output error"):
        save(manager, 3)
    save(manager, 3)
    assert found_in(manager.find(True)) == (3, "")


def test_one_save_is_in_flight_and_finding_waits_for_it(home: Any) -> None:
    manager = home.manager()
    save(manager, 1)
    begun, go_on = threading.Event(), threading.Event()

    def slow(folder: Path) -> None:
        begun.set()
        assert go_on.wait(120)
        content(2)(folder)

    manager.save(2, slow, background=True)
    assert begun.wait(120)
    assert list(manager.complete()) == [1]
    assert get_last_checkpoint(home.root) == home.place(1)
    threading.Timer(0.05, go_on.set).start()
    assert found_in(manager.find(True)) == (2, "")
    assert manager.last_seconds >= 0.04


def step_of_newest(home: Any) -> int:
    """The step of the newest checkpoint, found again if the writer removes it before it is read here."""
    while True:
        found = home.manager().find(True)
        try:
            return found_in(found)[0]
        except FileNotFoundError:
            assert home.manager().find(True) != found


def test_reading_while_saves_run_always_finds_a_complete_checkpoint(home: Any) -> None:
    """As another process does that looks at the same place."""
    writer = home.manager()
    save(writer, 1)
    steps = []
    for step in range(2, 12):
        writer.save(step, content(step), keep=1, background=True)
        steps.append(step_of_newest(home))
    writer.wait()
    writer.raise_if_failed()
    assert steps == sorted(steps)
    assert not [name for name in home.names() if "damaged" in name]


@pytest.mark.parametrize("listing", [0, 1])
def test_a_checkpoint_that_is_removed_after_it_is_listed_makes_room_for_the_newer(
    listing: int, home: Any, monkeypatch: Any
) -> None:
    save(home.manager(), 1)
    reader = home.manager()
    names, listings = reader.storage.names, []

    def listed_early() -> list[str]:
        found = names()
        if len(listings) == listing:
            save(home.manager(), 2, keep=1)
        listings.append(found)
        return found

    monkeypatch.setattr(reader.storage, "names", listed_early)
    assert found_in(reader.find(True)) == (2, "")


def test_a_checkpoint_that_is_removed_while_it_is_read_is_not_taken_for_damaged(home: Any, monkeypatch: Any) -> None:
    save(home.manager(), 1)
    reader = home.manager()
    fetch, writes = reader.storage.fetch, [2]

    def fetch_late(*args: Any) -> Any:
        while writes:
            save(home.manager(), writes.pop(), keep=1)
        return fetch(*args)

    monkeypatch.setattr(reader.storage, "fetch", fetch_late)
    assert found_in(reader.find(True)) == (2, "")
    assert len(home.names()) == 1


def test_a_checkpoint_may_be_removed_at_any_moment_of_a_search(tmp_path: Path) -> None:
    """Before each call of the reader that looks at the disk."""
    number, happened = 0, True
    while happened:
        home = Local(str(tmp_path / str(number)), fsspec.filesystem("file"), str(tmp_path / str(number)))
        save(home.manager(), 1)
        calls = []

        def looked(call: Callable[..., Any], home: Any = home, number: int = number, calls: list[int] = calls) -> Any:
            def at_this_moment(*args: Any, **options: Any) -> Any:
                calls.append(1)
                if len(calls) == number + 1:
                    save(home.manager(), 2, keep=1)
                return call(*args, **options)

            return at_this_moment

        with pytest.MonkeyPatch.context() as patch:
            for name in ("stat", "lstat", "scandir", "listdir", "rename", "open"):
                patch.setattr(os, name, looked(getattr(os, name)))
            patch.setattr("builtins.open", looked(open))
            found = home.manager().find(True)
        happened = len(calls) > number
        # Found before it was removed, or its successor: never an error, never renamed as damaged.
        assert found is not None and found.endswith(("checkpoint-1", "checkpoint-2")), number
        assert home.names() == (["checkpoint-2"] if happened else ["checkpoint-1"]), number
        number += 1
    assert number > 20


def test_two_managers_share_a_place(home: Any) -> None:
    first, second = home.manager(), home.manager()
    save(first, 1, word="first")
    save(second, 2, word="second")
    save(first, 2, 3, word="first")
    assert list(second.complete()) == [1, 2, 3]
    assert found_in(second.find(home.place(2))) == (2, "first")
    save(second, 4, keep=1)
    assert list(first.complete()) == [4] and len(home.names()) == 1


# ---- cut off at every operation -------------------------------------------------------------------------------------


@pytest.fixture
def quick_disk(monkeypatch: Any) -> None:
    """A process that ends loses nothing the system already has, so there is nothing to wait for."""
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)


def skip_where_nothing_is_torn(home: Any, torn: bool) -> None:
    if torn and not home.is_remote:
        pytest.skip("files of this machine are cut off in the staging folder only")


def cut(home: Any, number: int, torn: bool, act: Callable[[CheckpointManager], None]) -> bool:
    """Whether a process doing this ended before that operation."""
    with pytest.MonkeyPatch.context() as patch:
        manager = home.manager()
        counter = home.killed_at(number, patch, torn=torn)
        try:
            act(manager)
        except Killed:
            pass
    return counter.struck


@pytest.mark.usefixtures("quick_disk")
@pytest.mark.parametrize("torn", [False, True])
@pytest.mark.parametrize("keep", [1, 2])
def test_whatever_operation_a_save_is_cut_off_at_a_complete_checkpoint_is_found(
    home: Any, keep: int, torn: bool
) -> None:
    skip_where_nothing_is_torn(home, torn)
    number, seen = 0, set()
    while True:
        save(home.manager(), 1, 2, keep=keep)
        struck = cut(home, number, torn, lambda manager: save(manager, 3, keep=keep))
        after = home.manager()
        newest, _ = found_in(after.find(True))
        assert newest in (2, 3), number
        assert max(after.complete()) == newest
        seen.add(newest)
        if struck:
            save(after, 4, 5, keep=keep)
            assert list(home.manager().complete()) == [4, 5][-keep:]
            assert found_in(home.manager().find(True)) == (5, "")
        left = [name for name in home.names() if not is_known(home, name)]
        assert not left, (number, left)
        home.fs.rm(home.path, recursive=True)
        if not struck:
            break
        number += 1
    assert number > 8 and seen == {2, 3}


def is_known(home: Any, name: str) -> bool:
    """Whether a folder is a complete checkpoint, or one whose manifest a store that shows halves has only half of."""
    path = f"{home.path}/{name}/{MANIFEST}"
    return name.startswith("checkpoint-") and bool(home.fs.isfile(path))


@pytest.mark.usefixtures("quick_disk")
@pytest.mark.parametrize("torn", [False, True])
def test_whatever_operation_saving_a_step_again_is_cut_off_at_one_of_both_is_found(home: Any, torn: bool) -> None:
    skip_where_nothing_is_torn(home, torn)
    number, seen = 0, set()
    while True:
        save(home.manager(), 3, word="old")
        struck = cut(home, number, torn, lambda manager: save(manager, 3, word="new", keep=1))
        found = found_in(home.manager().find(True))
        seen.add(found[1])
        assert found in ((3, "old"), (3, "new")), number
        save(home.manager(), 4, keep=2)
        save(home.manager(), 5, keep=1)
        assert list(home.manager().complete()) == [5]
        left = [name for name in home.names() if not is_known(home, name)]
        assert not left, (number, left)
        home.fs.rm(home.path, recursive=True)
        if not struck:
            break
        number += 1
    assert number > 8 and seen == {"old", "new"}


@pytest.mark.usefixtures("quick_disk")
def test_whatever_operation_setting_aside_is_cut_off_at_the_older_one_is_found(home: Any) -> None:
    number = 0
    while True:
        save(home.manager(), 1, 2)
        flip(home, home.file(2, "model.bin"))
        struck = cut(home, number, False, lambda manager: manager.find(True) and None)
        assert found_in(home.manager().find(True)) == (1, ""), number
        home.fs.rm(home.path, recursive=True)
        if not struck:
            break
        number += 1
    assert number > 0


def test_leftovers_of_runs_that_died_are_cleaned_up(local: Local) -> None:
    save(local.manager(), 3)
    staging = Path(local.root) / ".checkpoint-6.partial-1234"
    staging.mkdir()
    (staging / "model.bin").write_bytes(b"half")
    replaced = Path(local.root) / "checkpoint-3.replaced"
    os.rename(Path(local.root) / "checkpoint-3", replaced)
    assert found_in(local.manager().find(True)) == (3, "")
    save(local.manager(), 3, word="new")
    assert local.names() == ["checkpoint-3", "checkpoint-3.replaced"], "the only complete one waits for its successor"
    assert found_in(local.manager().find(True)) == (3, "new")
    save(local.manager(), 4)
    assert local.names() == ["checkpoint-3", "checkpoint-4"]


def test_a_url_of_this_machine_is_a_folder(tmp_path: Path) -> None:
    manager = CheckpointManager(f"file://{tmp_path}/run", notices=Notices(quiet=True))
    save(manager, 3)
    assert manager.folder == tmp_path / "run"
    assert manager.complete() == {3: tmp_path / "run/checkpoint-3"}
    assert manager.find(f"file://{tmp_path}/run/checkpoint-3") == str(tmp_path / "run/checkpoint-3")
