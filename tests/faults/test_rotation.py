"""Which checkpoints are removed: by the step in the manifest, not by names, clocks or other runs."""

from __future__ import annotations

import itertools
import os
from pathlib import Path

import pytest

from loopwright.core.checkpoint.folder import folder_name
from loopwright.core.checkpoint.manager import CheckpointManager
from loopwright.core.checkpoint.manifest import describe
from loopwright.core.checkpoint.rotation import to_delete
from loopwright.notices import Notices

TABLE = [
    # steps, keep, protected, what goes
    ([], 1, [], []),
    ([5], 1, [], []),
    ([1, 2, 3], None, [], []),
    ([1, 2, 3], 0, [], []),
    ([1, 2, 3], -1, [], []),
    ([1, 2, 3], 1, [], [1, 2]),
    ([3, 1, 2], 1, [], [1, 2]),
    ([1, 2, 3], 2, [], [1]),
    ([1, 2, 3], 3, [], []),
    ([9_900, 10_000], 1, [], [9_900]),
    ([900, 1_000, 9_900, 10_000], 2, [], [900, 1_000]),
    ([1, 2, 3, 4], 1, [2], [1, 3]),
    ([1, 2, 3, 4], 2, [2], [1, 3]),
    ([1, 2, 3, 4], 3, [2], [1]),
    ([1, 2, 3, 4], 1, [4], [1, 2, 3]),
    ([1, 2, 3, 4], 2, [1, 2], [3]),
    ([1, 2, 3, 4], 1, [1, 2, 3], []),
    ([1, 2, 3, 4], 2, [None], [1, 2]),
    ([1, 2, 3, 4], 2, [77], [1, 2]),
    ([2, 2, 3], 1, [], [2]),
]


@pytest.mark.parametrize(("steps", "keep", "protect", "gone"), TABLE)
def test_what_goes(steps: list[int], keep: int | None, protect: list[int | None], gone: list[int]) -> None:
    assert to_delete(steps, keep=keep, protect=protect) == gone


def test_what_stays_for_all_small_cases() -> None:
    """The newest and the protected stay, no more than needed go, and the oldest go first."""
    for many, keep in itertools.product(range(1, 6), range(1, 4)):
        steps = list(range(many))
        for best in (None, *steps):
            gone = to_delete(steps, keep=keep, protect=[best])
            kept = [step for step in steps if step not in gone]
            safe = {steps[-1], best} - {None}
            assert safe <= set(kept)
            assert len(kept) == max(min(keep, many), len(safe))
            assert gone == sorted(gone) and not [s for s in kept if s not in safe and gone and s < gone[-1]]


def publish(manager: CheckpointManager, step: int, *, keep: int | None = None, protect: tuple[int, ...] = ()) -> None:
    manager.save(step, lambda folder: (folder / "model.safetensors.json").write_text(str(step)) and None, keep=keep,
                 protect=protect)  # fmt: skip


def kept(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


@pytest.fixture
def manager(tmp_path: Path) -> CheckpointManager:
    return CheckpointManager(tmp_path / "run", notices=Notices(quiet=True))


@pytest.mark.parametrize("clock", ["equal", "reversed", "in the future"])
def test_clocks_do_not_matter(clock: str, manager: CheckpointManager, tmp_path: Path) -> None:
    for step in (9_900, 9_950, 10_000):
        publish(manager, step)
        when = {"equal": 1e9, "reversed": 2e9 - step, "in the future": 4e9 - step}[clock]
        os.utime(tmp_path / "run" / folder_name(step), (when, when))
    publish(manager, 10_050, keep=2)
    assert kept(tmp_path / "run") == ["checkpoint-10000", "checkpoint-10050"]


def test_the_best_in_the_middle_stays(manager: CheckpointManager, tmp_path: Path) -> None:
    for step in (10, 20, 30, 40, 50):
        publish(manager, step, keep=2, protect=(20,))
    assert kept(tmp_path / "run") == ["checkpoint-20", "checkpoint-50"]


def test_a_limit_of_one_never_leaves_none(manager: CheckpointManager, tmp_path: Path) -> None:
    for step in (1, 2, 3):
        publish(manager, step, keep=1)
        assert kept(tmp_path / "run") == [folder_name(step)]


def test_a_folder_counts_by_its_manifest_not_its_name(manager: CheckpointManager, tmp_path: Path) -> None:
    publish(manager, 5)
    os.rename(tmp_path / "run/checkpoint-5", tmp_path / "run/checkpoint-500")
    assert list(manager.complete()) == [5]
    publish(manager, 6)
    assert max(manager.complete()) == 6
    found = manager.find(True)
    assert found is not None and found.endswith("checkpoint-6")


def test_what_has_no_valid_manifest_is_never_removed_nor_counted(manager: CheckpointManager, tmp_path: Path) -> None:
    """Folders of another trainer, and whatever else is named like a checkpoint, are not ours to delete."""
    run = tmp_path / "run"
    for name in ("checkpoint-7", "checkpoint-old", "notes"):
        (run / name).mkdir(parents=True)
        (run / name / "file").write_text("theirs")
    for step in (1, 2, 3):
        publish(manager, step, keep=1)
    assert kept(run) == ["checkpoint-3", "checkpoint-7", "checkpoint-old", "notes"]


def test_leftovers_of_an_earlier_run_with_higher_steps(manager: CheckpointManager, tmp_path: Path) -> None:
    """An older run's checkpoint with a higher step is the newest by its manifest; what was just saved goes last of all
    only if something is newer than it."""
    publish(manager, 900)
    for step in (10, 20):
        publish(manager, step, keep=2)
    assert "checkpoint-900" in kept(tmp_path / "run")


def test_nothing_is_removed_when_the_new_one_cannot_be_published(manager: CheckpointManager, tmp_path: Path) -> None:
    publish(manager, 1, keep=1)

    def fails(folder: Path) -> None:
        raise OSError(28, "No space left on device")

    manager.save(2, fails, keep=1)
    assert kept(tmp_path / "run") == ["checkpoint-1"]
    assert describe(tmp_path / "run/checkpoint-1", 1, format="native").files == manager_files(manager, 1)


def manager_files(manager: CheckpointManager, step: int) -> dict[str, object]:
    from loopwright.core.checkpoint.manifest import read_manifest

    manifest = read_manifest(Path(manager.complete()[step]))
    assert manifest is not None
    return dict(manifest.files)
