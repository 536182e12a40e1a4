"""T5-v1.1-large on one GPU: pairs of source and target, dropout as in the real model, 64 pairs per update.

    python benchmarks/t5.py [--samples 64] [--arms ours transformers ...] [--json FILE]

T5's loss is a mean over the targets of a micro-batch. Transformers takes the mean of those means, ours that over the
targets of the update: with 8 pairs of different lengths each they differ a little, and so does dropout; the judge
compares the mean loss over the updates both arms saw. Useful tokens are those of sources and of targets.
"""

from __future__ import annotations

import argparse
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np
from arms import Benchmark, Target, Tolerance, add_options, main
from lengths import SOURCE, TARGET, Lengths, Texts
from processes import Result


@dataclass(frozen=True)
class Shape:
    """The size of a T5 with a gated inner layer."""

    width: int
    inner: int
    layers: int
    heads: int
    head_width: int
    vocabulary: int

    def operations(self, sources: np.ndarray, targets: np.ndarray) -> np.ndarray:
        """Forward and backward of each pair; keys and values of the cross-attention are made from the source."""
        s, t = sources.astype(np.float64), targets.astype(np.float64)
        inside = self.heads * self.head_width
        attention, mlp = 4 * self.width * inside, 3 * self.width * self.inner
        encoder = s * (attention + mlp)
        decoder = t * (attention + mlp) + (s + t) * attention / 2
        scores = (12 * s**2 + 6 * t**2 + 12 * s * t) * inside
        return self.layers * (6.0 * (encoder + decoder) + scores) + 6.0 * t * self.vocabulary * self.width

    def build(self) -> Any:
        from transformers import T5Config, T5ForConditionalGeneration

        config = T5Config(
            vocab_size=self.vocabulary, d_model=self.width, d_kv=self.head_width, d_ff=self.inner,
            num_layers=self.layers, num_decoder_layers=self.layers, num_heads=self.heads, dropout_rate=0.1,
            feed_forward_proj="gated-gelu", tie_word_embeddings=False, use_cache=False, decoder_start_token_id=0,
            initializer_factor=0.05,  # at 1.0 the first losses are in the hundreds
        )  # fmt: skip
        return T5ForConditionalGeneration(config)


MODELS = {
    "large": Shape(1024, 2816, 24, 16, 64, 32_128),
    "tiny": Shape(64, 128, 2, 4, 16, 512),  # to try the script itself
}


def lengths_of(options: argparse.Namespace) -> tuple[Lengths, Lengths]:
    if options.model == "tiny":
        return replace(SOURCE, mean=3.0, high=64), replace(TARGET, mean=2.0, high=32)
    return SOURCE, TARGET


def work(options: argparse.Namespace, arm: str) -> Result:
    from trainers import Task, run, watch_for

    watch, shape = watch_for(options), MODELS[options.model]
    sources, targets = lengths_of(options)
    data = Texts("pair", options.samples * 400, sources, shape.vocabulary, targets=targets)
    micro = min(options.samples, 8)
    task = Task(
        build=shape.build,
        data=data,
        operations=shape.operations,
        watch=watch,
        micro=micro,
        accumulation=options.samples // micro,
        bf16=watch.device == "cuda",
        counts_items=False,
    )
    return run(arm, task)


def about(options: argparse.Namespace) -> Result:
    sources, targets = lengths_of(options)
    return {
        "model": f"T5-v1.1-{options.model}",
        "weights": "fp32 + bf16 autocast",
        "dropout": 0.1,
        "samples per update": options.samples,
        "source lengths": asdict(sources),
        "target lengths": asdict(targets),
    }


def parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description="T5-large on one GPU, all arms in one run.")
    parser.add_argument("--model", choices=MODELS, default="large")
    parser.add_argument("--samples", type=int, default=64, help="pairs per update")
    add_options(parser, warmup=3, warm_seconds=4.0, seconds=10.0, updates=4, timeout=150.0)
    return parser


if __name__ == "__main__":
    told = parser().parse_args()
    benchmark = Benchmark(
        name=f"t5-{told.model}-{told.samples}",
        script=__file__,
        work=work,
        about=about,
        tolerance=lambda options: Tolerance(mean=3e-2),
        targets=lambda options: [
            Target("2.5 x transformers' samples/s", "samples_per_s", 2.5, "transformers"),
            Target("1.5 x transformers-best's samples/s", "samples_per_s", 1.5, "transformers-best"),
        ],
        key="samples_per_s",
    )
    main(benchmark, parser())
