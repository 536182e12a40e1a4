"""Seeds give the same numbers as transformers', and every stream can be kept and put back exactly."""

from __future__ import annotations

import json
import random

import numpy as np
import pytest
import torch
from hypothesis import given, strategies

from loopwright import snapshot
from loopwright.pt import rng as seeding


def draw() -> list[float]:
    # gauss and normal keep a second number in hand, which a snapshot has to hold as well
    return [random.random(), random.gauss(0, 1), np.random.rand(), np.random.randn(), torch.rand(1).item()]


@pytest.mark.parametrize("seed", [0, 42, 2**32 - 1])
def test_seed_gives_the_numbers_of_transformers(seed):
    theirs = pytest.importorskip("transformers").set_seed
    seeding.set_seed(seed)
    mine = draw()
    theirs(seed)
    assert mine == draw()


def test_deterministic_seed_refuses_nondeterministic_operations():
    seeding.set_seed(1, deterministic=True)
    assert torch.are_deterministic_algorithms_enabled()


def test_full_determinism_switches_everything(monkeypatch):
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":16:8")
    seeding.enable_full_determinism(1, warn_only=True)
    assert torch.is_deterministic_algorithms_warn_only_enabled()
    assert torch.backends.cudnn.deterministic and not torch.backends.cudnn.benchmark
    assert seeding.os.environ["CUBLAS_WORKSPACE_CONFIG"] == ":16:8"  # the user's own choice stays


@given(seed=strategies.integers(0, 2**32 - 1), draws=strategies.integers(0, 3))
def test_snapshot_through_json_is_exact(seed, draws):
    seeding.set_seed(seed)
    for _ in range(draws):
        draw()
    text = json.dumps(seeding.rng_to_json(snapshot.snapshot_rng()))
    expected = [draw() for _ in range(3)]
    snapshot.restore_rng(seeding.rng_from_json(json.loads(text)))
    assert [draw() for _ in range(3)] == expected


def test_encoding_holds_only_integers():
    draw()

    def leaves(value):
        if isinstance(value, dict):
            value = list(value.values())
        return [leaf for each in value for leaf in leaves(each)] if isinstance(value, list) else [value]

    assert {type(leaf) for leaf in leaves(seeding.rng_to_json(snapshot.snapshot_rng()))} <= {int, type(None)}


def test_nothing_is_drawn_inside_untouched_rng():
    seeding.set_seed(3)
    expected = draw()
    seeding.set_seed(3)
    with pytest.raises(ZeroDivisionError), snapshot.untouched_rng():
        draw()
        raise ZeroDivisionError
    assert draw() == expected


def test_streams_missing_from_a_snapshot_stay():
    state = random.getstate()
    snapshot.restore_rng({"torch": torch.get_rng_state()})
    assert random.getstate() == state


class FakeDevice:
    """Stands for an accelerator module with two devices."""

    def __init__(self, started=True):
        self.states, self.started = (
            [torch.tensor([1], dtype=torch.uint8), torch.tensor([2], dtype=torch.uint8)],
            started,
        )

    def is_initialized(self):
        return self.started

    def device_count(self):
        return len(self.states)

    def get_rng_state_all(self):
        assert self.started, "asking would have started the device"
        return [state.clone() for state in self.states]

    def set_rng_state(self, state, index):
        self.states[index] = state


@pytest.fixture
def device(monkeypatch):
    fake = FakeDevice()
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
    monkeypatch.setattr(torch, "get_device_module", lambda device=None: fake)
    return fake


def test_accelerator_streams_are_put_back(device):
    encoded = seeding.rng_to_json(snapshot.snapshot_rng())
    device.states = [torch.tensor([9], dtype=torch.uint8)] * 2
    snapshot.restore_rng(seeding.rng_from_json(encoded))
    assert [state.tolist() for state in device.states] == [[1], [2]]


def test_fewer_devices_than_before_are_no_error(device):
    states = snapshot.snapshot_rng()
    device.states = device.states[:1]
    snapshot.restore_rng(states)
    assert len(device.states) == 1


def test_snapshot_does_not_start_a_device(device):
    device.started = False
    assert "accelerator" not in snapshot.snapshot_rng()
