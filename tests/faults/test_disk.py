"""Full disks, damaged files, and the order in which a checkpoint reaches the disk."""

from __future__ import annotations

import errno
import os
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch

from loopwright import CheckpointError
from loopwright.core.checkpoint.manifest import damage, read_manifest

from . import runs
from .boundaries import Boundaries, grows
from .checks import differences, leftovers, newest_intact, result, rows, said, trace

pytestmark = pytest.mark.xdist_group("faults-disk")

FILES = ("arguments.json", "manifest.json", "model.safetensors", "optimizer.json", "optimizer.safetensors",
         "progress.json", "rng.json", "scheduler.json", "trainer_state.json")  # fmt: skip


# ---- no space left -------------------------------------------------------------------------------------------------


def needing_space(forks: Any, folder: Path, options: dict[str, Any]) -> list[str]:
    """The boundaries of a run at which a full disk could say no."""
    assert forks.run("listed", folder, **options) == 0, said(folder)
    return [label for label in Path(f"{folder}.boundaries").read_text().splitlines() if grows(label)]


def full_at(
    forks: Any, folder: Path, reference: Any, numbers: Any, options: dict[str, Any], error: int = errno.ENOSPC
) -> None:
    """The disk is full for one operation: one checkpoint is missing, and nothing else."""
    wrong: dict[int, Any] = {}
    whole = reference(**options)
    for number in numbers:
        case = folder / f"full-{number}"
        status = forks.run("full", case, number=number, error=error, **options)
        struck = [line for line in Path(f"{case}.trace").read_text().splitlines() if line.startswith("full")]
        found: list[str] = [] if status == 0 else [f"ended with {status}: {said(case)[-1500:]}"]
        if status == 0:
            found += differences(case, whole) + leftovers(case)
            if "the disk is full" not in said(case) or "training continues" not in said(case):
                found.append("no message")
            newest_intact(case)
        if found:
            wrong[number] = (struck, found)
        shutil.rmtree(case, ignore_errors=True)
    assert not wrong, wrong


def broken_at(forks: Any, folder: Path, numbers: Any, options: dict[str, Any], error: int) -> None:
    """The disk fails: the run stops with an error that says what failed, and earlier checkpoints are intact."""
    wrong: dict[int, Any] = {}
    for number in numbers:
        case = folder / f"broken-{number}"
        status = forks.run("full", case, number=number, error=error, **options)
        struck = [line for line in Path(f"{case}.trace").read_text().splitlines() if line.startswith("full")]
        words = ("CheckpointError", "could not be written", "earlier checkpoints are intact", os.strerror(error))
        missing = [each for each in words if each not in said(case)]
        if (status, missing) != (1, []):
            wrong[number] = (struck, status, missing, said(case)[-1500:])
        newest_intact(case)
        for path in case.glob("checkpoint-*"):
            manifest = read_manifest(path)
            assert manifest is not None and damage(path, manifest) is None, (struck, path)
        shutil.rmtree(case, ignore_errors=True)
    assert not wrong, wrong


KINDS = [{"async_save": now, "checkpoint_format": form} for now in (False, True) for form in ("native", "transformers")]
NAMES = ["native, now", "transformers, now", "native, in the background", "transformers, in the background"]


@pytest.mark.parametrize("options", KINDS, ids=NAMES)
def test_a_full_disk_at_some_writes_costs_one_checkpoint(
    options: Any, forks: Any, reference: Any, tmp_path: Path
) -> None:
    labels = needing_space(forks, tmp_path / "listed", options)
    second = [i for i, label in enumerate(labels) if "checkpoint-6" in label]
    full_at(forks, tmp_path, reference, second[1::9] if options["async_save"] else second[3::7], options)


@pytest.mark.parametrize("options", KINDS[1:3], ids=NAMES[1:3])
def test_a_disk_that_fails_at_some_writes_stops_the_run(options: Any, forks: Any, tmp_path: Path) -> None:
    labels = needing_space(forks, tmp_path / "listed", options)
    second = [i for i, label in enumerate(labels) if "checkpoint-6" in label]
    broken_at(forks, tmp_path, second[2::13], options, errno.EIO)


@pytest.mark.grid
@pytest.mark.slow
@pytest.mark.parametrize("error", [errno.ENOSPC, errno.EDQUOT])
@pytest.mark.parametrize("options", KINDS, ids=NAMES)
def test_a_full_disk_at_any_write_costs_one_checkpoint(
    options: Any, error: int, forks: Any, reference: Any, tmp_path: Path
) -> None:
    labels = needing_space(forks, tmp_path / "listed", options)
    last_but_one = [i for i, label in enumerate(labels) if "checkpoint-9" in label]
    full_at(forks, tmp_path, reference, range(last_but_one[-1] + 1), options, error)


@pytest.mark.grid
@pytest.mark.slow
@pytest.mark.parametrize("options", KINDS, ids=NAMES)
def test_a_disk_that_fails_at_any_write_stops_the_run(options: Any, forks: Any, tmp_path: Path) -> None:
    labels = needing_space(forks, tmp_path / "listed", options)
    second = [i for i, label in enumerate(labels) if "checkpoint-6" in label]
    broken_at(forks, tmp_path, second, options, errno.EIO)


def test_an_error_of_flushing_metrics_jsonl_is_not_ignored(forks: Any, tmp_path: Path) -> None:
    assert forks.run("unsynced_metrics", tmp_path / "run", error=errno.EIO) == 1
    assert "metrics.jsonl cannot be written" in said(tmp_path / "run")
    assert forks.run("unsynced_metrics", tmp_path / "other", error=errno.ENOSPC) == 0, said(tmp_path / "other")
    assert "rows of" in said(tmp_path / "other") and "may be lost" in said(tmp_path / "other")


@pytest.fixture
def small_disk(tmp_path: Path) -> Any:
    """A file system with room for two checkpoints and a half."""
    place = tmp_path / "disk"
    place.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=128k,nr_inodes=400", "tmpfs", str(place)]
    if os.geteuid() != 0 or shutil.which("mount") is None or subprocess.run(command, capture_output=True).returncode:
        pytest.skip("a file system of a chosen size can only be mounted by root")
    yield place
    subprocess.run(["umount", "-l", str(place)], check=True)


@pytest.mark.parametrize("format", ["native", "transformers"])
@pytest.mark.parametrize("async_save", [True, False])
def test_a_disk_that_is_really_full(
    format: str, async_save: bool, small_disk: Path, forks: Any, reference: Any, tmp_path: Path
) -> None:
    folder, notes = small_disk / "run", tmp_path / "notes"
    options = {"checkpoint_format": format, "async_save": async_save}
    (small_disk / "reserve").write_bytes(b"0" * 8192)  # what logging needs
    assert forks.run("filling", notes, disk=str(small_disk), **options) == 0, said(notes)
    assert "the disk is full" in said(notes)
    assert 0 < newest_intact(folder) < 10
    assert not leftovers(folder)
    assert result(notes)["same"]["weights"] == result(reference(**options))["same"]["weights"]


def test_a_full_disk_under_metrics_jsonl_does_not_stop_the_run(forks: Any, reference: Any, tmp_path: Path) -> None:
    assert forks.run("full_metrics", tmp_path / "run", number=5) == 0, said(tmp_path / "run")
    assert result(tmp_path / "run")["same"]["weights"] == result(reference())["same"]["weights"]
    assert rows(tmp_path / "run") == rows(reference())


# ---- damage ---------------------------------------------------------------------------------------------------------


def truncated(content: bytes) -> bytes:
    return content[: len(content) // 2]


def flipped(content: bytes) -> bytes:
    """One bit is another, in a place that holds a value."""
    place = len(content) * 2 // 3
    while content[place : place + 1].isspace() or content[place : place + 1] in (b'"', b",", b":"):
        place += 1
    return content[:place] + bytes([content[place] ^ 1]) + content[place + 1 :]


def emptied(content: bytes) -> bytes:
    return b""


@pytest.fixture(scope="module")
def stopped(forks: Any, tmp_path_factory: Any) -> Path:
    """A run that ended with checkpoints of steps 3, 6 and 7."""
    folder = tmp_path_factory.mktemp("stopped") / "run"
    assert forks.run("stop", folder, step=7) == 0, said(folder)
    return folder


def copied(stopped: Path, tmp_path: Path) -> Path:
    folder = tmp_path / "run"
    shutil.copytree(stopped, folder)
    return folder


@pytest.mark.parametrize("harm", [truncated, flipped, emptied], ids=lambda harm: harm.__name__)
@pytest.mark.parametrize("victim", FILES)
def test_damage_to_any_file_is_noticed_and_the_older_checkpoint_used(
    victim: str, harm: Any, stopped: Path, forks: Any, reference: Any, tmp_path: Path
) -> None:
    assert {path.name for path in (stopped / "checkpoint-7").iterdir()} == set(FILES)
    folder = copied(stopped, tmp_path)
    path = folder / "checkpoint-7" / victim
    harmed = harm(path.read_bytes())
    path.write_bytes(harmed)
    assert forks.run("train", folder) == 0, said(folder)
    assert trace(folder, "begin") == [6]
    assert differences(folder, reference()) == []
    assert f"checkpoint-7: {victim}" in said(folder)
    assert (folder / "damaged-checkpoint-7" / victim).read_bytes() == harmed


def test_every_bit_of_a_manifest_counts(stopped: Path, tmp_path: Path) -> None:
    """With any one bit changed it is no manifest, or it says the same."""
    from loopwright.core.checkpoint.manifest import read_manifest

    content = (stopped / "checkpoint-7/manifest.json").read_bytes()
    whole = read_manifest(stopped / "checkpoint-7")
    assert whole is not None and whole.check
    for place in range(0, len(content), 19):
        changed = bytearray(content)
        changed[place] ^= 1 << (place % 8)
        (tmp_path / "manifest.json").write_bytes(bytes(changed))
        assert read_manifest(tmp_path) in (None, whole), f"bit {place % 8} of byte {place}"


def test_a_run_with_nothing_but_damaged_checkpoints_does_not_resume_from_one(
    stopped: Path, forks: Any, reference: Any, tmp_path: Path
) -> None:
    folder = copied(stopped, tmp_path)
    for path in folder.glob("checkpoint-*/manifest.json"):
        path.write_bytes(flipped(path.read_bytes()))
    assert forks.run("train", folder) == 0, said(folder)
    assert trace(folder, "begin") == [0]
    assert differences(folder, reference()) == []


def test_a_missing_file_is_named(stopped: Path, tmp_path: Path) -> None:
    folder = copied(stopped, tmp_path)
    (folder / "checkpoint-7/rng.json").unlink()
    with pytest.raises(CheckpointError, match="rng.json is missing"):
        runs.make(str(folder)).train(resume_from_checkpoint=str(folder / "checkpoint-7"))


# ---- in which order a checkpoint reaches the disk -------------------------------------------------------------------


def test_a_checkpoint_is_flushed_before_it_is_visible(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What a power cut could take: nothing a visible checkpoint needs. All files, then the manifest, then the folder
    are flushed before the rename, and the folder above right after it."""
    events: list[tuple[str, str]] = []
    fsync, rename = os.fsync, os.rename

    def noted_sync(descriptor: int) -> None:
        events.append(("sync", os.readlink(f"/proc/self/fd/{descriptor}")))
        fsync(descriptor)

    def noted_rename(source: Any, target: Any) -> None:
        events.append(("rename", os.fspath(source)))
        rename(source, target)

    if not Path("/proc/self/fd").is_dir():
        pytest.skip("needs /proc")
    trainer = runs.make(str(tmp_path / "run"), max_steps=3, async_save=False)
    monkeypatch.setattr(os, "fsync", noted_sync)
    monkeypatch.setattr(os, "rename", noted_rename)
    trainer.train()
    renamed = next(i for i, (what, path) in enumerate(events) if what == "rename" and "checkpoint-3" in path)
    staging = events[renamed][1]
    before = [path for what, path in events[:renamed] if what == "sync"]
    assert {f"{staging}/{name}" for name in FILES} <= set(before)
    assert before.index(f"{staging}/manifest.json") > max(before.index(f"{staging}/{n}") for n in FILES[:1] + FILES[2:])
    assert before[-1] == staging
    assert events[renamed + 1] == ("sync", str(tmp_path / "run"))


def test_the_manifest_is_the_last_file_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import builtins
    import io

    for module, name in ((builtins, "open"), (io, "open"), (os, "rename"), (os, "replace"), (os, "mkdir"),
                         (os, "unlink"), (os, "remove"), (os, "rmdir"), (os, "truncate"), (os, "fsync")):  # fmt: skip
        monkeypatch.setattr(module, name, getattr(module, name))  # so that it is put back
    from loopwright.pt.checkpoint import tensors as checkpoint

    monkeypatch.setattr(checkpoint, "save_file", checkpoint.save_file)
    labels: list[str] = []
    trainer = runs.make(str(tmp_path / "run"), max_steps=3, async_save=False)
    Boundaries(str(tmp_path / "run"), labels.append).install()
    trainer.train()
    written = [label for label in labels if label.startswith(("open .checkpoint", "tensors .checkpoint"))]
    assert "manifest.json" in written[-1]
    assert all(torch.isfinite(value).all() for value in trainer.model.state_dict().values())
