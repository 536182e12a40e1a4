"""Running the tests of a file as a script, on machines that have a GPU and no pytest."""

from __future__ import annotations

import gc
import sys
import time
import traceback
from typing import Any

import torch

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
