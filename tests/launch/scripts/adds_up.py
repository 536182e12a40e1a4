"""Joins the group, adds up, and ends as it is told: fine, with an error or with a code."""

import os
import sys

import torch
import torch.distributed as dist

if not dist.is_initialized():  # Ray has opened it
    dist.init_process_group("gloo")
rank = dist.get_rank()
total = torch.full((1,), float(rank + 1))
dist.all_reduce(total)
print(f"rank {rank} of {dist.get_world_size()} sum {total.item():g}", flush=True)
print(f"threads {os.environ.get('OMP_NUM_THREADS')} words {sys.argv[1:]}", file=sys.stderr, flush=True)
how = sys.argv[1] if len(sys.argv) > 1 else "fine"
if how == "error" and rank == 1:
    raise ValueError("rank 1 has had enough")
if how == "code":
    dist.barrier()
    dist.destroy_process_group()
    sys.exit(int(sys.argv[2]))
if "RAY_JOB_ID" not in os.environ:
    dist.destroy_process_group()
