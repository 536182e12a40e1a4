"""MFU relative to measured matrix products: only on request, under its own name, and without side effects."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest
import torch

from loopwright.callbacks.text import work_line
from loopwright.pt.measure import throughput
from loopwright.speed.measure import sustained
from tests.models import Tokens, samples, trainer_of

CPU = torch.device("cpu")
TWICE: dict[str, Any] = {"num_train_epochs": 2, "logging_steps": 2, "measure_matmul": True}


@pytest.fixture
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    """Measures a moment instead of a second."""
    measure = sustained.sustained_operations
    monkeypatch.setattr(throughput, "sustained_operations", lambda device, format: measure(device, format, 0.02))


def test_the_rate_is_that_of_products_counted_by_hand() -> None:
    found = sustained.sustained_operations(CPU, "fp32", 0.2)
    size = sustained.SIZE_ON_CPU
    a, b = torch.randn(2, size, size)
    times = []
    for _ in range(20):
        start = time.perf_counter()
        a @ b
        times.append(time.perf_counter() - start)
    assert found is not None
    assert found < 4 * 2 * size**3 / min(times), "no faster than the fastest product; other load only slows it down"


def test_measuring_leaves_the_random_state_alone() -> None:
    before = torch.random.get_rng_state()
    sustained.sustained_operations(CPU, "bf16", 0.0)
    assert torch.equal(before, torch.random.get_rng_state())


def test_a_device_that_cannot_wait_is_not_measured() -> None:
    assert sustained.sustained_operations(torch.device("meta"), "fp32", 0.0) is None


def test_a_run_reports_both_measures(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, short: None) -> None:
    monkeypatch.setattr(throughput, "device_peak", lambda device, dtype: 1e9)
    trainer = trainer_of(Tokens(), samples([20] * 4), tmp_path, **TWICE)
    trainer.train()
    numbers = trainer.speed_report().numbers
    measured = trainer._loopwright.run.pace._sustained_operations
    assert numbers["mfu_of_matmul"] == pytest.approx(numbers["mfu"] * 1e9 / measured, rel=1e-3)
    assert "MFU of the measured matmul" in str(trainer.speed_report())


def test_a_device_without_data_sheet_reports_what_was_measured(tmp_path: Path, short: None) -> None:
    trainer = trainer_of(Tokens(), samples([20] * 4), tmp_path, **TWICE)
    trainer.train()
    numbers = trainer.speed_report().numbers
    assert numbers["mfu_of_matmul"] > 0 and "mfu" not in numbers


def test_nothing_is_measured_unless_asked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(throughput, "sustained_operations", lambda *args: pytest.fail("measured"))
    trainer = trainer_of(Tokens(), samples([20] * 4), tmp_path, num_train_epochs=1)
    trainer.train()
    assert "mfu_of_matmul" not in trainer.speed_report().numbers


def test_a_device_that_cannot_be_measured_is_reported_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(throughput, "sustained_operations", lambda *args: None)
    trainer = trainer_of(Tokens(), samples([20] * 4), tmp_path, num_train_epochs=1, measure_matmul=True)
    trainer.train()
    told = [text for text in trainer._loopwright.notices.told if text.startswith("measure_matmul")]
    assert len(told) == 1 and "cannot be timed on cpu" in told[0]


def test_measuring_changes_no_weight(tmp_path: Path, short: None) -> None:
    def weights(folder: Path, **more: Any) -> list[torch.Tensor]:
        torch.manual_seed(0)
        trainer = trainer_of(Tokens(), samples([20] * 8), folder, num_train_epochs=1, logging_steps=1, **more)
        trainer.train()
        return [each.detach() for each in trainer.model.state_dict().values()]

    plain, measured = weights(tmp_path / "a"), weights(tmp_path / "b", measure_matmul=True)
    assert all(torch.equal(a, b) for a, b in zip(plain, measured, strict=True))


def test_the_line_names_both_measures() -> None:
    pace = {"tokens_per_second": 58691.0, "mfu": 0.59, "mfu_of_matmul": 0.72}
    assert work_line(pace) == "58.7k tokens/s, MFU 59.0%, 72.0% of the measured matmul, "
