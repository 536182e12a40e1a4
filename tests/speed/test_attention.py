"""Attention within documents against attention with a dense mask: outputs and gradients."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from loopwright.speed.attention import varlen as document_attention
from loopwright.speed.attention.dispatch import AttentionRefused, AttentionRequest, attend, one_by_one
from loopwright.speed.attention.document_mask import as_mask, borders_of
from loopwright.speed.attention.per_document import CHUNK, FEWEST, MOST

LENGTHS = [7, 1, 12, 4]


def dense(q: Tensor, k: Tensor, v: Tensor, ask: AttentionRequest, lengths: list[int] = LENGTHS) -> Tensor:
    """The definition: scores of all pairs, those that may not see each other left out."""
    groups = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(groups, 1), v.repeat_interleave(groups, 1)
    scores = q @ k.transpose(2, 3) * (q.shape[-1] ** -0.5 if ask.scale is None else ask.scale)
    if ask.softcap:
        scores = ask.softcap * torch.tanh(scores / ask.softcap)
    document = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))
    place = torch.arange(len(document))
    distance = place[:, None] - place[None, :]
    seen = document[:, None] == document[None, :]
    if ask.causal:
        seen &= distance >= 0
    if ask.window is not None:
        seen &= distance.abs() < ask.window
    return (torch.softmax(scores.masked_fill(~seen, float("-inf")), -1) @ v).transpose(1, 2)


@pytest.mark.parametrize(
    ("causal", "window", "softcap", "kv_heads", "scale"),
    itertools.product([True, False], [None, 3], [None, 5.0], [1, 2, 4], [None, 0.3]),
)
def test_documents_see_themselves_only(causal: bool, window: Any, softcap: Any, kv_heads: int, scale: Any) -> None:
    torch.manual_seed(0)
    tokens = sum(LENGTHS)
    q, k, v = (torch.randn(1, heads, tokens, 8, dtype=torch.float64) for heads in (4, kv_heads, kv_heads))
    ask = AttentionRequest(causal, window, softcap, 0.0, scale)
    documents = as_mask(borders_of(np.array(LENGTHS), fill=True), max(LENGTHS))
    weight = torch.randn(1, tokens, 4, 8, dtype=torch.float64)
    results = []
    for run in (lambda *x: dense(*x, ask), lambda *x: one_by_one(*x, documents, ask)):
        inputs = [each.clone().requires_grad_() for each in (q, k, v)]
        output = run(*inputs)
        results.append([output, *torch.autograd.grad((output * weight).sum(), inputs)])
    for expected, found in zip(*results, strict=True):
        # Capped scores go through a softmax in single precision, as transformers' own do.
        torch.testing.assert_close(found, expected, rtol=1e-5 if softcap else 1e-10, atol=1e-6 if softcap else 1e-12)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("heads", [(4, 4), (4, 2)])
@pytest.mark.parametrize("lengths", [[CHUNK], [FEWEST], [5, FEWEST + 1, 3], [4 * CHUNK - 1, 2], [MOST], [MOST + 1]])
def test_long_causal_documents_have_the_same_attention(
    lengths: list[int], heads: tuple[int, int], dtype: torch.dtype
) -> None:
    torch.manual_seed(0)
    of, kv = heads
    q, k, v, weight = (torch.randn(1, each, sum(lengths), 8, dtype=dtype) for each in (of, kv, kv, of))
    ask = AttentionRequest(True, None, None, 0.0, None)
    documents = as_mask(borders_of(np.array(lengths)), max(lengths))
    results = []
    for run in (lambda *x: dense(*x, ask, lengths), lambda *x: one_by_one(*x, documents, ask)):
        inputs = [each.clone().requires_grad_() for each in (q, k, v)]
        output = run(*inputs)
        results.append([output, *torch.autograd.grad((output * weight.transpose(1, 2)).sum(), inputs)])
    for expected, found in zip(*results, strict=True):
        close = {"rtol": 1e-9, "atol": 1e-11} if dtype is torch.float64 else {"rtol": 1e-4, "atol": 1e-5}
        torch.testing.assert_close(found, expected, **close)


@pytest.mark.parametrize(("causal", "share"), [(True, 0.57), (False, 1.0)])
def test_scores_that_no_token_sees_are_hardly_computed(
    monkeypatch: pytest.MonkeyPatch, causal: bool, share: float
) -> None:
    scores = []
    attention = torch.nn.functional.scaled_dot_product_attention

    def counted(query: Tensor, key: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        scores.append(query.shape[2] * key.shape[2])
        return attention(query, key, *args, **kwargs)

    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", counted)
    q = torch.randn(1, 2, 512, 8)
    documents = as_mask(borders_of(np.array([512])), 512)
    one_by_one(q, q, q, documents, AttentionRequest(causal, None, None, 0.0, None))
    assert sum(scores) <= share * 512**2


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    ("lengths", "causal", "softcap"), [(LENGTHS, False, None), ([FEWEST], True, None), (LENGTHS, True, 5.0)]
)
def test_half_precision_is_computed_in_single_precision_on_a_cpu(
    dtype: torch.dtype, lengths: list[int], causal: bool, softcap: float | None
) -> None:
    """torch's kernel takes up to seven times longer in half precision, and autocast would choose it again."""
    torch.manual_seed(0)
    documents = as_mask(borders_of(np.array(lengths)), max(lengths))
    ask = AttentionRequest(causal, None, softcap, 0.0, None)
    q, k, v = (torch.randn(1, heads, sum(lengths), 8).to(dtype) for heads in (4, 2, 2))
    results = []
    for inputs in ([q, k, v], [q.float(), k.float(), v.float()]):
        inputs = [each.requires_grad_() for each in inputs]
        with torch.autocast("cpu", dtype, enabled=inputs[0] is q):
            output = one_by_one(*inputs, documents, ask)
        results.append([output, *torch.autograd.grad(output.float().sum(), inputs)])
    assert all(torch.equal(half, single.to(dtype)) for half, single in zip(*results, strict=True))


def test_heads_are_not_moved_to_join_documents() -> None:
    q = torch.randn(1, 12, 4, 8).transpose(1, 2)
    documents = as_mask(borders_of(np.array([5, 7])), 7)
    joined = one_by_one(q, q, q, documents, AttentionRequest(False, None, None, 0.0, None))
    assert joined.shape == (1, 12, 4, 8) and joined.is_contiguous()


def test_dropout_drops(tmp_path: Any) -> None:
    torch.manual_seed(0)
    q, k, v = (torch.randn(1, 2, sum(LENGTHS), 8) for _ in range(3))
    documents = as_mask(borders_of(np.array(LENGTHS)), max(LENGTHS))
    ask = AttentionRequest(True, None, None, 0.5, None)
    assert not torch.equal(one_by_one(q, k, v, documents, ask), one_by_one(q, k, v, documents, ask))


@pytest.mark.parametrize("name", ["s_aux", "position_bias", "alibi", "head_mask"])
def test_what_is_not_computed_is_refused(name: str) -> None:
    q = torch.randn(1, 2, 3, 4)
    documents = as_mask(borders_of(np.array([3])), 3)
    with pytest.raises(AttentionRefused, match=name):
        attend(nn.Module(), q, q, q, documents, **{name: torch.ones(1)})


@pytest.mark.parametrize("mask", [None, torch.ones(1, 1, 3, 3, dtype=torch.bool), torch.ones(1, 3)])
def test_a_mask_of_the_models_own_is_refused(mask: Any) -> None:
    q = torch.randn(1, 2, 3, 4)
    with pytest.raises(AttentionRefused, match="its own attention mask"):
        attend(nn.Module(), q, q, q, mask)


def test_attention_to_another_row_is_refused() -> None:
    documents = as_mask(borders_of(np.array([3])), 3)
    with pytest.raises(AttentionRefused, match="more than one row"):
        attend(nn.Module(), torch.randn(1, 2, 3, 4), torch.randn(1, 2, 5, 4), torch.randn(1, 2, 5, 4), documents)


# ---- our kernels, as far as they can be seen without a GPU (tests/gpu/test_attention_gpu.py runs them) ---------------


@pytest.mark.parametrize(
    ("heads", "key_heads", "together"), [(32, 8, 4), (12, 12, 1), (14, 2, 1), (6, 2, 1), (32, 1, 4)]
)
def test_query_heads_that_share_keys_are_taken_together(heads: int, key_heads: int, together: int) -> None:
    q, k = torch.empty(10, heads, 64), torch.empty(10, key_heads, 64)
    shape = document_attention.Shape.of(q, k)
    assert shape.together == together and shape.sharing % together == 0 and heads % together == 0
    assert shape.tokens * together == document_attention.TILE


def test_the_compiler_knows_what_the_operation_returns() -> None:
    from torch._subclasses.fake_tensor import FakeTensorMode

    document_attention.register()
    with FakeTensorMode():
        q = torch.empty(8, 30, 16, dtype=torch.bfloat16).transpose(0, 1).requires_grad_()
        k, v = (torch.empty(30, 2, 16, dtype=torch.bfloat16, requires_grad=True) for _ in range(2))
        borders = torch.empty(5, dtype=torch.int32)
        output = document_attention.attend(q, k, v, borders, causal=True, window=0, scale=0.1, drop=0.1)
        found = torch.autograd.grad(output.sum(), (q, k, v))
    assert output.shape == q.shape and output.dtype is torch.bfloat16 and output.is_contiguous()
    assert [each.shape for each in found] == [q.shape, k.shape, v.shape]


def test_what_tiles_cannot_hold_is_left_to_others() -> None:
    def takes(size: int, value_size: int | None = None, documents: int = 4) -> bool:
        q, v = torch.empty(1, 2, 5, size), torch.empty(1, 2, 5, value_size or size)
        return document_attention.takes(q, v, documents)

    assert takes(64) and takes(128, documents=4096)
    assert not (takes(80) or takes(256) or takes(64, 32) or takes(64, documents=5000))


def test_kernels_are_compiled_once_while_a_proof_in_single_precision_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    compiled: list[tuple[str, Any, bool]] = []

    class Kernel:
        def __init__(self, name: str) -> None:
            self.name = name

        def warmup(self, *args: Any, grid: Any, **options: Any) -> None:
            compiled.append((self.name, args[0].dtype, options["DROP"]))

    for name, value in (("_SEEN", set()), ("_UNDER_WAY", []), ("_PREPARING", [])):
        monkeypatch.setattr(document_attention, name, value)
    monkeypatch.setattr(
        document_attention, "kernels", lambda: {name: Kernel(name) for name in ("forward", "queries", "keys")}
    )
    q, k, v = (torch.randn(heads, 12, 16).transpose(0, 1) for heads in (4, 2, 2))
    borders = torch.tensor([0, 5, 12], dtype=torch.int32)
    for _ in range(2):
        document_attention.prepare(q, k, v, borders, causal=True, window=0)
    for threads in (document_attention._PREPARING, document_attention._UNDER_WAY):
        document_attention._await(threads)
    assert sorted(compiled) == [(name, torch.bfloat16, False) for name in ("forward", "keys", "queries")]
    shape, bias = document_attention.Shape.of(q, k), torch.empty(0)
    job = document_attention.Job(shape, bias, borders, borders, borders[:1], True, 0, 0.25, 0.0)
    assert not document_attention._is_new(job, torch.bfloat16) and document_attention._is_new(job, torch.float16)
