"""NaN and infinite updates: raise, skip or continue, for any optimizer and logging interval."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import loopwright
from tests.models import CPU, regression_run, trainer_of
from tests.spreads import spread

STEPS = 8
OPTIMIZERS = [
    {"optim": "sgd"},
    {"optim": "sgd", "optim_args": "momentum=0.9"},
    {"optim": "adamw_torch", "learning_rate": 0.01},
    {"optim": "adamw_torch_fused", "learning_rate": 0.01},
]


def named(value: Any) -> str:
    is_optimizer = isinstance(value, dict)
    return str(value["optim"]) + ("+" if "optim_args" in value else "") if is_optimizer else str(value)


class Poison(torch.autograd.Function):
    """Passes a number on and breaks its gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient * float("nan")


class Fragile(nn.Module):
    """A line whose loss or gradient breaks on marked samples."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.line = nn.Linear(3, 1)

    def forward(self, x: Tensor, labels: Tensor, bad: Tensor) -> dict[str, Tensor]:
        loss = ((self.line(x).squeeze(-1) - labels) ** 2).mean()
        kind = int(bad.max())
        if kind == 1:
            loss = loss * float("nan")
        elif kind == 2:
            loss = loss * float("inf")
        elif kind == 3:
            loss = Poison.apply(loss)
        return {"loss": loss}


KINDS = {"NaN loss": 1, "infinite loss": 2, "NaN gradient": 3}


def data(bad: dict[int, int], leave_out: tuple[int, ...] = ()) -> list[dict[str, Any]]:
    """One sample per step, in order; those of the steps in `bad` break, those in `leave_out` are not there."""
    g = torch.Generator().manual_seed(4)
    rows = [
        {"x": torch.randn(3, generator=g), "labels": torch.randn((), generator=g), "bad": bad.get(step, 0)}
        for step in range(1, STEPS + 1)
    ]
    return [row for step, row in enumerate(rows, start=1) if step not in leave_out]


def run(rows: Any, folder: Any, **options: Any) -> Any:
    options = {"per_device_train_batch_size": 1, "num_train_epochs": 1, **options}
    trainer = trainer_of(Fragile(), rows, folder, collator=None, **options)
    trainer.error = None
    try:
        trainer.train()
    except loopwright.NonFiniteError as error:
        trainer.error = error
    return trainer


def assert_equal_state(ours: Any, theirs: Any) -> None:
    for mine, other in zip(ours.model.parameters(), theirs.model.parameters(), strict=True):
        assert torch.equal(mine, other)
    mine, other = ours.optimizer.state_dict()["state"], theirs.optimizer.state_dict()["state"]
    assert mine.keys() == other.keys()
    for index in mine:
        for slot, value in mine[index].items():
            assert value is other[index][slot] or torch.equal(
                torch.as_tensor(value), torch.as_tensor(other[index][slot])
            )


@pytest.mark.parametrize(("optimizer", "kind", "clip"), spread(OPTIMIZERS, KINDS, [0.0, 1.0]), ids=named)
def test_a_skipped_update_never_happened(optimizer: dict[str, Any], kind: str, clip: float, tmp_path: Any) -> None:
    for step in (1, 3, STEPS):
        bad = {step: KINDS[kind]}
        skipping = run(data(bad), tmp_path / "a", on_nonfinite="skip", max_grad_norm=clip, **optimizer)
        without = run(data({}, leave_out=(step,)), tmp_path / "b", max_grad_norm=clip, **optimizer)
        assert skipping.state.global_step == STEPS
        assert_equal_state(skipping, without)


@pytest.mark.parametrize(("step", "interval", "kind"), spread([1, 4, STEPS], [3, 100, 1], KINDS))
def test_the_error_names_the_step(kind: str, interval: int, step: int, tmp_path: Any) -> None:
    broken = run(data({step: KINDS[kind]}), tmp_path / "a", on_nonfinite="raise", logging_steps=interval)
    assert f"at step {step};" in str(broken.error) and f"after step {step - 1}" in str(broken.error)
    before = run(data({}, leave_out=tuple(range(step, STEPS + 1))), tmp_path / "b") if step > 1 else None
    expected = Fragile() if before is None else before.model
    for mine, theirs in zip(broken.model.parameters(), expected.parameters(), strict=True):
        assert torch.equal(mine, theirs)


@pytest.mark.parametrize(("interval", "optimizer", "kind"), spread([1, 3, 100], OPTIMIZERS, KINDS), ids=named)
def test_on_a_device_whose_reads_wait_nothing_moves_until_the_log_point(
    kind: str, optimizer: dict[str, Any], interval: int, tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on an accelerator: the flag is read at the log point, and no update after the bad one counts."""
    from loopwright.pt.strategies.single import SingleDevice

    # A class attribute with a setter nobody can use: the strategy believes that its reads wait.
    monkeypatch.setattr(
        SingleDevice, "reads_are_free", property(lambda self: False, lambda self, value: None), raising=False
    )
    broken = run(data({2: KINDS[kind]}), tmp_path / "a", on_nonfinite="raise", logging_steps=interval, **optimizer)
    assert "at step 2;" in str(broken.error)
    expected = run(data({}, leave_out=tuple(range(2, STEPS + 1))), tmp_path / "b", **optimizer)
    assert_equal_state(broken, expected)


def test_a_bad_update_never_reaches_a_checkpoint(tmp_path: Any) -> None:
    broken = run(data({4: 1}), tmp_path, on_nonfinite="raise", save_strategy="steps", save_steps=1, logging_steps=100)
    assert broken.error is not None
    assert loopwright.get_last_checkpoint(str(tmp_path)).endswith("checkpoint-3")


@pytest.mark.parametrize(("policy", "counts"), [("skip", [0, 1, 1, 0]), ("continue", [0, 2, 2, 2])])
def test_bad_updates_are_counted_and_reported_once(policy: str, counts: list[int], tmp_path: Any) -> None:
    """Updates 3 and 6 break; where the third is applied, nothing is finite ever after."""
    trainer = run(data({3: 1, 6: 2}), tmp_path, on_nonfinite=policy, logging_steps=2)
    rows = [row for row in trainer.state.log_history if "loss" in row]
    assert [row.get("nonfinite_steps", 0) for row in rows] == counts
    told = [text for text in trainer._loopwright.notices.told if "NaN" in text]
    assert len(told) == 1 and "first at step 3" in told[0]
    assert ("are skipped" if policy == "skip" else "applied anyway") in told[0]


@pytest.mark.parametrize("filtered", [True, False])
@pytest.mark.parametrize("interval", [1, 2, 4])
def test_the_filter_leaves_bad_losses_out_of_the_mean_and_nothing_else(
    filtered: bool, interval: int, tmp_path: Any
) -> None:
    good = run(data({}), tmp_path / "a", learning_rate=0.0, logging_steps=1)
    losses = [row["loss"] for row in good.state.log_history if "loss" in row]
    trainer = run(
        data({3: 1}), tmp_path / "b", learning_rate=0.0, logging_steps=interval, logging_nan_inf_filter=filtered,
        on_nonfinite="skip",
    )  # fmt: skip
    rows = [row for row in trainer.state.log_history if "loss" in row]
    for number, row in enumerate(rows):
        steps = range(number * interval + 1, (number + 1) * interval + 1)
        finite = [losses[step - 1] for step in steps if step != 3]
        if 3 in steps and (not filtered or not finite):
            assert math.isnan(row["loss"]), "a NaN is shown where nothing else is left to show"
        else:
            assert row["loss"] == pytest.approx(sum(finite) / len(finite), rel=1e-6)


def test_strict_runs_stop_at_the_report(tmp_path: Any) -> None:
    trainer = trainer_of(
        Fragile(), data({2: 1}), tmp_path, collator=None, per_device_train_batch_size=1, strict=True,
        on_nonfinite="skip",
    )  # fmt: skip
    with pytest.raises(loopwright.LoopwrightError, match="first at step 2"):
        trainer.train()


def test_a_resumed_run_names_the_right_step(tmp_path: Any) -> None:
    """The bad update comes after the resume, in the middle of a log interval that began before it."""
    options = {"save_strategy": "steps", "save_steps": 3, "logging_steps": 100, "on_nonfinite": "raise"}
    first = run(data({}), tmp_path, **options)
    assert first.error is None
    again = trainer_of(Fragile(), data({5: 1}), tmp_path, collator=None, per_device_train_batch_size=1,
                       num_train_epochs=1, **options)  # fmt: skip
    with pytest.raises(loopwright.NonFiniteError, match="at step 5;"):
        again.train(resume_from_checkpoint=str(tmp_path / "checkpoint-3"))


def test_the_default_is_to_continue() -> None:
    assert "on_nonfinite" not in CPU
    assert loopwright.TrainingArguments("x", use_cpu=True).on_nonfinite == "continue"


def test_a_run_of_nothing_but_nan_has_no_loss_of_zero(tmp_path: Path) -> None:
    class Nan(loopwright.Trainer):
        def compute_loss(self, model: Any, inputs: Any) -> Any:
            return model(**inputs)["loss"] * float("nan")

    trainer = regression_run(tmp_path, cls=Nan, max_steps=3)
    final = trainer.state.log_history[-1]["train_loss"]
    assert final != final
