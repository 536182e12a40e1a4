"""`--json` of the commands: one JSON object on standard output instead of text."""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping
from typing import Any


def add_json(parser: argparse.ArgumentParser) -> None:
    """Add the option to a command."""
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of text")


def show(options: argparse.Namespace, data: Mapping[str, Any], text: str) -> None:
    """Print the result of a command; an empty text is not printed."""
    if options.json or text:
        print(json.dumps(data, default=str) if options.json else text)
