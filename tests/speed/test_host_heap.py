"""Memory that a micro-batch frees on a CPU is kept for the next one, and returned after training."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

from loopwright.speed.memory.host_heap import SETTINGS, _glibc, keep_heap

pytestmark = pytest.mark.skipif(_glibc() is None, reason="the C library is not glibc")

SCRIPT = """
import json, resource, statistics, sys, tempfile
import torch
from torch import nn
from loopwright import Trainer, TrainerCallback, TrainingArguments

class Wide(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(*(nn.Sequential(nn.Linear(64, 64), nn.ReLU()) for _ in range(8)))

    def forward(self, x, labels):
        return {"loss": (self.layers(x) - labels).square().mean()}

class Faults(TrainerCallback):
    def __init__(self):
        self.seen = []

    def on_step_end(self, args, state, control, **kwargs):
        self.seen.append(resource.getrusage(resource.RUSAGE_SELF).ru_minflt)

def faults(speed):
    torch.manual_seed(0)
    data = [{"x": torch.ones(2048, 64), "labels": torch.zeros(2048, 64)}] * 16
    args = TrainingArguments(tempfile.mkdtemp(), per_device_train_batch_size=4, max_steps=12, speed=speed, use_cpu=True,
                             save_strategy="no", report_to="none", disable_tqdm=True, html_report=False)
    watch = Faults()
    trainer = Trainer(Wide(), args, train_dataset=data, callbacks=[watch])
    trainer.train()
    weights = sum(float(each.double().sum()) for each in trainer.model.parameters())
    # The median: a thread that writes a report or a collection of garbage may touch pages in one of them.
    new = [after - before for before, after in zip(watch.seen[3:], watch.seen[4:])]
    return {"per_update": statistics.median(new), "weights": weights}

print(json.dumps({speed: faults(speed) for speed in ("off", "auto")}))
"""


def test_a_run_on_a_cpu_touches_few_new_pages_and_trains_the_same() -> None:
    clean = {name: value for name, value in os.environ.items() if name not in (*SETTINGS, "GLIBC_TUNABLES")}
    done = subprocess.run([sys.executable, "-c", SCRIPT], env=clean, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    # A tenth, as a rule; on a busy machine a thread of torch may allocate from a heap of its own.
    assert found["auto"]["per_update"] < 0.5 * found["off"]["per_update"], found
    assert found["auto"]["weights"] == found["off"]["weights"]


@pytest.mark.parametrize("setting", [*((name, "131072") for name in SETTINGS), ("GLIBC_TUNABLES", "glibc.malloc.x=1")])
def test_a_heap_that_the_user_configured_is_left_alone(setting: tuple[str, str]) -> None:
    assert keep_heap(dict([setting])) is None


FREED = """
import os
from pathlib import Path
from loopwright.speed.memory.host_heap import keep_heap

def resident():
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")

heap = keep_heap({})
blocks = [bytearray(8 << 20) for _ in range(16)]
full = resident()
del blocks
heap.release()
print(full - resident())
"""


def test_free_memory_is_returned_after_training() -> None:
    """In a process of its own: the heap of this one has holes of other tests."""
    done = subprocess.run([sys.executable, "-c", FREED], capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr[-2000:]
    assert int(done.stdout) > 100 << 20



def test_blocks_of_any_size_are_reused_if_that_is_wanted() -> None:
    script = """
import resource, sys
import numpy as np
from loopwright.speed.memory.host_heap import keep_heap

def faults():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    np.empty(5 << 23, dtype=np.uint8).fill(1)
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

heap = keep_heap({}, all_sizes=True)
kept = [faults() for _ in range(4)]
heap.release()
print(kept[-1], faults())
"""
    clean = {name: value for name, value in os.environ.items() if name not in (*SETTINGS, "GLIBC_TUNABLES")}
    done = subprocess.run([sys.executable, "-c", script], env=clean, capture_output=True, text=True, timeout=60)
    kept, released = map(int, done.stdout.split())
    assert kept < 5 and released > kept, (done.stdout, done.stderr)
