"""`loopwright watch RUN`: follow a run of this or another process in a terminal."""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable

from rich.console import Console
from rich.live import Live
from rich.text import Text

from ...errors import ArgumentsError
from ...report.document import run_document
from ...report.folder import RunFolder, RunView, open_run
from ...report.frame import frame, plain_line

DESCRIPTION = """Show a run while it trains: curves, speed, memory, time ledger and incidents.

RUN is its output folder; the run may belong to another process. Without a terminal it prints a plain line for each
log. It ends when the run ends; Ctrl-C leaves it, and the run continues."""
INTERVAL = 1.0


def run(words: list[str]) -> int:
    """Follow the run until it ends."""
    parser = argparse.ArgumentParser(
        "loopwright watch", description=DESCRIPTION, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("run", metavar="RUN")
    parser.add_argument("--once", action="store_true", help="show the run as it is now, and end")
    parser.add_argument("--interval", type=float, default=INTERVAL, help="seconds between two readings of the folder")
    parser.add_argument("--json", action="store_true", help="print a line of JSON for each change")
    options = parser.parse_args(words)
    if not options.interval > 0:
        raise ArgumentsError(f"--interval {options.interval:g}: must be more than 0 seconds")
    folder, console = open_run(options.run), Console()
    if options.json:
        _follow(folder, lambda view: print(json.dumps(run_document(view)), flush=True), options)
    elif not console.is_terminal or console.is_dumb_terminal:
        _follow(folder, lambda view: print(plain_line(view), flush=True), options)
    elif options.once:
        console.print(_drawn(folder.read(), console), soft_wrap=True)
    else:
        _watch(folder, console, options.interval)
    return 0


def _follow(folder: RunFolder, show: Callable[[RunView], None], options: argparse.Namespace) -> None:
    """Show each change, until the run has ended."""
    shown = None
    while True:
        view = folder.read()
        state = (view.metrics.rows, view.step, view.status)
        if state != shown:
            show(view)
            shown = state
        if options.once or not view.is_running:
            return
        time.sleep(options.interval)


def _watch(folder: RunFolder, console: Console, interval: float) -> None:
    view = folder.read()
    with Live(_drawn(view, console), console=console, auto_refresh=False, transient=False) as live:
        while view.is_running:
            time.sleep(interval)
            view = folder.read()
            live.update(_drawn(view, console), refresh=True)


def _drawn(view: RunView, console: Console) -> Text:
    return Text("\n".join(frame(view, console.width)), no_wrap=True, overflow="crop")
