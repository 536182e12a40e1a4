"""What a run pushes, and when."""

from __future__ import annotations

import json
import logging
import pickle
import threading
from pathlib import Path
from typing import Any

import pytest

from loopwright import Trainer, TrainerCallback

from .runs import checked, trainer_of
from .server import TOKEN, HubServer


def titles(server: HubServer, branch: str = "main") -> list[str]:
    return [commit.message for commit in server.repo().commits[1:] if commit.branch == branch]


class Gate:
    """Holds large files back until it is opened."""

    def __init__(self, server: HubServer) -> None:
        self.opened, self.reached = threading.Event(), threading.Event()
        server.before = self

    def __call__(self, method: str, path: str) -> None:
        if method == "PUT":
            self.reached.set()
            assert self.opened.wait(60)


class Opens(TrainerCallback):
    """Opens a gate after the last save, when all pushes are in the queue."""

    def __init__(self, gate: Gate) -> None:
        self.gate = gate

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.gate.opened.set()


class Waits(TrainerCallback):
    """Lets a run continue after its first save when the push of it has begun."""

    def __init__(self, gate: Gate) -> None:
        self.gate = gate

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step == 3:
            assert self.gate.reached.wait(60)


def test_every_save_pushes_the_model_of_each_checkpoint(online: HubServer) -> None:
    trainer = trainer_of(hub_always_push=True, eval_strategy="steps", eval_steps=3)
    trainer.train()
    assert titles(online) == [f"Training in progress, step {step}" for step in (2, 4, 6)]
    head = online.repo().head()
    assert head["model.safetensors"] == Path("run/checkpoint-6/model.safetensors").read_bytes()
    assert {*head} == {".gitattributes", "README.md", "arguments.json", "model.safetensors"}
    assert "eval" in head["README.md"].decode() and "6 of 6" in head["README.md"].decode()
    assert trainer.hub_model_id == "me/model" and trainer.push_in_progress.is_done()
    assert not list(Path("run").glob(".push-*")), "the links are removed"


def test_the_newest_checkpoint_is_in_last_checkpoint(online: HubServer) -> None:
    trainer_of(hub_strategy="checkpoint", hub_always_push=True).train()
    repo = online.repo()
    assert [checked(commit, "last-checkpoint") for commit in repo.commits[1:]] == [2, 4, 6]
    whole = {path.removeprefix("last-checkpoint/") for path in repo.head() if path.startswith("last-checkpoint/")}
    assert whole == {path.name for path in Path("run/checkpoint-6").iterdir()}
    assert len(online.uploads) == len(set(online.uploads)), "the weights at the root are not sent a second time"


def test_files_of_an_earlier_push_are_removed(online: HubServer) -> None:
    trainer_of("first", hub_strategy="checkpoint", max_steps=2).train()
    old = {"last-checkpoint/ranks/9.json": b"{}", "model-00001-of-00002.safetensors": b"old", "notes.txt": b"mine"}
    online.repo().head().update(old)
    trainer_of("second", hub_strategy="checkpoint", max_steps=2).train()
    head = online.repo().head()
    assert not {*old} - {"notes.txt"} & {*head} and head["notes.txt"] == b"mine"
    assert checked(online.repo().commits[-1], "last-checkpoint") == 2


@pytest.mark.parametrize("background", [True, False])
def test_all_checkpoints_arrive_though_they_were_removed_here(online: HubServer, background: bool) -> None:
    gate = Gate(online)
    trainer_of(
        hub_strategy="all_checkpoints", save_total_limit=1, callbacks=[Opens(gate)], async_save=background
    ).train()
    assert [path.name for path in Path("run").glob("checkpoint-*")] == ["checkpoint-6"]
    last = online.repo().commits[-1]
    assert [checked(last, f"checkpoint-{step}") for step in (2, 4, 6)] == [2, 4, 6]
    assert len(titles(online)) == 3


def test_a_newer_push_takes_the_place_of_one_that_waits(online: HubServer, caplog: Any) -> None:
    gate = Gate(online)
    with caplog.at_level(logging.WARNING, "loopwright"):
        trainer_of(hub_strategy="checkpoint", callbacks=[Waits(gate), Opens(gate)]).train()
    assert [checked(commit, "last-checkpoint") for commit in online.repo().commits[1:]] == [2, 6]
    line = (
        "checkpoint-4 is not pushed to me/model: checkpoint-2 was still being pushed when checkpoint-6 was ready, "
        "which takes its place"
    )
    assert [each.getMessage() for each in caplog.records].count(line) == 1


def test_end_pushes_only_what_is_saved_by_the_user(online: HubServer) -> None:
    trainer = trainer_of(hub_strategy="end")
    trainer.train()
    assert titles(online) == []
    trainer.save_model()
    commit = trainer.push_to_hub(tags=["mine"], license="mit")
    assert titles(online) == ["Model save", "End of training"] and commit.oid == online.repo().branches["main"]
    head = online.repo().head()
    assert {"model.safetensors", "README.md", "metrics.jsonl"} <= {*head}
    assert not [path for path in head if path.startswith(("checkpoint", ".push", "run.", "current_run"))]
    assert "- mine" in head["README.md"].decode() and "license: mit" in head["README.md"].decode()


def test_a_push_after_training_without_push_to_hub(online: HubServer) -> None:
    trainer = trainer_of(push_to_hub=False, hub_private_repo=True, hub_revision="dev", max_steps=1)
    trainer.train()
    assert online.repos == {}
    future = trainer.push_to_hub(blocking=False, commit_message="mine")
    assert future.result(60).oid == online.repo().branches["dev"] != online.repo().branches["main"]
    assert online.repo().private and titles(online, "dev") == ["mine"]


def test_pickles_are_left_out_and_reported(online: HubServer, caplog: Any) -> None:
    class Writes(TrainerCallback):
        def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            folder = Path(args.output_dir) / f"checkpoint-{state.global_step}"
            (folder / "notes.dat").write_bytes(pickle.dumps({"a": 1}))
            (folder / "notes.txt").write_text("mine")

    options = {"hub_strategy": "checkpoint", "checkpoint_format": "transformers", "max_steps": 2}
    with caplog.at_level(logging.WARNING, "loopwright"):
        trainer_of(callbacks=[Writes()], **options).train()
    head = online.repo().head()
    assert {"last-checkpoint/model.safetensors", "last-checkpoint/notes.txt", "model.safetensors"} <= {*head}
    assert not [path for path in head if path.endswith((".pt", ".pth", ".bin", ".dat"))]
    assert "can run code: notes.dat, optimizer.pt, rng_state.pth, scheduler.pt, training_args.bin" in caplog.text


def test_the_token_is_in_no_file(online: HubServer) -> None:
    trainer = trainer_of(hub_strategy="all_checkpoints")
    trainer.train()
    trainer.push_to_hub()
    pushed = [path for path, content in online.repo().head().items() if TOKEN.encode() in content]
    written = [path for path in Path("run").rglob("*") if path.is_file() and TOKEN.encode() in path.read_bytes()]
    assert pushed == [] and written == []


def test_a_gitignore_in_the_repository_leaves_nothing_out(online: HubServer) -> None:
    trainer = trainer_of(hub_strategy="checkpoint", max_steps=2)
    online.repo().head()[".gitignore"] = b"manifest.json\nmodel.safetensors\n"
    trainer.train()
    assert checked(online.repo().commits[-1], "last-checkpoint") == 2


def test_an_override_gets_complete_checkpoints(online: HubServer) -> None:
    seen = []

    class Own(Trainer):
        def _push_from_checkpoint(self, checkpoint_folder: str) -> None:
            seen.append(json.loads((Path(checkpoint_folder) / "manifest.json").read_text())["step"])
            super()._push_from_checkpoint(checkpoint_folder)

    trainer_of(kind=Own, hub_always_push=True).train()
    assert seen == [2, 4, 6] and len(titles(online)) == 3


def test_a_push_begins_with_its_event(online: HubServer) -> None:
    class Counts(TrainerCallback):
        steps: list[int] = []

        def on_push_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            self.steps.append(state.global_step)

    trainer_of(callbacks=[Counts()]).train()
    assert Counts.steps == [2, 4, 6]


def test_a_save_by_a_callback_is_pushed(online: HubServer) -> None:
    class Saves(TrainerCallback):
        trainer: Any

        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            if state.global_step == 3:
                self.trainer._save_checkpoint(self.trainer.model)

    for background in (True, False):
        callback = Saves()
        callback.trainer = trainer_of(
            f"run-{background}", hub_strategy="all_checkpoints", save_strategy="no", async_save=background,
            hub_model_id=f"me/{background}", callbacks=[callback],
        )  # fmt: skip
        callback.trainer.train()
        assert checked(online.repo(f"me/{background}").commits[-1], "checkpoint-3") == 3


def test_checkpoints_at_a_url_are_pushed(online: HubServer, url: str) -> None:
    trainer = trainer_of(url, hub_strategy="all_checkpoints", save_total_limit=1)
    trainer.train()
    trainer.push_to_hub()
    last = online.repo().commits[-1]
    assert [checked(last, f"checkpoint-{step}") for step in (2, 4, 6)] == [2, 4, 6]
    assert {"model.safetensors", "README.md"} <= {*last.files}
    assert not list(Path("trainer_output").rglob(".push-*"))


def test_another_strategy_pushes_what_it_needs(online: HubServer) -> None:
    trainer_of(max_steps=2).train()
    trainer_of(max_steps=2, hub_strategy="checkpoint").train(resume_from_checkpoint=True)
    assert checked(online.repo().commits[-1], "last-checkpoint") == 2
    before = len(online.repo().commits)
    trainer_of(max_steps=2, hub_strategy="checkpoint").train(resume_from_checkpoint=True)
    assert len(online.repo().commits) == before, "nothing is missing"


def test_an_unknown_word_for_the_card_is_refused(online: HubServer) -> None:
    with pytest.raises(TypeError, match="colour"):
        trainer_of(hub_strategy="end").push_to_hub(colour="red")
