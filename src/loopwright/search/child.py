"""The process of a trial: loads the trainer, trains, and returns what it reached. Started by `process.py`."""

from __future__ import annotations

import os
import sys
from multiprocessing.connection import Connection
from typing import Any

from ..core.shutdown.parent import stop_with_parent
from .main_module import load_main
from .process import DONE, FAILED, UNREADY, RemoteCoordinator, packed_error
from .transfer import next_value, unpacked
from .trial_run import run_trial
from .trials import KnownTrial


def main() -> int:
    """Run the trial that stdin describes; returns the exit code."""
    header = next_value(sys.stdin.buffer)
    recipe_data, job = next_value(sys.stdin.buffer), next_value(sys.stdin.buffer)
    os.set_inheritable(header.descriptor, False)
    coordinator = RemoteCoordinator(Connection(header.descriptor))
    stop_with_parent()
    sys.path[:], sys.argv[:] = header.path, header.words
    try:
        load_main(header.main)
        recipe = unpacked(recipe_data)
    except Exception as error:  # anything that the user's modules raise when they are imported
        coordinator.send(UNREADY, f"{type(error).__name__}: {error}")
        return 1
    leads = os.environ.get("RANK", "0") == "0"
    trial: Any = dict(job.params)
    if not job.has_dict:
        trial = KnownTrial(job.number, job.params, coordinator.suggest if leads else None)
    try:
        outcome = run_trial(recipe, job, trial, coordinator if leads else None)
    except Exception as error:  # sent to the search, which raises it
        coordinator.send(FAILED, packed_error(error))
        return 1
    coordinator.send(DONE, outcome)
    return 0


if __name__ == "__main__":
    sys.exit(main())
