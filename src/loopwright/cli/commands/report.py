"""`loopwright report RUN [RUN ...]`: write the page of a run, or one page with several runs."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from ...errors import ArgumentsError, OutputError
from ...report.data_file import write_data
from ...report.document import document
from ...report.folder import open_run
from ...report.page import FILE, write_page

DESCRIPTION = """Write report.html of a run, or one page that shows several runs in the same charts.

RUN is the output folder of a run. The page is one file, needs no server and contacts none."""


def run(words: list[str]) -> int:
    """Write the page and print its path."""
    parser = argparse.ArgumentParser(
        "loopwright report", description=DESCRIPTION, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("runs", nargs="+", metavar="RUN")
    parser.add_argument(
        "-o", "--output", type=Path, help="the file to write; by default report.html in RUN, or here for several runs"
    )
    parser.add_argument("--json", action="store_true", help="print the data of the page instead of writing it")
    options = parser.parse_args(words)
    views = [open_run(each).read() for each in options.runs]
    found = document(views)
    if options.json:
        print(json.dumps(found))
        return 0
    if options.output is not None and not options.output.absolute().parent.is_dir():
        raise ArgumentsError(f"--output {options.output}: there is no folder {options.output.parent}; create it first")
    if options.output is not None and options.output.is_dir():
        raise ArgumentsError(f"--output {options.output} is a folder; name a file in it, such as {FILE}")
    beside = len(views) == 1 and options.output is None
    path = views[0].folder / FILE if beside else options.output or Path(FILE)
    try:
        write_page(path, found, follows=beside)
        if beside:
            write_data(views[0].folder, found)
    except OutputError:
        raise
    except OSError as error:
        reason = error.strerror or error
        raise ArgumentsError(f"{path} cannot be written ({reason}); choose another file with --output") from None
    print(path)
    return 0
