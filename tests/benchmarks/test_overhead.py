"""The trainer makes no more calls than a hand-written loop, for any size of the model."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "overhead.py"
pytestmark = pytest.mark.xdist_group("overhead")  # measured once, not once per process
MODELS = ("mlp-2", "mlp-40", "llama-2")


@pytest.fixture(scope="module")
def results(tmp_path_factory: Any) -> dict[str, Any]:
    """Calls per update, counted in a process of its own: what other tests import and switch on would count too."""
    file = tmp_path_factory.mktemp("overhead") / "overhead.json"
    command = [sys.executable, SCRIPT, "--arms", "loop", "loopwright", "--rounds", "0", "--json", file]
    subprocess.run([*command, "--models", *MODELS], check=True, timeout=300, capture_output=True)
    return json.loads(file.read_text())["results"]


@pytest.mark.parametrize("model", MODELS)
def test_an_update_makes_no_more_calls_than_that_of_a_hand_written_loop(results: dict[str, Any], model: str) -> None:
    loop, ours = (results[model][arm]["calls"] for arm in ("loop", "loopwright"))
    assert ours <= loop, f"{model}: {ours:.0f} calls per update, the loop makes {loop:.0f}"
