"""`loopwright check` predicts the peak memory of a run; how its benchmarks compare times."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType

import pytest

pytest.importorskip("transformers")

NAMES = ["mlp", "causal-lm", "text-classification"]


def load_benchmark(name: str = "check") -> ModuleType:
    path = Path(__file__).resolve().parents[2] / "benchmarks" / f"{name}.py"
    spec = importlib.util.spec_from_file_location(f"benchmark_of_{name}", path)
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


def test_imports_that_forks_save_are_on_both_sides() -> None:
    benchmark = load_benchmark("check_gpu")
    found = benchmark.totals({"total": 13.0}, 10.0, imports=15.0)
    assert (found["seconds_predicted"], found["seconds"]) == (28.0, 26.0)
    assert found["seconds_ratio_without_imports"] == pytest.approx(1.2), "the interpreter is not in a fork"
    assert benchmark.totals({"total": 13.0}, 10.0, imports=None)["seconds_ratio"] == pytest.approx(1.3)


def test_a_command_that_fails_in_a_fork_is_an_error(tmp_path: Path) -> None:
    benchmark = load_benchmark("check_gpu")
    with pytest.raises(SystemExit, match="nowhere.json"):
        benchmark.in_fork(["check", "nowhere.json"], tmp_path)
