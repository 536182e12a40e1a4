"""`loopwright run SCRIPT [ARGUMENTS]`: run a script written for transformers' Trainer on loopwright."""

from __future__ import annotations

import runpy
import sys
from collections.abc import Sequence
from pathlib import Path

from ..errors import ArgumentsError
from .installation import install

USAGE = """usage: loopwright run SCRIPT [ARGUMENTS]
       loopwright run -m MODULE [ARGUMENTS]

Run a script or module with loopwright's Trainer, TrainingArguments and callbacks in the place of transformers' own.
On several processes: loopwright launch --processes 8 -m loopwright.compat SCRIPT [ARGUMENTS]"""


def run(words: Sequence[str]) -> int:
    """Run a script with transformers' classes replaced; its exit code is that of the script."""
    if not words or words[0] in ("-h", "--help"):
        print(USAGE)
        return 0 if words else 2
    install()
    if words[0] == "-m":
        if len(words) < 2:
            raise ArgumentsError("loopwright run -m needs the name of a module")
        sys.argv = list(words[1:])
        sys.path.insert(0, "")
        runpy.run_module(words[1], run_name="__main__", alter_sys=True)
        return 0
    script = Path(words[0])
    if not script.is_file():
        raise ArgumentsError(f"loopwright run {words[0]}: no such file")
    sys.argv = list(words)
    sys.path.insert(0, str(script.resolve().parent))
    runpy.run_path(str(script), run_name="__main__")
    return 0
