"""The loss from hidden states and the head's weight is that of the logits, and so are all its gradients."""

from __future__ import annotations

import itertools
import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings, strategies as st
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from loopwright.errors import ArgumentsError
from loopwright.speed.fused_loss import cross_entropy as linear_loss, loss_kernel
from loopwright.speed.fused_loss.cross_entropy import add_product, linear_cross_entropy, tokens_per_chunk
from loopwright.speed.fused_loss.loss_kernel import LogitMap, softmax_loss_and_gradient_

TOLERANCE = {torch.float64: 1e-12, torch.float32: 1e-6}


def parts(
    tokens: int = 23, width: int = 8, classes: int = 37, dtype: torch.dtype = torch.float64, ignored: float = 0.3
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(tokens * 1000 + classes)
    hidden = torch.randn(tokens, width, generator=generator, dtype=dtype).requires_grad_()
    weight = torch.randn(classes, width, generator=generator, dtype=dtype).requires_grad_()
    bias = torch.randn(classes, generator=generator, dtype=dtype).requires_grad_()
    targets = torch.randint(0, classes, (tokens,), generator=generator)
    targets[torch.rand(tokens, generator=generator) < ignored] = -100
    return hidden, weight, bias, targets


def reference(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    targets: Tensor,
    *,
    scale: float = 1.0,
    softcap: float | None = None,
    **options: Any,
) -> Tensor:
    """The same loss by way of the logits."""
    logits = F.linear(hidden, weight, bias)
    logits = (logits if logits.dtype == torch.float64 else logits.float()) * scale
    if softcap is not None:
        logits = torch.tanh(logits / softcap) * softcap
    return F.cross_entropy(logits.reshape(-1, weight.shape[0]), targets.reshape(-1), **options)


def same(found: Any, expected: Any, tolerance: float = 1e-12) -> None:
    torch.testing.assert_close(found, expected, rtol=tolerance, atol=tolerance, equal_nan=True)


def compare(inputs: tuple[Tensor, Tensor, Tensor | None, Tensor], tolerance: float = 1e-12, **options: Any) -> None:
    """Loss and all gradients against the reference."""
    ours = {name: options.pop(name) for name in ("count", "chunk_tokens") if name in options}
    learning = [each for each in inputs[:3] if each is not None and each.requires_grad]
    found, expected = linear_cross_entropy(*inputs, **ours, **options), reference(*inputs, **options)
    same(found, expected, tolerance)
    got, wanted = (torch.autograd.grad(loss * 0.7, learning) for loss in (found, expected))
    for a, b in zip(got, wanted, strict=True):
        assert a.shape == b.shape and a.dtype == b.dtype
        same(a, b, tolerance)


MAPS = [{}, {"scale": 0.25}, {"softcap": 3.0}, {"scale": 2.0, "softcap": 5.0}]


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("with_bias", [True, False], ids=["bias", "no bias"])
@pytest.mark.parametrize("chunk", [None, 1, 7, 64])
@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_it_is_the_cross_entropy_of_the_logits(reduction, chunk, with_bias, dtype):
    hidden, weight, bias, targets = parts(dtype=dtype)
    for smoothing, mapped in itertools.product([0.0, 0.2], MAPS):
        compare(
            (hidden, weight, bias if with_bias else None, targets),
            TOLERANCE[dtype] * (10 if reduction == "sum" and dtype == torch.float32 else 1),
            reduction=reduction,
            chunk_tokens=chunk,
            label_smoothing=smoothing,
            **mapped,
        )


@settings(max_examples=40, deadline=None)
@given(
    tokens=st.integers(1, 40),
    width=st.integers(1, 9),
    classes=st.integers(1, 50),
    ignored=st.sampled_from([0.0, 0.1, 0.5, 0.95, 1.0]),
    chunk=st.integers(1, 41),
    smoothing=st.sampled_from([0.0, 0.1, 1.0]),
    frozen=st.sampled_from([(), (0,), (1,), (2,), (0, 1), (0, 2), (1, 2)]),
)
def test_any_sizes_any_ignored_share_any_frozen_part(tokens, width, classes, ignored, chunk, smoothing, frozen):
    *inputs, targets = parts(tokens, width, classes, ignored=ignored)
    for place in frozen:
        inputs[place] = inputs[place].detach()
    for reduction in ("mean", "sum"):
        compare((*inputs, targets), chunk_tokens=chunk, label_smoothing=smoothing, reduction=reduction)


@pytest.mark.parametrize("frozen", [(0,), (1,), (2,), (0, 2), (1, 2)], ids=str)
def test_gradients_nobody_needs_are_not_computed(frozen, monkeypatch):
    products: list[int] = []
    real = linear_loss.add_product
    monkeypatch.setattr(linear_loss, "add_product", lambda *a: (products.append(a[1].shape[0]), real(*a))[1])
    *inputs, targets = parts()
    for place in frozen:
        inputs[place] = inputs[place].detach()
    loss = linear_cross_entropy(*inputs, targets)
    saved = loss.grad_fn.saved_tensors[:3]
    assert [each is None for each in saved] == [place in frozen for place in range(3)]
    classes = inputs[1].shape[0]  # rows of the product for the weight; that for hidden states has one per target
    assert (classes in products, any(each != classes for each in products)) == (1 not in frozen, 0 not in frozen)


def test_without_grad_only_the_loss_is_computed(monkeypatch):
    asked: list[bool] = []
    real = linear_loss.softmax_loss_and_gradient_
    monkeypatch.setattr(
        linear_loss, "softmax_loss_and_gradient_", lambda *a, **k: (asked.append(k["with_gradient"]), real(*a, **k))[1]
    )
    inputs = parts()
    with torch.no_grad():
        same(linear_cross_entropy(*inputs), reference(*inputs))
    linear_cross_entropy(*(each.detach() for each in inputs))
    linear_cross_entropy(*inputs)
    assert asked == [False, False, True]


@pytest.mark.parametrize("reduction", ["mean", "sum"])
@pytest.mark.parametrize("tokens", [0, 5])
def test_nothing_to_count_is_what_torch_says(tokens, reduction):
    hidden, weight, bias, _ = parts(tokens)
    targets = torch.full((tokens,), -100)
    compare((hidden, weight, bias, targets), reduction=reduction)
    loss = linear_cross_entropy(hidden, weight, bias, targets, reduction=reduction)
    assert math.isnan(loss) if reduction == "mean" else loss == 0


def test_other_ignored_targets_and_more_dimensions():
    hidden, weight, bias, targets = parts(24)
    hidden, targets = hidden.detach().view(2, 3, 4, 8).requires_grad_(), targets.clamp(min=0).view(2, 3, 4)
    compare((hidden, weight, bias, targets), ignore_index=int(targets[0, 0, 0]))
    compare((hidden.transpose(0, 2), weight, bias, targets.transpose(0, 2)))
    same(linear_cross_entropy(hidden, weight, bias, targets.int()), reference(hidden, weight, bias, targets))


def test_weights_need_not_be_contiguous():
    hidden, weight, bias, targets = parts()
    transposed = weight.detach().t().contiguous().t().requires_grad_()
    every_second = torch.randn(74, 16, dtype=torch.float64)[::2, ::2].requires_grad_()
    for other in (transposed, every_second):
        assert not other.is_contiguous()
        compare((hidden, other, bias, targets), chunk_tokens=5)


def test_a_target_that_is_no_class_is_an_error():
    hidden, weight, bias, targets = parts()
    targets[0] = 37
    with pytest.raises((IndexError, RuntimeError), match="out of bounds"):
        linear_cross_entropy(hidden, weight, bias, targets)


@pytest.mark.parametrize("wrong", [{"reduction": "none"}, {"label_smoothing": 1.5}, {"label_smoothing": -0.1}], ids=str)
def test_what_it_cannot_do_is_refused(wrong):
    with pytest.raises(ArgumentsError, match=next(iter(wrong))):
        linear_cross_entropy(*parts(), **wrong)


# ---- choosing rows without asking the device -------------------------------------------------------------------------


@pytest.fixture(params=["nonzero_static", "argsort"])
def on_device(request, monkeypatch) -> None:
    """Choose rows as on a device that must not be waited for."""
    monkeypatch.setattr(linear_loss, "_rows_on_host", linear_loss._rows_on_device)
    if request.param == "argsort":

        def missing(*_: Any, **__: Any) -> None:
            raise NotImplementedError

        monkeypatch.setattr(torch, "nonzero_static", missing)


@pytest.mark.parametrize("extra", [0, 1, 5, None])
@pytest.mark.parametrize("ignored", [0.0, 0.3, 1.0])
@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_a_count_known_to_the_host_picks_the_same_rows(reduction, ignored, extra, on_device):
    *inputs, targets = parts(ignored=ignored)
    count = None if extra is None else int((targets != -100).sum()) + extra
    for chunk in (None, 4):
        compare((*inputs, targets), reduction=reduction, count=count, chunk_tokens=chunk, label_smoothing=0.1)


def test_rows_beyond_the_counted_ones_do_not_reach_the_head(on_device, monkeypatch):
    rows: list[int] = []
    real = linear_loss.softmax_loss_and_gradient_
    monkeypatch.setattr(
        linear_loss, "softmax_loss_and_gradient_", lambda z, *a, **k: (rows.append(len(z)), real(z, *a, **k))[1]
    )
    *inputs, targets = parts()
    count = int((targets != -100).sum())
    linear_cross_entropy(*inputs, targets, count=count)
    assert rows == [count] and count < 23


@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_a_count_that_is_too_small_cannot_go_unnoticed(reduction, on_device):
    *inputs, targets = parts()
    count = int((targets != -100).sum()) - 1
    loss = linear_cross_entropy(*inputs, targets, count=count, reduction=reduction)
    assert loss.isnan() and torch.autograd.grad(loss, inputs[1])[0].isnan().all()


def test_a_count_that_is_too_small_is_an_error_on_a_cpu():
    *inputs, targets = parts()
    real = int((targets != -100).sum())
    with pytest.raises(ArgumentsError, match=f"count={real - 1}, but {real} targets"):
        linear_cross_entropy(*inputs, targets, count=real - 1)


def test_rows_that_are_left_out_may_hold_anything():
    hidden, weight, bias, targets = parts()
    poisoned = hidden.detach().clone()
    poisoned[targets == -100] = float("nan")
    poisoned.requires_grad_()
    found = torch.autograd.grad(linear_cross_entropy(poisoned, weight, bias, targets), (poisoned, weight, bias))
    wanted = torch.autograd.grad(linear_cross_entropy(hidden, weight, bias, targets), (hidden, weight, bias))
    same(list(found), list(wanted))


# ---- in a model ------------------------------------------------------------------------------------------------------


class Tied(nn.Module):
    def __init__(self, fused: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Embedding(19, 8, dtype=torch.float64)
        self.body = nn.Linear(8, 8, dtype=torch.float64)
        self.loss = linear_cross_entropy if fused else reference

    def forward(self, ids: Tensor) -> Tensor:
        hidden = torch.tanh(self.body(self.embedding(ids)))
        return self.loss(hidden[:, :-1], self.embedding.weight, None, ids[:, 1:])


def test_tied_weights_collect_both_gradients_over_micro_batches():
    ids = torch.randint(0, 19, (3, 2, 12), generator=torch.Generator().manual_seed(0))
    models = [Tied(True), Tied(False)]
    for model in models:
        for micro_batch in ids:
            (model(micro_batch) / 3).backward()
    for a, b in zip(*(model.parameters() for model in models), strict=True):
        same(a.grad, b.grad)


@pytest.mark.parametrize("reentrant", [True, False])
def test_checkpointing_around_it(reentrant):
    inputs = parts()
    loss = checkpoint(linear_cross_entropy, *inputs, use_reentrant=reentrant)
    same(list(torch.autograd.grad(loss, inputs[:3])) if not reentrant else backward(loss, inputs), wanted(inputs))


def backward(loss: Tensor, inputs: Any) -> list[Tensor]:
    loss.backward()
    return [each.grad for each in inputs[:3]]


def wanted(inputs: Any) -> list[Tensor]:
    return list(torch.autograd.grad(reference(*inputs), inputs[:3]))


def test_a_graph_that_is_kept_can_be_gone_through_again():
    inputs = parts()
    loss = linear_cross_entropy(*inputs)
    first = torch.autograd.grad(loss, inputs[:3], retain_graph=True)
    again = torch.autograd.grad(3.0 * loss, inputs[:3])
    same([3.0 * each for each in first], list(again))


# ---- narrow dtypes ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("weights", ["float32", "narrow"])
def test_narrow_matmuls_are_as_exact_as_the_stock_path(weights, dtype):
    exact = parts(256, 32, 301)
    truth = torch.autograd.grad(reference(*exact), exact[:3])
    kind = torch.float32 if weights == "float32" else dtype
    inputs = [each.detach().to(kind).requires_grad_() for each in exact[:3]]

    def run(function: Any) -> tuple[Tensor, list[float]]:
        with torch.autocast("cpu", dtype=dtype, enabled=weights == "float32"):
            loss = function(*inputs, exact[3])
        found = torch.autograd.grad(loss, inputs)
        assert [each.dtype for each in found] == [kind] * 3
        return loss, [float((a.double() - b).norm() / b.norm()) for a, b in zip(found, truth, strict=True)]

    loss, errors = run(lambda *given: linear_cross_entropy(*given, chunk_tokens=64))
    stock_loss, stock_errors = run(reference)
    assert loss.dtype == torch.float32
    same(loss, stock_loss, 1e-5)
    assert all(ours <= 1.1 * stock for ours, stock in zip(errors, stock_errors, strict=True)), (errors, stock_errors)


def test_float64_is_left_alone_by_autocast():
    inputs = parts()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        compare(inputs)


def test_wrong_shapes_do_not_decide_how_later_products_are_added(monkeypatch):
    monkeypatch.setattr(linear_loss, "_FIRST_WAY", {})
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        add_product(None, torch.ones(2, 3).bfloat16(), torch.ones(4, 5).bfloat16(), torch.float32)
    assert not linear_loss._FIRST_WAY


def test_products_are_added_in_the_wide_dtype():
    a, b = torch.randn(64, 32), torch.randn(32, 16)
    for dtype in (torch.float32, torch.bfloat16):
        total, tolerance = torch.ones(64, 16), 1e-5 if dtype == torch.float32 else 5e-2
        product = a.to(dtype).float() @ b.to(dtype).float()
        same(add_product(None, a.to(dtype), b.to(dtype), torch.float32), product, tolerance)
        assert add_product(total, a.to(dtype), b.to(dtype), torch.float32) is total
        same(total, 1 + product, tolerance)


# ---- chunks ----------------------------------------------------------------------------------------------------------


@given(tokens=st.integers(0, 100_000), classes=st.integers(1, 300_000), kind=st.sampled_from(["cpu", "cuda"]))
def test_chunks_fit_their_bytes(tokens, classes, kind):
    chunk = tokens_per_chunk(tokens, classes, torch.bfloat16, torch.device(kind))
    least, most = (128, 32 << 20) if kind == "cpu" else (1024, 1 << 30)
    assert 1 <= chunk <= 16384
    assert chunk <= least or chunk * classes * 2 <= most
    assert chunk < max(1, tokens) + 128  # no larger than it needs to be


def test_chunks_of_the_reference_model():
    assert tokens_per_chunk(16384, 128_256, torch.bfloat16, torch.device("cuda")) == 4096


# ---- the softmax of a chunk ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("logit_map", [LogitMap(), LogitMap.of(0.5), LogitMap.of(1.5, 3.0, 2.0)], ids=str)
@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_losses_and_gradient_of_a_chunk(dtype, logit_map, smoothing):
    torch.manual_seed(0)
    logits, targets = torch.randn(9, 41).mul(3).to(dtype), torch.randint(0, 41, (9,))
    targets[4] = -100
    wide = logits.clone().double().requires_grad_()
    mapped = logit_map.apply(wide)[0]
    losses = F.cross_entropy(mapped, targets, reduction="none", label_smoothing=smoothing)
    expected = torch.autograd.grad(losses.sum(), wide)[0]
    options = {"label_smoothing": smoothing, "logit_map": logit_map}
    found = softmax_loss_and_gradient_(logits.clone(), targets, with_gradient=False, **options)
    again = softmax_loss_and_gradient_(logits, targets, **options)
    assert found.dtype == (torch.float64 if dtype == torch.float64 else torch.float32) and torch.equal(found, again)
    tolerance = {torch.float64: 1e-12, torch.float32: 2e-6, torch.bfloat16: 1e-2}[dtype]
    same(found.double(), losses.detach(), min(tolerance, 1e-5))
    same(logits.double(), expected, tolerance)
    assert logits.dtype == dtype and not logits[4].any()


def test_maps_follow_each_other():
    x = torch.randn(50, dtype=torch.float64)
    granite, gemma = LogitMap().times(1 / 8), LogitMap().times(1 / 30).capped()
    assert gemma is not None and gemma.times(30.0).capped() is None
    same(granite.apply(x)[0], x / 8)
    same(gemma.times(30.0).times(2.0).apply(x)[0], torch.tanh(x / 30) * 30 * 2)
    same(LogitMap.of(0.5, 30.0, 2.0).apply(x)[0], torch.tanh(x * 0.5 / 30) * 30 * 2)
    assert LogitMap.of(0.5) == LogitMap().times(0.5)


def test_the_kernel_is_not_asked_for_on_a_cpu():
    assert not loss_kernel.has_kernel(torch.zeros(2, 3))


def test_launches_cover_all_classes():
    for classes in (1, 2, 63, 64, 65, 1000, 8192, 128_256):
        options = loss_kernel.launch_options(classes)
        assert options["BLOCK"] & (options["BLOCK"] - 1) == 0 and options["BLOCK"] >= min(classes, 8192)


@pytest.mark.parametrize("options", [{}, {"label_smoothing": 0.1}, {"softcap": 5.0}, {"reduction": "sum"}])
@pytest.mark.parametrize("with_bias", [True, False])
def test_classes_added_for_alignment_change_nothing(options, with_bias, monkeypatch):
    """On GPUs half-precision products of an odd number of classes are several times slower."""
    shapes = []
    monkeypatch.setattr(linear_loss, "add_product", lambda *a: shapes.append(a[1].shape) or add_product(*a))

    def run():
        hidden, weight, bias, targets = parts(classes=37, dtype=torch.bfloat16)
        needed = [hidden, weight, *([bias] if with_bias else [])]
        loss = linear_cross_entropy(hidden, weight, bias if with_bias else None, targets, chunk_tokens=8, **options)
        return [loss, *torch.autograd.grad(loss, needed)]

    plain = run()
    assert {shape[1] for shape in shapes} & {37} and not {shape[1] for shape in shapes} & {64}
    shapes.clear()
    monkeypatch.setitem(linear_loss.ALIGNED, "cpu", 64)
    aligned = run()
    assert {shape[1] for shape in shapes} & {64} and not {shape[1] for shape in shapes} & {37}
    for found, expected in zip(aligned, plain, strict=True):
        assert found.shape == expected.shape and found.is_contiguous()
        torch.testing.assert_close(found, expected, rtol=2e-2, atol=1e-3)
