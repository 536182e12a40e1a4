"""Two machines with a cable between them: they train together, the cable is pulled, and put back."""

from __future__ import annotations

import pytest

from .jobs import LAUNCH, job
from .machines import two_machines, why_not
from .runs import TRAIN, assert_same_run, checkpoints, hurry, kept, last_step, lines, undisturbed

ROWS = 160
CONF = "last_call_timeout=1,join_timeout=120,keep_alive_interval=1,keep_alive_max_attempt=3,read_timeout=10"


@pytest.fixture(scope="module")
def machines():
    reason = why_not()
    if reason:
        pytest.skip(reason)
    with two_machines() as pair:
        yield pair


@pytest.mark.parametrize(
    ("nodes", "cut"),
    [
        ("2", "long"),  # the other fails, starts again and waits
        pytest.param("2", "short", marks=pytest.mark.grid),  # shorter than ddp_timeout: nobody has to start again
        pytest.param("1:2", "long", marks=pytest.mark.grid),  # the other trains alone meanwhile
    ],
)
def test_a_machine_is_cut_off_and_the_job_goes_on_when_it_returns(machines, nodes, cut, tmp_path):
    """The one that is left says which host is missing, and nothing is lost or done twice."""
    head, other = machines
    run = tmp_path / "run"
    words = [*LAUNCH, "--nnodes", nodes, "-n", "1", "--host", f"{head.address}:29555", "--rdzv-id", "j",
             "--rdzv-conf", CONF, "--max-restarts", "9", TRAIN, "--output", str(run), "--rows", str(ROWS),
             "--seconds", "0.4", "--timeout", "12"]  # fmt: skip
    reference = undisturbed(str(tmp_path / "undisturbed"), "--rows", str(ROWS))
    with (
        job(head.words(*words), tmp_path / "a", name="head") as first,
        job(other.words(*words), tmp_path / "b", name="other") as second,
    ):
        first.until(lambda: len(checkpoints(run)) >= 2, seconds=240)
        assert {line["host"] for line in lines(run, None)} == {"machine-a", "machine-b"}
        assert lines(run)[-1]["world"] == 2
        other.unplug()
        first.until(lambda: "missing: rank 1 on machine-b" in first.text(), seconds=240)
        reached = last_step(run)
        if cut == "long":
            first.until(lambda: "LostRankError" in first.text(), seconds=240)
        if nodes == "1:2":
            first.until(lambda: lines(run)[-1]["world"] == 1 and last_step(run) > reached, seconds=240)
        assert second.process.poll() is None  # it looks for the others
        other.plug_in()
        first.until(lambda: lines(run)[-1]["world"] == 2 and last_step(run) > reached, seconds=240)
        hurry(run)
        assert first.wait(300) == 0, first.text()
        assert second.wait(300) == 0, second.text()
        assert ("resuming from" in first.text() + second.text()) == (cut == "long")
    assert_same_run(run, reference, ROWS)
    assert 2 in {line["world"] for line in kept(run).values()}
