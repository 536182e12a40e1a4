"""Joins the group, adds up, and ends as it is told: fine, with an error, with a code, or waiting for a signal."""

import os
import signal
import sys
import time

import torch
import torch.distributed as dist

if not dist.is_initialized():  # Ray has opened it
    dist.init_process_group("gloo")
rank = dist.get_rank()
total = torch.full((1,), float(rank + 1))
dist.all_reduce(total)
print(f"rank {rank} of {dist.get_world_size()} sum {total.item():g}", flush=True)
attempt, resume = os.environ.get("TORCHELASTIC_RESTART_COUNT"), os.environ.get("LOOPWRIGHT_RESUME")
print(f"attempt {attempt} resume {resume}", flush=True)
print(f"threads {os.environ.get('OMP_NUM_THREADS')} words {sys.argv[1:]}", file=sys.stderr, flush=True)
how = sys.argv[1] if len(sys.argv) > 1 else "fine"
if how == "error" and rank == 1:
    raise ValueError("rank 1 has had enough")
if how == "code":
    dist.barrier()
    dist.destroy_process_group()
    sys.exit(int(sys.argv[2]))
if how == "abort":  # as torch may do to a process that has saved and is ending
    dist.barrier()
    open(os.environ["LOOPWRIGHT_STOPPED"], "w").close()
    os.abort()
if how == "first" and rank == 0 and os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
    os.kill(os.getpid(), signal.SIGKILL)
if how == "wait":  # as a Trainer does: save, then leave with 75
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(75))
    dist.destroy_process_group()
    print("ready", flush=True)
    time.sleep(60)
if how != "first" or os.environ["TORCHELASTIC_RESTART_COUNT"] != "0":
    dist.destroy_process_group() if dist.is_initialized() and "RAY_JOB_ID" not in os.environ else None
else:
    dist.barrier()
