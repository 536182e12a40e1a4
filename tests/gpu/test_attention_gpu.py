"""Our attention kernels against attention in double precision, against torch's, compiled, and twice.

Also runs without pytest: `python tests/gpu/test_attention_gpu.py`.
"""

from __future__ import annotations

import itertools
import sys
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

if __name__ == "__main__":
    sys.path[:0] = [str(Path(__file__).parents[2] / "src"), str(Path(__file__).parents[2])]

from loopwright.speed.attention import dispatch as attention, varlen as document_attention
from loopwright.speed.attention.dispatch import AttentionRequest
from loopwright.speed.attention.document_mask import as_mask
from loopwright.speed.proof.prober import gradient_distance
from tests.gpu.script import needs_gpu, run_tests

pytestmark = needs_gpu()

LENGTHS = (5, 130, 1, 64, 0, 777, 63, 0)
KINDS = (
    ((8, 2), 64, True, None), ((4, 4), 64, False, None), ((6, 2), 128, True, 40), ((7, 1), 32, True, None),
    ((4, 4), 16, False, 40), ((2, 1), 128, False, None), ((32, 2), 64, True, 100),
)  # fmt: skip
"""Heads and those of keys, their size, causal or not, window: few, since each is three kernels to compile."""


def a_row(heads: int, key_heads: int, size: int, dtype: torch.dtype = torch.bfloat16) -> tuple[list[Tensor], Tensor]:
    """Queries, keys and values of a row as transformers hand them over, and the documents as a mask."""
    torch.manual_seed(0)
    tokens = sum(LENGTHS)
    row = [
        torch.randn(1, tokens, many, size, device="cuda", dtype=dtype).transpose(1, 2).requires_grad_()
        for many in (heads, key_heads, key_heads)
    ]
    borders = torch.tensor([0, *itertools.accumulate(LENGTHS)], dtype=torch.int32, device="cuda")
    attention.VARLEN_TAKES.update(attention.varlen_options())
    assert document_attention.has_kernel()
    return row, as_mask(borders, max(LENGTHS))


def with_gradients(run: Any, row: list[Tensor], documents: Tensor, ask: AttentionRequest) -> list[Tensor]:
    output = run(*row, documents, ask)
    towards = torch.randn(output.shape, generator=torch.Generator("cuda").manual_seed(1), device="cuda")
    return [output, *torch.autograd.grad(output, row, towards.to(output.dtype))]


def distances(mine: list[Tensor], exact: list[Tensor]) -> list[float]:
    return [float((a.detach().double() - b).norm() / b.norm()) for a, b in zip(mine, exact, strict=True)]


def test_kernels_are_as_exact_as_half_precision() -> None:
    worst = 0.0
    for (heads, key_heads), size, causal, window in KINDS:
        row, documents = a_row(heads, key_heads, size)
        ask = AttentionRequest(causal, window, None, 0.0, 0.2)
        mine = with_gradients(attention.by_kernel, row, documents, ask)
        wide = [each.detach().double().requires_grad_() for each in row]
        exact = with_gradients(attention.one_by_one, wide, documents, ask)
        found = distances(mine, exact)
        worst = max(worst, *found)
        assert max(found) < 1e-2, (heads, key_heads, size, causal, window, found)
    print(f"        largest distance {worst:.2g}")


def test_kernels_are_no_further_off_than_flash() -> None:
    row, documents = a_row(8, 2, 64)
    ask = AttentionRequest(True, None, None, 0.0, None)
    wide = [each.detach().double().requires_grad_() for each in row]
    exact = with_gradients(attention.one_by_one, wide, documents, ask)
    ours, flash = (
        distances(with_gradients(run, row, documents, ask), exact) for run in (attention.by_kernel, attention.by_flash)
    )
    print(f"        ours {ours}\n        flash {flash}")
    assert all(a <= 1.3 * b + 1e-4 for a, b in zip(ours, flash, strict=True))


def test_two_runs_are_equal_to_the_last_bit() -> None:
    row, documents = a_row(8, 2, 64)
    for drop in (0.0, 0.1):
        ask, found = AttentionRequest(True, None, None, drop, None), []
        for _ in range(3):
            torch.manual_seed(7)
            found.append(with_gradients(attention.by_kernel, row, documents, ask))
        for again in found[1:]:
            assert all(torch.equal(a, b) for a, b in zip(found[0], again, strict=True)), drop


def test_dropout_drops_its_share_and_keeps_the_mean() -> None:
    row, documents = a_row(4, 4, 64)
    with torch.no_grad():
        plain = attention.by_kernel(*row, documents, AttentionRequest(False, None, None, 0.0, None)).double()
        draws = [
            attention.by_kernel(*row, documents, AttentionRequest(False, None, None, 0.25, None)).double()
            for _ in range(200)
        ]
    mean = torch.stack(draws).mean(0)
    assert not torch.equal(draws[0], draws[1])
    assert float((mean - plain).norm() / plain.norm()) < 0.08
    # With values of one, an output is what was kept of weights that sum to one.
    ones = [row[0].detach(), row[1].detach(), torch.ones_like(row[2])]
    kept = attention.by_kernel(*ones, documents, AttentionRequest(False, None, None, 0.25, None)).float()
    long = kept[0, 200:977]
    assert abs(float(long.mean()) - 1.0) < 0.01


def test_the_gradient_of_dropout_is_that_of_its_own_draw() -> None:
    """Values enter linearly: what the forward gives for the gradient as values is the gradient's square."""
    row, documents = a_row(4, 2, 64)
    ask = AttentionRequest(True, None, None, 0.3, None)

    def run(value: Tensor) -> Tensor:
        torch.manual_seed(11)
        return attention.by_kernel(row[0], row[1], value, documents, ask)

    towards = torch.randn_like(run(row[2]))
    (gradient,) = torch.autograd.grad(run(row[2]), row[2], towards)
    said = float(gradient.double().square().sum())
    seen = float((run(gradient).double() * towards.double()).sum())
    assert abs(said - seen) < 2e-2 * said


def test_compiled_it_is_one_graph_for_all_lengths_and_equal() -> None:
    attention.HAS["kernel"] = True
    row, documents = a_row(8, 2, 64)
    ask = AttentionRequest(True, None, None, 0.0, None)

    def block(q: Tensor, k: Tensor, v: Tensor, documents: Tensor) -> Tensor:
        return attention.by_kernel(q * 1.0, k * 1.0, v * 1.0, documents, ask) * 2.0

    compiled = torch.compile(block, fullgraph=True, dynamic=True)
    found = with_gradients(lambda q, k, v, documents, ask: compiled(q, k, v, documents), row, documents, ask)
    plain = with_gradients(lambda q, k, v, documents, ask: block(q, k, v, documents), row, documents, ask)
    assert all(torch.allclose(a, b, atol=1e-2, rtol=1e-2) for a, b in zip(found, plain, strict=True))


def test_gradients_can_be_differentiated_again() -> None:
    """Twice differentiated, kernels are torch's operations; quietly left out, a gradient penalty would be nothing."""
    for causal, window in ((True, None), (False, None), (True, 40)):
        row, documents = a_row(4, 2, 64)
        ask = AttentionRequest(causal, window, None, 0.0, None, twice=True)
        wide = [each.detach().double().requires_grad_() for each in row]
        found, exact = [], []
        for run, inputs, into in ((attention.by_kernel, row, found), (attention.one_by_one, wide, exact)):
            output = run(*inputs, documents, ask)
            first = torch.autograd.grad(output.double().square().sum(), inputs, create_graph=True)
            penalty = sum(each.double().square().sum() for each in first)
            into.extend(torch.autograd.grad(penalty, inputs))
        assert max(distances(found, exact)) < 3e-2, (causal, window)
    try:
        output = attention.by_kernel(*row, documents, AttentionRequest(True, None, None, 0.1, None))
        torch.autograd.grad(output.sum(), row, create_graph=True)
    except RuntimeError as error:
        assert "double backward" in str(error)
    else:
        raise AssertionError("dropout was differentiated twice")


def test_chunks_and_windows_of_masks_are_those_of_padded_batches() -> None:
    from tests.speed.architectures import collate, samples
    from tests.speed.windowed import AS_THEY_ARE, rows_of

    for name in ("llama4", "phimoe", "qwen2_moe", "mistral", "cohere2", "modernbert"):
        data = samples(6, "masked" if name == "modernbert" else "causal", longest=40)
        model = AS_THEY_ARE[name]().eval().to("cuda", torch.bfloat16)
        wide = AS_THEY_ARE[name]().eval().to("cuda")
        wide.load_state_dict({key: value.double() for key, value in model.state_dict().items()})
        batch = {key: value.cuda() for key, value in collate(data).items()}
        exact = [*torch.autograd.grad(wide(**batch).loss, list(wide.parameters()), allow_unused=True)]
        padded = torch.autograd.grad(model(**batch).loss, list(model.parameters()), allow_unused=True)
        row = torch.autograd.grad(rows_of(model, data, fill=True), list(model.parameters()), allow_unused=True)
        theirs, ours = gradient_distance(exact, padded), gradient_distance(exact, row)
        print(f"        {name}: padded {theirs:.2g}, rows {ours:.2g}")
        assert ours <= 1.5 * theirs + 1e-3, name


def test_tensors_beyond_two_to_the_31_numbers_are_addressed() -> None:
    tokens = 2**31 // (32 * 128) + 1000
    with torch.no_grad():
        q = torch.zeros(tokens, 32, 128, device="cuda", dtype=torch.bfloat16)
        k, v = (torch.zeros(tokens, 8, 128, device="cuda", dtype=torch.bfloat16) for _ in range(2))
        v[-300:] = torch.randn_like(v[-300:])
        borders = torch.tensor([0, 1000, tokens - 300, tokens], dtype=torch.int32, device="cuda")
        # A window keeps the long document in the middle cheap.
        found = document_attention.attend(q, k, v, borders, causal=True, window=64, scale=0.1, drop=0.0)
        expected = torch.stack([v[-300 + max(0, i - 63) : tokens - 300 + i + 1].float().mean(0) for i in range(300)])
    assert torch.allclose(found[-300:, ::4].float(), expected, atol=1e-2)


if __name__ == "__main__":
    raise SystemExit(run_tests(dict(globals())))
