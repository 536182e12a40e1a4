"""One process of the pool: receives cases, runs them in a group of their own, sends back what they returned."""

from __future__ import annotations

import gc
import os
import pickle
import sys
import time
import traceback
from multiprocessing.connection import Client
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "src"), str(ROOT / "tests"), str(ROOT)]
PLACE = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


def main() -> None:
    connection = Client(("127.0.0.1", int(sys.argv[1])), authkey=bytes.fromhex(os.environ["POOL_KEY"]))
    import torch

    torch.set_num_threads(1)
    from distributed import cases

    connection.send(os.getpid())
    while True:
        try:
            name, place, given = connection.recv()
        except EOFError:
            return
        before = dict(os.environ)
        os.environ.update(place)
        started = time.monotonic()
        try:
            answer = ("returned", getattr(cases, name)(**given))
        except SystemExit as leaving:
            answer = ("exited", leaving.code)
        except BaseException:
            answer = ("raised", traceback.format_exc())
        seconds = time.monotonic() - started
        close_group()
        os.environ.clear()
        os.environ.update(before)
        # Plain pickles: torch would have tensors shared with a process that does not know how.
        connection.send_bytes(pickle.dumps((*answer, seconds)))


def close_group() -> None:
    from loopwright.pt.distributed import process_group as group

    if group._opened is not None:
        group._opened.close()
    gc.collect()  # a group that is collected in a forked worker waits there for threads it does not have


if __name__ == "__main__":
    main()
