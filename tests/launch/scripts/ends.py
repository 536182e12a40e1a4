"""A rank without torch: it waits for the other ranks of its node and ends as asked for on the command line."""

import os
import signal
import sys
import time

rank, world = os.environ["RANK"], os.environ["WORLD_SIZE"]
attempt, resume = os.environ["TORCHELASTIC_RESTART_COUNT"], os.environ.get("LOOPWRIGHT_RESUME")
how = sys.argv[1]


def meet(place: str) -> None:
    """Until every rank is here."""
    open(f"{place}-{attempt}-{rank}", "w").close()
    while not all(os.path.exists(f"{place}-{attempt}-{other}") for other in range(int(world))):
        time.sleep(0.01)


if how == "wait":  # as a Trainer does: save, then leave with 75
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(75))
print(f"rank {rank} of {world}", flush=True)
print(f"attempt {attempt} resume {resume}", flush=True)
meet("printed")
if how == "error" and rank == "1":
    raise ValueError("rank 1 has had enough")
if how == "code":
    sys.exit(int(sys.argv[2]))
if how == "abort":  # as torch may do to a process that has saved and is ending
    open(os.environ["LOOPWRIGHT_STOPPED"], "w").close()
    meet("saved")
    os.abort()
if how == "first" and attempt == "0" and rank == "0":
    os.kill(os.getpid(), signal.SIGKILL)
if how == "wait":
    print("ready", flush=True)
if how in ("error", "wait") or (how == "first" and attempt == "0"):
    time.sleep(600)
