"""The collectives of `trainer.accelerator`, which other libraries call, on two processes."""

from __future__ import annotations

from pathlib import Path

from .pool import Pool


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
