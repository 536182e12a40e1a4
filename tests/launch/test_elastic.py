"""Machines come and go while a job runs: agents are processes of their own that meet on the loopback."""

from __future__ import annotations

import os
import signal
import sys
from contextlib import ExitStack
from pathlib import Path

import pytest

from .jobs import LAUNCH, Job, descendants, free_port, job
from .runs import TRAIN, assert_same_run, checkpoints, hurry, kept, last_step, lines, undisturbed

ROWS = 256
TORCHRUN = [sys.executable, "-m", "torch.distributed.run"]
CONF = "last_call_timeout=1,join_timeout=120,keep_alive_interval=1,keep_alive_max_attempt=3"


def kill_machine(agent: Job) -> None:
    """All processes of a machine at once, as when its power fails."""
    for pid in [agent.process.pid, *descendants(agent.process.pid)]:
        try:
            os.kill(pid, signal.SIGKILL)
        except ProcessLookupError:
            pass


def world_of(run: Path) -> int:
    """Processes of the last finished update."""
    done = lines(run)
    return done[-1]["world"] if done else 0


@pytest.mark.parametrize(
    ("worlds", "command"),
    [
        ((1, 2), "launch"),
        pytest.param((1, 2, 1), "launch", marks=pytest.mark.grid),
        pytest.param((1, 2, 4, 1), "launch", marks=pytest.mark.grid),
        # torch 2.13 keeps the meeting point of the first round, so a machine that comes later waits for it in vain,
        # unless its store is not shared; loopwright launch sees to that itself.
        pytest.param((1, 2, 1), "torchrun", marks=pytest.mark.grid),
    ],
    ids=str,
)
def test_processes_come_and_go_and_the_run_is_the_same(worlds, command, tmp_path):
    """Over one epoch: every sample once, the learning rates of one process, its weights within 1e-10."""
    run = tmp_path / "run"
    where = f"127.0.0.1:{free_port()}"
    meeting = {
        "launch": [*LAUNCH, "--host", where],
        "torchrun": [*TORCHRUN, "--rdzv-backend=c10d", f"--rdzv-endpoint={where}"],
    }
    options = [
        "--nnodes",
        "1:4",
        "--nproc-per-node",
        "1",
        "--rdzv-id",
        "e",
        "--rdzv-conf",
        CONF,
        "--max-restarts",
        "10",
    ]
    script = [TRAIN, "--output", str(run), "--rows", str(ROWS), "--seconds", "0.4"]
    words = [*meeting[command], *options, *script]
    more = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"} if command == "torchrun" else {}
    reference = undisturbed(str(tmp_path / "undisturbed"), "--rows", str(ROWS))
    with ExitStack() as stack:
        agents: list[Job] = []
        for world in worlds:
            while len(agents) < world:
                agents.append(stack.enter_context(job(words, tmp_path, name=f"agent-{len(agents)}", more=more)))
                if len(agents) == 1:
                    agents[0].until(lambda: last_step(run) >= 1)
            if world > 2:  # growth through a kill: whoever waits outside is in when the rest start again
                os.kill(agents[0].workers()[0], signal.SIGKILL)
            while len(agents) > world:
                kill_machine(agents.pop())
            agents[0].until(lambda world=world: world_of(run) == world, seconds=240)
            reached = last_step(run)
            if world != worlds[-1]:
                agents[0].until(lambda reached=reached: max(checkpoints(run), default=0) > reached, seconds=240)
        hurry(run)
        assert agents[0].wait(300) == 0, agents[0].text()
    assert_same_run(run, reference, ROWS)
    assert {line["world"] for line in kept(run).values()} == set(worlds)
