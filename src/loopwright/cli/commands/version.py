"""`loopwright version`."""

from __future__ import annotations

import argparse

from ... import __version__
from ..json_output import add_json, show


def run(words: list[str]) -> int:
    """Print the version."""
    parser = argparse.ArgumentParser("loopwright version", description="Show the version of loopwright.")
    add_json(parser)
    show(parser.parse_args(words), {"loopwright": __version__}, f"loopwright {__version__}")
    return 0
