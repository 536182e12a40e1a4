"""The output layer of a model whose number of classes is odd: padded, or fused with the loss, in CUDA graphs.

Also runs without pytest, and then prints the timings too: `python3 tests/gpu/test_output_layer_gpu.py`.
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

if __name__ == "__main__":
    sys.path[:0] = [str(Path(__file__).parents[2] / "src"), str(Path(__file__).parents[2])]

import loopwright.speed.planner.heads as heads
from loopwright import Trainer, TrainingArguments
from loopwright.speed.output_layer import padded_classes, padded_linear
from tests.gpu.script import needs_gpu, run_tests

pytestmark = needs_gpu()

CLASSES, WIDTH, TOKENS = 51_865, 768, 4096


def of_layer(linear: Callable[[Tensor, Tensor], Tensor]) -> Callable[[], list[Tensor]]:
    torch.manual_seed(0)
    hidden = torch.randn(16, TOKENS // 16, WIDTH, device="cuda", requires_grad=True)
    weight = (0.05 * torch.randn(CLASSES, WIDTH, device="cuda")).requires_grad_()
    targets = torch.randint(0, CLASSES, (TOKENS,), device="cuda")

    def run() -> list[Tensor]:
        with torch.autocast("cuda", torch.bfloat16):
            loss = F.cross_entropy(linear(hidden, weight).view(-1, CLASSES), targets)
        return [loss, *torch.autograd.grad(loss, [hidden, weight])]

    return run


def padded(hidden: Tensor, weight: Tensor) -> Tensor:
    return padded_linear(hidden, weight, None, padded_classes(weight))


def apart(found: Tensor, expected: Tensor) -> float:
    return float((found.double() - expected.double()).norm() / expected.double().norm())


def milliseconds(run: Callable[[], Any], times: int = 10) -> float:
    for _ in range(3):
        run()
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    for _ in range(times):
        run()
    end.record()
    torch.cuda.synchronize()
    return start.elapsed_time(end) / times


def test_the_padded_product_is_that_of_the_layer():
    found, expected = of_layer(padded)(), of_layer(F.linear)()
    assert [each.shape for each in found] == [each.shape for each in expected]
    assert all(apart(mine, other) < 1e-2 for mine, other in zip(found, expected, strict=True))


def kernels_of(run: Callable[[], Any]) -> list[str]:
    run()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profiler:
        run()
        torch.cuda.synchronize()
    return [event.key for event in profiler.key_averages()]


def test_no_kernel_is_for_matrices_that_are_not_aligned():
    slow = [name for name in kernels_of(of_layer(F.linear)) if "align1" in name]
    print(f"        as written: {slow}")
    assert not [name for name in kernels_of(of_layer(padded)) if "align1" in name or "align2" in name]


def test_the_padded_product_is_faster():
    before, after = milliseconds(of_layer(F.linear)), milliseconds(of_layer(padded))
    print(f"        output layer and loss, {TOKENS:,} x {CLASSES:,}: {before:.2f} ms, padded {after:.2f} ms")
    if torch.cuda.get_device_capability() >= (9, 0):
        assert after < 0.8 * before


def whisper() -> nn.Module:
    from transformers import WhisperConfig, WhisperForConditionalGeneration

    torch.manual_seed(0)
    config = WhisperConfig(
        vocab_size=CLASSES, num_mel_bins=16, d_model=128, encoder_layers=2, decoder_layers=2, encoder_attention_heads=2,
        decoder_attention_heads=2, encoder_ffn_dim=256, decoder_ffn_dim=256, max_source_positions=50, use_cache=False,
        pad_token_id=0, bos_token_id=1, eos_token_id=1, decoder_start_token_id=1,
    )  # fmt: skip
    return WhisperForConditionalGeneration(config)


def recordings(count: int = 128) -> list[dict[str, Tensor]]:
    generator = torch.Generator().manual_seed(5)
    made = []
    for length in torch.randint(20, 60, (count,), generator=generator).tolist():
        labels = torch.full((64,), -100)
        labels[:length] = torch.randint(2, CLASSES, (length,), generator=generator)
        made.append({"input_features": torch.randn(16, 100, generator=generator), "labels": labels})
    return made


def trained(speed: str, steps: int = 12) -> Any:
    with tempfile.TemporaryDirectory() as folder:
        args = TrainingArguments(
            folder, per_device_train_batch_size=8, max_steps=steps, learning_rate=1e-4, logging_steps=1, bf16=True,
            report_to="none", save_strategy="no", disable_tqdm=True, speed=speed,
        )  # fmt: skip
        trainer = Trainer(whisper(), args, train_dataset=recordings())
        trainer.train()
        return trainer


def losses(trainer: Any) -> list[float]:
    return [row["loss"] for row in trainer.state.log_history if "loss" in row]


def alike(fast: Any, plain: Any) -> None:
    pairs = zip(losses(fast), losses(plain), strict=True)
    assert all(abs(mine - other) < 5e-3 * other for mine, other in pairs), (losses(fast), losses(plain))


def test_whisper_has_the_fused_loss_in_its_graphs():
    plain, fast = trained("off"), trained("max")
    plan = fast._loopwright.run.speed.plan
    print("        " + "\n        ".join(plan.lines()))
    assert plan.graphed and plan.linear_loss, plan.lines()
    alike(fast, plain)


def test_whisper_has_the_padded_layer_in_its_graphs():
    fused = heads.HeadChoice._fused
    heads.HeadChoice._fused = lambda *args: None  # type: ignore[method-assign]
    try:
        fast = trained("max")
    finally:
        heads.HeadChoice._fused = fused  # type: ignore[method-assign]
    plan = fast._loopwright.run.speed.plan
    assert plan.graphed and plan.padded_head, plan.lines()
    alike(fast, trained("off"))


if __name__ == "__main__":
    sys.exit(run_tests(dict(globals())))
