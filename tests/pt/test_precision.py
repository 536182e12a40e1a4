"""Number formats: autocast, loss scaling and its skipped steps, full-eval casts, Apex, tf32."""

from __future__ import annotations

import copy
import sys
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import loopwright
from tests.models import Tokens, made, samples, trainer_of, weights


class Line(nn.Module):
    """A linear model that remembers the number formats it computed in, and overflows on marked samples."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(2)
        self.line = nn.Linear(3, 1)
        self.register_buffer("offset", torch.tensor([0.1234567]))
        self.seen: set[torch.dtype] = set()
        self.held: set[torch.dtype] = set()

    def forward(self, x: Tensor, labels: Tensor, bad: Tensor | None = None) -> dict[str, Tensor]:
        y = self.line(x.to(self.line.weight.dtype)).squeeze(-1) + self.offset
        self.seen.add(self.line(x.to(self.line.weight.dtype)).dtype)
        self.held |= {self.line.weight.dtype, self.offset.dtype}
        loss = 0.02 * ((y.float() - labels) ** 2).mean()  # small enough for torch's first scale
        if bad is not None and bool(bad.any()):
            loss = Overflow.apply(loss)
        return {"loss": loss, "logits": y}


class Overflow(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient * float("inf")


def data(n: int = 6, bad: tuple[int, ...] = ()) -> list[dict[str, Any]]:
    g = torch.Generator().manual_seed(4)
    return [
        {"x": torch.randn(3, generator=g), "labels": torch.randn((), generator=g), "bad": float(step in bad)}
        for step in range(1, n + 1)
    ]


ONE_BY_ONE = {"learning_rate": 1.0, "collator": None, "per_device_train_batch_size": 1, "num_train_epochs": 1}


class Follow(loopwright.TrainerCallback):
    """Weights and learning rate after every update."""

    def __init__(self) -> None:
        self.weights: list[dict[str, Tensor]] = []
        self.rates: list[float] = []

    def on_step_end(self, args: Any, state: Any, control: Any, model: Any, optimizer: Any, **kwargs: Any) -> None:
        self.weights.append(weights(model))
        self.rates.append(optimizer.param_groups[0]["lr"])


@pytest.mark.parametrize(("name", "dtype"), [("bf16", torch.bfloat16), ("fp16", torch.float16)])
def test_autocast_computes_in_half_and_keeps_weights_whole(name: str, dtype: torch.dtype, tmp_path: Any) -> None:
    trainer = trainer_of(Line(), data(), tmp_path, **{name: True}, **ONE_BY_ONE)
    trainer.train()
    assert trainer.model.seen == {dtype}
    assert {p.dtype for p in trainer.model.parameters()} == {torch.float32}
    exact = trainer_of(Line(), data(), tmp_path, **ONE_BY_ONE)
    exact.train()
    for mine, theirs in zip(trainer.model.parameters(), exact.model.parameters(), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=0.05, atol=0.02)
        assert not torch.equal(mine, theirs)


@pytest.mark.parametrize("name", ["bf16", "fp16"])
def test_half_precision_and_accumulation(name: str, tmp_path: Any) -> None:
    """Loss scaling is undone before gradients of several micro-batches are clipped and logged."""
    options = {"collator": None, "max_steps": 1, "max_grad_norm": 1e-3, "learning_rate": 1.0}
    parts = trainer_of(Line(), data(), tmp_path, per_device_train_batch_size=1, gradient_accumulation_steps=6,
                       **{name: True}, **options)  # fmt: skip
    whole = trainer_of(Line(), data(), tmp_path, per_device_train_batch_size=6, **options)
    parts.train(), whole.train()
    for mine, theirs in zip(parts.model.parameters(), whole.model.parameters(), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=0, atol=1e-5)
    rows = [next(row for row in t.state.log_history if "grad_norm" in row) for t in (parts, whole)]
    assert rows[0]["grad_norm"] == pytest.approx(rows[1]["grad_norm"], rel=0.02)


@pytest.mark.parametrize("step", [1, 3])
def test_a_step_that_overflows_is_skipped_and_the_schedule_waits(step: int, tmp_path: Any) -> None:
    follow, free = Follow(), Follow()
    options = {"fp16": True, "lr_scheduler_type": "linear", "logging_steps": 1, **ONE_BY_ONE}
    trainer = trainer_of(Line(), data(bad=(step,)), tmp_path, callbacks=[follow], **options)
    start = weights(trainer.model)
    trainer.train()
    before = start if step == 1 else follow.weights[step - 2]
    assert all(torch.equal(before[name], value) for name, value in follow.weights[step - 1].items())
    trainer_of(Line(), data(), tmp_path, callbacks=[free], **options).train()
    # The rates of the run without an overflow, one update late from there on.
    assert follow.rates == [
        *free.rates[: step - 1],
        *([1.0] if step == 1 else [free.rates[step - 2]]),
        *free.rates[step - 1 : -1],
    ]
    assert trainer.state.global_step == 6
    assert trainer._loopwright.strategy.precision.scaler.get_scale() == 2.0**15, "half of torch's first scale"


def test_the_scale_travels_with_the_checkpoint(tmp_path: Any) -> None:
    options = {"fp16": True, "save_strategy": "steps", "save_steps": 2, **ONE_BY_ONE}
    whole = trainer_of(Line(), data(bad=(1, 2)), tmp_path, **options)
    whole.train()
    again = trainer_of(Line(), data(bad=(1, 2)), tmp_path, **options)
    again.train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
    assert (
        again._loopwright.strategy.precision.scaler.state_dict()
        == whole._loopwright.strategy.precision.scaler.state_dict()
    )
    for mine, theirs in zip(again.model.parameters(), whole.model.parameters(), strict=True):
        assert torch.equal(mine, theirs)


@pytest.mark.parametrize("policy", ["raise", "skip", "continue"])
def test_an_overflow_of_the_scale_is_no_broken_update(policy: str, tmp_path: Any) -> None:
    """Loss scaling tries a scale, overflows and goes on with half of it: that is how it works, not an error."""
    trainer = trainer_of(Line(), data(bad=(1, 2)), tmp_path, fp16=True, on_nonfinite=policy, **ONE_BY_ONE)
    assert trainer.train().global_step == 6
    assert trainer._loopwright.strategy.precision.scaler.get_scale() == 2.0**14
    assert not [row for row in trainer.state.log_history if "nonfinite_steps" in row]
    assert not [text for text in trainer._loopwright.notices.told if "NaN" in text]


def test_fp16_weights_cannot_be_scaled(tmp_path: Any) -> None:
    trainer = trainer_of(Line().half(), data(), tmp_path, fp16=True, **ONE_BY_ONE)
    with pytest.raises(loopwright.ArgumentsError, match="needs trainable weights in fp32, but 'line.weight'"):
        trainer.train()


# ---- evaluation -----------------------------------------------------------------------------------------------------


class Tied(Tokens):
    def __init__(self) -> None:
        super().__init__()
        self.head.weight = self.embed.weight


@pytest.mark.parametrize(("name", "dtype"), [("bf16_full_eval", torch.bfloat16), ("fp16_full_eval", torch.float16)])
def test_a_full_eval_cast_is_undone_to_the_bit(name: str, dtype: torch.dtype, tmp_path: Any) -> None:
    trainer = trainer_of(Line(), data(), tmp_path, eval_dataset=data(), **{name: True}, **ONE_BY_ONE)
    trainer.train()
    before = copy.deepcopy(trainer.model.state_dict())
    places = [p.data_ptr() for p in trainer.model.parameters()]
    parameters = list(trainer.model.parameters())
    trainer.model.held.clear()
    assert trainer.evaluate()["eval_loss"] > 0
    assert trainer.model.held == {dtype}
    for key, value in trainer.model.state_dict().items():
        assert value.dtype is torch.float32 and torch.equal(value, before[key])
    assert [p.data_ptr() for p in trainer.model.parameters()] == places
    assert all(a is b for a, b in zip(trainer.model.parameters(), parameters, strict=True))


def test_a_full_eval_cast_is_undone_after_an_error(tmp_path: Any) -> None:
    trainer = trainer_of(Line(), data(), tmp_path, eval_dataset=[{"x": torch.zeros(4), "labels": 1.0}],
                         bf16_full_eval=True, **ONE_BY_ONE)  # fmt: skip
    before = copy.deepcopy(trainer.model.state_dict())
    with pytest.raises(RuntimeError):
        trainer.evaluate()
    for key, value in trainer.model.state_dict().items():
        assert value.dtype is torch.float32 and torch.equal(value, before[key])


def test_ties_survive_a_full_eval_cast(tmp_path: Any) -> None:
    torch.manual_seed(0)
    trainer = trainer_of(Tied(), samples((5, 8)), tmp_path, eval_dataset=samples((5, 8)), bf16_full_eval=True)
    trainer.evaluate()
    assert trainer.model.head.weight is trainer.model.embed.weight
    assert trainer.model.head.weight.dtype is torch.float32


def test_an_evaluation_inside_training_casts_nothing(tmp_path: Any) -> None:
    trainer = trainer_of(Line(), data(), tmp_path, eval_dataset=data(), eval_strategy="steps", eval_steps=3,
                         bf16_full_eval=True, **ONE_BY_ONE)  # fmt: skip
    trainer.train()
    assert trainer.model.held == {torch.float32}


@pytest.mark.parametrize("name", ["bf16", "fp16"])
def test_evaluation_runs_under_autocast(name: str, tmp_path: Any) -> None:
    trainer = trainer_of(Line(), data(), tmp_path, eval_dataset=data(), **{name: True}, **ONE_BY_ONE)
    result = trainer.predict(data())
    assert trainer.model.seen == {torch.bfloat16 if name == "bf16" else torch.float16}
    assert result.predictions.shape == (6,) and result.predictions.dtype.kind == "f"


# ---- Apex -----------------------------------------------------------------------------------------------------------

AMP = """
from contextlib import contextmanager

calls = []
SCALE = 8.0


def initialize(model, optimizer, opt_level):
    calls.append(("initialize", opt_level))
    return model, optimizer


@contextmanager
def scale_loss(loss, optimizer):
    calls.append(("scale_loss",))
    before = [None if p.grad is None else p.grad.clone() for p in _parameters(optimizer)]
    yield loss * SCALE
    for p, old in zip(_parameters(optimizer), before):
        if p.grad is not None:
            new = p.grad if old is None else p.grad - old
            p.grad = new / SCALE if old is None else old + new / SCALE


def master_params(optimizer):
    calls.append(("master_params",))
    return _parameters(optimizer)


def _parameters(optimizer):
    return [p for group in optimizer.param_groups for p in group["params"]]


def state_dict():
    return {"scale": SCALE}


def load_state_dict(state):
    calls.append(("load_state_dict", state))
"""


@pytest.fixture
def amp(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """A stand-in for NVIDIA Apex that does what its amp promises."""
    package = tmp_path / "packages" / "apex"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("")
    (package / "amp.py").write_text(AMP)
    monkeypatch.syspath_prepend(str(package.parent))
    for name in ("apex", "apex.amp"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    from apex import amp

    yield amp
    for name in ("apex", "apex.amp"):
        sys.modules.pop(name, None)


APEX = {"fp16": True, "half_precision_backend": "apex", "fp16_opt_level": "O2"}


def test_apex_is_really_used(amp: Any, tmp_path: Any) -> None:
    options = {**ONE_BY_ONE, "gradient_accumulation_steps": 2, "max_grad_norm": 0.5}
    trainer = trainer_of(Line(), data(), tmp_path / "a", **APEX, **options)
    trainer.train()
    kinds = [call[0] for call in amp.calls]
    assert kinds[0] == "initialize" and amp.calls[0][1] == "O2"
    assert kinds.count("initialize") == 1 and kinds.count("scale_loss") == 6 and "master_params" in kinds
    exact = trainer_of(Line(), data(), tmp_path / "b", **options)
    exact.train()
    for mine, theirs in zip(trainer.model.parameters(), exact.model.parameters(), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-5, atol=1e-6)


def test_apexs_state_travels_with_the_checkpoint(amp: Any, tmp_path: Any) -> None:
    options = {**APEX, **ONE_BY_ONE, "save_strategy": "steps", "save_steps": 3}
    trainer_of(Line(), data(), tmp_path / "a", **options).train()
    trainer_of(Line(), data(), tmp_path / "a", **options).train(
        resume_from_checkpoint=str(tmp_path / "a" / "checkpoint-3")
    )
    assert ("load_state_dict", {"scale": 8.0}) in amp.calls


def test_apex_that_is_not_there_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> None:
    monkeypatch.setitem(sys.modules, "apex", None)
    with pytest.raises(loopwright.MissingPackage, match="half_precision_backend=.apex. needs the package 'apex'"):
        trainer_of(Line(), data(), tmp_path, **APEX, **ONE_BY_ONE)


@pytest.mark.parametrize("backend", ["auto", "torch", "cuda_amp", "cpu_amp"])
def test_every_other_backend_is_torchs(backend: str, tmp_path: Any) -> None:
    trainer = trainer_of(Line(), data(), tmp_path, fp16=True, half_precision_backend=backend, **ONE_BY_ONE)
    assert isinstance(trainer._loopwright.strategy.precision.scaler, torch.amp.GradScaler)


# ---- tf32 -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("wanted", [True, False, None])
def test_tf32_is_set_as_asked_and_left_alone_otherwise(wanted: bool | None, tmp_path: Any) -> None:
    flags = torch.backends.cuda.matmul, torch.backends.cudnn
    before = [flag.allow_tf32 for flag in flags]
    try:
        for start in (True, False):
            for flag in flags:
                flag.allow_tf32 = start
            trainer_of(Line(), data(), tmp_path, tf32=wanted, **ONE_BY_ONE)
            assert [flag.allow_tf32 for flag in flags] == [start if wanted is None else wanted] * 2
    finally:
        for flag, value in zip(flags, before, strict=True):
            flag.allow_tf32 = value


def test_bf16_on_a_device_without_it_says_so(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> None:
    monkeypatch.setattr("loopwright.pt.precision.supports_bf16", lambda device: False)
    with pytest.raises(loopwright.ArgumentsError, match="does not support bfloat16; use fp16"):
        trainer_of(made(Tokens), samples(), tmp_path, bf16=True)
