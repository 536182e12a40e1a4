"""`loopwright version`."""

from __future__ import annotations

import argparse

from .. import __version__


def run(words: list[str]) -> int:
    """Print the version."""
    argparse.ArgumentParser("loopwright version", description="Show the version of loopwright.").parse_args(words)
    print(f"loopwright {__version__}")
    return 0
