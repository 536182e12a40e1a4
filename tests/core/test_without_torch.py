"""The core and all its tests run where no framework can be imported."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]

RUN = """
import sys

class Refusal:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in ("torch", "tensorflow", "jax", "keras", "transformers"):
            raise ImportError(f"{name} is not to be had here")

sys.meta_path.insert(0, Refusal())
import pytest
sys.exit(pytest.main(sys.argv[1:]))
"""
"""pytest in a process in which a framework cannot be imported."""


@pytest.mark.parametrize(
    "what",
    [["--collect-only", "-q", str(HERE)], [f"{HERE}/test_loop.py", "-k", "by_hand or verb or granted", "-q"]],
    ids=["all are collected", "some are run"],
)
def test_no_framework_is_needed(what: list[str], tmp_path: Path) -> None:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT / "src"), str(ROOT)])}
    environment.pop("PYTEST_ADDOPTS", None)
    command = [sys.executable, "-c", RUN, *what, "-p", "no:cacheprovider", "-p", "no:xdist"]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, cwd=ROOT, timeout=300)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]


def test_a_run_imports_no_framework(tmp_path: Path) -> None:
    code = (
        "import sys\nfrom tests.core.numpy_runs import trainer_of\n"
        "trainer_of('run', save_strategy='steps', save_steps=3).train()\n"
        "print(*sorted({'torch', 'tensorflow', 'jax', 'transformers'} & {*sys.modules}))"
    )
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT / "src"), str(ROOT)])}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment, cwd=tmp_path)
    assert done.returncode == 0 and done.stdout.strip() == "", done.stdout + done.stderr
