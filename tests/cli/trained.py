"""`loopwright train` in processes that are forked from one that has imported everything; see tests/faults/server.py."""

from __future__ import annotations

import json
import os
import sys
import tempfile
from pathlib import Path

from loopwright.cli.main import main
from tests.faults.lines import Line, Lines, Seen
from tests.tasks.cases import write_config

CONFIG = "table-regression.json"
STEPS = 4


def prepare(folder: Path) -> None:
    """Write the configuration that all runs in this folder have."""
    write_config(
        folder, "table-regression", max_steps=STEPS, save_strategy="steps", save_steps=2, eval_strategy="steps",
        eval_steps=2, report_to=[],
    )  # fmt: skip


def command(folder: str) -> int:
    """The exit code of the command whose output folder this is; the configuration is beside the folder."""
    os.chdir(Path(folder).parent)
    return main(["train", CONFIG, f"output_dir={Path(folder).name}", "--json"])


def warm_up() -> None:
    with tempfile.TemporaryDirectory() as folder:
        here = os.getcwd()
        prepare(Path(folder))
        assert command(f"{folder}/run") == 0
        os.chdir(here)


# ---- what a forked process can be asked to do -----------------------------------------------------------------------


def train(folder: str) -> None:
    sys.exit(command(folder))


def listed(folder: str) -> None:
    """A run that writes down when it executed each line."""
    seen = Seen()
    with Lines(seen):
        code = command(folder)
    Path(f"{folder}.lines").write_text(json.dumps([[*line, *moments] for line, moments in seen.lines.items()]))
    sys.exit(code)


def signalled(folder: str, *, file: str, line: int, time: int, number: int) -> None:
    """A run that gets a signal the n-th time it executes a line."""
    left = time

    def strike(at: Line) -> None:
        nonlocal left
        if at == (file, line):
            left -= 1
            if left == 0:
                Path(f"{folder}.struck").touch()
                os.kill(os.getpid(), number)

    with Lines(strike, only=file):
        code = command(folder)
    sys.exit(code)


def waiting(folder: str) -> None:
    """A run that waits in its third update until FOLDER.go exists."""
    import time

    from loopwright.config.run_control import RunControl

    def wait(at: Line) -> None:
        if len(list(Path(folder).glob("checkpoint-*"))) and not Path(f"{folder}.go").exists():
            Path(f"{folder}.waiting").touch()
            while not Path(f"{folder}.go").exists():
                time.sleep(0.02)

    assert RunControl.on_step_end  # its lines are executed once an update
    with Lines(wait, only="config/run_control.py"):
        code = command(folder)
    sys.exit(code)
