"""Real XLA: these tests need an environment of their own, which `make test-xla` builds."""

from __future__ import annotations

import os
from importlib.util import find_spec

if find_spec("torch_xla") is None:
    collect_ignore_glob = ["test_*.py"]
else:
    os.environ.setdefault("PJRT_DEVICE", "CPU")
