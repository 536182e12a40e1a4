"""Loading a checkpoint runs no code, with any content of its files."""

from __future__ import annotations

import hashlib
import json
import pickle
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from loopwright import CheckpointError
from loopwright.core.checkpoint.manifest import describe

from . import runs
from .test_disk import FILES

pytestmark = pytest.mark.xdist_group("faults-disk")


class Payload:
    """Runs code when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = str(path)

    def __reduce__(self) -> Any:
        return (open, (self.path, "w"))


@pytest.fixture(scope="module")
def trained(tmp_path_factory: Any) -> Path:
    folder = tmp_path_factory.mktemp("trained") / "run"
    runs.make(str(folder), max_steps=3).train()
    return folder / "checkpoint-3"


def planted(trained: Path, tmp_path: Path, slot: str, *, vouched: bool) -> Path:
    """A copy of the checkpoint with a malicious pickle in one slot; `vouched` if the manifest says it belongs there."""
    folder = tmp_path / "run/checkpoint-3"
    folder.mkdir(parents=True)
    for path in trained.iterdir():
        (folder / path.name).write_bytes(path.read_bytes())
    (folder / slot).write_bytes(pickle.dumps(Payload(tmp_path / "trace")))
    if vouched:
        try:
            describe(folder, 3, format="native").write(folder)
        except Exception:  # an attacker can write any manifest: one that is true for this file
            manifest = json.loads((folder / "manifest.json").read_text())
            content = (folder / slot).read_bytes()
            manifest["files"][slot] = {"size": len(content), "sha256": hashlib.sha256(content).hexdigest()}
            manifest["check"] = None
            (folder / "manifest.json").write_text(json.dumps(manifest))
    return folder


@pytest.mark.parametrize("vouched", [False, True], ids=["manifest unchanged", "manifest says so"])
@pytest.mark.parametrize("slot", FILES)
def test_a_malicious_pickle_in_any_slot_runs_nothing(slot: str, vouched: bool, trained: Path, tmp_path: Path) -> None:
    if slot == "manifest.json" and vouched:
        pytest.skip("nothing vouches for the manifest")
    folder = planted(trained, tmp_path, slot, vouched=vouched)
    trainer = runs.make(str(tmp_path / "run"), max_steps=4)
    with pytest.raises(CheckpointError, match=re.escape(slot)):
        trainer.train(resume_from_checkpoint=str(folder))
    assert not (tmp_path / "trace").exists()


@pytest.mark.parametrize("name", ["optimizer.pt", "rng_state.pth", "training_args.bin", "scheduler.pt", "extra.pkl"])
def test_a_malicious_pickle_beside_the_files_runs_nothing(name: str, trained: Path, tmp_path: Path) -> None:
    folder = planted(trained, tmp_path, name, vouched=False)
    runs.make(str(tmp_path / "run"), max_steps=4).train(resume_from_checkpoint=str(folder))
    assert not (tmp_path / "trace").exists()


AUDITED = """
import sys, torch
torch.set_num_threads(1)
from tests.faults import runs

trainer = runs.make(sys.argv[1], max_steps=6)
watched = []
found = []
reading = []

def audit(event, values):
    if not watched:
        return
    if event.startswith(("pickle.", "marshal.", "exec", "compile", "os.system", "subprocess.", "os.exec")):
        found.append((event, str(values)[:200]))
    if event == "open" and "checkpoint-3" in str(values[0]):
        reading.append(str(values[0]))

sys.addaudithook(audit)
import pickle
from loopwright.core.checkpoint.manager import CheckpointManager
saving = trainer._loopwright.saving
resume, load = saving.resume, trainer._load_from_checkpoint

def watching(call):
    def run(*args, **kwargs):
        watched.append(1)
        try:
            return call(*args, **kwargs)
        finally:
            watched.pop()
    return run

saving.resume, trainer._load_from_checkpoint = watching(resume), watching(load)
CheckpointManager.find = watching(CheckpointManager.find)
trainer.train(resume_from_checkpoint=True)
watched.append(1)
pickle.loads(pickle.dumps(runs.Rows))  # the hook does hear of pickles
watched.pop()
print("heard", len([event for event, _ in found if event == "pickle.find_class"]))
print("found", [each for each in found if "Rows" not in each[1]])
print("read", len(set(reading)))
print("step", trainer.state.global_step)
"""


def test_loading_a_native_checkpoint_unpickles_nothing(trained: Path, tmp_path: Path) -> None:
    """An audit hook hears of all that is unpickled, compiled or executed while a checkpoint is found and loaded."""
    folder = planted(trained, tmp_path, "arguments.json", vouched=False)
    (folder / "arguments.json").write_bytes((trained / "arguments.json").read_bytes())
    root = Path(__file__).resolve().parents[2]
    done = subprocess.run(
        [sys.executable, "-c", AUDITED, str(tmp_path / "run")], capture_output=True, text=True, timeout=120, cwd=root
    )
    assert done.returncode == 0, done.stderr[-3000:]
    words = ("heard", "found", "read", "step")
    said = dict(line.split(" ", 1) for line in done.stdout.splitlines() if line.split(" ")[0] in words)
    assert said["step"] == "6"
    assert int(said["heard"]) == 1, done.stdout
    assert said["found"] == "[]", said["found"]
    assert int(said["read"]) >= 6
