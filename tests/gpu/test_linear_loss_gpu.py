"""The linear cross-entropy on a GPU: the kernel against plain torch, no waiting, and its time and memory.

Also runs without pytest, and then prints the timings too: `python3 tests/gpu/test_linear_loss_gpu.py`.
"""

from __future__ import annotations

import itertools
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

if __name__ == "__main__":
    sys.path[:0] = [str(Path(__file__).parents[2] / "src"), str(Path(__file__).parents[2])]

from loopwright.speed.fused_loss import cross_entropy as linear_loss, loss_kernel
from loopwright.speed.fused_loss.cross_entropy import add_product, linear_cross_entropy
from loopwright.speed.fused_loss.lazy_logits import PendingHead, PendingLogits
from loopwright.speed.fused_loss.loss_kernel import LogitMap, plain_loss_and_gradient_, softmax_loss_and_gradient_
from tests.gpu.script import HAS_GPU, needs_gpu, run_tests

pytestmark = needs_gpu()

MAPS = [LogitMap(), LogitMap.of(0.25), LogitMap.of(1.5, 30.0, 2.0)]
# Relative to the largest number: what one rounding to the dtype may do.
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 1e-2, torch.float16: 2e-3}


def close(found: Tensor, expected: Tensor, tolerance: float, floor: float = 1e-30) -> None:
    """The largest difference, relative to the largest number expected (or to `floor`), is within the tolerance."""
    assert found.dtype == expected.dtype and found.shape == expected.shape
    found, expected = found.double(), expected.double()
    error = (found - expected).abs().max() / expected.abs().max().clamp(min=floor)
    assert error <= tolerance, f"off by {float(error):.2e}, allowed {tolerance:.0e}"


def apart(found: Tensor, truth: Tensor) -> float:
    return float((found.double() - truth.double()).norm() / truth.double().norm())


def parts(
    tokens: int, width: int, classes: int, dtype: torch.dtype = torch.float32, ignored: float = 0.0
) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator("cuda").manual_seed(0)
    hidden = torch.randn(tokens, width, device="cuda", generator=generator).to(dtype).requires_grad_()
    weight = (torch.randn(classes, width, device="cuda", generator=generator) * 0.05).to(dtype).requires_grad_()
    targets = torch.randint(0, classes, (tokens,), device="cuda", generator=generator)
    targets[torch.rand(tokens, device="cuda", generator=generator) < ignored] = -100
    return hidden, weight, targets


def stock(hidden: Tensor, weight: Tensor, bias: Tensor | None, targets: Tensor, **options: Any) -> Tensor:
    return F.cross_entropy(F.linear(hidden, weight, bias).float(), targets, **options)


def test_the_kernel_is_used():
    for dtype in TOLERANCE:
        assert loss_kernel.has_kernel(torch.zeros(2, 3, device="cuda", dtype=dtype))
    assert not loss_kernel.has_kernel(torch.zeros(2, 3, device="cuda", dtype=torch.float64))


def test_the_kernel_is_plain_torch():
    for dtype, classes in itertools.product(TOLERANCE, (1, 7, 1000, 8192, 8193, 50257, 128256)):
        for logit_map, smoothing, with_gradient in itertools.product(MAPS, (0.0, 0.1), (True, False)):
            torch.manual_seed(classes)
            given = torch.randn(17, classes + 8, device="cuda").mul(4).to(dtype)[:, :classes]  # rows with a gap between
            targets = torch.randint(0, classes, (17,), device="cuda")
            targets[3] = targets[16] = -100
            options = {"label_smoothing": smoothing, "logit_map": logit_map, "with_gradient": with_gradient}
            ours, plain = given.clone(), given.clone()
            assert loss_kernel.has_kernel(ours)
            losses = softmax_loss_and_gradient_(ours, targets, **options)
            close(losses, plain_loss_and_gradient_(plain, targets, **options), 1e-5, floor=1.0)
            assert losses[3] == 0
            if with_gradient:
                close(ours, plain, TOLERANCE[dtype], floor=1.0)
                assert not ours[3].any() and not ours[16].any()
            else:
                assert torch.equal(ours, given)


def test_the_kernel_keeps_to_its_rows():
    around = torch.randn(9, 1300, device="cuda", dtype=torch.bfloat16)
    before = around.clone()
    softmax_loss_and_gradient_(around[2:7, :1001], torch.zeros(5, dtype=torch.int64, device="cuda"))
    changed = around != before
    assert not changed[:2].any() and not changed[7:].any() and not changed[:, 1001:].any() and changed[2:7, :1001].any()


def test_more_than_two_to_the_31_logits():
    rows, classes = 17000, 128256
    logits = torch.zeros(rows, classes, device="cuda", dtype=torch.bfloat16)
    logits[-2:] = torch.randn(2, classes, device="cuda").to(torch.bfloat16)
    last, targets = logits[-2:].clone(), torch.full((rows,), 5, device="cuda")
    losses = softmax_loss_and_gradient_(logits, targets)
    close(losses[-2:], plain_loss_and_gradient_(last, targets[-2:]), 1e-5)
    close(logits[-2:], last, 1e-2)


def test_a_target_that_is_no_class_makes_its_loss_nan():
    logits = torch.randn(3, 50, device="cuda")
    losses = softmax_loss_and_gradient_(logits, torch.tensor([1, 50, -7], device="cuda"))
    assert losses.isnan().tolist() == [False, True, True]
    assert logits.isnan().any(1).tolist() == [False, True, True]  # a gradient without its target would be wrong


def test_float32_and_float64_are_exact():
    for dtype, tolerance in ((torch.float64, 1e-12), (torch.float32, 2e-5)):
        hidden, weight, targets = parts(3000, 64, 5003, dtype, ignored=0.3)
        bias = torch.randn(5003, device="cuda", dtype=dtype, requires_grad=True)
        inputs = (hidden, weight, bias)
        real = int((targets != -100).sum())
        truth = [each.detach().double().requires_grad_() for each in inputs]
        for reduction, count in itertools.product(("mean", "sum"), (None, real, real + 5, 3000)):
            expected = F.cross_entropy(F.linear(*truth), targets, reduction=reduction)
            wanted = torch.autograd.grad(expected, truth)
            loss = linear_cross_entropy(*inputs, targets, reduction=reduction, count=count, chunk_tokens=700)
            close(loss, expected.to(dtype), tolerance)
            for a, b in zip(torch.autograd.grad(loss, inputs), wanted, strict=True):
                close(a, b.to(dtype), tolerance)


def test_narrow_matmuls_are_as_exact_as_the_stock_path():
    for kind in (torch.float32, torch.bfloat16):
        hidden, weight, targets = parts(4096, 512, 32003, kind, ignored=0.4)
        truth = [hidden.detach().double().requires_grad_(), weight.detach().double().requires_grad_()]
        wanted = torch.autograd.grad(F.cross_entropy(F.linear(*truth), targets), truth)
        errors = []
        for function in (lambda *given: linear_cross_entropy(*given, chunk_tokens=1024), stock):
            with torch.autocast("cuda", dtype=torch.bfloat16, enabled=kind == torch.float32):
                loss = function(hidden, weight, None, targets)
            found = torch.autograd.grad(loss, (hidden, weight))
            assert [each.dtype for each in found] == [kind, kind]
            errors.append([apart(a, b) for a, b in zip(found, wanted, strict=True)])
        print(f"{kind}: relative error of the gradients (hidden, weight): ours {errors[0]}, stock {errors[1]}")
        assert all(ours <= 1.1 * theirs for ours, theirs in zip(*errors, strict=True))


def test_nothing_waits_for_the_device():
    head = nn.Linear(64, 5003, bias=False, device="cuda")
    hidden, _, targets = parts(2000, 64, 5003, ignored=0.5)
    count = int((targets != -100).sum())
    pending_head = PendingHead(head)
    pending_head.install()

    def run() -> Tensor:
        with torch.autocast("cuda", dtype=torch.bfloat16):
            logits = head(hidden.view(4, 500, 64))
        assert type(logits) is PendingLogits
        loss = F.cross_entropy(logits.float().view(-1, 5003), targets)
        loss.backward()
        return loss

    for known in (None, count):
        pending_head.count = known
        run()  # compiles the kernel, finds out what the device can do
        torch.cuda.set_sync_debug_mode("error")
        try:
            loss = run()
        finally:
            torch.cuda.set_sync_debug_mode("default")
        close(loss.detach(), stock(hidden, head.weight, None, targets).detach(), 1e-2)


def test_logits_used_besides_the_loss():
    """A second loss on more targets than were announced, a penalty on the gradient, the gradient of the logits."""
    torch.manual_seed(0)
    head = nn.Linear(16, 50, device="cuda", dtype=torch.float64)
    hidden = torch.randn(40, 16, device="cuda", dtype=torch.float64, requires_grad=True)
    targets, others = (torch.randint(0, 50, (40,), device="cuda") for _ in range(2))
    targets[::2] = -100
    pending_head, found = PendingHead(head), []
    for pending in (False, True):
        if pending:
            pending_head.install()
            pending_head.count = 20
        logits = head(hidden)
        loss = F.cross_entropy(logits, targets) + F.cross_entropy(logits, others)
        first = torch.autograd.grad(loss, [hidden, logits], create_graph=True)
        penalty = sum(each.square().sum() for each in first)
        found.append([loss, *first, *torch.autograd.grad(penalty, [hidden, *head.parameters()], allow_unused=True)])
    for expected, got in zip(*found, strict=True):
        assert (expected is None) == (got is None)
        if expected is not None:
            close(got, expected, 1e-10)


def test_a_count_that_is_too_small_makes_the_loss_nan():
    hidden, weight, targets = parts(100, 16, 50)
    assert linear_cross_entropy(hidden, weight, None, targets, count=99).isnan()
    assert not linear_cross_entropy(hidden, weight, None, targets, count=100).isnan()


def test_products_are_added_in_float32():
    a, b = torch.randn(512, 4096, device="cuda").bfloat16(), torch.randn(4096, 256, device="cuda").bfloat16()
    total = torch.ones(512, 256, device="cuda")
    close(add_product(None, a, b, torch.float32), a.float() @ b.float(), 1e-3)
    assert add_product(total, a, b, torch.float32) is total
    close(total, 1 + a.float() @ b.float(), 1e-3)
    way = linear_loss._FIRST_WAY[("cuda", torch.bfloat16)]
    print("the weight's gradient is added by", linear_loss._WAYS[way].__name__)


# ---- time and memory -------------------------------------------------------------------------------------------------


def measure(run: Callable[[], Any], repeats: int = 5) -> tuple[float, float]:
    """Milliseconds of the fastest run, and GiB at the peak above what was there before."""
    run()
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    times = []
    for _ in range(repeats):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        run()
        end.record()
        torch.cuda.synchronize()
        times.append(start.elapsed_time(end))
    return min(times), (torch.cuda.max_memory_allocated() - before) / 2**30


def time_kernel(rows: int = 4096, classes: int = 128256) -> None:
    logits = torch.randn(rows, classes, device="cuda", dtype=torch.bfloat16)
    targets = torch.randint(0, classes, (rows,), device="cuda")
    floor = 3 * logits.numel() * 2 / 4.3e12 * 1e3
    print(f"\nkernel alone, {rows} x {classes} bf16, gradient included ({floor:.2f} ms at 4.3 TB/s):")
    for block, warps in itertools.product((4096, 8192, 16384), (8, 16, 32)):
        ms, _ = measure(
            lambda block=block, warps=warps: loss_kernel._run_kernel(
                logits, targets, -100, 0.0, LogitMap(), True, block=block, warps=warps
            )
        )
        print(f"  block {block:5d}, {warps:2d} warps: {ms:7.2f} ms")
    ms, _ = measure(lambda: plain_loss_and_gradient_(logits, targets))
    print(f"  plain torch:           {ms:7.2f} ms")


def train_once(function: Callable[..., Tensor], inputs: tuple[Tensor, Tensor, Tensor], **options: Any) -> None:
    hidden, weight, targets = inputs
    hidden.grad = weight.grad = None
    with torch.autocast("cuda", dtype=torch.bfloat16):
        loss = function(hidden, weight, None, targets, **options)
    loss.backward()


def time_loss(tokens: int = 16384, width: int = 2048, classes: int = 128256) -> None:
    for kind, ignored in ((torch.float32, 0.0), (torch.bfloat16, 0.0), (torch.float32, 0.4)):
        inputs = parts(tokens, width, classes, kind, ignored)
        count = int((inputs[2] != -100).sum())
        print(f"\n{tokens} x {width} x {classes}, weights {kind}, bf16 matmuls, {count} targets, forward + backward:")
        ms, peak = measure(partial(train_once, stock, inputs))
        print(f"  F.linear + F.cross_entropy: {ms:7.1f} ms  {peak:6.2f} GiB")
        torch.cuda.empty_cache()
        for chunk in (2048, 4096, 8192, 16384, None):
            ms, peak = measure(partial(train_once, linear_cross_entropy, inputs, chunk_tokens=chunk, count=count))
            rate = 6 * count * width * classes / ms / 1e9
            print(f"  chunk {str(chunk):>7}:              {ms:7.1f} ms  {peak:6.2f} GiB  {rate:6.0f} TFLOP/s")
        del inputs
        torch.cuda.empty_cache()


def main() -> int:
    if not HAS_GPU:
        print("no GPU here: nothing was run")
        return 0
    import triton

    print(f"triton {triton.__version__}")
    failed = run_tests(globals())
    time_kernel()
    torch.cuda.empty_cache()
    time_loss()
    print(f"\n{failed} failed")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
