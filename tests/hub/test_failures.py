"""Pushes that fail: a clear error at the end, nothing lost, and what is missing arrives when the run is resumed."""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from loopwright import Trainer
from loopwright.core.checkpoint.manager import CheckpointManager
from loopwright.errors import HubError
from loopwright.notices import Notices

from .runs import checked, final_weights, trainer_of
from .server import CLOSE, TOKEN, Answer, HubServer


def refusing(what: str, answer: Answer, *, after: int = 0, times: int = 10**9) -> Callable[[str, str], Answer]:
    """Answers requests of a kind, after a number of them and for a number of times."""
    seen = []

    def before(method: str, path: str) -> Answer:
        if what not in f"{method} {path}":
            return None
        seen.append(path)
        return answer if after < len(seen) <= after + times else None

    return before


FAULTS = {
    "wrong token": ("commit/", 401, "the token was refused"),
    "no right to write": ("commit/", 403, "may not write"),
    "full server": ("PUT /store/", 507, "storage of the account is full"),
    "too large": ("PUT /store/", 413, "refused the size"),
    "lost connection": ("PUT /store/", CLOSE, "the connection failed"),
    "lost connection at the commit": ("commit/", CLOSE, "the connection failed"),
    "broken server": ("preupload/", 500, "the server reports an error"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_failed_push_loses_nothing(online: HubServer, caplog: Any, fault: str) -> None:
    what, answer, cause = FAULTS[fault]
    online.before = refusing(what, answer, after=0)
    trainer = trainer_of(hub_strategy="checkpoint", save_total_limit=2)
    with caplog.at_level(logging.ERROR, "loopwright"), pytest.raises(HubError) as caught:
        trainer.train()
    text = str(caught.value)
    assert cause in text and "checkpoint-6 to me/model failed" in text and "all files are saved in run" in text
    assert TOKEN not in text and TOKEN not in caplog.text
    assert cause in caplog.text, "it is reported when it happens"
    assert len(online.repo().commits) == 1, "nothing is visible"
    assert trainer.state.global_step == 6
    manager = CheckpointManager("run", notices=Notices())
    assert sorted(manager.complete()) == [4, 6] and manager.find(True) is not None
    assert json.loads(Path("run/current_run.json").read_text())["status"] == "finished"
    online.before = lambda method, path: None
    trainer_of(hub_strategy="checkpoint", save_total_limit=2).train(resume_from_checkpoint="auto")
    assert checked(online.repo().commits[-1], "last-checkpoint") == 6, "resuming pushes what is missing"


@pytest.mark.parametrize(("what", "answer"), [("PUT /store/", CLOSE), ("commit/", 503), ("validate-yaml", CLOSE)])
def test_a_fault_that_passes_is_not_noticed(online: HubServer, what: str, answer: Answer) -> None:
    online.before = refusing(what, answer, times=2)
    trainer_of(hub_strategy="all_checkpoints").train()
    assert [checked(online.repo().commits[-1], f"checkpoint-{step}") for step in (2, 4, 6)] == [2, 4, 6]


def test_a_checkpoint_that_failed_arrives_later_if_later_ones_do(online: HubServer) -> None:
    online.before = refusing("commit/", 403, times=1)
    trainer_of(hub_strategy="all_checkpoints").train()
    assert [checked(online.repo().commits[-1], f"checkpoint-{step}") for step in (2, 4, 6)] == [2, 4, 6]


def test_an_error_of_a_push_that_was_replaced_is_not_raised(online: HubServer, caplog: Any) -> None:
    online.before = refusing("commit/", 403, times=1)
    trainer_of(hub_strategy="checkpoint", hub_always_push=False).train()
    assert checked(online.repo().commits[-1], "last-checkpoint") == 6 and "may not write" in caplog.text


def test_a_commit_whose_answer_is_lost_is_made_again(online: HubServer) -> None:
    trainer = trainer_of(hub_strategy="checkpoint", max_steps=2)
    online.lost_answers = 1
    trainer.train()
    assert [checked(commit, "last-checkpoint") for commit in online.repo().commits[1:]] == [2, 2]


def test_a_wrong_token_is_refused_before_training(online: HubServer) -> None:
    with pytest.raises(HubError, match="me/model could not be created on the Hub: the token was refused") as caught:
        trainer_of(hub_token="hf_" + "wrong" * 5)
    assert "wrongwrong" not in str(caught.value)


def test_the_repository_is_the_one_that_is_named(online: HubServer) -> None:
    assert trainer_of("named/here", hub_model_id=None).hub_model_id == "me/here"
    assert trainer_of(hub_model_id="mine").hub_model_id == "me/mine"
    assert trainer_of(hub_model_id="team/mine").hub_model_id == "team/mine"
    assert {*online.repos} == {"me/here", "me/mine", "team/mine"}


def test_offline_is_refused_before_training(online: HubServer, monkeypatch: Any) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(HubError, match="HF_HUB_OFFLINE is set, so nothing is sent: unset it"):
        trainer_of()


def test_push_to_hub_raises_its_error_at_once(online: HubServer) -> None:
    trainer = trainer_of(hub_strategy="end", max_steps=1)
    trainer.train()
    online.before = refusing("PUT /store/", 507)
    with pytest.raises(HubError, match="pushing the model to me/model failed: the storage.*call push_to_hub"):
        trainer.push_to_hub()
    online.before = lambda method, path: None
    trainer.push_to_hub()
    trainer.train(resume_from_checkpoint=False)


def test_an_error_of_the_run_is_not_delayed_by_a_push(online: HubServer, caplog: Any) -> None:
    """A push whose server does not answer is abandoned, and the error of the user's code is raised at once."""
    from .test_pushes import Gate

    gate = Gate(online)

    class Breaks(Trainer):
        def training_step(self, *args: Any, **kwargs: Any) -> Any:
            if self.state.global_step == 4:
                assert gate.reached.wait(60)
                raise ValueError("broken")
            return super().training_step(*args, **kwargs)

    started = time.monotonic()
    with pytest.raises(ValueError, match="broken"):
        trainer_of(kind=Breaks, hub_strategy="all_checkpoints").train()
    assert time.monotonic() - started < 30
    assert "not pushed to me/model: checkpoint-2, checkpoint-4" in caplog.text
    gate.opened.set()


def test_a_card_that_cannot_be_made_stops_nothing(online: HubServer, caplog: Any) -> None:
    class Odd(list):
        builder_name = property(lambda self: 1 / 0)

    trainer = trainer_of(max_steps=2)
    trainer.eval_dataset = Odd()
    trainer.train()
    head = online.repo().head()
    assert "model.safetensors" in head and "README.md" not in head and "ZeroDivisionError" in caplog.text


def test_a_checkpoint_that_cannot_be_linked_is_reported(online: HubServer) -> None:
    """Its files cannot be kept for the push: the run ends, and the error names the checkpoint."""
    trainer = trainer_of(max_steps=4, hub_strategy="all_checkpoints")
    Path("run/.push-checkpoint-2-1").write_text("a file where a folder goes")
    with pytest.raises(HubError, match="pushing checkpoint-2 to me/model failed: checkpoint-2 cannot be read"):
        trainer.train()
    assert checked(online.repo().commits[-1], "checkpoint-4") == 4
    assert CheckpointManager("run", notices=Notices()).find(True) is not None


def test_a_run_that_pushes_is_the_run_that_does_not(online: HubServer) -> None:
    trainer_of("plain", push_to_hub=False).train()
    online.before = refusing("PUT /store/", CLOSE)
    with pytest.raises(HubError):
        trainer_of("pushed").train()
    plain, pushed = final_weights("plain"), final_weights("pushed")
    assert all(torch.equal(plain[name], pushed[name]) for name in plain)
