"""on_save comes when the checkpoint is there, and what the user's code does to its files belongs to it."""

from __future__ import annotations

import errno
import os
import shutil
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from loopwright.callbacks.flow import DefaultFlowCallback
from loopwright.core.checkpoint.manager import get_last_checkpoint
from loopwright.core.checkpoint.manifest import damage, read_manifest
from loopwright.core.events import CallbackHandler, TrainerCallback

from .numpy_runs import steps_in, trainer_of
from .numpy_trainer import NumpyTrainer

SAVED: dict[str, Any] = {"save_strategy": "steps", "save_steps": 2, "max_steps": 6}
WHOLE = {"manifest.json", "model.safetensors", "optimizer.safetensors", "progress.json", "trainer_state.json"}


def folder_of(args: Any, state: Any) -> Path:
    return Path(args.output_dir) / f"checkpoint-{state.global_step}"


class Looks(TrainerCallback):
    """Lists, copies and adds files, as callbacks of users do."""

    def __init__(self) -> None:
        self.seen: dict[int, set[str]] = {}

    def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        folder = folder_of(args, state)
        self.seen[state.global_step] = set(os.listdir(folder))
        shutil.copytree(folder, Path(args.output_dir) / f"copy-{state.global_step}")
        (folder / "extra").mkdir()
        (folder / "extra" / "notes.txt").write_text(f"step {state.global_step}")


def slow_saves(trainer: NumpyTrainer, seconds: float = 0.1) -> list[str]:
    """Make every save slow; returns the names of the threads that write."""
    saving = trainer._loopwright.saving
    make, threads = saving._checkpoint_writer, list[str]()

    def writer() -> Any:
        write = make()

        def slowly(folder: Path) -> None:
            threads.append(threading.current_thread().name)
            time.sleep(seconds)
            write(folder)

        return slowly

    saving._checkpoint_writer = writer
    return threads


def test_a_callback_finds_the_whole_checkpoint_and_its_files_stay(tmp_path: Path) -> None:
    looks = Looks()
    trainer = trainer_of(tmp_path / "run", looks, **SAVED)
    slow_saves(trainer)
    trainer.train()
    assert list(looks.seen) == [2, 4, 6] and all(found >= WHOLE for found in looks.seen.values())
    for step in (2, 4, 6):
        assert (tmp_path / "run" / f"checkpoint-{step}" / "extra" / "notes.txt").read_text() == f"step {step}"
        assert read_manifest(tmp_path / "run" / f"copy-{step}") is not None


def test_files_of_a_callback_survive_resuming_and_go_with_their_checkpoint(tmp_path: Path) -> None:
    trainer_of(tmp_path / "run", Looks(), **{**SAVED, "max_steps": 4}).train()
    (tmp_path / "run" / "checkpoint-4" / "extra" / "notes.txt").write_text("changed later")
    again = trainer_of(tmp_path / "run", Looks(), **SAVED, save_total_limit=2)
    again.train("auto")
    assert again._loopwright.run.first_step == 4
    assert (tmp_path / "run" / "checkpoint-4" / "extra" / "notes.txt").read_text() == "changed later"
    assert steps_in(tmp_path / "run") == [4, 6]


class Overriding(NumpyTrainer):
    """Adds a file to every checkpoint, as trainers of other libraries do."""

    def _save_checkpoint(self, model: Any, trial: Any = None) -> None:
        super()._save_checkpoint(model, trial)
        folder = folder_of(self.args, self.state)
        assert set(os.listdir(folder)) >= WHOLE
        (folder / "adapter.txt").write_text("adapter")


def test_an_override_of_save_checkpoint_finds_it_there(tmp_path: Path) -> None:
    trainer = trainer_of(tmp_path, cls=Overriding, **SAVED)
    slow_saves(trainer)
    trainer.train()
    assert all((tmp_path / f"checkpoint-{step}" / "adapter.txt").is_file() for step in (2, 4, 6))


class Changes(TrainerCallback):
    """Writes the weights once more under the same name, and removes a file, as callbacks for adapters do."""

    def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        folder = folder_of(args, state)
        content = (folder / "model.safetensors").read_bytes()
        (folder / "model.safetensors").unlink()
        (folder / "model.safetensors").write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
        (folder / "rng.json").unlink()
        (folder / "scaler.json").write_text("{}")


def test_files_that_a_callback_changes_removes_or_adds_are_those_of_the_checkpoint(tmp_path: Path) -> None:
    trainer_of(tmp_path, Changes(), **SAVED).train()
    for step in (2, 4, 6):
        folder = tmp_path / f"checkpoint-{step}"
        manifest = read_manifest(folder)
        assert manifest is not None and damage(folder, manifest) is None
        assert "rng.json" not in manifest.files and "scaler.json" in manifest.files
        assert any(name.startswith("model.safetensors/") for name in manifest.tensors)
    assert get_last_checkpoint(tmp_path) == str(tmp_path / "checkpoint-6")


def test_damage_after_the_event_is_still_found(tmp_path: Path) -> None:
    trainer_of(tmp_path, Changes(), **SAVED).train()
    path = tmp_path / "checkpoint-6" / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-1] + b"x")
    manifest = read_manifest(path.parent)
    assert manifest is not None and "does not match" in str(damage(path.parent, manifest))


class Quiet(DefaultFlowCallback):
    """A callback of the user that does not use the event."""


class OwnHandler(CallbackHandler):
    """A handler of the user that gets every event."""

    def call_event(self, *given: Any, **kwargs: Any) -> Any:
        return super().call_event(*given, **kwargs)


def test_the_background_is_used_unless_the_users_code_follows(tmp_path: Path) -> None:
    def threads(name: str, *callbacks: Any, handler: Any = None) -> set[bool]:
        trainer = trainer_of(tmp_path / name, *callbacks, **SAVED)
        if handler is not None:
            trainer.callback_handler = handler(trainer.callback_handler.callbacks)
        found = slow_saves(trainer, 0.0)
        trainer.train()
        return {each.startswith("save-") for each in found}

    assert threads("nobody") == {True}
    assert threads("quiet", Quiet(), TrainerCallback()) == {True}
    assert threads("callback", Looks()) == {False}
    late = TrainerCallback()
    late.on_save = lambda *given, **kwargs: None  # type: ignore[method-assign]
    assert threads("attribute", late) == {False}
    assert threads("handler", handler=OwnHandler) == {False}


def test_no_event_without_a_checkpoint(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    looks = Looks()
    trainer = trainer_of(tmp_path, looks, **SAVED)
    saving = trainer._loopwright.saving
    make = saving._checkpoint_writer

    def full(folder: Path) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    saving._checkpoint_writer = lambda: full if trainer.state.global_step == 4 else make()
    trainer.train()
    assert list(looks.seen) == [2, 6] and steps_in(tmp_path) == [2, 6]
    assert caplog.text.count("the disk is full") == 1
