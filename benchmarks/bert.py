"""BERT classification on one GPU: lengths up to 512, dropout as in the real model, one batch per update.

    python benchmarks/bert.py [--model base|large] [--samples 32] [--arms ours transformers ...] [--json FILE]

Dropout makes two runs agree in distribution only, so the judge compares the mean loss over the updates both arms saw.
MFU as in sft.py, with both halves of attention: 6 x weights x tokens + 12 x layers x width x sum of squared lengths.
"""

from __future__ import annotations

import argparse
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from arms import Benchmark, Target, Tolerance, add_options, main
from lengths import CLASSIFICATION, Texts
from processes import Result


@dataclass(frozen=True)
class Shape:
    """The size of a BERT."""

    width: int
    inner: int
    layers: int
    heads: int
    vocabulary: int = 30_522

    @property
    def body(self) -> int:
        """Weights of matrix products of the blocks; pooler and classifier see one token of each sample."""
        return self.layers * (4 * self.width**2 + 2 * self.width * self.inner)

    def operations(self, lengths: np.ndarray, targets: np.ndarray) -> np.ndarray:
        """Forward and backward of each sample, without padding."""
        length = lengths.astype(np.float64)
        return 6.0 * self.body * length + 12.0 * self.layers * self.width * length**2

    def build(self, dropout: float = 0.1, classes: int = 2) -> Any:
        from transformers import BertConfig, BertForSequenceClassification

        config = BertConfig(
            vocab_size=self.vocabulary, hidden_size=self.width, intermediate_size=self.inner,
            num_hidden_layers=self.layers, num_attention_heads=self.heads, max_position_embeddings=512,
            hidden_dropout_prob=dropout, attention_probs_dropout_prob=dropout, num_labels=classes,
        )  # fmt: skip
        return BertForSequenceClassification(config)


MODELS = {
    "base": Shape(768, 3072, 12, 12),
    "large": Shape(1024, 4096, 24, 16),
    "tiny": Shape(64, 128, 2, 4, 512),  # to try the script itself
}


def work(options: argparse.Namespace, arm: str) -> Result:
    from trainers import Task, run, watch_for

    watch, shape = watch_for(options), MODELS[options.model]
    data = Texts("class", options.samples * 2048, CLASSIFICATION, shape.vocabulary)
    task = Task(
        build=shape.build,
        data=data,
        operations=shape.operations,
        watch=watch,
        micro=options.samples,
        accumulation=1,
        learning_rate=2e-5,
        bf16=watch.device == "cuda",
        counts_items=False,
        grouped_updates=200,
    )
    return run(arm, task)


def about(options: argparse.Namespace) -> Result:
    return {
        "model": f"BERT-{options.model}",
        "weights": "fp32 + bf16 autocast",
        "dropout": 0.1,
        "samples per update": options.samples,
        "lengths": asdict(CLASSIFICATION),
    }


def parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description="BERT classification on one GPU, all arms in one run.")
    parser.add_argument("--model", choices=MODELS, default="base")
    parser.add_argument("--samples", type=int, default=32, help="samples per update, in one batch")
    add_options(parser, warmup=20, warm_seconds=3.0, seconds=8.0, updates=50, timeout=120.0)
    return parser


if __name__ == "__main__":
    told = parser().parse_args()
    benchmark = Benchmark(
        name=f"bert-{told.model}-{told.samples}",
        script=__file__,
        work=work,
        about=about,
        tolerance=lambda options: Tolerance(mean=3e-2),
        targets=lambda options: [Target("3 x transformers' samples/s", "samples_per_s", 3.0, "transformers")],
        key="samples_per_s",
    )
    main(benchmark, parser())
