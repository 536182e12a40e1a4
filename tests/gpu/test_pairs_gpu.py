"""Attention between rows of other lengths and with a bias by distance: our kernels against double precision, and T5.

Also runs without pytest: `python tests/gpu/test_pairs_gpu.py`.
"""

from __future__ import annotations

import itertools
import sys
from pathlib import Path

import torch
from torch import Tensor

if __name__ == "__main__":
    sys.path[:0] = [str(Path(__file__).parents[2] / "src"), str(Path(__file__).parents[2])]

from loopwright.speed.attention import varlen
from loopwright.speed.attention.per_document import AttentionRequest, each_document
from tests.gpu.script import needs_gpu, run_tests

pytestmark = needs_gpu()

QUERIES, KEYS = (5, 130, 1, 64, 0, 777, 63, 9), (70, 1, 300, 64, 0, 5, 640, 0)
LONGEST = 1024


def borders_of(lengths: tuple[int, ...]) -> Tensor:
    return torch.tensor([0, *itertools.accumulate(lengths)], dtype=torch.int32, device="cuda")


def compared(causal: bool, *, has_bias: bool, is_cross: bool, size: int = 64, drop: float = 0.0) -> list[float]:
    """The distances of output and gradients from those in double precision, relative."""
    torch.manual_seed(0)
    keys = KEYS if is_cross else QUERIES
    assert varlen.has_kernel()
    rows = [torch.randn(sum(n), 4, size, device="cuda", dtype=torch.bfloat16) for n in (QUERIES, keys, keys)]
    given = [*rows, torch.randn(4, 2 * LONGEST - 1, device="cuda")][: 4 if has_bias else 3]
    given = [each.requires_grad_() for each in given]
    begin, key_begin = borders_of(QUERIES), borders_of(keys)
    output = varlen.attend(
        *given[:3], begin, causal=causal, window=0, scale=0.2, drop=drop, key_borders=key_begin if is_cross else None,
        bias=given[3] if has_bias else None,
    )  # fmt: skip
    towards = torch.randn_like(output)
    mine = [output, *torch.autograd.grad(output, given, towards)]
    wide = [each.detach().double().requires_grad_() for each in given]
    ask = AttentionRequest(causal, None, None, 0.0, 0.2, twice=True)
    row = each_document(
        *(each.transpose(0, 1).unsqueeze(0) for each in wide[:3]), begin, key_begin if is_cross else begin, ask,
        bias=wide[3] if has_bias else None,
    )[0]  # fmt: skip
    exact = [row, *torch.autograd.grad(row, wide, towards.double())]
    return [float((a.detach().double() - b).norm() / b.norm()) for a, b in zip(mine, exact, strict=True)]


def test_bias_and_other_rows_are_as_exact_as_half_precision() -> None:
    for causal, has_bias, is_cross in ((False, True, False), (True, True, False), (False, False, True)):
        for size in (64, 128):
            found = compared(causal, has_bias=has_bias, is_cross=is_cross, size=size)
            print(f"        causal {causal}, bias {has_bias}, other row {is_cross}: largest {max(found):.1e}")
            assert max(found) < 1e-2


def test_the_gradient_of_the_bias_is_equal_to_the_last_bit_in_two_runs() -> None:
    torch.manual_seed(0)
    q, k, v = (torch.randn(sum(QUERIES), 4, 64, device="cuda", dtype=torch.bfloat16) for _ in range(3))
    bias, found = torch.randn(4, 2 * LONGEST - 1, device="cuda", requires_grad=True), []
    for _ in range(3):
        torch.manual_seed(7)
        output = varlen.attend(q, k, v, borders_of(QUERIES), causal=False, window=0, scale=0.2, drop=0.1, bias=bias)
        found.append(torch.autograd.grad(output.float().square().sum(), bias)[0])
    assert all(torch.equal(found[0], each) for each in found[1:])


def test_the_gradient_of_the_bias_under_dropout_is_that_of_its_own_draw() -> None:
    """The change of the loss along the gradient, by a difference of two forwards of the same draw."""
    torch.manual_seed(0)
    q, k, v = (torch.randn(sum(QUERIES), 4, 64, device="cuda", dtype=torch.bfloat16) for _ in range(3))
    bias = torch.randn(4, 2 * LONGEST - 1, device="cuda", requires_grad=True)
    towards = torch.randn(sum(QUERIES), 4, 64, device="cuda")

    def loss(bias: Tensor) -> Tensor:
        torch.manual_seed(7)
        output = varlen.attend(q, k, v, borders_of(QUERIES), causal=True, window=0, scale=0.2, drop=0.3, bias=bias)
        return (output.double() * towards).sum()

    (gradient,) = torch.autograd.grad(loss(bias), bias)
    step = gradient / gradient.norm()
    change = float(loss(bias.detach() + 0.5 * step) - loss(bias.detach() - 0.5 * step))
    assert abs(change - float(gradient.norm())) < 5e-2 * float(gradient.norm())


if __name__ == "__main__":
    raise SystemExit(run_tests(dict(globals())))
