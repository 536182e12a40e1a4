"""No wait between log points, and no walk over the model per update: counted, not timed."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import loopwright
from loopwright.pt.strategies.single import SingleDevice
from loopwright.speed.proof.audit import is_turn
from tests import models
from tests.models import Tokens, samples, trainer_of

READS = ("item", "tolist", "cpu", "numpy", "__bool__", "__float__", "__int__", "__index__", "__array__", "nonzero")
"""What makes the host wait for a device."""
UPDATES = 12


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> Iterator[Counter[str]]:
    """How often each way to read a tensor was used."""
    counted: Counter[str] = Counter()

    def counting(name: str, original: Any) -> Any:
        def read(self: Tensor, *args: Any, **kwargs: Any) -> Any:
            counted[name] += 1
            return original(self, *args, **kwargs)

        return read

    # Nobody can set this property: the strategy takes its device for one whose reads wait.
    waits = property(lambda self: False, lambda self, value: None)
    monkeypatch.setattr(SingleDevice, "reads_are_free", waits, raising=False)
    for name in READS:
        monkeypatch.setattr(Tensor, name, counting(name, getattr(Tensor, name)))
    yield counted


class Ledger(loopwright.TrainerCallback):
    """What was counted from the end of each update to the end of the next, outside the model's own forward."""

    def __init__(self, counted: Counter[str]) -> None:
        self.counted, self.last = counted, Counter(counted)
        self.between: list[Counter[str]] = []

    def on_train_begin(self, args: Any, state: Any, control: Any, model: Any, **kwargs: Any) -> None:
        entered: list[Counter[str]] = []
        model.register_forward_pre_hook(lambda module, inputs: entered.append(Counter(self.counted)))
        model.register_forward_hook(lambda module, inputs, output: self.forget(entered.pop()))

    def forget(self, before: Counter[str]) -> None:
        self.counted.clear()
        self.counted.update(before)

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.between.append(self.counted - self.last)
        self.last = Counter(self.counted)


class Line(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.line = nn.Linear(3, 1)

    def forward(self, x: Tensor, labels: Tensor) -> dict[str, Tensor]:
        return {"loss": ((self.line(x).squeeze(-1) - labels) ** 2).mean()}


def floats(n: int) -> list[dict[str, Any]]:
    return [{"x": torch.randn(3), "labels": torch.randn(())} for _ in range(n)]


MODELS = {
    "floats": (lambda: Line(), floats),
    "tokens": (lambda: Tokens(), lambda n: samples([6] * n)),
    "llama": (lambda: models.llama().float(), lambda n: samples([6] * n)),
}
DEFAULTS = {"optim": "adamw_torch_fused", "lr_scheduler_type": "linear", "max_grad_norm": 1.0}


def watched(name: str, counted: Counter[str], folder: Any, accumulation: int = 1, **options: Any) -> Ledger:
    make, data = MODELS[name]
    ledger = Ledger(counted)
    trainer = trainer_of(
        make(), data(UPDATES * accumulation), folder, collator=None, callbacks=[ledger], num_train_epochs=1,
        **{**DEFAULTS, "per_device_train_batch_size": 1, "gradient_accumulation_steps": accumulation, **options},
    )  # fmt: skip
    trainer.train()
    assert trainer.state.global_step == UPDATES
    return ledger


@pytest.mark.parametrize("clip", [0.0, 1.0])
@pytest.mark.parametrize("accumulation", [1, 3])
@pytest.mark.parametrize("name", MODELS)
def test_nothing_is_read_between_log_points(
    name: str, accumulation: int, clip: float, reads: Counter[str], tmp_path: Any
) -> None:
    ledger = watched(name, reads, tmp_path, accumulation, logging_steps=5, max_grad_norm=clip)
    # Labels are in host memory here. Equally long samples leave open what a mean is divided by, so that each update is
    # asked whether it would matter: labels are counted once more.
    times = {"floats": 0, "tokens": 2, "llama": 1}[name]
    counted = Counter({"__int__": times * accumulation if accumulation > 1 else 0})
    # The first update finds out how the loss is scaled; the one after a log point comes after its read.
    for step, between in enumerate(ledger.between[1:], start=2):
        expected = counted + Counter({"tolist": 1 if step in (6, 11) else 0})
        if name == "tokens" and accumulation > 1 and is_turn(step, is_small=True):
            # The loss is tested again, for which labels, in host memory, are counted some more times.
            assert between["__int__"] >= expected.pop("__int__") and between.pop("__int__")
        assert between == expected, f"step {step}: {dict(between)}"


@pytest.mark.parametrize("interval", [1, 2, 4])
def test_a_log_point_is_one_read(interval: int, reads: Counter[str], tmp_path: Any) -> None:
    ledger = watched("floats", reads, tmp_path, logging_steps=interval)
    total = sum(ledger.between[1:], Counter())
    assert total == Counter({"tolist": (UPDATES - 1) // interval})


def test_the_first_update_of_one_micro_batch_reads_nothing_either(reads: Counter[str], tmp_path: Any) -> None:
    def beginning(updates: int) -> Counter[str]:
        before = Counter(reads)
        trainer = trainer_of(Line(), floats(updates), tmp_path, collator=None, per_device_train_batch_size=1,
                             num_train_epochs=1, logging_strategy="no", **DEFAULTS)  # fmt: skip
        trainer.train()
        return reads - before

    assert beginning(1) == beginning(9)


@pytest.mark.parametrize("policy", ["raise", "skip"])
def test_a_policy_for_broken_updates_reads_once_per_update_at_most(
    policy: str, reads: Counter[str], tmp_path: Any
) -> None:
    """On the CPU, where reads are free; an accelerator with a fused optimizer reads nothing."""
    ledger = watched("floats", reads, tmp_path, logging_steps=100, on_nonfinite=policy)
    for between in ledger.between[1:]:
        assert sum(between.values()) <= 2


def test_fp16_reads_its_flag_and_nothing_else(reads: Counter[str], tmp_path: Any) -> None:
    ledger = watched("floats", reads, tmp_path, logging_steps=100, fp16=True)
    assert all(set(between) <= {"item", "__float__"} for between in ledger.between[1:])
    assert len({sum(between.values()) for between in ledger.between[1:]}) == 1


# ---- walks ----------------------------------------------------------------------------------------------------------

WALKS = ("train", "eval", "parameters", "named_parameters", "modules", "named_modules", "buffers", "named_buffers",
         "state_dict", "children", "named_children", "to", "_apply")  # fmt: skip


@pytest.mark.parametrize("accumulation", [1, 3])
@pytest.mark.parametrize("name", MODELS)
def test_the_model_is_not_walked_per_update(
    name: str, accumulation: int, tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    counted: Counter[str] = Counter()

    def counting(walk: str, original: Any) -> Any:
        def call(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
            counted[walk] += 1
            return original(self, *args, **kwargs)

        return call

    for walk in WALKS:
        monkeypatch.setattr(nn.Module, walk, counting(walk, getattr(nn.Module, walk)))
    make, data = MODELS[name]

    def walks(updates: int) -> Counter[str]:
        counted.clear()
        trainer = trainer_of(make(), data(updates * accumulation), tmp_path, collator=None, num_train_epochs=1,
                             per_device_train_batch_size=1, gradient_accumulation_steps=accumulation, logging_steps=2,
                             **DEFAULTS)  # fmt: skip
        trainer.train()
        return Counter(counted)

    walks(1)
    short, long = walks(8), walks(11)  # 8: the loss is checked again
    assert short == long and short["train"] >= 1


def test_an_evaluation_switches_the_mode_twice(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[bool] = []
    original = nn.Module.train

    def train(self: nn.Module, mode: bool = True) -> Any:
        if isinstance(self, Line):
            calls.append(mode)
        return original(self, mode)

    monkeypatch.setattr(nn.Module, "train", train)
    trainer = trainer_of(Line(), floats(4), tmp_path, collator=None, eval_dataset=floats(8), eval_strategy="epoch",
                         num_train_epochs=2, per_device_eval_batch_size=1, **DEFAULTS)  # fmt: skip
    trainer.train()
    assert calls == [True, False, True, False, True]
