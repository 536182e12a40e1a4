"""A real notebook: live table and chart, an interrupt of the kernel, and training that continues in the next cell."""

from __future__ import annotations

import asyncio
import re
import time
from pathlib import Path
from typing import Any

import pytest

nbformat = pytest.importorskip("nbformat")
pytest.importorskip("nbclient")
pytest.importorskip("ipykernel")

SECONDS = 300
"""How long a cell may take on a slow machine."""
LARGEST = 64_000
"""Bytes of the output of a cell."""

SETUP = """
import torch
from loopwright import Trainer, TrainerCallback, TrainingArguments

class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = torch.nn.Linear(2, 1)
    def forward(self, x, labels=None):
        return {"loss": torch.nn.functional.mse_loss(self.linear(x).squeeze(-1), labels)}

torch.manual_seed(0)
data = [{"x": torch.randn(2), "labels": torch.tensor(1.0)} for _ in range(64)]
args = TrainingArguments("run", max_steps=1_000_000, logging_steps=1, save_strategy="no", save_on_interrupt=True,
                         report_to="none", learning_rate=1e-3)
trainer = Trainer(Model(), args, train_dataset=data)
"""
TRAIN = "trainer.train()"
CONTINUE = """
reached = trainer.state.global_step

class Stop(TrainerCallback):
    def on_step_end(self, args, state, control, **kwargs):
        control.should_training_stop = state.global_step >= reached + 120

trainer.add_callback(Stop())
trainer.train(resume_from_checkpoint=True)
print("reached", reached, "then", trainer.state.global_step, "first row", trainer.state.log_history[0]["step"])
"""


def executed(folder: Path) -> Any:
    """Run the notebook; its second cell is interrupted once the run has logged."""
    from nbclient import NotebookClient

    cells = [nbformat.v4.new_code_cell(source) for source in (SETUP, TRAIN, CONTINUE)]
    notebook = nbformat.v4.new_notebook(cells=cells)
    client = NotebookClient(
        notebook, timeout=SECONDS, kernel_name="python3", resources={"metadata": {"path": str(folder)}}
    )

    async def interrupt() -> None:
        end, path = time.monotonic() + SECONDS, folder / "run" / "metrics.jsonl"
        while time.monotonic() < end:
            if path.exists() and path.read_bytes().count(b"\n") >= 60:
                break
            await asyncio.sleep(0.05)
        found = client.km.interrupt_kernel()
        if asyncio.iscoroutine(found):
            await found

    async def run() -> None:
        async with client.async_setup_kernel():
            await client.async_execute_cell(cells[0], 0)
            waiting = asyncio.ensure_future(interrupt())
            cells[1].metadata["tags"] = ["raises-exception"]
            await client.async_execute_cell(cells[1], 1)
            await waiting
            await client.async_execute_cell(cells[2], 2)

    asyncio.run(run())
    return notebook


@pytest.fixture(scope="module")
def notebook(tmp_path_factory: Any) -> Any:
    return executed(tmp_path_factory.mktemp("notebook"))


def outputs(notebook: Any, cell: int, kind: str) -> list[Any]:
    return [each for each in notebook.cells[cell].outputs if each["output_type"] == kind]


@pytest.mark.parametrize("cell", [1, 2])
def test_a_saved_notebook_shows_the_chart_and_the_latest_rows(notebook: Any, cell: int) -> None:
    reopened = nbformat.reads(nbformat.writes(notebook), as_version=4)
    pages = [each["data"]["text/html"] for each in outputs(reopened, cell, "display_data")]
    assert len(pages) == 1
    assert '<svg role="img" aria-label="chart of loss from step' in pages[0] and "<script" not in pages[0]
    assert 1 < pages[0].count("<tr>") <= 51 and re.search(r"the latest 50 of [\d,]+ rows", pages[0])


def test_the_output_of_a_cell_is_bounded(notebook: Any) -> None:
    assert all(len(str(cell.outputs)) < LARGEST for cell in notebook.cells)


def test_an_interrupt_finishes_the_update_and_the_trainer_continues(notebook: Any) -> None:
    (error,) = outputs(notebook, 1, "error")
    assert error["ename"] == "KeyboardInterrupt"
    text = "".join(each["text"] for each in outputs(notebook, 2, "stream"))
    found = re.search(r"reached (\d+) then (\d+) first row (\d+)", text)
    assert found is not None, text
    reached, then, first = map(int, found.groups())
    assert reached >= 60 and then == reached + 120 and first == 1
