"""Linear layers with oneDNN's products: the same numbers, for every product of a layout, and nowhere else."""

from __future__ import annotations

import copy
import pickle
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

import loopwright.speed.linear_products as linear_products
from loopwright.speed.linear_products import LinearProducts, onednn_is_faster

pytestmark = pytest.mark.skipif(not torch.backends.mkldnn.is_available(), reason="torch has no oneDNN here")

ONEDNN, MKL = "mkldnn._linear_pointwise", ("aten.mm", "aten.addmm")


class Products(TorchDispatchMode):
    """Counts calls by operator."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.calls[str(func._overloadpacket)] += 1
        return func(*args, **(kwargs or {}))

    @property
    def of_mkl(self) -> int:
        return sum(self.calls[name] for name in MKL)


@pytest.fixture
def faster(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(linear_products, "onednn_is_faster", lambda: True)
    monkeypatch.setattr(linear_products, "LEAST", 1)


def counted(run: Callable[[], Any]) -> Products:
    with Products() as products:
        run()
    return products


def gradients(layer: nn.Module, given: Tensor) -> list[Tensor]:
    """The output, its gradients, and the gradient of those."""
    output = layer(given)
    first = torch.autograd.grad(output.square().sum(), [given, *layer.parameters()], create_graph=True)
    second = torch.autograd.grad(first[0].square().sum(), [given, layer.weight])
    return [output, *first, *second]


@pytest.mark.parametrize("shape", [(7, 5), (2, 7, 5), (2, 3, 7, 5)])
@pytest.mark.parametrize("bias", [False, True])
def test_outputs_and_gradients_are_those_of_the_layer(bias: bool, shape: tuple[int, ...], faster: None) -> None:
    torch.manual_seed(0)
    layer, given = nn.Linear(5, 3, bias=bias), torch.randn(shape, requires_grad=True)
    expected = gradients(layer, given)
    with LinearProducts(layer).active():
        found: list[Tensor] = []
        products = counted(lambda: found.extend(gradients(layer, given)))
    assert products.calls[ONEDNN] >= 5 and products.of_mkl == 0, products.calls
    assert "forward" not in vars(layer)
    for mine, other in zip(found, expected, strict=True):
        assert mine.shape == other.shape
        torch.testing.assert_close(mine, other, rtol=1e-5, atol=1e-5)


def test_a_frozen_layer_computes_the_gradient_of_its_input_only(faster: None) -> None:
    layer, given = nn.Linear(5, 3).requires_grad_(False), torch.randn(7, 5, requires_grad=True)
    with LinearProducts(layer).active():
        assert counted(lambda: layer(given).sum().backward()).calls[ONEDNN] == 2
        assert counted(lambda: layer(given.detach())).calls[ONEDNN] == 1
    assert layer.weight.grad is None


@pytest.mark.usefixtures("faster")
def test_every_product_of_an_unpadded_encoder_is_of_onednn() -> None:
    pytest.importorskip("transformers")
    from tests.speed.test_unpadded_embeddings import classifier, loss_and_gradients, padded, unpadded

    model = classifier("bert").float()
    batch = padded()
    expected = loss_and_gradients(model, batch)
    layout, laid = unpadded(model, batch)
    loss_and_gradients(model, laid, layout)  # the first batch is also compared
    found: list[Tensor] = []
    products = counted(lambda: found.extend(loss_and_gradients(model, laid, layout)))
    linears = sum(type(module) is nn.Linear for module in model.modules())
    assert (products.calls[ONEDNN], products.of_mkl) == (3 * linears, 0), products.calls
    for mine, other in zip(found, expected, strict=True):
        torch.testing.assert_close(mine, other, rtol=1e-4, atol=1e-6)


class OwnLinear(nn.Linear):
    pass


def test_other_layers_and_inputs_are_computed_as_written(faster: None) -> None:
    own, given = OwnLinear(5, 3), torch.randn(7, 5)
    replaced = nn.Linear(5, 3)
    replaced.forward = lambda input: 2 * F.linear(input, replaced.weight)  # type: ignore[method-assign]
    double, plain = nn.Linear(5, 3).double(), nn.Linear(5, 3)
    with LinearProducts(nn.ModuleList([own, replaced, double, plain])).active():
        assert counted(lambda: [own(given), replaced(given), double(given.double())]).calls[ONEDNN] == 0
        with torch.autocast("cpu", torch.bfloat16):
            products = counted(lambda: plain(given))
            assert products.calls[ONEDNN] == 0 and plain(given).dtype is torch.bfloat16
        torch.testing.assert_close(torch.vmap(plain)(given), F.linear(given, plain.weight, plain.bias))
    assert replaced(given).shape == (7, 3) and "forward" not in vars(own)


def test_small_products_stay_with_mkl(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(linear_products, "onednn_is_faster", lambda: True)
    layer = nn.Linear(128, 128)
    with LinearProducts(layer).active():
        assert counted(lambda: layer(torch.randn(8, 128))).of_mkl == 1
        assert counted(lambda: layer(torch.randn(128, 128))).calls[ONEDNN] == 1


@pytest.mark.parametrize(
    ("processor", "capability", "enabled", "expected"),
    [
        ("vendor_id\t: AuthenticAMD", "AVX512", True, True),
        ("vendor_id\t: AuthenticAMD", "AVX2", True, False),
        ("vendor_id\t: AuthenticAMD", "AVX512", False, False),
        ("vendor_id\t: GenuineIntel", "AVX512", True, False),
        ("", "AVX512", True, False),
    ],
)
def test_it_is_used_where_mkl_has_no_code_for_the_processor(
    processor: str, capability: str, enabled: bool, expected: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(linear_products, "_processor", lambda: processor)
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: capability)
    monkeypatch.setattr(torch.backends.mkl, "is_available", lambda: True)
    monkeypatch.setattr(torch.backends.mkldnn, "enabled", enabled)
    assert onednn_is_faster() is expected
    monkeypatch.setattr(torch.backends.mkl, "is_available", lambda: False)
    assert not onednn_is_faster()


def test_a_copy_of_the_model_computes_with_its_own_weights(faster: None) -> None:
    model = nn.Sequential(nn.Linear(5, 3))
    with LinearProducts(model).active():
        teacher, stored = copy.deepcopy(model), pickle.dumps(model)
    given, expected = torch.randn(4, 5), model(torch.ones(4, 5))
    before = teacher(given)
    with torch.no_grad():
        model[0].weight.zero_()
    assert torch.equal(teacher(given), before)
    assert torch.allclose(pickle.loads(stored)(torch.ones(4, 5)), expected)


def test_a_frozen_layer_keeps_no_input_for_its_gradient(faster: None) -> None:
    model, kept = nn.Linear(5, 3), []
    model.weight.requires_grad_(False)
    given = torch.randn(4, 5, requires_grad=True)
    with LinearProducts(model).active(), torch.autograd.graph.saved_tensors_hooks(kept.append, lambda value: value):
        model(given)
    assert [each.data_ptr() for each in kept] == [model.weight.data_ptr()]
