"""What happens to one process happens to all: an error stops them, a signal makes them save and leave together."""

from __future__ import annotations

from pathlib import Path

import pytest

from loopwright.core.checkpoint.manager import CheckpointManager
from loopwright.notices import Notices

from .pool import Pool
from .test_contract import assert_same_run

RUN = {"n": 20, "per_device_train_batch_size": 1, "gradient_accumulation_steps": 2, "save_strategy": "no"}


@pytest.mark.parametrize("rank", [0, 1])
def test_a_signal_at_any_process_saves_one_checkpoint_and_exits_with_75(pool: Pool, tmp_path: Path, rank: int) -> None:
    outcomes = pool.outcomes(2, "stopped", how="term", rank=rank, folder=str(tmp_path / "run"), **RUN)
    assert [(each.kind, each.value) for each in outcomes] == [("exited", 75)] * 2
    assert list(CheckpointManager(tmp_path / "run", notices=Notices()).complete()) == [3]

    whole = pool.run(2, "stopped", how="nothing", rank=rank, folder=str(tmp_path / "whole"), **RUN)
    again = pool.run(2, "stopped", how="nothing", rank=rank, folder=str(tmp_path / "run"), resume=True, **RUN)
    for each, expected in zip(again, whole, strict=True):
        assert_same_run(each, expected)


@pytest.mark.parametrize("rank", [pytest.param(0, marks=pytest.mark.grid), 1])
def test_an_error_on_one_process_stops_all_within_seconds_with_that_error(
    pool: Pool, tmp_path: Path, rank: int
) -> None:
    pool.send(2, "stopped", how="fail", rank=rank, folder=str(tmp_path), **RUN)
    answers = pool.endings(2, timeout=120)
    failed, other = answers[rank], answers[1 - rank]
    assert failed.kind == "raised" and "upside down" in failed.value
    assert other.seconds - failed.seconds < 10
    if other.kind == "ended":  # it was inside a collective: the thread that heard of the error ended it
        code, said = other.value
        assert code == 1
    else:
        said = other.value
        assert "PeerError" in said
    assert f"rank {rank} on" in said and "upside down" in said
