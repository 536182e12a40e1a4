"""What users of the package see: how completely it is typed, and whether a name has changed since the last release.

    python release/interface.py        run by `make interface`, in an environment with pyright and griffe

The first part fails if pyright's score is below LEAST; raise LEAST when the score has risen. The second part compares
with the last tag, and is left out if there is none.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
LEAST = 0.89
"""The share of public symbols with a known type, of pyright --verifytypes; measured: 0.8957."""


def score() -> float:
    """The share of public symbols whose type pyright knows; types of other packages are not counted."""
    words = [sys.executable, "-m", "pyright", "--verifytypes", "loopwright", "--ignoreexternal", "--outputjson"]
    done = subprocess.run(
        [*words, "--pythonpath", os.environ.get("PACKAGES_OF", sys.executable)], capture_output=True, text=True,
        env={**os.environ, "PYTHONPATH": str(ROOT / "src")}, cwd=ROOT, timeout=600,
    )  # fmt: skip
    return json.loads(done.stdout)["typeCompleteness"]["completenessScore"]


def last_tag() -> str:
    """The newest tag of a release, or nothing."""
    words = ["git", "describe", "--tags", "--abbrev=0", "--match", "v*"]
    return subprocess.run(words, capture_output=True, text=True, cwd=ROOT).stdout.strip()


def changes(tag: str) -> int:
    """Print what has changed in the public names since a tag; returns griffe's exit code."""
    words = [sys.executable, "-m", "griffe", "check", "loopwright", "--search", "src", "--against", tag]
    return subprocess.run(words, cwd=ROOT).returncode


def main() -> int:
    found = score()
    print(f"typed: {found:.2%} of the public symbols (at least {LEAST:.0%})")
    tag = last_tag()
    print(f"compared with {tag}:" if tag else "there is no tag of a release to compare the public names with")
    return int(found < LEAST) or (changes(tag) if tag else 0)


if __name__ == "__main__":
    sys.exit(main())
