"""python -m loopwright.compat SCRIPT [ARGUMENTS]: run a script written for transformers' Trainer on loopwright."""

from __future__ import annotations

import sys

from .script import run

if __name__ == "__main__":
    sys.exit(run(sys.argv[1:]))
