"""Running the tests of a file as a script, on machines that have a GPU and no pytest.

This file itself runs those of all files, in one process: `python tests/gpu/script.py`.
"""

from __future__ import annotations

import gc
import importlib
import os
import sys
import time
import traceback
from pathlib import Path
from typing import Any

import torch

HERE = Path(__file__).resolve().parent
FIRST = ("test_speed_parts", "test_graphed_training", "test_output_layer_gpu", "test_evaluation_gpu", "test_pairs_gpu")
"""The files that run first: time may end before the last."""

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


def run_all() -> int:
    """Run the tests of all files; returns how many failed. A file that cannot be imported is one failure."""
    sys.path[:0] = [str(HERE.parents[1] / "src"), str(HERE.parents[1])]
    os.environ.update({"HF_HUB_OFFLINE": "1", "LOOPWRIGHT_KEPT_PLANS": "off"})  # as under pytest
    others = sorted({file.stem for file in HERE.glob("test_*.py")} - set(FIRST))
    failed = 0
    for name in (*FIRST, *others):
        print(f"\n{name}", flush=True)
        try:
            failed += run_tests(vars(importlib.import_module(f"tests.gpu.{name}")))
        except Exception:
            failed += 1
            print(f"FAILED  {name}\n{traceback.format_exc()[-1800:]}", flush=True)
    print(f"\n{failed} failed", flush=True)
    return failed


if __name__ == "__main__":
    sys.exit(min(run_all(), 1))
