"""Supervised fine-tuning of a Llama-like model on one GPU: useful tokens per second, memory, time to ready.

    python benchmarks/sft.py [--model 0.5b|1.24b|1.7b] [--samples 64|8] [--bf16-weights] [--prompt-masked]
                             [--arms ours transformers ...] [--seconds 12] [--json FILE]

Useful tokens are real ones, not padding. MFU is the necessary work over a bf16 matrix product measured in the same
process: 6 x weights of matrix products x tokens (the head: x targets) + 6 x layers x width x sum of squared lengths.
Each arm has a process, the same initial weights, samples, order and updates; weights in fp32 under bf16 autocast.
"""

from __future__ import annotations

import argparse
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np
from arms import Benchmark, Target, Tolerance, add_options, main
from lengths import SFT, Lengths, Texts, exactly
from processes import Result

UPDATES_IN_DATA = 400


@dataclass(frozen=True)
class Shape:
    """The size of a Llama-like model with a tied head."""

    width: int
    inner: int
    layers: int
    heads: int
    kv_heads: int
    head_width: int
    vocabulary: int
    rope: float = 10_000.0

    @property
    def body(self) -> int:
        """Weights of matrix products outside the head."""
        attention = self.width * self.head_width * (2 * self.heads + 2 * self.kv_heads)
        return self.layers * (attention + 3 * self.width * self.inner)

    @property
    def head(self) -> int:
        return self.width * self.vocabulary

    def operations(self, lengths: np.ndarray, targets: np.ndarray) -> np.ndarray:
        """Forward and backward of each sample, without padding or recomputation, the causal half of attention only."""
        length = lengths.astype(np.float64)
        attention = 6 * self.layers * self.heads * self.head_width * length**2
        return 6.0 * self.body * length + 6.0 * self.head * targets + attention

    def build(self, positions: int = 2048) -> Any:
        from transformers import LlamaConfig, LlamaForCausalLM

        config = LlamaConfig(
            vocab_size=self.vocabulary, hidden_size=self.width, intermediate_size=self.inner,
            num_hidden_layers=self.layers, num_attention_heads=self.heads, num_key_value_heads=self.kv_heads,
            head_dim=self.head_width, max_position_embeddings=positions, rope_theta=self.rope,
            tie_word_embeddings=True, use_cache=False,
        )  # fmt: skip
        return LlamaForCausalLM(config)


MODELS = {
    "0.5b": Shape(896, 4864, 24, 14, 2, 64, 151_936),
    "1.24b": Shape(2048, 8192, 16, 32, 8, 64, 128_256, 500_000.0),
    "1.7b": Shape(2048, 6144, 28, 16, 8, 128, 151_936),
    "tiny": Shape(64, 128, 2, 4, 2, 16, 512),  # to try the script itself
}


def lengths_of(options: argparse.Namespace) -> Lengths:
    return replace(SFT, mean=3.0, high=128) if options.model == "tiny" else SFT


def task(options: argparse.Namespace, *, context: int | None = None) -> Any:
    """What every arm trains; with a context, one document of that length per update."""
    from trainers import Task, watch_for

    watch, shape = watch_for(options), MODELS[options.model]
    lengths = lengths_of(options) if context is None else exactly(context)
    samples = options.samples * (UPDATES_IN_DATA if context is None else 48)
    data = Texts("causal", samples, lengths, shape.vocabulary, prompt_masked=options.prompt_masked)
    micro = min(options.samples, 8)
    return Task(
        build=lambda: shape.build(max(2048, lengths.high)),
        data=data,
        operations=shape.operations,
        watch=watch,
        micro=micro,
        accumulation=options.samples // micro,
        bf16=watch.device == "cuda",  # on a CPU only the script itself is tried
        bf16_weights=options.bf16_weights,
        liger_micro=min(options.samples, 16),
    )


def work(options: argparse.Namespace, arm: str) -> Result:
    from trainers import run

    return run(arm, task(options))


def about(options: argparse.Namespace) -> Result:
    return {
        "model": options.model,
        "weights": "bf16" if options.bf16_weights else "fp32 + bf16 autocast",
        "samples per update": options.samples,
        "lengths": asdict(lengths_of(options)),
        "targets": "prompt masked" if options.prompt_masked else "all tokens",
    }


def targets(options: argparse.Namespace) -> list[Target]:
    if options.samples < 64:
        return [Target("3 x transformers' useful tokens/s", "tokens_per_s", 3.0, "transformers")]
    ratios = [
        Target("6 x transformers' useful tokens/s", "tokens_per_s", 6.0, "transformers"),
        Target("4 x transformers-best's useful tokens/s", "tokens_per_s", 4.0, "transformers-best"),
        Target("the same with micro-batches of 16", "tokens_per_s", 4.0, "transformers-wide"),
    ]
    if options.model == "1.24b":
        ratios.append(Target("58 % of the measured matrix product", "mfu", 0.58))
        ratios.append(Target("at most 45 GiB", "peak_gib", 45.0, at_most=True))
    return [*ratios, Target("ready to train in 25 s", "ready_s", 25.0, at_most=True)]


def parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description="Supervised fine-tuning on one GPU, all arms in one run.")
    parser.add_argument("--model", choices=MODELS, default="1.24b")
    parser.add_argument("--samples", type=int, default=64, help="samples per update")
    parser.add_argument("--bf16-weights", action="store_true")
    parser.add_argument("--prompt-masked", action="store_true", help="a Beta(2, 3) share of each sample has no target")
    add_options(parser, warmup=3, warm_seconds=5.0, seconds=12.0, updates=4, timeout=180.0)
    parser.set_defaults(arms=["ours", "transformers", "transformers-best", "transformers-wide", "lightning", "loop"])
    return parser


def name_of(options: argparse.Namespace) -> str:
    """One file per variant."""
    variants = ["bf16"] * options.bf16_weights + ["masked"] * options.prompt_masked
    return "-".join(["sft", options.model, str(options.samples), *variants])


if __name__ == "__main__":
    benchmark = Benchmark(
        name=name_of(parser().parse_args()),
        script=__file__,
        work=work,
        about=about,
        tolerance=lambda options: Tolerance(),
        targets=targets,
    )
    main(benchmark, parser())
