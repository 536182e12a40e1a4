"""Running the tests of a file as a script, on machines that have a GPU and no pytest.

This file itself runs those of all files, some files at a time: `python tests/gpu/script.py`.
"""

from __future__ import annotations

import gc
import os
import subprocess
import sys
import time
import traceback
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch

HERE = Path(__file__).resolve().parent
FIRST = ("test_graphed_training", "test_speed_parts", "test_two_processes", "test_output_layer_gpu")
"""The files that run first, because they take longest."""
BESIDE = 4
"""Files that run at a time."""

HAS_GPU = torch.cuda.is_available()


def needs_gpu() -> Any:
    """The mark of a file whose tests skip without a GPU; None where there is no pytest."""
    try:
        import pytest
    except ImportError:
        return None
    return pytest.mark.skipif(not HAS_GPU, reason="needs a CUDA or ROCm device")


def run_tests(names: dict[str, Any]) -> int:
    """Run the tests among these names, those of the words given; returns how many failed."""
    print(torch.__version__, torch.cuda.get_device_name() if HAS_GPU else "no GPU")
    failed = 0
    for name, function in list(names.items()):
        if not name.startswith("test_") or (len(sys.argv) > 1 and not any(word in name for word in sys.argv[1:])):
            continue
        start = time.time()
        try:
            function()
            print(f"passed  {name}  {time.time() - start:.1f} s", flush=True)
        except Exception:
            failed += 1
            print(f"FAILED  {name}\n{traceback.format_exc()[-1800:]}", flush=True)
        gc.collect()
        torch.cuda.empty_cache()
    return failed


def run_all(beside: int) -> int:
    """Run the tests of all files, several files at a time; returns how many files failed."""
    others = sorted({file.stem for file in HERE.glob("test_*.py")} - set(FIRST))
    names = [*FIRST, *others]
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "LOOPWRIGHT_KEPT_PLANS": "off"}  # as under pytest
    with ThreadPoolExecutor(beside) as pool:
        return sum(pool.map(lambda name: _run_file(name, environment), names))


def _run_file(name: str, environment: dict[str, str]) -> int:
    """Run the tests of a file in a process of its own, and print what it printed as soon as it has ended."""
    command = [sys.executable, str(HERE / f"{name}.py")]
    done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    verdict = "passed" if done.returncode == 0 else f"failed with exit code {done.returncode}"
    print(f"\n{done.stdout}\n{name}: {verdict}", flush=True)
    return int(done.returncode != 0)


if __name__ == "__main__":
    sys.exit(min(run_all(BESIDE), 1))
