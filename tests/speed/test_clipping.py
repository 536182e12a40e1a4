"""Clipping inside the optimizer's kernel: the same steps as clipping first."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from loopwright import Trainer, TrainerCallback, TrainingArguments
from loopwright.pt.precision import Autocast, Precision, ScaledAutocast
from loopwright.pt.strategies.single import SingleDevice
from loopwright.speed.device.clipping import FoldedClip, cannot_fold, clip_norm_, total_norm
from tests.models import Regression, regression_data
from tests.spreads import spread

CPU = torch.device("cpu")


def step(optimizer: Any) -> bool:
    optimizer.step()
    return True


def parameters(seed: int = 0, dtype: torch.dtype = torch.float32) -> list[nn.Parameter]:
    torch.manual_seed(seed)
    return [nn.Parameter(torch.randn(size).to(dtype)) for size in ((7, 5), (33,), (), (2, 3, 4))]


def gradients(own: list[nn.Parameter], number: int) -> None:
    """Gradients whose norm is now above, now below 1."""
    draws = torch.Generator().manual_seed(number)
    size = 10.0 ** ((number % 5) - 3)
    for parameter in own:
        parameter.grad = (size * torch.randn(parameter.shape, generator=draws)).to(parameter.dtype)


@pytest.mark.parametrize("kind", [torch.optim.Adam, torch.optim.AdamW])
@pytest.mark.parametrize("options", [{}, {"weight_decay": 0.1}, {"amsgrad": True}, {"maximize": True}])
def test_a_hundred_steps_end_at_the_same_parameters(kind: Any, options: dict[str, Any]) -> None:
    ours, theirs = parameters(), parameters()
    folded, plain = (kind(each, lr=1e-2, fused=True, **options) for each in (ours, theirs))
    fold = FoldedClip(folded, step)
    assert cannot_fold(folded, ours) is None
    for number in range(100):
        gradients(ours, number), gradients(theirs, number)
        mine, reference = fold.clip(ours, 1.0), nn.utils.clip_grad_norm_(theirs, 1.0)
        assert torch.equal(mine, reference)
        assert fold.step(folded)
        plain.step()
        for a, b in zip(ours, theirs, strict=True):
            torch.testing.assert_close(a.grad, b.grad, rtol=1e-6, atol=1e-12)  # the kernel writes them back
    for a, b in zip(ours, theirs, strict=True):
        assert (a - b).norm() <= 1e-6 * b.norm()


def test_the_scale_does_not_outlive_its_step() -> None:
    ours, theirs = parameters(), parameters()
    folded, plain = (torch.optim.AdamW(each, fused=True) for each in (ours, theirs))
    fold = FoldedClip(folded, step)
    gradients(ours, 4), gradients(theirs, 4)
    fold.clip(ours, 1e-3), fold.step(folded)
    nn.utils.clip_grad_norm_(theirs, 1e-3), plain.step()
    gradients(ours, 1), gradients(theirs, 1)
    folded.step(), plain.step()  # neither clips
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-9)
    assert folded.grad_scale is None and "grad_scale" not in folded.state_dict()


def test_gradients_that_are_not_finite_stay_so() -> None:
    for bad in (float("nan"), float("inf")):
        ours = parameters()
        gradients(ours, 0)
        ours[0].grad[0, 0] = bad
        folded = torch.optim.AdamW(ours, fused=True)
        fold = FoldedClip(folded, step)
        assert not fold.clip(ours, 1.0).isfinite()
        fold.step(folded)
        assert not ours[0][0, 0].isfinite()


def test_a_veto_still_leaves_everything_as_it_was() -> None:
    ours = parameters()
    before = [p.detach().clone() for p in ours]
    folded = torch.optim.AdamW(ours, fused=True)
    fold = FoldedClip(folded, step)
    gradients(ours, 4)
    fold.clip(ours, 1.0)
    folded.found_inf = torch.ones(())
    fold.step(folded)
    assert all(torch.equal(a, b) for a, b in zip(ours, before, strict=True))


def test_while_somebody_looks_gradients_are_clipped_at_once() -> None:
    ours = parameters()
    folded = torch.optim.AdamW(ours, fused=True)
    watched = True
    fold = FoldedClip(folded, step, lambda: not watched)
    gradients(ours, 4)
    fold.clip(ours, 1.0)
    assert nn.utils.get_total_norm([p.grad for p in ours]) < 1.001
    watched = False
    gradients(ours, 4)
    fold.clip(ours, 1.0)
    assert nn.utils.get_total_norm([p.grad for p in ours]) > 10
    folded.register_step_pre_hook(lambda *_: None)
    fold.clip(ours, 1.0)
    assert nn.utils.get_total_norm([p.grad for p in ours]) < 1.001


class Own(torch.optim.AdamW):
    """Somebody's subclass."""


CASES = {
    "sgd": (lambda own: torch.optim.SGD(own, fused=True), "not torch's fused"),
    "not fused": (lambda own: torch.optim.AdamW(own, fused=False), "not torch's fused"),
    "one group is not": (
        lambda own: torch.optim.AdamW([{"params": own[:1], "fused": True}, {"params": own[1:], "fused": False}]),
        "not torch's fused",
    ),
    "a subclass": (lambda own: Own(own, fused=True), "not torch's fused"),
    "more parameters": (lambda own: torch.optim.AdamW([*own, *parameters(1)], fused=True), "not clipped"),
}


@pytest.mark.parametrize("name", CASES)
def test_what_cannot_fold_is_refused(name: str) -> None:
    own = parameters()
    build, words = CASES[name]
    assert words in str(cannot_fold(build(own), own))


def test_double_precision_is_refused_and_half_is_not() -> None:
    own = parameters(dtype=torch.float64)
    assert "float64" in str(cannot_fold(torch.optim.AdamW(own, fused=True), own))
    own = parameters(dtype=torch.bfloat16)
    assert cannot_fold(torch.optim.AdamW(own, fused=True), own) is None


@pytest.mark.parametrize(
    ("kind", "precision", "folds"),
    [
        ("cuda", Precision(), True),
        ("cuda", Autocast(CPU, torch.bfloat16), True),
        ("cuda", ScaledAutocast(CPU), False),
        ("cpu", Precision(), False),
    ],
)
def test_the_strategy_folds_on_cuda_without_loss_scaling_only(kind: str, precision: Any, folds: bool) -> None:
    strategy = SingleDevice(CPU, precision)
    strategy.setup_model(nn.Linear(3, 2))
    strategy.setup_optimizer(torch.optim.AdamW(strategy.model.parameters(), fused=True))
    strategy.device = torch.device(kind)  # the kernels of the host take a scale as well
    strategy.fold_clipping(lambda: True)
    assert isinstance(getattr(strategy._clip, "__self__", None), FoldedClip) is folds
    if folds:
        strategy.model(torch.ones(1, 3)).sum().mul(100).backward()
        before = [p.detach().clone() for p in strategy.model.parameters()]
        assert strategy.clip_gradients(1.0, want_norm=True) > 1 and strategy.optimizer.grad_scale > 1
        assert strategy.optimizer_step() and strategy.optimizer.grad_scale is None
        assert not any(torch.equal(a, b) for a, b in zip(strategy.model.parameters(), before, strict=True))


def test_the_trainer_says_whether_a_callback_looks(tmp_path: Any) -> None:
    class Look(TrainerCallback):
        def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            pass

    for callbacks, speed, expected in (([], "auto", True), ([Look()], "auto", False), ([], "off", None)):
        args = TrainingArguments(str(tmp_path), max_steps=1, speed=speed, save_strategy="no", disable_tqdm=True)
        trainer = Trainer(Regression(), args, train_dataset=regression_data(8), callbacks=callbacks)
        trainer.train()
        allowed = trainer._loopwright.strategy._may_fold
        assert (allowed is None if expected is None else allowed() is expected)


# ---- clipping on its own ---------------------------------------------------------------------------------------------

FORMATS = {
    "float64": [torch.float64] * 3,
    "float32": [torch.float32] * 3,
    "bfloat16": [torch.bfloat16] * 3,
    "mixed": [torch.float32, torch.float64, torch.bfloat16],
}


SCALES = [1.0, 1e-8, 1e30, float("nan"), 0.0]
NORMS = [1e-3, 0.7, 1e6, float("inf"), 1]


@pytest.mark.parametrize(("missing", "max_norm"), spread([(), (1,), (0, 1, 2)], NORMS))
@pytest.mark.parametrize(("formats", "scale"), spread(FORMATS, SCALES))
@pytest.mark.parametrize("reads", [False, True])
def test_clipping_is_torchs_to_the_bit(reads: bool, formats: str, missing: Any, scale: float, max_norm: float) -> None:
    def made() -> list[nn.Parameter]:
        g = torch.Generator().manual_seed(1)
        found = []
        for index, dtype in enumerate(FORMATS[formats]):
            p = nn.Parameter(torch.zeros(5, index + 1, dtype=dtype))
            p.grad = None if index in missing else (torch.randn(5, index + 1, generator=g) * scale).to(dtype)
            found.append(p)
        return found

    ours, theirs = made(), made()
    norm, expected = clip_norm_(ours, max_norm, reads=reads), nn.utils.clip_grad_norm_(theirs, max_norm)
    assert norm.dtype == expected.dtype and torch.equal(norm.nan_to_num(-1), expected.nan_to_num(-1))
    for one, other in zip(ours, theirs, strict=True):
        assert (one.grad is None) == (other.grad is None)
        assert one.grad is None or torch.equal(one.grad.nan_to_num(-1), other.grad.nan_to_num(-1))


def test_clipping_leaves_no_trace_in_a_graph_of_gradients() -> None:
    parameter = nn.Parameter(torch.ones(3))
    parameter.grad = (parameter * 2).detach().requires_grad_(True)
    assert not clip_norm_([parameter], 1.0).requires_grad


@pytest.mark.parametrize("limit", [0.0, 0.1])
def test_sparse_gradients_have_the_norm_of_dense_ones(limit: float) -> None:
    rows = torch.tensor([1, 3, 3])
    runs = []
    for sparse in (False, True):
        torch.manual_seed(0)
        table, layer = nn.Embedding(5, 4, sparse=sparse), nn.Linear(4, 2)
        layer(table(rows)).pow(2).sum().backward()
        own = [*table.parameters(), *layer.parameters()]
        folded = FoldedClip(torch.optim.AdamW(own, fused=True), lambda optimizer: True).clip(own, 1.0)
        norm = clip_norm_(own, limit) if limit else total_norm([p.grad for p in own if p.grad is not None])
        assert table.weight.grad is not None and table.weight.grad.is_sparse is sparse
        runs.append([norm, folded, table.weight.grad.to_dense(), layer.weight.grad])
    torch.testing.assert_close(*runs)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_gradients_near_the_limit_are_torchs_to_the_bit(dtype: torch.dtype) -> None:
    for size in torch.linspace(0.8, 1.1, 301).tolist():
        ours, others = ([nn.Parameter(torch.zeros(1, dtype=dtype)) for _ in range(2)] for _ in range(2))
        for parameter in (*ours, *others):
            parameter.grad = torch.full((1,), size * 0.5**0.5, dtype=dtype)
        norm, expected = clip_norm_(ours, 1.0, reads=True), nn.utils.clip_grad_norm_(others, 1.0)
        assert torch.equal(norm, expected)
        assert all(torch.equal(one.grad, other.grad) for one, other in zip(ours, others, strict=True)), size


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_limits_as_small_as_the_addend_of_torch_are_torchs_to_the_bit(dtype: torch.dtype) -> None:
    for limit in (1e-4, 2e-5, 1e-5, 5e-6, 1e-6, 1e-7, 1e-12):
        for share in (0.01, 0.1, 0.5, 0.8, 0.89):
            ours, theirs = ([nn.Parameter(torch.zeros(1, dtype=dtype))] for _ in range(2))
            for parameter in (*ours, *theirs):
                parameter.grad = torch.full((1,), share * limit, dtype=dtype)
            clip_norm_(ours, limit, reads=True), nn.utils.clip_grad_norm_(theirs, limit)
            assert torch.equal(ours[0].grad, theirs[0].grad), (limit, share)
