"""The trainer may add a tenth to the calls of a hand-written loop, no more."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest


@pytest.fixture(scope="module")
def overhead() -> Any:
    path = Path(__file__).parents[2] / "benchmarks" / "overhead.py"
    spec = importlib.util.spec_from_file_location("overhead", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("model", ["mlp-2", "mlp-40", "llama-2"])
def test_calls_per_update_stay_within_a_tenth_of_the_hand_written_loop(overhead: Any, model: str) -> None:
    loop, ours = (overhead.calls_per_update(arm, model) for arm in ("loop", "loopwright"))
    assert ours <= 1.10 * loop, f"{model}: {ours:.0f} calls per update, the loop makes {loop:.0f}"
