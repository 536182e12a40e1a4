"""A script that searches: `python searching.py FOLDER BACKEND [TRIAL]`, which waits inside a trial if one is named."""

from __future__ import annotations

import json
import sys
from pathlib import Path

from tests.search.toy import Counting, WaitsInside, space, toy


def main(folder: Path, backend: str, trial: str) -> None:
    callbacks = [Counting(folder), WaitsInside(folder, trial, 3)]
    best = toy(folder / "run", callbacks).search(space, backend, n_trials=4)
    (folder / "best.json").write_text(
        json.dumps([best.run_id, best.objective, best.hyperparameters, best.checkpoint]), encoding="utf-8"
    )


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2], sys.argv[3] if len(sys.argv) > 3 else "")
