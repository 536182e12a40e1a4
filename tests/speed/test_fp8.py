"""Linear layers in fp8: numbers against dequantised products, which layers are changed, and on which devices."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn

from loopwright import Trainer, TrainingArguments
from loopwright.errors import ArgumentsError
from loopwright.speed.device import fp8
from loopwright.speed.device.fp8 import GRADIENTS, VALUES, Timing, dequantised_product, use_fp8
from tests.models import Regression, small_llama

FASTER, SLOWER = Timing(plain=2.0, fp8=1.0), Timing(plain=2.0, fp8=1.95)
CPU = torch.device("cpu")


@pytest.fixture
def emulated(monkeypatch: Any) -> None:
    """The products in float32 of what the fp8 numbers stand for: runs on every machine."""

    def product(a: Any, b: Any, a_scale: Any, b_scale: Any, *, dtype: torch.dtype, fast: bool = False) -> Any:
        assert a.is_contiguous() and b.t().is_contiguous(), "the kernels take rows times columns"
        assert not any(size % 16 for size in (a.shape[1], *b.shape)), "the kernels take multiples of 16"
        return dequantised_product(a, b, a_scale, b_scale).to(dtype)

    monkeypatch.setattr(fp8, "scaled_product", product)


def error(found: Any, expected: Any) -> float:
    found, expected = found.detach().float(), expected.detach().float()
    return float((found - expected).norm() / expected.norm())


@pytest.mark.parametrize("dtype", [VALUES, GRADIENTS])
@pytest.mark.parametrize("size", [1e-6, 1.0, 1e5])
def test_converting_uses_the_whole_range_and_overflows_nowhere(dtype: torch.dtype, size: float) -> None:
    x = size * torch.randn(64, 48)
    rows, scale = fp8.as_rows(x, dtype)
    assert rows.dtype is dtype and rows.float().abs().max() == torch.finfo(dtype).max
    digits = {VALUES: 2**-4, GRADIENTS: 2**-3}[dtype]  # half a unit in the last place of 3 and 2 bits
    assert ((rows.float() * scale - x).abs() <= digits * x.abs() + scale * 2**-9).all()
    both, columns, same = fp8.as_both(x, dtype)
    assert torch.equal(both.float(), rows.float()) and torch.equal(columns.float(), rows.float().t()) and same == scale
    assert torch.equal(fp8.as_columns(x, scale, dtype).float(), columns.float())


def test_zeros_stay_zero_and_what_is_not_finite_is_not_hidden() -> None:
    rows, scale = fp8.as_rows(torch.zeros(16, 16), VALUES)
    assert rows.float().eq(0).all() and scale.isfinite()
    for bad in (float("nan"), float("inf")):
        x = torch.ones(16, 16)
        x[3, 4] = bad
        rows, scale = fp8.as_rows(x, VALUES)
        assert not dequantised_product(rows, rows.t(), scale, scale).isfinite().any()


@pytest.mark.parametrize("rows", [16, 7, 37])
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_forward_and_backward_are_near_those_of_the_layer(
    emulated: None, rows: int, bias: bool, dtype: torch.dtype
) -> None:
    torch.manual_seed(0)
    plain = nn.Linear(64, 48, bias=bias, dtype=dtype)
    ours = copy.deepcopy(plain)
    assert len(use_fp8(ours, lambda *_: FASTER).layers) == 1
    x = torch.randn(2, rows, 64, dtype=dtype)
    a, b = x.clone().requires_grad_(), x.clone().requires_grad_()
    mine, theirs = ours(a), plain(b)
    assert mine.dtype is theirs.dtype and mine.shape == theirs.shape
    gradient = torch.randn_like(theirs)
    mine.backward(gradient), theirs.backward(gradient)
    assert 1e-4 < error(mine, theirs) < 0.05
    assert error(a.grad, b.grad) < 0.1 and error(ours.weight.grad, plain.weight.grad) < 0.1
    assert ours.weight.grad.dtype is dtype
    if bias:
        assert error(ours.bias.grad, plain.bias.grad) < 1e-2


def test_autocast_decides_the_dtype_and_fp32_weights_get_fp32_gradients(emulated: None) -> None:
    layer = nn.Linear(32, 32)
    use_fp8(layer, lambda *_: FASTER)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out = layer(torch.randn(16, 32))
    assert out.dtype is torch.bfloat16
    out.float().sum().backward()
    assert layer.weight.grad.dtype is layer.bias.grad.dtype is torch.float32


def test_frozen_weights_and_inputs_without_gradient_get_none(emulated: None) -> None:
    layer = nn.Linear(32, 32)
    layer.weight.requires_grad_(False)
    use_fp8(layer, lambda *_: FASTER)
    x = torch.randn(16, 32, requires_grad=True)
    layer(x).sum().backward()
    assert layer.weight.grad is None and x.grad is not None and layer.bias.grad is not None


def test_a_small_model_learns_about_as_well(emulated: None) -> None:
    def train(convert: bool) -> float:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(16, 64), nn.Tanh(), nn.Linear(64, 16))
        if convert:
            assert len(use_fp8(model, lambda *_: FASTER).layers) == 2
        optimizer = torch.optim.AdamW(model.parameters(), 3e-3)
        for _ in range(200):
            x = torch.randn(64, 16)
            loss = (model(x) - x.flip(-1).sin()).square().mean()
            loss.backward(), optimizer.step(), optimizer.zero_grad()
        return float(loss.detach())

    plain, ours = train(False), train(True)
    assert ours < 1.3 * plain + 0.01 and ours != plain


def test_the_kernel_computes_what_the_emulation_says() -> None:
    torch.manual_seed(0)
    a, a_scale = fp8.as_rows(torch.randn(48, 32), VALUES)
    b, b_scale = fp8.as_rows(torch.randn(64, 32), VALUES)
    try:
        found = fp8.scaled_product(a, b.t(), a_scale, b_scale, dtype=torch.bfloat16)
    except (RuntimeError, NotImplementedError) as missing:
        pytest.skip(f"no 8-bit products on this machine: {missing}")
    assert error(found, dequantised_product(a, b.t(), a_scale, b_scale)) < 5e-3


def test_only_layers_that_win_are_changed_and_each_size_is_measured_once() -> None:
    asked: list[tuple[int, int]] = []

    def measure(inputs: int, outputs: int) -> Timing:
        asked.append((inputs, outputs))
        return FASTER if outputs > 64 else SLOWER

    model = nn.Sequential(*[nn.Linear(64, 128), nn.Linear(128, 64)] * 1, nn.Linear(64, 128), nn.Linear(128, 30))
    names, found = list(model.state_dict()), None
    found = use_fp8(model, measure)
    assert asked == [(64, 128), (128, 64)]
    assert found.layers == [model[0], model[2]] and list(model.state_dict()) == names
    assert found.left == {"not faster": 1, "with sizes not divisible by 16": 1}
    assert found.summary() == "fp8: 2 linear layers; 1 not faster; 1 with sizes not divisible by 16"
    found.remove()
    assert not any("forward" in layer.__dict__ for layer in model)


def test_the_head_and_layers_of_another_kind_are_left_alone() -> None:
    class Other(nn.Linear):
        pass

    model = small_llama(0.0)
    model.model.extra = Other(16, 16)
    patched = nn.Linear(16, 16)
    patched.forward = lambda x: x
    model.model.patched = patched
    found = use_fp8(model, lambda *_: FASTER)
    assert model.get_output_embeddings() not in found.layers
    assert found.layers and found.left["of an unsupported type"] == 2


def test_evaluation_computes_with_the_weights_as_they_are(emulated: None) -> None:
    layer = nn.Linear(32, 32)
    x = torch.randn(16, 32)
    expected = layer(x)
    use_fp8(layer, lambda *_: FASTER)
    assert not torch.equal(layer(x), expected)
    assert torch.equal(layer.eval()(x), expected)


def test_a_copy_of_a_changed_model_computes_with_its_own_weights(emulated: None) -> None:
    layer = nn.Linear(32, 32)
    use_fp8(layer, lambda *_: FASTER)
    other = copy.deepcopy(layer)
    with torch.no_grad():
        other.weight.zero_(), other.bias.zero_()
    assert other(torch.randn(16, 32)).eq(0).all()


def test_the_argument_is_refused_where_no_device_computes_in_it(tmp_path: Any) -> None:
    args = TrainingArguments(str(tmp_path), fp8=True, use_cpu=True)
    with pytest.raises(ArgumentsError, match="fp8=True, but cpu is not an NVIDIA GPU. FP8 needs .* 8.9"):
        Trainer(Regression(), args)


@pytest.mark.parametrize(("capability", "fine"), [((8, 0), False), ((8, 9), True), ((9, 0), True), ((7, 5), False)])
def test_the_compute_capability_decides(monkeypatch: Any, capability: tuple[int, int], fine: bool) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    if fine:
        fp8.refuse_without_fp8(torch.device("cuda"))
        return
    with pytest.raises(ArgumentsError, match=f"has compute capability {capability[0]}.{capability[1]}"):
        fp8.refuse_without_fp8(torch.device("cuda"))


def test_a_run_changes_its_layers_and_gives_them_back(emulated: None, monkeypatch: Any, tmp_path: Any) -> None:
    from loopwright.pt import precision
    from loopwright.pt.model import options as preparing

    monkeypatch.setattr(precision, "refuse_without_fp8", lambda device: None)
    monkeypatch.setattr(preparing, "measured_on", lambda *args, **options: lambda *size: FASTER)
    seen: list[int] = []

    class Wide(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer, self.out = nn.Linear(16, 16), nn.Linear(16, 1)

        def forward(self, x: Any, labels: Any) -> Any:
            seen.append("forward" in self.layer.__dict__)
            return {"loss": (self.out(self.layer(x)).squeeze(-1) - labels).square().mean()}

    data = [{"x": torch.randn(16), "labels": torch.randn(())} for _ in range(16)]
    args = TrainingArguments(str(tmp_path), fp8=True, use_cpu=True, max_steps=3, save_strategy="no", disable_tqdm=True)
    trainer = Trainer(Wide(), args, train_dataset=data)
    trainer.train()
    assert all(seen) and "forward" not in trainer.model.layer.__dict__
    monkeypatch.setattr(preparing, "measured_on", lambda *args, **options: lambda *size: SLOWER)
    trainer = Trainer(Wide(), args, train_dataset=data)
    trainer.train()
    assert any("fp8=True has no effect here" in text for text in trainer._loopwright.notices.told)
