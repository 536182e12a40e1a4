"""`loopwright ctl` on two ranks: each does what is requested in the same update, and again when the run resumes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.tasks.cases import write_config

from .pool import Pool

STEPS = 8
RATE = ["set", "learning_rate=0.002"]


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("control")
    options = {"max_steps": STEPS, "save_strategy": "no", "eval_strategy": "no", "lr_scheduler_type": "cosine"}
    return str(write_config(folder, "table-regression", per_device_train_batch_size=2, **options))


def trained(pool: Pool, config: str, folder: Path, requests: Any, **options: Any) -> list[dict[str, Any]]:
    words = [f"output_dir={folder}", *options.pop("words", [])]
    found: list[dict[str, Any]] = pool.run(2, "controlled", config=config, requests=requests, words=words, **options)
    return found


def assert_equal(first: dict[str, Any], second: dict[str, Any]) -> None:
    assert all(torch.equal(value, second["weights"][name]) for name, value in first["weights"].items())


def test_all_ranks_do_what_is_requested_in_the_same_update(pool: Pool, config: str, tmp_path: Path) -> None:
    requests = {2: [["save"]], 3: [["evaluate"], RATE]}
    plain = trained(pool, config, tmp_path / "plain", {})[0]["rates"]
    ranks = trained(pool, config, tmp_path / "run", requests)
    assert [each["saved"] for each in ranks] == [[2], [2]] and (tmp_path / "run/checkpoint-2").is_dir()
    assert [each["evaluated"] for each in ranks] == [[3], [3]]
    for each in ranks:
        assert each["rates"][:3] == plain[:3]
        assert each["rates"][3:] == pytest.approx([rate * 0.2 for rate in plain[3:]])
    assert_equal(*ranks)
    rows = [json.loads(line) for line in (tmp_path / "run/metrics.jsonl").read_text().splitlines()]
    assert [(row["step"], row["control"]) for row in rows if "control" in row] == [
        (2, "save"), (3, "evaluate"), (3, "set learning_rate=0.002"),
    ]  # fmt: skip


def test_stop_saves_once_and_ends_all_ranks_with_75(pool: Pool, config: str, tmp_path: Path) -> None:
    ranks = trained(pool, config, tmp_path / "run", {3: [["stop"]]})
    assert [(each["code"], each["step"]) for each in ranks] == [(75, 3), (75, 3)]
    assert (tmp_path / "run/checkpoint-3").is_dir()


@pytest.mark.parametrize("saved_at", [2, 4], ids=["set after the checkpoint", "set before the checkpoint"])
def test_a_setting_survives_a_resume_on_all_ranks(saved_at: int, pool: Pool, config: str, tmp_path: Path) -> None:
    requests = {saved_at: [["save"]], 3: [RATE]}
    whole = trained(pool, config, tmp_path / "whole", requests)
    trained(pool, config, tmp_path / "run", requests, fails_at=6)
    again = trained(pool, config, tmp_path / "run", {}, words=["resume_from_checkpoint=true"])
    for first, second in zip(whole, again, strict=True):
        assert second["step"] == STEPS and second["rates"] == first["rates"][saved_at:]
        assert_equal(first, second)
