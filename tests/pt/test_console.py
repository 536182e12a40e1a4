"""What a user sees of a run: at its beginning, while it runs, at its end; in a file, a terminal and a notebook."""

from __future__ import annotations

import logging
import os
import pty
import re
import select
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from loopwright import EarlyStoppingCallback, MetricError, PrinterCallback, Trainer, TrainingArguments
from loopwright.callbacks.notebook import NotebookProgressCallback
from loopwright.callbacks.progress import ProgressCallback
from tests.models import Regression, regression_data

DATA = regression_data(64)
ROOT = Path(__file__).resolve().parents[2]
SECONDS = 60
"""The longest a process of a test may take."""

SCRIPT = """
import sys
from loopwright import Trainer, TrainingArguments
from tests.models import Regression, regression_data
args = TrainingArguments(sys.argv[1], max_steps=20, logging_steps=10, save_steps=10, use_cpu=True, report_to="none",
                         per_device_train_batch_size=4)
Trainer(Regression(), args, train_dataset=regression_data(64)).train()
"""


def run(folder: Any, *, metrics: list[float] | None = None, callbacks: Any = (), **options: Any) -> Trainer:
    values = iter([0.0, *(metrics or [])])  # the metrics function is tried once before training
    extra: dict[str, Any] = {}
    if metrics is not None:
        extra = {"eval_dataset": DATA[:8], "compute_metrics": lambda p: {"f1": next(values)}}
        options = {
            "eval_strategy": "steps", "eval_steps": 10, "metric_for_best_model": "f1", "greater_is_better": True,
            "load_best_model_at_end": True, **options,
        }  # fmt: skip
    settings = {
        "max_steps": 20, "logging_steps": 500, "save_steps": 10, "use_cpu": True, "report_to": "none",
        "per_device_train_batch_size": 4, "gradient_accumulation_steps": 2, **options,
    }  # fmt: skip
    args = TrainingArguments(str(folder), **settings)
    trainer = Trainer(Regression(), args, train_dataset=DATA, callbacks=[*callbacks], **extra)
    trainer.train()
    return trainer


def test_the_beginning_shows_the_sizes_of_the_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run(tmp_path)
    first, second, begun, *_ = capsys.readouterr().out.splitlines()
    assert first == (
        "Running training on 64 samples: 2.5 epochs, 20 steps, effective batch size 8 "
        "(4 samples x 2 accumulated x 1 rank)"
    )
    assert second == "Regression: 49 parameters, 49 trainable; cpu, fp32"
    assert begun == "step 1/20", "a sign of life before the first log"


def test_frozen_parameters_precision_and_streams(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    class Stream(torch.utils.data.IterableDataset):
        def __iter__(self) -> Any:
            return iter(DATA)

    model = Regression()
    frozen = next(model.parameters()).requires_grad_(False).numel()
    args = TrainingArguments(str(tmp_path), max_steps=2, use_cpu=True, bf16=True, report_to="none", save_strategy="no")
    Trainer(model, args, train_dataset=Stream()).train()
    first, second, *_ = capsys.readouterr().out.splitlines()
    assert first.startswith("Running training on a stream of samples: 2 steps, effective batch size 8")
    assert second == f"Regression: 49 parameters, {49 - frozen} trainable; cpu, bf16"


@pytest.mark.parametrize("background", [True, False])
def test_saves_the_stop_and_the_best_are_shown(
    background: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run(
        tmp_path, max_steps=100, metrics=[0.5, 0.75, 1.0, 0.9, 0.8, 0.7], callbacks=[EarlyStoppingCallback(3)],
        async_save=background,
    )  # fmt: skip
    lines = capsys.readouterr().out.splitlines()
    saved = [line for line in lines if line.startswith("saved")]
    assert saved == [f"saved checkpoint-{step}" for step in (10, 20, 30, 40, 50, 60)]
    assert "early stopping at step 60 (no improvement of f1 for 3 evaluations)" in lines
    assert lines[-1] == "loaded best checkpoint-30 (f1 1.0)"


def test_what_is_resumed_is_shown(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run(tmp_path)
    capsys.readouterr()
    run(tmp_path, resume_from_checkpoint=str(tmp_path / "checkpoint-10"))
    lines = capsys.readouterr().out.splitlines()
    assert f"resuming from {tmp_path / 'checkpoint-10'}: step 10 of 20 (epoch 1.25)" in lines
    assert "step 11/20" in lines


def test_a_failed_save_is_not_shown_as_saved(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    class Unsaved(Trainer):
        def _save_checkpoint(self, model: Any, trial: Any = None) -> None:
            pass

    args = TrainingArguments(str(tmp_path), max_steps=2, save_steps=1, use_cpu=True, report_to="none")
    Unsaved(Regression(), args, train_dataset=DATA).train()
    assert "saved" not in capsys.readouterr().out


@pytest.mark.parametrize("level", ["warning", "error", "critical"])
def test_a_log_level_above_info_turns_the_lines_off(
    level: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run(tmp_path, log_level=level)
    assert not re.search("training on|saved|parameters", capsys.readouterr().out)


def test_without_bars_the_lines_are_logged_at_info(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    run(tmp_path, disable_tqdm=True)
    assert all(line.startswith("{") for line in capsys.readouterr().out.splitlines()), "only the dictionaries"
    assert "saved" not in caplog.text
    run(tmp_path / "info", disable_tqdm=True, log_level="info")
    told = [record.getMessage() for record in caplog.records if record.levelno == logging.INFO]
    assert any(text.startswith("Running training on 64 samples") for text in told) and "saved checkpoint-20" in told


def test_other_ranks_show_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    class Second(Trainer):
        def train(self, *given: Any, **options: Any) -> Any:
            self.state.is_world_process_zero = False
            return super().train(*given, **options)

    args = TrainingArguments(str(tmp_path), max_steps=2, save_steps=1, use_cpu=True, report_to="none")
    Second(Regression(), args, train_dataset=DATA).train()
    assert capsys.readouterr().out == ""


def test_one_display_is_enough(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A user who removes the display, and one who adds a printer."""
    args = TrainingArguments(str(tmp_path), max_steps=2, use_cpu=True, report_to="none")
    trainer = Trainer(Regression(), args, train_dataset=DATA, callbacks=[PrinterCallback()])
    trainer.remove_callback(ProgressCallback)
    trainer.train()
    assert "training on" not in capsys.readouterr().out


def test_columns_that_are_not_used_are_reported_once_at_info(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    data = [{**sample, "extra": index} for index, sample in enumerate(DATA)]
    args = TrainingArguments(str(tmp_path), max_steps=6, per_device_train_batch_size=32, use_cpu=True, log_level="info",
                             save_strategy="no", strict=True, report_to="none")  # fmt: skip
    Trainer(Regression(), args, train_dataset=data).train()
    found = [record for record in caplog.records if "removed columns" in record.getMessage()]
    assert [record.levelno for record in found] == [logging.INFO]
    assert found[0].getMessage().endswith("does not accept: extra")


# ---- a file, a terminal, a notebook ---------------------------------------------------------------------------------


def environment() -> dict[str, str]:
    paths = os.pathsep.join([str(ROOT / "src"), str(ROOT)])
    return {**os.environ, "PYTHONPATH": paths, "TERM": "xterm", "COLUMNS": "120", "OMP_NUM_THREADS": "1"}


def test_a_file_gets_plain_lines(tmp_path: Path) -> None:
    command = [sys.executable, "-c", SCRIPT, str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, env=environment(), timeout=SECONDS)
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert "\x1b" not in done.stdout
    assert lines[0].startswith("Running training on 64 samples: 1.25 epochs, 20 steps")
    assert lines[2] == "step 1/20"
    assert [line for line in lines if line.startswith("saved")] == ["saved checkpoint-10", "saved checkpoint-20"]
    assert re.search(r"\nstep 10/20  loss \S+ .*\(.*steps/s, 0:00:0\d left\)\n", done.stdout)


def test_a_terminal_gets_the_lines_above_the_bar(tmp_path: Path) -> None:
    leader, follower = pty.openpty()
    process = subprocess.Popen(
        [sys.executable, "-c", SCRIPT, str(tmp_path)], stdout=follower, stderr=follower, env=environment()
    )
    os.close(follower)
    text, deadline = b"", time.monotonic() + SECONDS
    try:
        while time.monotonic() < deadline:
            if select.select([leader], [], [], 1.0)[0]:
                try:
                    piece = os.read(leader, 65536)
                except OSError:  # the terminal was closed: the process has ended
                    break
                if not piece:
                    break
                text += piece
    finally:
        process.kill() if process.poll() is None and time.monotonic() >= deadline else process.wait(SECONDS)
        os.close(leader)
    shown = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", text.decode())
    lines = [line.strip() for line in re.split(r"[\r\n]+", shown)]
    assert process.returncode == 0, shown
    assert any(line.startswith("Running training on 64 samples") for line in lines)
    assert "saved checkpoint-10" in lines and "saved checkpoint-20" in lines
    assert any(re.match(r"training +━* *20/20 .*steps/s", line) for line in lines)
    assert "step 1/20" not in lines, "the bar is the sign of life"


def test_a_notebook_gets_the_lines_above_the_table(tmp_path: Path) -> None:
    shown: list[str] = []
    steps = {"max_steps": 20, "save_steps": 10, "logging_steps": 10}
    args = TrainingArguments(str(tmp_path), **steps, use_cpu=True, report_to="none")
    trainer = Trainer(Regression(), args, train_dataset=DATA)
    trainer.remove_callback(ProgressCallback)
    trainer.add_callback(NotebookProgressCallback(show=shown.append))
    trainer.train()
    assert "<div>Running training on 64 samples: " in shown[1]
    assert "49 parameters" in shown[2]
    last = shown[-1]
    assert "<div>saved checkpoint-20</div>" in last and "<td>20</td>" in last and "steps/s" in last


# ---- metrics --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("value", "text"), [(0.5, "returned 0.5"), (None, "returned None"), ([1], r"returned \[1\]")])
def test_a_metrics_function_that_returns_no_dict_is_refused(value: Any, text: str, tmp_path: Path) -> None:
    args = TrainingArguments(str(tmp_path), use_cpu=True, report_to="none", disable_tqdm=True)
    trainer = Trainer(Regression(), args, eval_dataset=DATA[:8], compute_metrics=lambda p: value)
    with pytest.raises(MetricError, match=f"compute_metrics {text}, not a dict; return a dict"):
        trainer.evaluate()


# ---- help -----------------------------------------------------------------------------------------------------------


def test_help_shows_full_signatures() -> None:
    import inspect
    import pydoc

    import loopwright

    wanted = list(inspect.signature(Trainer).parameters)
    assert len(wanted) > 12
    for name in ("Trainer", "Seq2SeqTrainer", "NeuronTrainer", "Seq2SeqNeuronTrainer"):
        cls = getattr(loopwright, name)
        assert list(inspect.signature(cls).parameters) == wanted, name
        text = pydoc.render_doc(cls, renderer=pydoc.plaintext)
        assert all(f"{each}: " in text for each in wanted if each != "old_names"), name
        for method, function in inspect.getmembers(cls, inspect.isfunction):
            if not method.startswith("_"):
                assert inspect.getdoc(function), f"{name}.{method}"
                kinds = [each.kind for each in inspect.signature(function).parameters.values()]
                assert inspect.Parameter.VAR_POSITIONAL not in kinds, f"{name}.{method}"


def test_a_module_without_parameters_in_its_name() -> None:
    """The lines need nothing of a model but its parameters."""

    class Odd(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.shared = nn.Linear(4, 4)
            self.tied = self.shared

        def forward(self, x: torch.Tensor, labels: torch.Tensor) -> Any:
            return {"loss": (self.shared(x).sum(-1) - labels).pow(2).mean()}

    args = TrainingArguments("run", use_cpu=True, report_to="none", disable_tqdm=True)
    trainer = Trainer(Odd(), args, train_dataset=DATA)
    assert trainer._loopwright.model_sizes() == (20, 20), "tied weights count once"
