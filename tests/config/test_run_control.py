"""`loopwright ctl`: a run does what is requested after its current update, records it, and repeats it when resumed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from loopwright import TrainerCallback
from loopwright.config import build_trainer, load_config
from loopwright.config.control_files import FOLDER, HISTORY, Inbox, Request, send
from tests.tasks.cases import write_config

STEPS = 8


class Sender(TrainerCallback):
    """Sends requests while an update is computed, as another process would, and may fail in a later one."""

    def __init__(self, requests: dict[int, list[Request]], fails_at: int | None = None) -> None:
        self.requests, self.fails_at = requests, fails_at

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        step = state.global_step + 1
        if step == self.fails_at:
            raise RuntimeError("the machine fails")
        for request in self.requests.get(step, []):
            send(Path(args.output_dir), request)


def trained(
    folder: Path, name: str, requests: Any, *, fails_at: int | None = None, words: list[str] | None = None
) -> Any:
    path = write_config(folder, "table-regression", max_steps=STEPS, save_strategy="no", output_dir=name)
    trainer = build_trainer(load_config(path, ["eval_strategy=no", "lr_scheduler_type=cosine", *(words or [])]))
    trainer.add_callback(Sender(requests, fails_at))
    if fails_at is None:
        trainer.train()
    else:
        with pytest.raises(RuntimeError, match="the machine fails"):
            trainer.train()
    return trainer


def rows_of(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


RATE = Request("set", "learning_rate", 0.002)


def test_requests_are_done_after_the_update_and_recorded(tmp_path: Path) -> None:
    requests = {2: [Request("save")], 3: [Request("evaluate"), RATE], 4: [Request("set", "logging_steps", 2)]}
    trainer = trained(tmp_path, "run", requests)
    rows = rows_of(tmp_path / "run")
    assert (tmp_path / "run" / "checkpoint-2").is_dir()
    assert [row["step"] for row in rows if "eval_loss" in row] == [3]
    assert [(row["step"], row["control"]) for row in rows if "control" in row] == [
        (2, "save"), (3, "evaluate"), (3, "set learning_rate=0.002"), (4, "set logging_steps=2"),
    ]  # fmt: skip
    rates = {row["step"]: row["learning_rate"] for row in rows if "loss" in row}
    plain = {
        row["step"]: row["learning_rate"] for row in trained(tmp_path, "plain", {}).state.log_history if "loss" in row
    }
    assert rates[3] == plain[3] and rates[4] == pytest.approx(plain[4] * 0.2) and [*rates] == [1, 2, 3, 4, 6, 8]
    history = [json.loads(line) for line in (tmp_path / "run" / HISTORY).read_text().splitlines()]
    assert [(row["step"], row["action"]) for row in history] == [(2, "save"), (3, "evaluate"), (3, "set"), (4, "set")]
    assert not (tmp_path / "run" / FOLDER).exists()
    assert trainer.state.global_step == STEPS


@pytest.mark.parametrize("saved_at", [2, 4], ids=["set after the checkpoint", "set before the checkpoint"])
def test_settings_survive_a_resume_bitwise(saved_at: int, tmp_path: Path) -> None:
    requests = {3: [RATE], 5: [Request("set", "learning_rate", 0.05)]}
    whole = trained(tmp_path, "whole", {**requests, saved_at: [*requests.get(saved_at, []), Request("save")]})
    trained(tmp_path, "run", {**requests, saved_at: [*requests.get(saved_at, []), Request("save")]}, fails_at=7)
    again = trained(tmp_path, "run", {}, words=["resume_from_checkpoint=true"])
    for first, second in zip(whole.model.parameters(), again.model.parameters(), strict=True):
        assert torch.equal(first, second)
    kept = [
        [
            {key: row[key] for key in row if key in ("step", "loss", "learning_rate", "control")}
            for row in rows_of(folder)
        ]
        for folder in (tmp_path / "whole", tmp_path / "run")
    ]
    assert [row for row in kept[0] if len(row) > 1] == [row for row in kept[1] if len(row) > 1]


def test_intervals_survive_a_resume(tmp_path: Path) -> None:
    requests = {1: [Request("set", "logging_steps", 3)], 2: [Request("save")]}
    trained(tmp_path, "run", requests, fails_at=4)
    trained(tmp_path, "run", {}, words=["resume_from_checkpoint=true"])
    assert [row["step"] for row in rows_of(tmp_path / "run") if "loss" in row] == [1, 3, 6]


def test_a_fresh_run_has_no_settings_of_the_one_before(tmp_path: Path) -> None:
    trained(tmp_path, "run", {3: [RATE]})
    trainer = trained(tmp_path, "run", {})
    plain = trained(tmp_path, "plain", {})
    for first, second in zip(trainer.model.parameters(), plain.model.parameters(), strict=True):
        assert torch.equal(first, second)
    assert not (tmp_path / "run" / HISTORY).exists()


def test_stop_saves_and_exits_with_75(tmp_path: Path) -> None:
    path = write_config(tmp_path, "table-regression", max_steps=STEPS, save_strategy="no", output_dir="run")
    trainer = build_trainer(load_config(path))
    trainer.add_callback(Sender({3: [Request("stop")]}))
    with pytest.raises(SystemExit) as caught:
        trainer.train()
    assert caught.value.code == 75 and (tmp_path / "run" / "checkpoint-3").is_dir()
    assert not (tmp_path / "run" / FOLDER).exists()


def test_requests_that_cannot_be_done_are_reported(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    class Damaging(TrainerCallback):
        def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            if state.global_step == 1:
                (Path(args.output_dir) / FOLDER / "0.json").write_text("{")
                (Path(args.output_dir) / FOLDER / "1.json").write_text('{"action": "set", "key": "seed", "value": 3}')

    path = write_config(tmp_path, "table-regression", save_strategy="no", output_dir="run")
    trainer = build_trainer(load_config(path, ["data.validation_share=null"]))
    trainer.add_callback(Sender({2: [Request("evaluate")]}))
    trainer.add_callback(Damaging())
    trainer.train()
    assert "the request 0.json cannot be read" in caplog.text and "the request 1.json cannot be read" in caplog.text
    assert "'evaluate' is ignored, because there is no validation data" in caplog.text
    assert trainer.state.global_step == 3


def test_an_incomplete_history_is_read_as_far_as_it_goes(tmp_path: Path) -> None:
    inbox = Inbox(tmp_path)
    inbox.record(3, RATE)
    with open(inbox.history, "a") as file:
        file.write('{"step": 5, "acti')
    assert inbox.recorded() == [(3, RATE)]
