"""One owner of an output folder: real processes that meet there, are killed, fork, or take over."""

from __future__ import annotations

import errno
import json
import multiprocessing
import os
import random
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from loopwright.core.checkpoint.manager import CheckpointManager
from loopwright.core.checkpoint.manifest import read_manifest
from loopwright.core.checkpoint.ownership import lock_file, lock_object, owner
from loopwright.core.checkpoint.ownership.claim import decoded, own_claim
from loopwright.core.checkpoint.ownership.lock_file import FREE, LOCK, LockFile
from loopwright.errors import OwnerError
from loopwright.notices import Notices

from .numpy_runs import Interfering, outcome, steps_in, trainer_of

FORK = multiprocessing.get_context("fork")
SAVED: dict[str, Any] = {"save_strategy": "steps", "save_steps": 2, "num_train_epochs": 4}


@pytest.fixture(autouse=True)
def _no_long_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(owner, "GRACE", 0.3)


def slow(seconds: float) -> Interfering:
    """A callback that makes every update slow."""
    callback = Interfering("on_step_end", 1, lambda *given, **context: None)
    callback.on_step_end = lambda *given, **context: time.sleep(seconds)  # type: ignore[attr-defined]
    return callback


def child(folder: str, results: Any, seconds: float, resume: Any, options: dict[str, Any]) -> None:
    """A run in a process of its own; puts its ending on the queue."""
    trainer = trainer_of(folder, slow(seconds), **{**SAVED, **options})
    try:
        trainer.train(resume)
        results.put(("end", outcome(trainer)))
    except OwnerError as error:
        results.put(("owner", str(error)))
        results.close()
        results.join_thread()
        os._exit(1)


@contextmanager
def running(folder: Path, *, seconds: float = 0.1, resume: Any = None, **options: Any) -> Iterator[tuple[Any, Any]]:
    """A run in another process, and the queue of its result."""
    results = FORK.Queue()
    process = FORK.Process(target=child, args=(str(folder), results, seconds, resume, options))
    process.start()
    try:
        yield process, results
    finally:
        process.kill()
        process.join(120)


def until(condition: Callable[[], Any], seconds: float = 120) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "this did not happen in time"
        time.sleep(0.01)


def claim_in(folder: Path) -> dict[str, Any]:
    return json.loads((folder / LOCK).read_text())


def files_in(folder: Path) -> dict[str, bytes]:
    found = (path for path in folder.rglob("*") if path.is_file() and not path.name.startswith(f".{LOCK}"))
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in found}


def undisturbed(folder: Path) -> dict[str, Any]:
    trainer = trainer_of(folder, **SAVED)
    trainer.train()
    return outcome(trainer)


# ---- two runs -------------------------------------------------------------------------------------------------------


def test_a_second_run_is_refused_by_name_and_the_first_ends_to_the_bit(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    with running(folder) as (first, results):
        until(lambda: steps_in(folder))
        for take_over in ("auto", None):
            with pytest.raises(OwnerError) as refused:
                trainer_of(folder, **SAVED).train(take_over)
            text = str(refused.value)
            assert (
                f"process {first.pid} on " in text and "last sign of life" in text and claim_in(folder)["since"] in text
            )
            assert "another output_dir" in text and "take_over=True" in text
        kind, result = results.get(timeout=120)
    assert kind == "end"
    assert result == undisturbed(tmp_path / "alone")
    assert not (folder / LOCK).exists()


def test_two_threads_of_one_process_refuse_each_other(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    first = threading.Thread(target=trainer_of(folder, slow(0.1), **SAVED).train)
    first.start()
    until(lambda: steps_in(folder))
    with pytest.raises(OwnerError, match=f"process {os.getpid()} on "):
        trainer_of(folder).train()
    first.join(120)
    trainer_of(folder).train()
    assert not (folder / LOCK).exists()


def contend(folder: Path, start: Any, results: Any, done: Any) -> None:
    manager = CheckpointManager(folder, notices=Notices(quiet=True))
    start.wait()
    try:
        manager.take()
        results.put(True)
        done.wait(120)
        manager.release()
    except OwnerError:
        results.put(False)


@pytest.mark.parametrize("left", [False, True])
def test_of_many_that_start_together_one_gets_the_folder(left: bool, tmp_path: Path) -> None:
    for number in range(3):
        folder = tmp_path / str(number)
        folder.mkdir()
        if left:  # by a run that was killed
            dead = json.loads(own_claim("dead").encoded())
            (folder / LOCK).write_text(json.dumps({**dead, "born": "0"}))
        start, done, results = FORK.Event(), FORK.Event(), FORK.Queue()
        processes = [FORK.Process(target=contend, args=(folder, start, results, done)) for _ in range(6)]
        for process in processes:
            process.start()
        start.set()
        assert sum(results.get(timeout=120) for _ in processes) == 1
        done.set()
        for process in processes:
            process.join(120)
        assert list(folder.iterdir()) == []


def test_a_run_that_is_about_to_end_is_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(owner, "GRACE", 20.0)
    with running(tmp_path, seconds=0.02):
        until(lambda: (tmp_path / LOCK).exists())
        trainer_of(tmp_path).train()


def test_the_lock_names_the_run(tmp_path: Path) -> None:
    seen = []
    trainer_of(
        tmp_path, Interfering("on_step_end", 2, lambda *given, **context: seen.append(claim_in(tmp_path)))
    ).train()
    assert seen[0]["run"] == json.loads((tmp_path / "current_run.json").read_text())["run"]
    assert seen[0]["pid"] == os.getpid() and seen[0]["host"]


# ---- every end releases it ------------------------------------------------------------------------------------------


def fail(*given: Any, **context: Any) -> None:
    raise ValueError("the callback failed")


@pytest.mark.parametrize(
    ("act", "ending"),
    [
        (fail, ValueError),
        (lambda *given, **context: os.kill(os.getpid(), signal.SIGTERM), SystemExit),
        (lambda *given, **context: os.kill(os.getpid(), signal.SIGINT), KeyboardInterrupt),
    ],
)
def test_every_end_of_a_run_releases_the_folder(act: Any, ending: type[BaseException], tmp_path: Path) -> None:
    with pytest.raises(ending):
        trainer_of(tmp_path, Interfering("on_step_end", 3, act), **SAVED).train()
    assert not [path for path in tmp_path.iterdir() if LOCK in path.name]
    assert "owner" not in [each.name for each in threading.enumerate()]


@pytest.mark.parametrize("number", range(10))
def test_after_kill_9_at_a_random_moment_the_same_command_works_at_once(number: int, tmp_path: Path) -> None:
    moments, folder = random.Random(number), tmp_path / "run"
    with running(folder, seconds=0.01, resume="auto") as (process, _):
        until(lambda: folder.exists())
        time.sleep(moments.uniform(0.0, 0.3))
        process.kill()
        process.join(120)
    started = time.monotonic()
    trainer = trainer_of(folder, **SAVED)
    trainer.train("auto")
    assert time.monotonic() - started < 10
    assert not [path for path in folder.iterdir() if path.name == LOCK]
    if number == 0:
        expected = undisturbed(tmp_path / "alone")
        assert {**outcome(trainer), "state": None} == {**expected, "state": None}


def fork_and_die(folder: str, pids: Any) -> None:
    """A run that forks a child, as a loader does, and is killed."""

    def act(*given: Any, **context: Any) -> None:
        pid = os.fork()
        if pid == 0:
            time.sleep(60)
            os._exit(0)
        pids.send(pid)
        time.sleep(0.2)
        os.kill(os.getpid(), signal.SIGKILL)

    trainer_of(folder, Interfering("on_step_end", 2, act)).train()


def test_a_forked_worker_does_not_keep_the_lock(tmp_path: Path) -> None:
    receive, send = FORK.Pipe()
    process = FORK.Process(target=fork_and_die, args=(str(tmp_path), send))
    process.start()
    worker = receive.recv()
    try:
        until(lambda: not process.is_alive())
        os.kill(worker, 0)  # it lives
        found = LockFile(tmp_path).find()
        assert found is not None and found.hold == FREE
        found.close()
        trainer_of(tmp_path).train()
    finally:
        os.kill(worker, signal.SIGKILL)


def test_a_forked_child_that_ends_does_not_release_the_lock(tmp_path: Path) -> None:
    manager = CheckpointManager(tmp_path, notices=Notices(quiet=True))
    manager.take()
    process = FORK.Process(target=manager.release)
    process.start()
    process.join(120)
    found = LockFile(tmp_path).find()
    assert found is not None and found.hold != FREE
    found.close()
    manager.release()
    assert not (tmp_path / LOCK).exists()


# ---- another host ---------------------------------------------------------------------------------------------------


def record_of_another_host(folder: Path, **values: Any) -> Path:
    folder.mkdir(exist_ok=True)
    claim = json.loads(own_claim("theirs").encoded())
    claim.update({"host": "node-7", "boot": "another", "space": "another", **values})
    (folder / LOCK).write_text(json.dumps(claim))
    return folder / LOCK


def test_an_owner_on_another_host_without_heartbeats_is_dead_after_the_limit(tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setattr(owner, "LIMIT", 1.0)
    record_of_another_host(tmp_path)
    started = time.monotonic()
    trainer_of(tmp_path).train()
    assert 0.8 < time.monotonic() - started < 10
    assert not (tmp_path / LOCK).exists()


def test_an_old_record_of_another_host_is_taken_at_once(tmp_path: Path, monkeypatch: Any) -> None:
    path = record_of_another_host(tmp_path)
    before = path.stat().st_mtime - owner.LIMIT - 5
    os.utime(path, (before, before))
    slept: list[float] = []
    monkeypatch.setattr(owner.time, "sleep", slept.append)
    manager = CheckpointManager(tmp_path, notices=Notices(quiet=True))
    manager.take()
    assert not slept
    manager.release()


def test_heartbeats_from_another_host_are_a_reason_to_refuse(tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setattr(owner, "LIMIT", 5.0)
    path, over = record_of_another_host(tmp_path), threading.Event()

    def beat() -> None:
        while not over.wait(0.1):
            os.utime(path)

    thread = threading.Thread(target=beat)
    thread.start()
    try:
        with pytest.raises(OwnerError, match="on node-7"):
            trainer_of(tmp_path).train()
    finally:
        over.set()
        thread.join()
    assert decoded(path.read_bytes()).token == "theirs"  # type: ignore[union-attr]


def test_without_flock_the_process_decides(tmp_path: Path, monkeypatch: Any) -> None:
    import fcntl

    def unsupported(*given: Any) -> None:
        raise OSError(errno.EOPNOTSUPP, "Operation not supported")

    monkeypatch.setattr(fcntl, "flock", unsupported)
    with running(tmp_path) as (process, _):
        until(lambda: steps_in(tmp_path))
        with pytest.raises(OwnerError, match=f"process {process.pid} on "):
            trainer_of(tmp_path).train()
        process.kill()
        process.join(120)
        started = time.monotonic()
        trainer_of(tmp_path).train()
        assert time.monotonic() - started < 10
    assert not (tmp_path / LOCK).exists()


def test_an_incomplete_record_belongs_to_no_living_run(tmp_path: Path) -> None:
    (tmp_path / LOCK).write_bytes(b'{"token": "x", "ho')
    trainer_of(tmp_path).train()
    assert not (tmp_path / LOCK).exists()


def test_a_folder_that_cannot_be_locked_is_used_with_a_warning(tmp_path: Path, caplog: Any) -> None:
    (tmp_path / LOCK).mkdir()
    trainer_of(tmp_path).train()
    assert "cannot be locked" in caplog.text


def test_a_lock_that_was_deleted_is_written_again(tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setattr(lock_file.LockFile, "beat", 0.05)

    def delete(*given: Any, **context: Any) -> None:
        before = claim_in(tmp_path)["token"]
        (tmp_path / LOCK).unlink()
        until(lambda: (tmp_path / LOCK).exists())
        assert claim_in(tmp_path)["token"] == before

    trainer_of(tmp_path, Interfering("on_step_end", 2, delete)).train()
    assert not (tmp_path / LOCK).exists()


def test_a_signal_ends_the_wait_for_another_host(tmp_path: Path) -> None:
    path = record_of_another_host(tmp_path)
    timer = threading.Timer(0.5, os.kill, (os.getpid(), signal.SIGTERM))
    trainer = trainer_of(tmp_path)
    timer.start()
    with pytest.raises(SystemExit) as ended:
        trainer.train()
    assert ended.value.code == 75 and decoded(path.read_bytes()).token == "theirs"  # type: ignore[union-attr]


# ---- taking over ----------------------------------------------------------------------------------------------------


def test_taking_over_stops_the_first_run_which_writes_nothing_more(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    with running(folder, seconds=0.05, num_train_epochs=1000) as (first, results):
        until(lambda: len(steps_in(folder)) >= 2)
        run = claim_in(folder)["run"]
        seen: dict[str, dict[str, bytes]] = {}

        def look(*given: Any, **context: Any) -> None:
            seen["begin"] = files_in(folder)
            time.sleep(0.5)
            seen["later"] = files_in(folder)

        second = trainer_of(folder, Interfering("on_train_begin", 1, look), take_over=True, **SAVED)
        second.train()
        kind, text = results.get(timeout=120)
        first.join(120)
        assert kind == "owner" and f"was taken over by process {os.getpid()} on " in text
        assert first.exitcode == 1
    assert seen["begin"] == seen["later"]
    # What the first run had published is there, unless the second saved the same step; nothing was added.
    theirs = {name for name in seen["begin"] if name.startswith("checkpoint-") and name.endswith("manifest.json")}
    now = [each for each in folder.glob("checkpoint-*") if (found := read_manifest(each)) and found.run == run]
    assert {f"{each.name}/manifest.json" for each in now} <= theirs
    assert [row["step"] for row in outcome(second)["rows"]] == [
        row["step"] for row in undisturbed(tmp_path / "b")["rows"]
    ]
    assert not (folder / LOCK).exists()


def test_a_run_that_lost_its_folder_neither_publishes_nor_removes(home: Any) -> None:
    first, second = home(), home()
    first.take()
    first.save(1, write)
    second.take(take_over=True, pause=lambda seconds: None)
    for act in (lambda: first.save(2, write), lambda: first.storage.remove("checkpoint-1")):
        with pytest.raises(OwnerError, match="was taken over"):
            act()
    with pytest.raises(OwnerError, match="was taken over"):
        first.raise_if_failed()
    assert list(home().complete()) == [1]
    first.release()
    second.save(3, write)
    second.release()
    assert list(home().complete()) == [1, 3]


def write(folder: Path) -> None:
    (folder / "model.bin").write_bytes(b"weights")


@pytest.fixture(params=["local", "url"])
def home(request: Any, tmp_path: Path, monkeypatch: Any) -> Callable[[], CheckpointManager]:
    monkeypatch.setattr(owner, "LIMIT", 0.5)
    place = tmp_path if request.param == "local" else request.getfixturevalue("url")
    return lambda: CheckpointManager(place, notices=Notices(quiet=True))


# ---- URLs -----------------------------------------------------------------------------------------------------------


def test_a_url_has_one_owner(url: str, monkeypatch: Any) -> None:
    fs = pytest.importorskip("fsspec").filesystem("memory")
    path = "/" + url.removeprefix("memory://") + f"/{LOCK}"
    refused = []

    def second(*given: Any, **context: Any) -> None:
        with pytest.raises(OwnerError, match=f"process {os.getpid()} on ") as error:
            trainer_of(url).train()
        refused.append(error)

    trainer_of(url, Interfering("on_step_end", 2, second)).train()
    assert refused and not fs.exists(path) and not fs.exists(f"{path}.beat")


@pytest.mark.parametrize("beats", [True, False])
def test_the_owner_of_a_url_on_another_host(beats: bool, url: str, tmp_path: Path, monkeypatch: Any) -> None:
    fs = pytest.importorskip("fsspec").filesystem("memory")
    path = "/" + url.removeprefix("memory://") + f"/{LOCK}"
    theirs = lock_object.LockObject(fs, path.removesuffix(f"/{LOCK}"))
    theirs.replace(decoded(record_of_another_host(tmp_path / "a").read_bytes()))  # type: ignore[arg-type]
    monkeypatch.setattr(owner, "LIMIT", 1.0)
    over = threading.Event()

    def beat() -> None:
        while beats and not over.wait(0.1):
            theirs.touch()

    thread = threading.Thread(target=beat)
    thread.start()
    try:
        if beats:
            with pytest.raises(OwnerError, match="on node-7"):
                trainer_of(url).train()
        else:
            trainer_of(url).train()
    finally:
        over.set()
        thread.join()
    assert fs.exists(path) is beats
