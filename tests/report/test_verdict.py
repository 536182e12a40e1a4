"""The verdict names what costs most, with what to do."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import pytest

from loopwright.report.folder import RunView, open_run
from loopwright.report.verdict import verdict

from .folders import rows, write_ledger, write_rows


def view(folder: Path, *, status: str = "finished", **seconds: float) -> RunView:
    write_rows(folder, rows(100))
    write_ledger(folder, step=100, max_steps=100, status=status, seconds=seconds)
    found = open_run(folder).read()
    found.facts["values"] = {"dataloader_num_workers": 0, "async_save": False}
    return found


@pytest.mark.parametrize(
    ("seconds", "expected"),
    [
        ({"updates": 38, "data_wait": 62}, "62% of the time waited for data: raise dataloader_num_workers (it is 0)."),
        ({"updates": 50, "evaluation": 50}, "50% of the time was spent on evaluation: raise eval_steps"),
        (
            {"updates": 70, "saving": 30},
            "30% of the time was spent on checkpoints: raise save_steps, or set async_save",
        ),
        (
            {"updates": 60, "lost_work": 30, "restarts": 10},
            "40% of the time went to restarts and to work that was lost",
        ),
        ({"updates": 50, "compiling": 50}, "50% of the time was spent on compiling"),
        ({"updates": 50, "proving": 50}, "50% of the time was spent on proving"),
        ({"updates": 97, "data_wait": 3}, "No problem found: 97% of the time went into updates; the loss went from"),
    ],
)
def test_the_largest_part_comes_first(tmp_path: Path, seconds: dict[str, float], expected: str) -> None:
    assert verdict(view(tmp_path, **seconds))[0].startswith(expected)


@pytest.mark.parametrize(
    ("status", "expected"),
    [
        ("failed", "The run failed"),
        ("interrupted", "The run was interrupted after step 100"),
        ("running", "The run was killed"),
    ],
)
def test_the_end_of_a_run_comes_before_its_time(tmp_path: Path, status: str, expected: str) -> None:
    found = verdict(view(tmp_path, status=status, data_wait=62, updates=38))
    assert found[0].startswith(expected) and found[1].startswith("62%")


def test_a_rising_evaluation_loss_is_reported(tmp_path: Path) -> None:
    found = view(tmp_path, updates=100)
    for step, loss in enumerate((0.3, 0.2, 0.1, 0.15, 0.16, 0.17), start=101):
        found.metrics.add({"step": step, "eval_loss": loss, "eval_runtime": 1.0})
    assert verdict(found)[0].startswith("The evaluation loss has risen since step 103 (0.1)")


def test_numbers_that_are_not_finite_and_padding_are_reported(tmp_path: Path) -> None:
    found = view(tmp_path, updates=100)
    found.metrics.add({"step": 110, "loss": 1.0, "nonfinite_steps": 3, "pace": {"useful_token_share": 0.4}})
    texts = verdict(found)
    assert texts[0].startswith("3 steps had a loss") and texts[-1].startswith("60% of the computed tokens are padding")


@pytest.mark.parametrize("value", ["NaN", "Infinity"])
@pytest.mark.parametrize("name", ["loss", "eval_loss"])
def test_a_loss_that_is_no_number_is_reported(tmp_path: Path, name: str, value: str) -> None:
    found = view(tmp_path, updates=100)
    for step in (110, 120):
        found.metrics.add({"step": step, name: value})
    assert verdict(found)[0].startswith(f"{name} is {value} since step 110: lower learning_rate")
    assert found.latest(name) == value and [mark["step"] for mark in found.metrics.marks] == [110]
    found.metrics.add({"step": 130, name: 0.5})
    assert found.latest(name) == 0.5 and verdict(found)[0].startswith("No problem found")


def test_a_loss_that_rises_is_reported(tmp_path: Path) -> None:
    found = view(tmp_path, updates=100)
    for step in range(101, 200):
        found.metrics.add({"step": step, "loss": 1.1 ** (step - 100)})
    assert verdict(found)[0].startswith("The loss has risen from ")


def test_all_steps_that_were_not_finite_are_counted_and_marked_over_the_whole_run(tmp_path: Path) -> None:
    found = view(tmp_path, updates=100)
    for step in range(1000, 21000):
        found.metrics.add({"step": step, "loss": 1.0, "nonfinite_steps": 2})
    steps = [mark["step"] for mark in found.metrics.marks]
    assert verdict(found)[0].startswith("40,000 steps had a loss")
    assert len(steps) == 100 and steps == sorted(steps) and steps[0] == 1000 and steps[-1] == 20999
    assert max(second - first for first, second in pairwise(steps)) < 1000


def test_the_latest_incident_is_the_one_of_the_last_step(tmp_path: Path) -> None:
    for step in (200, 1000):
        (tmp_path / f"incident-step-{step}").mkdir()
    assert verdict(view(tmp_path, updates=100))[0].startswith("Step 1,000: loss or gradients were not finite")
