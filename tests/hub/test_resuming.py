"""Runs that are killed in a push, readers during one, and runs that begin with a pushed checkpoint."""

from __future__ import annotations

import copy
import hashlib
import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

from loopwright.errors import CheckpointError, HubError

from .conftest import connect
from .runs import checked, final_weights, trainer_of
from .server import CLOSE, TOKEN, Answer, HubServer

ROOT = Path(__file__).resolve().parents[2]


def start(server: HubServer, folder: Path, *, waits_at: int = -1) -> subprocess.Popen[str]:
    environment = {
        **os.environ,
        "HF_ENDPOINT": server.url,
        "HF_HUB_OFFLINE": "0",
        "HF_HUB_DISABLE_XET": "1",
        "PYTHONPATH": os.pathsep.join([str(ROOT / "src"), str(ROOT)]),
    }
    command = [sys.executable, "-m", "tests.hub.child", str(folder), "all_checkpoints", str(waits_at)]
    return subprocess.Popen(command, env=environment, stderr=subprocess.PIPE, text=True, cwd=ROOT)


class Held:
    """Holds back one of the large files that are sent; a checkpoint has two."""

    def __init__(self, server: HubServer, which: int) -> None:
        self.reached, self.opened, self.left = threading.Event(), threading.Event(), which
        server.before = self

    def __call__(self, method: str, path: str) -> Answer:
        if method == "PUT":
            self.left -= 1
            if self.left == 0:
                self.reached.set()
                self.opened.wait(120)
                return CLOSE
        return None


def folders(files: dict[str, bytes]) -> list[str]:
    return sorted({path.split("/")[0] for path in files if path.startswith("checkpoint-")})


def test_stopped_and_killed_in_a_push_and_resumed(server: HubServer, tmp_path: Path) -> None:
    """A signal does not wait for the push; a kill leaves what has arrived; the same command pushes all of them."""
    held = Held(server, 4)
    child = start(server, tmp_path / "run", waits_at=4)
    assert held.reached.wait(120), child.communicate(timeout=10)
    child.send_signal(signal.SIGTERM)
    _, errors = child.communicate(timeout=60)
    assert child.returncode == 75, errors
    assert "not pushed to me/model: checkpoint-4, checkpoint-5" in errors
    assert folders(server.repo().head()) == ["checkpoint-2"]
    held.opened.set()

    held = Held(server, 1)
    child = start(server, tmp_path / "run", waits_at=6)
    assert held.reached.wait(120), child.communicate(timeout=10)
    child.send_signal(signal.SIGKILL)
    child.communicate(timeout=60)
    held.opened.set()
    assert folders(server.repo().head()) == ["checkpoint-2"]

    server.before = lambda method, path: None
    child = start(server, tmp_path / "run")
    _, errors = child.communicate(timeout=120)
    assert child.returncode == 0, errors
    assert folders(server.repo().head()) == [f"checkpoint-{step}" for step in (2, 4, 5, 6)]
    for commit in server.repo().commits[1:]:
        assert all(checked(commit, folder) == int(folder.split("-")[1]) for folder in folders(commit.files))
    assert not list((tmp_path / "run").glob(".push-*"))
    trainer_of(tmp_path / "whole", push_to_hub=False).train()
    whole, resumed = final_weights(tmp_path / "whole"), final_weights(tmp_path / "run")
    assert all(torch.equal(whole[name], resumed[name]) for name in whole)


class Reader(threading.Thread):
    """Reads `last-checkpoint` again and again while a run pushes it, as another program would."""

    def __init__(self, target: Path) -> None:
        super().__init__(daemon=True)
        self.ended, self.steps, self.problems, self.target = threading.Event(), [], [], target

    def run(self) -> None:
        from huggingface_hub import HfApi, errors

        api = HfApi()
        while not self.ended.is_set():
            sha = api.model_info("me/model", token=TOKEN).sha
            try:
                path = api.hf_hub_download(
                    "me/model", "last-checkpoint/manifest.json", revision=sha, local_dir=self.target / sha, token=TOKEN
                )
            except errors.EntryNotFoundError:
                continue
            manifest = json.loads(Path(path).read_text())
            listed = api.list_repo_tree("me/model", "last-checkpoint", recursive=True, revision=sha, token=TOKEN)
            missing = {f"last-checkpoint/{name}" for name in manifest["files"]} - {each.path for each in listed}
            if missing:
                self.problems.append((manifest["step"], missing))
            for name, expected in manifest["files"].items():
                file = api.hf_hub_download(
                    "me/model", f"last-checkpoint/{name}", revision=sha, local_dir=self.target / sha, token=TOKEN
                )
                if hashlib.sha256(Path(file).read_bytes()).hexdigest() != expected["sha256"]:
                    self.problems.append((manifest["step"], name))
            self.steps.append(manifest["step"])


def test_a_reader_never_sees_half_a_checkpoint(online: HubServer, tmp_path: Path) -> None:
    reader = Reader(tmp_path / "read")
    trainer = trainer_of(hub_strategy="checkpoint", hub_always_push=True, max_steps=12)
    reader.start()
    trainer.train()
    reader.ended.set()
    reader.join(60)
    assert not reader.is_alive() and reader.problems == [] and reader.steps == sorted(reader.steps) and reader.steps


# ---- resuming from a pushed checkpoint ------------------------------------------------------------------------------


class Pushed(NamedTuple):
    """What two runs have pushed."""

    repos: dict[str, Any]
    weights: dict[str, Any]
    """The last weights of the first run."""


@pytest.fixture(scope="module")
def both(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pushed]:
    pytest.importorskip("huggingface_hub")
    folder, server = tmp_path_factory.mktemp("pushed"), HubServer()
    with pytest.MonkeyPatch.context() as patch:
        connect(server.url, patch)
        trainer_of(folder / "first", hub_strategy="all_checkpoints").train()
        trainer_of(folder / "last", hub_strategy="checkpoint", max_steps=2).train()
    server.stop()
    yield Pushed(server.repos, final_weights(folder / "first"))


@pytest.fixture
def pushed(online: HubServer, both: Pushed) -> HubServer:
    online.repos = copy.deepcopy(both.repos)
    return online


def test_a_run_resumes_from_the_hub_to_the_bit(pushed: HubServer, both: Pushed) -> None:
    revision = pushed.repo().commits[-2].oid  # before the second run
    trainer = trainer_of("second", push_to_hub=False)
    trainer.train(resume_from_checkpoint=f"hf://me/model@{revision}/checkpoint-2")
    assert trainer._loopwright.run.first_step == 2
    second = final_weights("second")
    assert all(torch.equal(both.weights[name], second[name]) for name in second)
    assert sorted(path.name for path in Path("second").glob("checkpoint-*")) == ["checkpoint-4", "checkpoint-6"]
    assert not Path("second/from-hub").exists(), "the download is removed at the end"


def test_the_name_last_checkpoint_is_that_of_the_repository(pushed: HubServer) -> None:
    trainer = trainer_of("second", hub_strategy="checkpoint")
    trainer.train(resume_from_checkpoint="last-checkpoint")
    assert trainer._loopwright.run.first_step == 2
    assert checked(pushed.repo().commits[-1], "last-checkpoint") == 6


def change(name: str, content: bytes | None) -> Callable[[dict[str, bytes]], Any]:
    path = f"last-checkpoint/{name}"
    return lambda files: files.pop(path) if content is None else files.update({path: content})


@pytest.mark.parametrize(
    ("place", "changed", "message"),
    [
        ("hf://me/model", change("manifest.json", None), "has no manifest.json, so it is not a complete checkpoint"),
        ("hf://me/model", change("manifest.json", b"{}"), "manifest.json is damaged"),
        ("hf://me/model", change("progress.json", None), "lacks progress.json, so it cannot be resumed"),
        ("hf://me/model", change("model.safetensors", b"other"), "model.safetensors is 5 bytes, the manifest says"),
        ("hf://me/other", None, "could not be downloaded: there is no such repository"),
        ("hf://me/model@nowhere", None, "could not be downloaded: there is no such repository or branch"),
        ("hf://model", None, "is not a place on the Hub; write hf://owner/name/last-checkpoint"),
        ("hf://me/model/nothing", None, "has no manifest.json"),
    ],
)
def test_what_cannot_be_resumed_is_refused(pushed: HubServer, place: str, changed: Any, message: str) -> None:
    if changed is not None:
        changed(pushed.repo().head())
    with pytest.raises((CheckpointError, HubError), match=message):
        trainer_of("second", push_to_hub=False).train(resume_from_checkpoint=place)


def test_a_manifest_cannot_lead_out_of_the_folder(pushed: HubServer) -> None:
    head = pushed.repo().head()
    values = json.loads(head["last-checkpoint/manifest.json"])
    values["files"]["../../outside.json"] = {"size": 2, "sha256": hashlib.sha256(b"{}").hexdigest()}
    del values["check"]
    values["check"] = hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()
    head["last-checkpoint/manifest.json"] = json.dumps(values).encode()
    with pytest.raises(CheckpointError, match="names ../../outside.json, which is not a checkpoint file"):
        trainer_of("second", push_to_hub=False).train(resume_from_checkpoint="hf://me/model")
