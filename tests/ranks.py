"""Processes of a group, forked from one that has imported everything: importing torch takes seconds each time."""

from __future__ import annotations

import gc
import os
import signal
import socket
import sys
import time
import traceback
from collections.abc import Callable


def run_ranks(world: int, work: Callable[[], None], *, seconds: float = 240) -> None:
    """Run `work` in so many processes, with the environment that torchrun gives them; a single one is on its own."""
    gc.freeze()  # so that a collection in a child does not copy every page
    port = str(free_port())
    children = {_fork(rank, world, port, work) for rank in range(world)}
    end = time.monotonic() + seconds
    failed = False
    while children:
        if failed or time.monotonic() > end:
            for child in children:
                os.kill(child, signal.SIGKILL)
        done, status = os.waitpid(-1, 0 if failed else os.WNOHANG)
        children.discard(done)
        failed = failed or bool(done and status) or time.monotonic() > end
        if not done:
            time.sleep(0.01)
    if failed:
        sys.exit(1)


def _fork(rank: int, world: int, port: str, work: Callable[[], None]) -> int:
    child = os.fork()
    if child:
        return child
    if world > 1:
        names = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": world, "LOCAL_WORLD_SIZE": world}
        os.environ.update({name: str(value) for name, value in names.items()})
        os.environ.update({"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port})
    code = 1
    try:
        work()
        code = 0
    except BaseException:
        traceback.print_exc()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)  # what the first process has registered for its end is its own


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
