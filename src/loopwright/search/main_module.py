"""The script of a search in the processes of its trials: imported under another name, if trials need its functions."""

from __future__ import annotations

import ast
import runpy
import sys
from dataclasses import dataclass
from pathlib import Path
from types import FrameType, ModuleType

NAME = "__mp_main__"
"""The name of the script where it is imported, as multiprocessing has it: `__name__ == "__main__"` is False."""


@dataclass(frozen=True)
class MainModule:
    """The script of this process."""

    path: str | None
    module: str | None
    """Its name, if it was started with -m."""


def this_main() -> MainModule | None:
    """The script of this process; None if there is none that could be imported."""
    main = sys.modules["__main__"]
    spec, path = getattr(main, "__spec__", None), getattr(main, "__file__", None)
    if spec is not None and spec.name:
        return MainModule(None, spec.name)
    return MainModule(str(Path(path).resolve()), None) if path and Path(path).is_file() else None


def load_main(main: MainModule | None) -> None:
    """Import the script of the search, so that its functions and classes can be unpickled."""
    if main is None:
        return
    module = ModuleType(NAME)
    sys.modules["__main__"] = sys.modules[NAME] = module
    if main.module is not None:
        found = runpy.run_module(main.module, run_name=NAME, alter_sys=True)
    else:
        assert main.path is not None
        found = runpy.run_path(main.path, run_name=NAME)
    vars(module).update(found)
    sys.modules["__main__"] = sys.modules[NAME] = module


def why_not_imported(frame: FrameType | None) -> str | None:
    """Why the script cannot be imported by a trial's process, or None; `frame` is where the search is called.

    Importing a script that calls the search outside of `if __name__ == "__main__":` would search again.
    """
    while frame is not None:
        if frame.f_code.co_name == "<module>" and frame.f_globals.get("__name__") == "__main__":
            break
        frame = frame.f_back
    if this_main() is None:
        return "the functions of an interactive session exist in this process only"
    if frame is None or _is_guarded(frame.f_code.co_filename, frame.f_lineno):
        return None
    return 'the search is not called below `if __name__ == "__main__":`'


def _is_guarded(path: str, line: int) -> bool:
    """Whether a line of a script runs only if the script is started, not if it is imported."""
    try:
        tree = ast.parse(Path(path).read_text(encoding="utf-8"))
    except (OSError, SyntaxError, ValueError):
        return False
    return any(
        isinstance(node, ast.If)
        and "__name__" in {each.id for each in ast.walk(node.test) if isinstance(each, ast.Name)}
        and node.lineno <= line <= (node.end_lineno or node.lineno)
        for node in ast.walk(tree)
    )
