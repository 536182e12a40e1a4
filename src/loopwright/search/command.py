"""The process of a trial that is a command: runs a script or a module, and ends with the search that started it.

python -m loopwright.search.command train.py --learning_rate 0.1
python -m loopwright.search.command -m package.module train run.yaml learning_rate=0.1
"""

from __future__ import annotations

import os
import runpy
import sys

from ..core.shutdown.parent import stop_with_parent


def main(words: list[str]) -> None:
    """Run the script or module in this process, as Python would."""
    stop_with_parent()
    if words[0] == "-m":
        sys.argv[:] = words[1:]
        runpy.run_module(words[1], run_name="__main__", alter_sys=True)
        return
    sys.argv[:] = words
    sys.path[0] = os.path.dirname(os.path.abspath(words[0]))
    runpy.run_path(words[0], run_name="__main__")


if __name__ == "__main__":
    main(sys.argv[1:])
