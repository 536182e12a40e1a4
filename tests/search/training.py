"""A script that trains the problem of toy.py: `python training.py --output_dir FOLDER --learning_rate 0.1`."""

from __future__ import annotations

import argparse
from pathlib import Path

from tests.search.toy import Counting, toy

if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--output_dir", type=Path)
    parser.add_argument("--learning_rate", type=float, default=0.1)
    parser.add_argument("--max_steps", type=int, default=6)
    given = parser.parse_args()
    given.output_dir.parent.mkdir(parents=True, exist_ok=True)
    toy(
        given.output_dir, [Counting(given.output_dir.parent)], learning_rate=given.learning_rate,
        max_steps=given.max_steps,
    ).train()  # fmt: skip
