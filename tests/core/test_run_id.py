"""Runs that share an output folder one after the other: each sees its own checkpoints only."""

from __future__ import annotations

import errno
import json
import os
import signal
from pathlib import Path
from typing import Any

import pytest

from loopwright.core.checkpoint.manager import CheckpointManager, get_last_checkpoint
from loopwright.core.checkpoint.manifest import Manifest, read_manifest
from loopwright.core.checkpoint.ownership.run_id import FILE, CurrentRun, read_current
from loopwright.errors import CheckpointError
from loopwright.notices import Notices

from .numpy_runs import Interfering, samples, trainer_of
from .test_owner import FORK

SAVED: dict[str, Any] = {"save_strategy": "steps", "save_steps": 3, "learning_rate": 0.01}


class Crash(Exception):
    """The end of a process, as far as its folder is concerned."""


def crash(*given: Any, **context: Any) -> None:
    raise Crash


@pytest.fixture(params=["local", "url"])
def place(request: Any, tmp_path: Path) -> str:
    return str(tmp_path / "run") if request.param == "local" else request.getfixturevalue("url")


def manager_of(place: str) -> CheckpointManager:
    return CheckpointManager(place, notices=Notices(quiet=True))


def current(place: str) -> CurrentRun:
    found = read_current(manager_of(place).storage)
    assert found is not None
    return found


def manifests(place: str) -> dict[int, Manifest]:
    storage = manager_of(place).storage
    found = [manifest for name in storage.names() if (manifest := storage.manifest(name))]
    return {each.step: each for each in found}


def older_run(place: str, **options: Any) -> str:
    """A finished run of 12 updates; returns its id."""
    trainer_of(place, **{**SAVED, "learning_rate": 0.05, **options}).train()
    run = current(place).run
    assert run is not None
    return run


def crashed(place: str, step: int, resume: Any = None, **options: Any) -> None:
    with pytest.raises(Crash):
        trainer_of(place, Interfering("on_step_begin", step + 1, crash), **{**SAVED, **options}).train(resume)


def weights(trainer: Any) -> dict[str, Any]:
    return {name: value.tolist() for name, value in trainer.model.parameters.items()}


def steps_begun(trainer: Any) -> int:
    return int(trainer._loopwright.run.first_step)


def test_every_manifest_and_the_folder_have_the_id_and_a_resumed_run_keeps_it(place: str) -> None:
    crashed(place, 7)
    run = current(place).run
    trainer = trainer_of(place, **SAVED)
    trainer.train(True)
    assert steps_begun(trainer) == 6 and current(place).run == run
    assert {step: each.run for step, each in manifests(place).items()} == dict.fromkeys((3, 6, 9, 12), run)


@pytest.mark.parametrize(("step", "begins"), [(2, 0), (4, 3)])
@pytest.mark.parametrize("resume", ["auto", "launcher"])
def test_a_restart_never_resumes_an_older_run_with_a_higher_step(
    step: int, begins: int, resume: str, place: str, tmp_path: Path, monkeypatch: Any
) -> None:
    older = older_run(place)
    crashed(place, step)
    assert current(place).run != older
    if resume == "launcher":
        monkeypatch.setenv("LOOPWRIGHT_RESUME", "auto")
    trainer = trainer_of(place, **SAVED)
    trainer.train("auto" if resume == "auto" else None)
    assert steps_begun(trainer) == begins
    alone = trainer_of(tmp_path / "alone", **SAVED)
    alone.train()
    assert weights(trainer) == weights(alone)


def test_killed_before_the_first_checkpoint_it_starts_from_scratch(tmp_path: Path) -> None:
    older = older_run(str(tmp_path))

    def die(*given: Any, **context: Any) -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    for event in ("on_train_begin", "on_step_end"):
        process = FORK.Process(target=trainer_of(tmp_path, Interfering(event, 1, die), **SAVED).train)
        process.start()
        process.join(120)
        assert process.exitcode == -9 and current(str(tmp_path)).run != older
        assert get_last_checkpoint(tmp_path) is None
    trainer = trainer_of(tmp_path, **SAVED)
    trainer.train("auto")
    assert steps_begun(trainer) == 0


def test_a_launch_that_never_took_the_folder_does_not_resume_an_earlier_one(place: str, monkeypatch: Any) -> None:
    """Its first start ended before it began to train, so the folder belongs to another launch."""
    monkeypatch.setenv("LOOPWRIGHT_LAUNCH", "first")
    older_run(place)
    monkeypatch.setenv("LOOPWRIGHT_RESUME", "auto")
    again = trainer_of(place, **SAVED)
    again.train()
    assert steps_begun(again) == 12
    monkeypatch.setenv("LOOPWRIGHT_LAUNCH", "second")
    other = trainer_of(place, **SAVED)
    other.train()
    assert steps_begun(other) == 0


def test_a_fresh_run_sees_no_other_checkpoints_and_says_which_there_are(place: str) -> None:
    older = older_run(place)
    seen: list[Any] = []

    def look(*given: Any, **context: Any) -> None:
        seen.append((get_last_checkpoint(place), manager_of(place).complete()))
        with pytest.raises(
            CheckpointError, match=r"No valid checkpoint found.*steps 3, 6, 9, 12\) are resumed by their path"
        ):
            manager_of(place).find(True)

    trainer = trainer_of(place, Interfering("on_step_end", 1, look), **SAVED)
    trainer.train()
    assert seen == [(None, {})]
    (text,) = [each for each in trainer._loopwright.notices.told if "checkpoints of" in each]
    assert f"4 checkpoints of a finished run ({older}, steps 3, 6, 9, 12): this run starts over" in text
    assert "by its path" in text


def test_rotation_leaves_an_older_run_alone(place: str) -> None:
    older = older_run(place)
    trainer_of(place, **{**SAVED, "save_steps": 2}, max_steps=5, save_total_limit=1).train()
    assert {step for step, each in manifests(place).items() if each.run == older} == {3, 6, 9, 12}
    assert {step for step, each in manifests(place).items() if each.run != older} == {5}


def test_a_checkpoint_of_the_same_step_is_replaced(place: str) -> None:
    older = older_run(place)
    crashed(place, 4)
    assert manifests(place)[3].run == current(place).run != older
    assert manifests(place)[6].run == older
    assert list(manager_of(place).complete()) == [3]


def test_an_explicit_path_continues_that_run(place: str) -> None:
    older = older_run(place)
    crashed(place, 4)
    trainer = trainer_of(place, **SAVED)
    trainer.train(f"{place}/checkpoint-9")
    assert steps_begun(trainer) == 9 and current(place).run == older
    assert manifests(place)[12].run == older


def test_after_an_explicit_path_later_checkpoints_of_that_run_are_not_resumed(place: str) -> None:
    """They belong to a future that this run has left: resuming one would skip its own updates."""
    run = older_run(place)
    crashed(place, 1, f"{place}/checkpoint-6", num_train_epochs=5)
    assert current(place).run == run and list(manager_of(place).complete()) == [3, 6]
    crashed(place, 4, "auto", num_train_epochs=5)
    assert list(manager_of(place).complete()) == [3, 6, 9]
    trainer = trainer_of(place, **SAVED, num_train_epochs=5)
    trainer.train("auto")
    assert steps_begun(trainer) == 9
    assert list(manager_of(place).complete()) == [3, 6, 9, 12, 15, 18, 20]


def test_a_checkpoint_of_another_folder_keeps_its_id(tmp_path: Path) -> None:
    run = older_run(str(tmp_path / "first"))
    trainer_of(tmp_path / "second", **SAVED).train(str(tmp_path / "first" / "checkpoint-6"))
    assert current(str(tmp_path / "second")).run == run
    assert {each.run for each in manifests(str(tmp_path / "second")).values()} == {run}


def test_the_best_model_is_never_that_of_an_older_run(place: str, tmp_path: Path, caplog: Any) -> None:
    """The best checkpoint could not be saved, and an older run has one of the same step."""
    older_run(place)
    options = {**SAVED, "eval_strategy": "steps", "eval_steps": 3, "load_best_model_at_end": True}
    trainer = trainer_of(place, eval_data=samples(6, seed=2), **options, async_save=False)
    internals = trainer._loopwright
    writer = internals.saving._checkpoint_writer

    def full(folder: Path) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    internals.saving._checkpoint_writer = lambda: full if trainer.state.global_step == 12 else writer()
    trainer._determine_best_metric = lambda metrics, trial=None: _best_at_12(trainer)
    trainer.train()
    assert trainer.state.best_global_step == 12
    assert any("could not be saved; keeping the last weights" in each for each in internals.notices.told)
    alone = trainer_of(tmp_path / "alone", **SAVED)
    alone.train()
    assert weights(trainer) == weights(alone)


def _best_at_12(trainer: Any) -> bool:
    if trainer.state.global_step == 12:
        trainer.state.best_global_step, trainer.state.best_metric = 12, 0.0
    return trainer.state.global_step == 12


def test_folders_without_ids_are_used_as_before(tmp_path: Path) -> None:
    """Those of earlier versions, and of other trainers."""
    older_run(str(tmp_path))
    (tmp_path / FILE).unlink()
    for folder in tmp_path.glob("checkpoint-*"):
        values = json.loads((folder / "manifest.json").read_text())
        del values["run"]
        Manifest(**{**values, "version": 1}).write(folder)
    assert list(manager_of(str(tmp_path)).complete()) == [3, 6, 9, 12]
    trainer = trainer_of(tmp_path, **SAVED, num_train_epochs=4, save_total_limit=2)
    trainer.train("auto")
    assert steps_begun(trainer) == 12 and current(str(tmp_path)).run is None
    assert list(manager_of(str(tmp_path)).complete()) == [15, 16]
    trainer_of(tmp_path, **SAVED, max_steps=2).train()
    assert list(manager_of(str(tmp_path)).complete()) == [2]


def test_a_manifest_without_the_field_is_read(tmp_path: Path) -> None:
    older_run(str(tmp_path))
    path = tmp_path / "checkpoint-3" / "manifest.json"
    values = json.loads(path.read_text())
    del values["run"], values["check"]
    path.write_text(json.dumps({**values, "version": 1}))
    manifest = read_manifest(path.parent)
    assert manifest is not None and manifest.run is None


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b'{"run": 3}', b'{"run": "a", "left": [1]}', b'{"other": 1}'])
def test_a_damaged_record_is_named_and_a_fresh_run_writes_a_new_one(content: bytes, tmp_path: Path) -> None:
    older_run(str(tmp_path))
    (tmp_path / FILE).write_bytes(content)
    with pytest.raises(CheckpointError, match=f"{FILE} is damaged.*by its path, or delete"):
        trainer_of(tmp_path, **SAVED).train("auto")
    trainer_of(tmp_path, **SAVED, max_steps=4).train()
    assert list(manager_of(str(tmp_path)).complete()) == [3, 4]
