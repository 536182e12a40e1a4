"""Charts and `loopwright watch` in terminals of several widths, and plain lines without one."""

from __future__ import annotations

import codecs
import io
import json
import os
import pty
import re
import select
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from rich.console import Console

from loopwright.callbacks.progress import ProgressCallback
from loopwright.cli.main import main
from loopwright.core.state import TrainerControl, TrainerState
from loopwright.report.braille import chart
from loopwright.report.folder import open_run
from loopwright.report.frame import frame

from .folders import rows, write_ledger, write_rows, write_run

GOLDEN = Path(__file__).parent / "golden"


@pytest.mark.parametrize("width", [80, 120, 200])
def test_a_frame_looks_as_it_did(tmp_path: Path, width: int) -> None:
    """After a change on purpose: LOOPWRIGHT_GOLDEN=write, and check the files."""
    lines = frame(open_run(write_run(tmp_path / "run")).read(), width)
    path = GOLDEN / f"watch-{width}.txt"
    if os.environ.get("LOOPWRIGHT_GOLDEN") == "write":
        path.parent.mkdir(exist_ok=True)
        path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    assert lines == path.read_text(encoding="utf-8").splitlines()
    assert max(map(len, lines)) <= width


@pytest.mark.parametrize("width", [20, 37, 80])
@pytest.mark.parametrize(
    "points", [[], [1.0], [None, None], [2.0, 2.0], [1.0, None, 3.0], [float(i) for i in range(500)]]
)
def test_a_chart_has_its_width_and_height_for_any_points(points: list[Any], width: int) -> None:
    lines = chart(([float(i) for i in range(len(points))], points), title="loss", width=width, height=5)
    assert len(lines) == 7 and all(len(line) <= width for line in lines)


def test_a_rising_curve_goes_from_the_lower_left_to_the_upper_right() -> None:
    _, *rows_, _ = chart(([0.0, 1.0], [0.0, 1.0]), title="t", width=31, height=4)
    filled = [[index for index, each in enumerate(row.split("│")[1]) if each != "\u2800"] for row in rows_]
    assert filled[0][-1] == 19 and filled[-1][0] == 0 and min(filled[0]) > max(filled[-1])


def test_the_chart_argument_draws_above_the_progress_bar() -> None:
    """`chart` draws in a terminal only."""
    for is_chart, is_terminal in ((True, True), (False, True), (True, False)):
        output = io.StringIO()
        console = Console(file=output, force_terminal=is_terminal, width=80, height=40)
        callback, args, state = (
            ProgressCallback(console=console),
            SimpleNamespace(chart=is_chart),
            TrainerState(max_steps=3),
        )
        callback.on_train_begin(args, state, TrainerControl())
        for step in range(1, 4):
            state.global_step = step
            callback.on_log(args, state, TrainerControl(), logs={"loss": 1.0 / step})
            callback.on_step_end(args, state, TrainerControl())
        callback.on_train_end(args, state, TrainerControl())
        braille = re.findall("[\u2801-\u28ff]", output.getvalue())
        assert bool(braille) == (is_chart and is_terminal)
        assert is_terminal or "\x1b" not in output.getvalue()


def test_watch_without_a_terminal_prints_plain_lines(tmp_path: Path, capsys: Any) -> None:
    folder = write_run(tmp_path / "run")
    assert main(["watch", str(folder)]) == 0
    text = capsys.readouterr().out
    assert text.startswith("step 500/500  loss ") and text.count("\n") == 1 and "\x1b" not in text
    assert main(["watch", str(folder), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["status"] == "finished"
    assert main(["watch", str(folder), "--interval", "0"]) == 2


def read_until(terminal: int, pattern: str) -> str:
    """What a terminal shows, up to this pattern."""
    text, end = "", time.monotonic() + 120
    decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")  # a read may end within a character
    while not re.search(pattern, text):
        ready, _, _ = select.select([terminal], [], [], max(end - time.monotonic(), 0))
        assert ready, f"{pattern!r} is not in {text[-3000:]!r}"
        try:
            text += decoder.decode(os.read(terminal, 65536))
        except OSError:  # the process has ended
            assert re.search(pattern, text), text[-3000:]
    return text


def test_watch_follows_a_run_of_another_process_in_a_terminal(tmp_path: Path) -> None:
    """The frames change while rows are appended, and the command ends with the run."""
    folder = tmp_path / "run"
    write_rows(folder, rows(500)[:20])
    write_ledger(folder, step=190, max_steps=500, status="running", updated=time.time() + 3600)
    main_end, child_end = pty.openpty()
    environment = {**os.environ, "TERM": "xterm-256color", "COLUMNS": "100", "LINES": "50"}
    command = [sys.executable, "-m", "loopwright", "watch", str(folder), "--interval", "0.05"]
    process = subprocess.Popen(command, stdin=child_end, stdout=child_end, stderr=child_end, env=environment)
    os.close(child_end)
    try:
        read_until(main_end, "step 190/500[\\s\\S]*[\u2801-\u28ff]")
        write_rows(folder, rows(500))
        write_ledger(folder, step=500, max_steps=500)
        assert "62% of the time waited for data" in read_until(
            main_end, r"finished  step 500/500[\s\S]*waited for data"
        )
        assert process.wait(120) == 0
    finally:
        if process.poll() is None:
            process.kill()
            process.wait()
        os.close(main_end)
