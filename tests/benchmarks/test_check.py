"""`loopwright check` predicts the peak memory of a run."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType

import pytest

pytest.importorskip("transformers")

NAMES = ["mlp", "causal-lm", "text-classification"]


def load_benchmark() -> ModuleType:
    path = Path(__file__).resolve().parents[2] / "benchmarks" / "check.py"
    spec = importlib.util.spec_from_file_location("benchmark_of_check", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.grid
@pytest.mark.parametrize("name", NAMES)
def test_the_peak_is_predicted_within_ten_percent(name: str, tmp_path: Path) -> None:
    benchmark = load_benchmark()
    assert [*benchmark.MODELS] == NAMES
    benchmark.STEPS[name] = 20
    assert benchmark.compare(name, tmp_path)["peak_ratio"] == pytest.approx(1, abs=0.1)
