"""A TFTrainer pushes to the Hub as any other trainer."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from tests.hub.conftest import connect
from tests.hub.runs import checked
from tests.hub.server import TOKEN, HubServer

from .tools import MARKS, trainer, weights

pytestmark = MARKS


@pytest.fixture
def online(monkeypatch: pytest.MonkeyPatch) -> Iterator[HubServer]:
    pytest.importorskip("huggingface_hub")
    made = HubServer()
    connect(made.url, monkeypatch)
    yield made
    made.stop()


def test_a_run_pushes_and_resumes_from_the_hub(online: HubServer, tmp_path: Path) -> None:
    options = {
        "save_strategy": "steps", "save_steps": 1, "push_to_hub": True, "hub_model_id": "me/model",
        "hub_token": TOKEN, "hub_strategy": "all_checkpoints",
    }  # fmt: skip
    first = trainer(tmp_path / "first", **options)
    first.train()
    assert [checked(online.repo().commits[-1], f"checkpoint-{step}") for step in (1, 2, 3)] == [1, 2, 3]
    first.push_to_hub(tags="mine")
    head = online.repo().head()
    assert {"model.keras", "model.safetensors", "README.md"} <= {*head} and "- mine" in head["README.md"].decode()
    second = trainer(tmp_path / "second", **{**options, "push_to_hub": False, "hub_strategy": "every_save"})
    second.train(resume_from_checkpoint="hf://me/model/checkpoint-1")
    assert second._loopwright.run.first_step == 1
    assert all(np.array_equal(one, two) for one, two in zip(weights(first), weights(second), strict=True))
