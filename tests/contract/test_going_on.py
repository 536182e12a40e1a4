"""PyTorch and Keras: an interrupted run is resumed by the same command, and on_save finds the checkpoint."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path
from typing import Any

import pytest

from loopwright import TrainerCallback

from .frameworks import Rows, spread


@pytest.mark.parametrize(("framework", "call"), spread(["signalled", "killed"], "signalled"), indirect=["framework"])
def test_an_interrupted_run_goes_on_without_being_told(
    call: str, framework: Any, processes: Any, references: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "run"
    number = {"number": int(signal.SIGTERM)} if call == "signalled" else {}
    code = processes.run(framework, call, folder, step=5, async_save=False, **number)
    assert code == (75 if call == "signalled" else -signal.SIGKILL)
    step = "5" if call == "signalled" else "3"
    if call == "signalled":
        assert "the same command resumes from checkpoint-5" in Path(f"{folder}.out").read_text()
    assert processes.run(framework, "train", folder, resume=None, async_save=False) == 0
    assert f"resuming the interrupted run from checkpoint-{step} (of 10 steps)" in Path(f"{folder}.out").read_text()
    whole = processes.whole(framework, references, async_save=False)
    mine, theirs = (json.loads(Path(f"{each}.result").read_text()) for each in (folder, whole))
    assert mine == theirs
    assert processes.run(framework, "train", folder, resume=None, async_save=False) == 0
    assert Path(f"{folder}.out").read_text().count("resuming") == 1


class Adds(TrainerCallback):
    """Lists the files of a checkpoint and adds one."""

    def __init__(self) -> None:
        self.seen: dict[int, list[str]] = {}

    def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        folder = Path(args.output_dir) / f"checkpoint-{state.global_step}"
        self.seen[state.global_step] = sorted(os.listdir(folder))
        (folder / "notes.txt").write_text("mine")


def test_a_callback_finds_the_checkpoint_and_its_file_stays(framework: Any, tmp_path: Path) -> None:
    adds = Adds()
    net, options = framework.net(dropout=0.3), {"max_steps": 4, "save_steps": 2}
    framework.trainer(str(tmp_path), net, Rows(14), evaluation=Rows(6), callbacks=[adds], **options).train()
    assert list(adds.seen) == [2, 4]
    assert all("manifest.json" in names and "progress.json" in names for names in adds.seen.values())
    assert all((tmp_path / f"checkpoint-{step}" / "notes.txt").is_file() for step in (2, 4))
    again = framework.trainer(
        str(tmp_path), net, Rows(14), evaluation=Rows(6), callbacks=[Adds()], **{**options, "max_steps": 6},
        save_total_limit=1,
    )  # fmt: skip
    again.train(resume_from_checkpoint=True)
    assert sorted(each.name for each in tmp_path.glob("checkpoint-*")) == ["checkpoint-6"]


def test_an_override_of_save_checkpoint_finds_it(framework: Any, tmp_path: Path) -> None:
    trainer = framework.trainer(
        str(tmp_path), framework.net(dropout=0.3), Rows(14), evaluation=Rows(6), max_steps=2, save_steps=1
    )
    found = []

    class Own(type(trainer)):  # type: ignore[misc]
        def _save_checkpoint(self, model: Any, trial: Any = None) -> None:
            super()._save_checkpoint(model, trial)
            folder = Path(self.args.output_dir) / f"checkpoint-{self.state.global_step}"
            found.append((folder / "manifest.json").is_file())

    trainer.__class__ = Own
    trainer.train()
    assert found == [True, True]
