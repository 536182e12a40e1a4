"""Places and stores: what is a URL, in which order a store is written and emptied, and what may go wrong on the way."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from loopwright.args.paths import is_url, plain_path, working_folder
from loopwright.core.checkpoint.folder import MANIFEST, STATE
from loopwright.core.checkpoint.manager import CheckpointManager
from loopwright.core.checkpoint.storage import FsspecStorage, LocalStorage, folder_for, open_storage, split_place
from loopwright.errors import CheckpointError, MissingPackage, OutputError
from loopwright.notices import Notices

fsspec = pytest.importorskip("fsspec")


@pytest.fixture
def fs() -> Any:
    return fsspec.filesystem("memory")


def write(folder: Path) -> None:
    (folder / "sub").mkdir()
    for name in ("model.bin", "sub/more.bin", STATE):
        (folder / name).write_text(f"this is {name}")


def manager_of(url: str) -> CheckpointManager:
    return CheckpointManager(url, notices=Notices(quiet=True))


def inside(url: str, *names: str) -> str:
    return "/".join(["/" + url.removeprefix("memory://"), *names])


# ---- places ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("place", "expected"),
    [
        ("run", "run"), ("/a/run", "/a/run"), ("./run", "./run"), ("C:/run", "C:/run"), (None, "."),
        ("file:///a/run", "/a/run"), ("local:///a/run", "/a/run"), ("file:///", "/"),
    ],
)  # fmt: skip
def test_a_folder_is_its_own_working_folder(place: Any, expected: str) -> None:
    assert not is_url(place)
    assert working_folder(place) == expected
    assert plain_path(place or ".") == expected
    assert isinstance(open_storage(place), LocalStorage)


@pytest.mark.parametrize(
    ("url", "expected"),
    [
        ("s3://bucket/run", "s3/bucket/run"), ("memory://run/", "memory/run"), ("gs://b/../../x", "gs/b/x"),
        ("abfs://c@a.host/run", "abfs/c@a.host/run"),
    ],
)  # fmt: skip
def test_a_url_has_a_working_folder_that_follows_from_it(url: str, expected: str) -> None:
    assert is_url(url)
    assert working_folder(url) == os.path.join("trainer_output", *expected.split("/"))


@pytest.mark.parametrize(
    ("place", "expected"),
    [
        ("run/checkpoint-3", ("run", "checkpoint-3")), ("checkpoint-3/", (".", "checkpoint-3")),
        ("file:///a/checkpoint-3", ("/a", "checkpoint-3")), ("memory://checkpoint-3", ("memory://", "checkpoint-3")),
        ("s3://b/run/checkpoint-3/", ("s3://b/run", "checkpoint-3")),
    ],
)  # fmt: skip
def test_a_place_splits_into_root_and_name(place: str, expected: tuple[str, str]) -> None:
    assert split_place(place) == expected
    assert split_place(Path(place))[1] == expected[1]


def test_folder_for_a_url_uploads_what_is_written(url: str, fs: Any, tmp_path: Path) -> None:
    with folder_for(f"{url}/final") as folder:
        write(Path(folder))
    assert not Path(folder).exists()
    assert fs.cat_file(inside(url, "final/sub/more.bin")) == b"this is sub/more.bin"
    with folder_for(tmp_path / "here") as folder:
        assert folder == str(tmp_path / "here")


# ---- the package ----------------------------------------------------------------------------------------------------


def test_without_urls_fsspec_is_not_loaded(tmp_path: Path) -> None:
    code = (
        "import sys\nfrom loopwright.core.checkpoint.manager import CheckpointManager\n"
        "from loopwright.notices import Notices\n"
        "CheckpointManager(sys.argv[1], notices=Notices()).save(1, lambda folder: None)\n"
        "assert 'fsspec' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code, str(tmp_path)], check=True)


def test_only_fsspec_is_loaded_by_name() -> None:
    """The walk over imports sees literal names; the one that is not literal is this one."""
    source = Path(sys.modules[FsspecStorage.__module__].__file__ or "").read_text(encoding="utf-8")
    assert re.findall(r"import_module\((.*)\)", source) == ['f"{_FSSPEC}.core"']
    assert re.findall(r"^_FSSPEC = (.*)$", source, flags=re.M) == ['"fsspec"']


def test_a_url_without_fsspec_says_what_to_install(monkeypatch: Any) -> None:
    monkeypatch.setitem(sys.modules, "fsspec", None)
    monkeypatch.delitem(sys.modules, "fsspec.core", raising=False)
    with pytest.raises(MissingPackage, match="memory://run.*pip install fsspec"):
        manager_of("memory://run")


def test_a_protocol_whose_package_is_missing_says_which(monkeypatch: Any) -> None:
    monkeypatch.setitem(sys.modules, "s3fs", None)
    with pytest.raises(MissingPackage, match="s3://bucket/run.*pip install s3fs"):
        manager_of("s3://bucket/run")


def test_an_unknown_protocol_is_an_error_of_the_output() -> None:
    with pytest.raises(OutputError, match="s4://bucket/run.*Protocol not known"):
        manager_of("s4://bucket/run")


@pytest.mark.parametrize("make", [lambda url: url, lambda url: "run"])
def test_check_writable_leaves_nothing_behind(make: Any, url: str, fs: Any, tmp_path: Path) -> None:
    open_storage(make(url)).check_writable()
    assert not [path for path in tmp_path.rglob("*") if path.is_file()]
    assert not fs.isdir(inside(url)) or fs.find(inside(url)) == []


def test_what_cannot_be_written_is_an_oserror(url: str, fs: Any, monkeypatch: Any) -> None:
    def refuse(*args: Any, **options: Any) -> None:
        raise NotImplementedError

    monkeypatch.setattr(fs, "pipe_file", refuse)
    with pytest.raises(OSError, match="can only be read"):
        open_storage(url).check_writable()


# ---- the order of things --------------------------------------------------------------------------------------------


class Spy:
    """Notes what is written and deleted, by the last two parts of the path."""

    def __init__(self, fs: Any, monkeypatch: Any) -> None:
        self.seen: list[tuple[str, str]] = []
        for name in ("put_file", "rm_file", "rm", "pipe_file"):
            monkeypatch.setattr(fs, name, self._noting(name, getattr(fs, name)))
        self._busy = False

    def _noting(self, name: str, operation: Any) -> Any:
        def run(*args: Any, **options: Any) -> Any:
            if self._busy:
                return operation(*args, **options)
            path = str(args[1] if name == "put_file" else args[0])
            self.seen.append((name, path.partition("/run/")[2]))
            self._busy = True
            try:
                return operation(*args, **options)
            finally:
                self._busy = False

        return run


def test_the_manifest_is_uploaded_last_and_deleted_first(url: str, fs: Any, monkeypatch: Any) -> None:
    manager = manager_of(url)
    spy = Spy(fs, monkeypatch)
    manager.save(1, write)
    files = ["model.bin", "sub/more.bin", STATE]
    assert spy.seen == [("put_file", f"checkpoint-1.1/{name}") for name in [*files, MANIFEST]]
    spy.seen.clear()
    manager.save(2, write, keep=1)
    assert spy.seen[-3:] == [
        ("put_file", f"checkpoint-2.1/{MANIFEST}"), ("rm_file", f"checkpoint-1.1/{MANIFEST}"), ("rm", "checkpoint-1.1")
    ]  # fmt: skip
    spy.seen.clear()
    manager.save(2, write)
    assert spy.seen[-3:] == [
        ("put_file", f"checkpoint-2.2/{MANIFEST}"), ("rm_file", f"checkpoint-2.1/{MANIFEST}"), ("rm", "checkpoint-2.1")
    ]  # fmt: skip


def test_only_own_leftovers_are_cleaned_up(url: str, fs: Any) -> None:
    manager_of(url).save(1, write)
    theirs = ["checkpoint-5/trainer_state.json", "other/checkpoint-7.1/x", "notes.txt", "checkpoint-8.1.bak/x"]
    ours = ["checkpoint-6.1/trainer_state.json", "checkpoint-1.3/model.bin"]
    kept = ["checkpoint-6.2/damaged.json", "checkpoint-6.3/manifest.json"]
    for name in [*theirs, *ours, *kept]:
        fs.pipe_file(inside(url, name), b"?")
    assert Path(manager_of(url).find(True) or "").name == "checkpoint-1"
    manager_of(url).save(2, write)
    assert all(fs.isfile(inside(url, name)) for name in [*theirs, *kept])
    assert not any(fs.exists(inside(url, name)) for name in ours)
    assert list(manager_of(url).complete()) == [1, 2]


def test_half_an_upload_is_nobodys_checkpoint(url: str, fs: Any) -> None:
    """Though it has the state file by which checkpoints of other trainers are known."""
    fs.pipe_file(inside(url, "checkpoint-6.1", STATE), b"{}")
    manager = manager_of(url)
    assert manager.find("auto") is None
    for name in ("checkpoint-6", "checkpoint-6.1"):
        with pytest.raises(CheckpointError, match="no such folder"):
            manager.find(f"{url}/{name}")


def test_a_local_checkpoint_that_was_copied_there_counts(url: str, fs: Any, tmp_path: Path) -> None:
    manager_of(str(tmp_path / "run")).save(3, write)
    with folder_for(f"{url}/checkpoint-3") as folder:
        os.rmdir(folder)
        shutil.move(tmp_path / "run/checkpoint-3", folder)
    assert list(manager_of(url).complete()) == [3]
    assert manager_of(url).find(True)
    manager_of(url).save(3, write)
    assert [Path(each).name for each in fs.ls(inside(url), detail=False)] == ["checkpoint-3.1"]


def test_a_publication_can_be_named_by_its_own_folder(url: str) -> None:
    manager = manager_of(url)
    manager.save(3, write)
    assert Path(manager.find(f"{url}/checkpoint-3.1") or "").name == "checkpoint-3"


def test_a_damaged_checkpoint_says_why_in_the_store(url: str, fs: Any) -> None:
    manager_of(url).save(3, write)
    fs.pipe_file(inside(url, "checkpoint-3.1/model.bin"), b"this is noodles!?")
    manager_of(url).find("auto")
    note = json.loads(fs.cat_file(inside(url, "checkpoint-3.1/damaged.json")))
    assert "model.bin" in note["reason"]
    assert "model.bin" in note["manifest"]["files"]
    assert not fs.exists(inside(url, "checkpoint-3.1", MANIFEST))


# ---- bad connections ------------------------------------------------------------------------------------------------


def failing(fs: Any, monkeypatch: Any, name: str, *, times: int = 1_000_000) -> None:
    """An operation of the store fails this many times."""
    operation, left = getattr(fs, name), [times]

    def run(*args: Any, **options: Any) -> Any:
        if left[0]:
            left[0] -= 1
            raise ConnectionError("the line is dead")
        return operation(*args, **options)

    monkeypatch.setattr(fs, name, run)


def test_a_manifest_that_cannot_be_read_now_is_not_one_that_is_gone(url: str, fs: Any, monkeypatch: Any) -> None:
    manager_of(url).save(3, write)
    with monkeypatch.context() as patch:
        failing(fs, patch, "cat_file")
        with pytest.raises(ConnectionError):
            manager_of(url).find("auto")
        with pytest.raises(CheckpointError, match="could not be written.*the line is dead"):
            manager_of(url).save(4, write)
    assert list(manager_of(url).complete()) == [3]


def test_a_download_that_fails_is_an_error_and_sets_nothing_aside(url: str, fs: Any, monkeypatch: Any) -> None:
    manager_of(url).save(3, write)
    with monkeypatch.context() as patch:
        failing(fs, patch, "get_file")
        with pytest.raises(CheckpointError, match="checkpoint-3 could not be read .*the line is dead"):
            manager_of(url).find(True)
    assert manager_of(url).find(True)


def test_a_download_that_went_wrong_once_is_no_damage(url: str, fs: Any, monkeypatch: Any) -> None:
    manager_of(url).save(3, write)
    operation, seen = fs.get_file, []

    def once_short(source: str, target: str, **options: Any) -> None:
        operation(source, target, **options)
        if not seen:
            os.truncate(target, 3)
        seen.append(target)

    monkeypatch.setattr(fs, "get_file", once_short)
    assert (Path(manager_of(url).find(True) or "") / "model.bin").read_text() == "this is model.bin"


@pytest.mark.parametrize("name", ["model.bin", MANIFEST])
def test_an_upload_that_fails_is_taken_back(url: str, fs: Any, monkeypatch: Any, name: str) -> None:
    manager = manager_of(url)
    manager.save(3, write)
    operation = fs.put_file

    def fail(source: str, target: str, **options: Any) -> None:
        operation(source, target, **options)
        if target.endswith(f"checkpoint-4.1/{name}"):
            raise ConnectionError("the line is dead")

    monkeypatch.setattr(fs, "put_file", fail)
    with pytest.raises(CheckpointError, match="checkpoint-4 could not be written .*the line is dead"):
        manager.save(4, write)
    assert [Path(each).name for each in fs.ls(inside(url), detail=False)] == ["checkpoint-3.1"]
    assert not list(Path(working_folder(url)).iterdir())


def test_a_file_that_arrives_cut_short_is_not_vouched_for(url: str, fs: Any, monkeypatch: Any) -> None:
    operation = fs.put_file

    def short(source: str, target: str, **options: Any) -> None:
        operation(source, target, **options)
        if target.endswith("model.bin"):
            fs.pipe_file(target, b"this")

    monkeypatch.setattr(fs, "put_file", short)
    with pytest.raises(CheckpointError, match="model.bin has 17 bytes, but 4 arrived at"):
        manager_of(url).save(4, write)
    assert manager_of(url).complete() == {}


# ---- downloads ------------------------------------------------------------------------------------------------------


def test_a_download_stays_until_the_next_save(url: str) -> None:
    manager_of(url).save(3, write)
    manager = manager_of(url)
    folder = Path(manager.find(True) or "")
    assert Path(working_folder(url)).absolute() in folder.parents
    del manager
    assert folder.is_dir(), "it belongs to whoever asked for it"
    manager = manager_of(url)
    second = Path(manager.find(True) or "")
    manager.save(4, write)
    assert not second.exists() and folder.is_dir()


def test_a_download_is_gone_when_the_process_ends(tmp_path: Path) -> None:
    code = (
        "import os\nfrom loopwright.core.checkpoint.manager import CheckpointManager\n"
        "from loopwright.notices import Notices\n"
        "manager = CheckpointManager('memory://run', notices=Notices())\n"
        "manager.save(1, lambda folder: (folder / 'a').write_text('b') and None)\n"
        "print(os.path.abspath(manager.find(True)))\nassert os.path.isdir(manager.find(True))\nos.chdir('/')"
    )
    ended = subprocess.run([sys.executable, "-c", code], check=True, cwd=tmp_path, capture_output=True, text=True)
    folder = Path(ended.stdout.strip())
    assert tmp_path in folder.parents
    assert not folder.exists() and not folder.parent.exists()


@pytest.mark.parametrize("name", ["../outside", "/tmp/outside", "sub/../../outside"])
def test_a_manifest_cannot_write_outside_the_download(url: str, fs: Any, name: str, tmp_path: Path) -> None:
    manager_of(url).save(3, write)
    path = inside(url, "checkpoint-3.1", MANIFEST)
    manifest = json.loads(fs.cat_file(path))
    manifest["files"][name] = {"size": 1, "sha256": "x"}
    manifest["check"] = None
    fs.pipe_file(path, json.dumps(manifest).encode())
    with pytest.raises(CheckpointError, match="its manifest names .*outside"):
        manager_of(url).find(f"{url}/checkpoint-3")
    assert not list(tmp_path.rglob("outside"))
