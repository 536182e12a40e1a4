"""The collectives of `trainer.accelerator`, which other libraries call, on two processes."""

from __future__ import annotations

from itertools import product
from pathlib import Path
from typing import Any

import pytest

from .pool import Pool

COUNTS = {"list": (1, 8, 9, 12, 13), "shuffled": (9, 13), "batches": (9, 12), "stream": (1, 8, 9, 13)}
"""Samples: batches of four on two ranks end with a short batch, an incomplete round, both or neither."""


def test_what_each_of_two_processes_gets(pool: Pool, tmp_path: Path) -> None:
    first, second = pool.run(2, "collected", folder=str(tmp_path))
    for each in (first, second):
        assert each["sum"] == [3.0] and each["mean"] == [3.0]
        assert each["gathered"] == [1.0, -1.0, 2.0, 2.0]
        assert each["objects"] == [{"rank": 0}, {"rank": 1}]
    assert (first["padded"], first["padded first"]) == ([1.0, -1.0], [-1.0, 1.0])
    assert second["padded"] == second["padded first"] == [2.0, 2.0]
    assert (first["part"], second["part"]) == ([0, 1, 2], [3, 4])
    assert (first["part padded"], second["part padded"]) == ([1, 2], [3, 3])
    assert first["loader"] == second["loader"] == 2 * first["batch"]


def test_a_state_that_two_processes_save_is_resumed(pool: Pool, tmp_path: Path) -> None:
    for each in pool.run(2, "saved_by_accelerator", folder=str(tmp_path)):
        assert each == {"same": True, "own": [7.0, 7.0], "step": 4}


def test_prepared_loaders_iterate_what_those_of_accelerate_do(pool: Pool, tmp_path: Path) -> None:
    """Each rank its batches, of equal number, and the samples that fill the last one are not gathered."""
    pytest.importorskip("accelerate")
    grid: list[Any] = [
        (kind, count, {"batch_size": 4, "drop_last": drop}, {"even_batches": even})
        for kind, drop, even in product(("list", "shuffled", "batches"), (False, True), (True, False))
        for count in COUNTS[kind]
    ]
    grid += [
        ("stream", count, {"batch_size": 4, "drop_last": drop}, {"dispatch_batches": dispatch})
        for drop, dispatch in ((False, None), (False, False), (True, False))  # (True, None) fails in accelerate itself
        for count in COUNTS["stream"]
    ]
    for rank, results in enumerate(pool.run(2, "prepared", folder=str(tmp_path), grid=grid)):
        for case, (ours, theirs) in zip(grid, results, strict=True):
            kind, _, loader, options = case
            if options.get("dispatch_batches") is False or (kind == "batches" and loader["drop_last"]):
                # Here accelerate gathers samples that fill the last batch, or leaves out real ones.
                ours, theirs = ({**each, "collected": None, "objects": None} for each in (ours, theirs))
            assert ours == theirs, (rank, case)


def test_loaders_of_a_trainer_are_shared_in_loops_by_hand(pool: Pool, tmp_path: Path) -> None:
    for each in pool.run(2, "loops_by_hand", folder=str(tmp_path)):
        assert each["labels"] == each["wanted"] and each["count"] == 4 and each["lengths"] == [2, 2]
        assert each["metrics"] == {"n": 7, "sum": sum(each["wanted"])}
        assert each["same"], "a run on a prepared loader differs from a run on the loader itself"
