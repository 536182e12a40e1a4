"""The report while a run trains: written beside training, complete at the end, never in its way."""

from __future__ import annotations

import copy
import json
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from loopwright import Trainer, TrainerCallback, TrainingArguments
from loopwright.core.measure.ledger_file import read_ledger
from loopwright.report import writer as writer_module
from loopwright.report.data_file import BEGINNING, END

DATA = [{"x": torch.tensor([float(i), 1.0]), "labels": torch.tensor(2.0 * i)} for i in range(16)]


class Line(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(2, 1)

    def forward(self, x: Any, labels: Any = None) -> Any:
        return {"loss": nn.functional.mse_loss(self.linear(x).squeeze(-1), labels)}


def make(folder: Path, *callbacks: Any, **options: Any) -> Trainer:
    values = {"max_steps": 6, "logging_steps": 1, "save_steps": 2, "report_to": "none", "use_cpu": True,
              "disable_tqdm": True, "learning_rate": 1e-3, **options}  # fmt: skip
    return Trainer(Line(), TrainingArguments(str(folder), **values), train_dataset=DATA, eval_dataset=DATA,
                   callbacks=list(callbacks))  # fmt: skip


def data_of(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "report.data.js").read_text().removeprefix(BEGINNING).removesuffix(END))


def test_a_run_leaves_a_report_with_its_evaluations(tmp_path: Path) -> None:
    trainer = make(tmp_path / "run", eval_strategy="steps", eval_steps=3)
    trainer.train()
    run = data_of(tmp_path / "run")["runs"][0]
    assert run["status"] == "finished" and run["step"] == 6 == run["max_steps"]
    assert len(run["curves"]["loss"]["x"]) == 6 and len(run["evaluations"]) == 2
    assert any("Running training on 16 samples" in note for note in run["notes"])
    assert {"name": "learning_rate", "value": "0.001", "source": "not default"} in run["config"]
    assert run["environment"]["torch"].startswith(torch.__version__.split("+")[0])
    trainer.evaluate(metric_key_prefix="test")
    assert data_of(tmp_path / "run")["runs"][0]["evaluations"][-1]["test_loss"] > 0
    copy.deepcopy(trainer.callback_handler.callbacks)
    trainer.log({"sample": "some text"})
    assert data_of(tmp_path / "run")["runs"][0]["texts"] == [{"step": 6, "name": "sample", "text": "some text"}]


def test_html_report_false_writes_no_page(tmp_path: Path) -> None:
    make(tmp_path / "run", html_report=False).train()
    assert not list((tmp_path / "run").glob("report*")) and read_ledger(tmp_path / "run") is not None


class WaitsForReport(TrainerCallback):
    """In the middle of the run: waits until the report shows the steps so far."""

    seen: Any = None

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        end, path = time.monotonic() + 120, Path(args.output_dir) / "report.data.js"
        while state.global_step == 4 and self.seen is None:
            assert time.monotonic() < end, "no report while the run trains"
            if path.exists() and (run := data_of(path.parent)["runs"][0])["step"] >= 2:
                self.seen = run
                self.thread = [each.name for each in threading.enumerate()]
            time.sleep(0.02)


def test_the_report_is_written_while_the_run_trains(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(writer_module, "FIRST_SECONDS", 0.01)
    monkeypatch.setattr(writer_module, "DATA_SECONDS", 0.01)
    waits = WaitsForReport()
    make(tmp_path / "run", waits).train()
    assert waits.seen["status"] == "running" and "loopwright-report" in waits.thread
    assert "loopwright-report" not in [each.name for each in threading.enumerate()], "the thread ends with the run"


class Fails(TrainerCallback):
    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step == 3:
            raise ValueError("a mistake")


def test_a_run_that_fails_says_so_and_a_resumed_one_has_one_ledger(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    with pytest.raises(ValueError, match="a mistake"):
        make(folder, Fails()).train()
    run = data_of(folder)["runs"][0]
    assert run["status"] == "failed" and run["verdict"] == "The run failed with an error after step 3."
    make(folder).train(resume_from_checkpoint=True)
    run = data_of(folder)["runs"][0]
    assert run["status"] == "finished" and run["starts"] == 2
    assert [mark["text"] for mark in run["marks"]] == ["resumed from the checkpoint of step 2"]
    parts = {row["part"]: row["seconds"] for row in run["ledger"]}
    assert parts["lost_work"] > 0 and parts["restarts"] > 0


def test_what_prevents_a_report_does_not_stop_the_run(tmp_path: Path, caplog: Any) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "report.html").write_text("a page of the user")
    assert make(tmp_path / "run").train().global_step == 6
    assert (tmp_path / "run" / "report.html").read_text() == "a page of the user"
    assert sum("cannot be written" in record.message for record in caplog.records) == 1


def test_proving_and_compiling_have_parts_of_their_own(tmp_path: Path) -> None:
    started = time.time()
    make(tmp_path / "run", gradient_accumulation_steps=2, torch_compile=True, torch_compile_backend="eager").train()
    wall = time.time() - started
    found = read_ledger(tmp_path / "run")
    assert found is not None and found.account.seconds["compiling"] > 0 and found.account.seconds["proving"] > 0
    assert found.account.total <= wall
