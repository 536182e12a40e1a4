"""The position of a rank is read from its stack; a rank that is behind is late; hangs and failures are reported."""

from __future__ import annotations

import dataclasses
import json
import socket
import sys
import threading
import time
from datetime import timedelta

import pytest
import torch.distributed as dist
from torch import nn
from torch.utils.data import Dataset

import loopwright.core.distributed.beacon as beacon
from loopwright import Trainer, TrainerCallback, TrainingArguments
from loopwright.core.distributed.beacon import ORDER, PHASES, Sighting, describe, late_ones, phase_of
from loopwright.errors import PeerError
from loopwright.pt.distributed import heartbeat as watch
from loopwright.pt.distributed.heartbeat import HangDetector, is_lost_connection, patience_for


def at(rank: int, step: int, phase: str, waits: str = "", **more) -> Sighting:
    return Sighting(rank, f"host{rank}", 100 + rank, step, phase, waits, **more)


@pytest.mark.parametrize(
    ("seen", "late"),
    [
        ([at(0, 5, "backward"), at(1, 5, "backward")], []),
        ([at(0, 5, "backward"), at(1, 5, "forward")], [1]),
        ([at(0, 5, "backward"), at(1, 5, "data"), at(2, 5, "forward")], [1]),
        ([at(0, 6, "callbacks", "all_gather_numbers"), at(1, 5, "optimizer step")], [1]),
        ([at(0, 6, "data"), at(1, 6, "saving")], [1]),
        ([at(0, 6, "evaluation", "gather"), at(1, 6, "evaluation"), at(2, 6, "evaluation", "all_gather_numbers")], [1]),
        ([at(0, 6, "saving", "barrier"), at(1, 6, "saving", "barrier")], []),
        ([at(0, 0, "getting ready"), at(1, 0, "forward")], [0]),
        ([], []),
    ],
)
def test_whoever_is_behind_is_late(seen, late):
    assert [each.rank for each in late_ones(seen)] == late


def test_every_phase_has_a_place_in_the_order():
    assert set(PHASES.values()) == set(ORDER)


def test_the_functions_that_phases_are_told_by_exist():
    """A renamed function would silently cost its phase."""
    import ast
    from pathlib import Path

    defined = {
        node.name
        for path in Path(beacon.PACKAGE).rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.FunctionDef)
    }
    assert not (set(PHASES) | beacon.WAITING) - defined


def test_reports_name_the_missing_before_the_late():
    seen = {0: at(0, 5, "backward", still=12), 1: at(1, 5, "data", still=12, stack="  File x\n    sleep()")}
    text = describe(seen, {}, 2, 12)
    assert "late: rank 1 on host1 (process 101) is at step 5, in data, for 12 s" in text and "sleep()" in text
    assert "the other ranks are at step 5, in backward" in text
    text = describe(seen, {1: 8.0}, 2, 12)
    assert "missing: rank 1 on host1" in text and "no heartbeat for 8 s" in text and "sleep()" not in text
    assert "rank 2 was never seen" in describe(seen, {}, 3, 12)
    equal = {rank: at(rank, 5, "backward", stack=f"stack of {rank}") for rank in (0, 1)}
    assert "no rank is behind" in describe(equal, {}, 2, 9) and "stack of 1" in describe(equal, {}, 2, 9)


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(1, 1)

    def forward(self, x, labels=None):
        look("forward" if self.training else "evaluation")
        return {"loss": ((self.layer(x) - labels) ** 2).mean()}


class Data(Dataset):
    def __len__(self):
        return 4

    def __getitem__(self, index):
        look("data" if not evaluating else "evaluation")
        import torch

        return {"x": torch.tensor([float(index)]), "labels": torch.tensor([1.0])}


class Looks(TrainerCallback):
    def on_step_end(self, *args, **kwargs):
        look("callbacks")

    def on_save(self, *args, **kwargs):
        look("callbacks")

    def on_evaluate(self, *args, **kwargs):
        look("callbacks")


found: list[tuple[str, str]] = []
evaluating = False


def look(expected: str) -> None:
    found.append((expected, phase_of(sys._getframe())[0]))


class Watched(Trainer):
    def evaluate(self, *args, **kwargs):
        global evaluating
        evaluating = True
        try:
            return super().evaluate(*args, **kwargs)
        finally:
            evaluating = False

    def _save_checkpoint(self, *args, **kwargs):
        look("saving")
        return super()._save_checkpoint(*args, **kwargs)

    def log(self, *args, **kwargs):
        look("logging" if "loss" in args[0] else "evaluation" if "eval_loss" in args[0] else "ending")
        return super().log(*args, **kwargs)


def test_phases_are_read_off_the_stack_of_a_real_run(output_dir):
    """Every phase that a run goes through is told right, wherever user code is called from."""
    found.clear()
    args = TrainingArguments(output_dir, num_train_epochs=1, per_device_train_batch_size=2, eval_strategy="steps",
                             eval_steps=1, save_steps=1, logging_steps=1, use_cpu=True, disable_tqdm=True)  # fmt: skip
    Watched(Model(), args, train_dataset=Data(), eval_dataset=Data(), callbacks=[Looks()]).train()
    wrong = {pair for pair in found if pair[0] != pair[1]} - {("evaluation", "callbacks")}
    assert not wrong
    assert {"forward", "data", "evaluation", "callbacks", "logging", "ending"} <= {real for _, real in found}


# ---- watching, with a real store --------------------------------------------------------------------------------


@pytest.fixture
def store():
    server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=60))
    yield server


def watcher(store, rank: int, said: list[str], *, patience: float = 0.5, step=lambda: 3, **more) -> HangDetector:
    return HangDetector(rank=rank, world=2, step=step, patience=patience, connect=store.clone, tell=said.append, **more)


@pytest.fixture
def quick(monkeypatch):
    monkeypatch.setattr(watch, "TICK", 0.05)
    monkeypatch.setattr(watch, "SILENT", 0.6)


def until(condition, seconds: float = 10.0) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.02)


def test_a_standstill_is_told_once_with_the_missing_host(store, quick):
    """The other has shone once and is gone."""
    said: list[str] = []
    store.set("beacon/1", json.dumps(at(1, 2, "data").as_json()))
    with watcher(store, 0, said, patience=1.0):
        until(lambda: said)
        time.sleep(0.5)
    assert len(said) == 1
    assert "missing: rank 1 on host1 (process 101)" in said[0] and "last: step 2, in data" in said[0]


def test_what_moves_is_not_told(store, quick):
    said, steps = [], iter(range(10**6))
    with watcher(store, 0, said, patience=0.5, step=lambda: next(steps)):
        time.sleep(1.5)
    assert not said


def test_a_lost_connection_is_explained_by_who_is_missing(store, quick):
    store.set("beacon/1", json.dumps(at(1, 2, "data").as_json()))
    with pytest.raises(PeerError) as caught, watcher(store, 0, []):
        raise RuntimeError("[gloo/transport/tcp/pair.cc] Connection closed by peer")
    assert "missing: rank 1 on host1" in str(caught.value) and "Connection closed" in str(caught.value)


def test_what_another_process_has_said_needs_no_explanation(store, quick):
    with pytest.raises(RuntimeError, match="Connection closed"), watcher(store, 0, [], heard=lambda: "rank 1 failed"):
        raise RuntimeError("[gloo/transport/tcp/pair.cc] Connection closed by peer")


def test_other_errors_are_left_alone(store, quick):
    with pytest.raises(ValueError, match="mine"), watcher(store, 0, []):
        raise ValueError("mine")


def test_a_lost_store_is_said(quick):
    def connect():
        raise ConnectionError("gone")

    lonely = HangDetector(rank=0, world=2, step=lambda: 0, patience=1, connect=connect)
    with pytest.raises(PeerError, match=f"cannot be reached from {socket.gethostname()}"), lonely:
        raise RuntimeError("gloo: Connection closed by peer")


def test_threads_are_gone_afterwards(store, quick):
    before = threading.active_count()
    with watcher(store, 0, []):
        assert threading.active_count() > before
    until(lambda: threading.active_count() <= before)


@pytest.mark.parametrize(
    ("error", "lost"),
    [
        (RuntimeError("[../gloo/transport/tcp/pair.cc:553] Connection closed by peer"), True),
        (RuntimeError("Timed out waiting 20000ms for recv operation to complete"), True),
        (RuntimeError("NCCL communicator was aborted"), True),
        (dist.DistNetworkError("x"), True),
        (RuntimeError("mat1 and mat2 shapes cannot be multiplied"), False),
        (ValueError("gloo"), False),
    ],
)
def test_lost_connections_are_told_from_other_errors(error, lost):
    assert is_lost_connection(error) == lost


def test_a_report_comes_before_the_timeout():
    assert patience_for(20) == 10 and patience_for(1800) == 120


def test_one_process_alone_is_not_watched(output_dir):
    """No thread, and no call in the loop: the beacon of a single process does not exist."""
    args = TrainingArguments(output_dir, max_steps=2, per_device_train_batch_size=2, use_cpu=True, disable_tqdm=True,
                             save_strategy="no")  # fmt: skip
    names: list[str] = []

    class Note(TrainerCallback):
        def on_step_end(self, *args, **kwargs):
            names.extend(thread.name for thread in threading.enumerate())

    Trainer(Model(), args, train_dataset=Data(), callbacks=[Note()]).train()
    assert names and not [name for name in names if "beacon" in name]


def test_sightings_travel_as_json():
    one = at(1, 2, "data", "all_gather_numbers", still=1.5, beat=3, stack="s")
    assert Sighting(**one.as_json()) == one and dataclasses.asdict(one)["step"] == 2
