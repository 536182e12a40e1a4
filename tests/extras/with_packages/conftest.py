"""These tests run in the environment of `make extras`; elsewhere tests/extras/test_packages.py starts them."""

from __future__ import annotations

import importlib.util

NEEDED = ("bitsandbytes", "torchao", "galore_torch", "apollo_torch", "grokadamw", "schedulefree", "optimi")

collect_ignore_glob = [] if all(map(importlib.util.find_spec, NEEDED)) else ["test_*.py"]
