"""What the everyday benchmark trains: models from configurations with random weights, generated data, batch sizes.

Every workload exists twice: at the size of its name, and tiny, which runs on a CPU in seconds to try the scripts.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import bert
import made_samples
import numpy as np
import sft
import t5
import torch
from lengths import CLASSIFICATION, SFT, SOURCE, TARGET, Lengths, Texts
from overhead import MLP
from torch import nn
from torch.utils.flop_counter import FlopCounterMode
from trainers import NotInstalled, Task
from watch import Watch

TRANSCRIPT = Lengths(math.log(90), 0.4, 20, 220)
UPDATES_IN_DATA = 256
"""More than any arm makes: no epoch ends while an arm is timed."""
LLAMA_8B = sft.Shape(4096, 14336, 32, 32, 8, 128, 128_256, 500_000.0)


def counted(build: Callable[[], nn.Module], batch: Callable[[], dict[str, torch.Tensor]]) -> float:
    """Operations of one sample, forward and backward, counted on a model without memory."""
    with torch.device("meta"):
        model, inputs = build(), batch()
    if hasattr(model, "set_attn_implementation"):
        model.set_attn_implementation("eager")  # plain products, which the counter sees
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        model(**inputs)
    return 3.0 * counter.get_total_flops()


def each(operations: float) -> Callable[[np.ndarray, np.ndarray], np.ndarray]:
    """The same number of operations for every sample."""
    return lambda lengths, targets: np.full(len(lengths), operations)


# ---- text ---------------------------------------------------------------------------------------------------------


def _sft(watch: Watch, tiny: bool, samples: int) -> Task:
    shape = sft.MODELS["tiny" if tiny else "1.24b"]
    lengths = replace(SFT, mean=3.0, high=64) if tiny else SFT
    micro = min(samples, 8)
    return Task(
        build=shape.build,
        data=Texts("causal", samples * UPDATES_IN_DATA, lengths, shape.vocabulary, pool=1 << (14 if tiny else 21)),
        operations=shape.operations,
        watch=watch,
        micro=micro,
        accumulation=samples // micro,
    )


def sft_64(watch: Watch, tiny: bool) -> Task:
    return _sft(watch, tiny, 16 if tiny else 64)


def sft_8(watch: Watch, tiny: bool) -> Task:
    return _sft(watch, tiny, 8)


def lora(watch: Watch, tiny: bool) -> Task:
    shape = sft.MODELS["tiny"] if tiny else LLAMA_8B
    return replace(
        _sft(watch, tiny, 16),
        build=lambda: with_adapters(shape, 4 if tiny else 16),
        data=Texts("causal", 16 * UPDATES_IN_DATA, replace(SFT, mean=3.0, high=64) if tiny else SFT, shape.vocabulary),
        # Weights that are frozen need no gradient: two thirds of the products.
        operations=lambda lengths, targets: shape.operations(lengths, targets) * 2 / 3,
        micro=4,
        accumulation=4,
        learning_rate=1e-4,
    )


def with_adapters(shape: sft.Shape, rank: int) -> nn.Module:
    """A model with frozen bf16 weights and fp32 adapters in the projections of attention."""
    try:
        from peft import LoraConfig, get_peft_model
    except ImportError as error:
        raise NotInstalled(f"peft: {error}") from error
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    try:
        model = shape.build()
    finally:
        torch.set_default_dtype(before)
    names = ["q_proj", "k_proj", "v_proj", "o_proj"]
    config = LoraConfig(r=rank, lora_alpha=2 * rank, target_modules=names, task_type="CAUSAL_LM")
    return get_peft_model(model, config)


def gpt2(watch: Watch, tiny: bool) -> Task:
    width, layers, length, vocabulary = (64, 2, 64, 512) if tiny else (768, 12, 1024, 50_257)

    def build() -> nn.Module:
        from transformers import GPT2Config, GPT2LMHeadModel

        config = GPT2Config(
            vocab_size=vocabulary, n_positions=length, n_embd=width, n_layer=layers, n_head=width // 64 or 1,
            resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, use_cache=False,
        )  # fmt: skip
        return GPT2LMHeadModel(config)

    def operations(lengths: np.ndarray, targets: np.ndarray) -> np.ndarray:
        n = lengths.astype(np.float64)
        return 6.0 * n * (12 * layers * width**2 + vocabulary * width) + 6.0 * layers * width * n**2

    samples = 4 if tiny else 16
    return Task(
        build=build,
        data=made_samples.blocks(samples * UPDATES_IN_DATA, length, vocabulary, 1 << (14 if tiny else 21)),
        operations=operations,
        watch=watch,
        micro=samples,
        accumulation=1,
        learning_rate=1e-4,
        counts_items=False,  # transformers would count first tokens too, since the class is not named ForCausalLM
        collate=made_samples.stack,
        fixed_shapes=True,
    )


def bert_base(watch: Watch, tiny: bool) -> Task:
    shape, samples = bert.MODELS["tiny" if tiny else "base"], 8 if tiny else 32
    lengths = replace(CLASSIFICATION, mean=3.0, high=64) if tiny else CLASSIFICATION
    return Task(
        build=shape.build,
        data=Texts("class", samples * UPDATES_IN_DATA, lengths, shape.vocabulary, pool=1 << (14 if tiny else 21)),
        operations=shape.operations,
        watch=watch,
        micro=samples,
        accumulation=1,
        learning_rate=2e-5,
        counts_items=False,
    )


def t5_large(watch: Watch, tiny: bool) -> Task:
    shape = t5.MODELS["tiny" if tiny else "large"]
    sources = replace(SOURCE, mean=3.0, high=64) if tiny else SOURCE
    targets = replace(TARGET, mean=2.0, high=32) if tiny else TARGET
    micro = 4 if tiny else 16
    return Task(
        build=shape.build,
        data=Texts("pair", 4 * micro * UPDATES_IN_DATA, sources, shape.vocabulary, targets=targets),
        operations=shape.operations,
        watch=watch,
        micro=micro,
        accumulation=2 if tiny else 4,
        counts_items=False,
    )


# ---- speech and images --------------------------------------------------------------------------------------------


def whisper(watch: Watch, tiny: bool) -> Task:
    width, layers, frames, vocabulary, bins = (64, 2, 100, 600, 16) if tiny else (768, 12, 3000, 51_865, 80)
    positions = frames // 2

    def build() -> nn.Module:
        from transformers import WhisperConfig, WhisperForConditionalGeneration

        config = WhisperConfig(
            vocab_size=vocabulary, num_mel_bins=bins, d_model=width, encoder_layers=layers, decoder_layers=layers,
            encoder_attention_heads=width // 64, decoder_attention_heads=width // 64, encoder_ffn_dim=4 * width,
            decoder_ffn_dim=4 * width, max_source_positions=positions, use_cache=False, pad_token_id=0,
            bos_token_id=1, eos_token_id=1, decoder_start_token_id=1,
        )  # fmt: skip
        return WhisperForConditionalGeneration(config)

    def operations(lengths: np.ndarray, targets: np.ndarray) -> np.ndarray:
        t, s = targets.astype(np.float64), float(positions)
        block = 12 * width**2
        convolutions = 3 * bins * width * frames + 3 * width**2 * positions
        encoder = convolutions + layers * block * s
        decoder = layers * (block * t + 2 * width**2 * (s + t)) + vocabulary * width * t
        scores = layers * width * (12 * s**2 + 6 * t**2 + 12 * s * t)
        return 6.0 * (encoder + decoder) + scores

    samples = 2 if tiny else 16
    transcripts = replace(TRANSCRIPT, mean=2.5, low=4, high=32) if tiny else TRANSCRIPT
    return Task(
        build=build,
        data=made_samples.Speech(samples * UPDATES_IN_DATA, bins, frames, transcripts, vocabulary),
        operations=operations,
        watch=watch,
        micro=samples,
        accumulation=1,
        counts_items=False,
        collate=made_samples.stack_speech,
        workers=8,
        widest=32 if tiny else 256,
    )


def _images(watch: Watch, tiny: bool, build: Callable[[], nn.Module], *, channels_last: bool) -> Task:
    samples, size = (2, 32) if tiny else (64, 224)

    def one() -> dict[str, torch.Tensor]:
        return {"pixel_values": torch.zeros(1, 3, size, size), "labels": torch.zeros(1, dtype=torch.int64)}

    return Task(
        build=build,
        data=made_samples.images(samples * UPDATES_IN_DATA, size),
        operations=each(counted(build, one)),
        watch=watch,
        micro=samples,
        accumulation=1,
        learning_rate=1e-4,
        counts_items=False,
        collate=made_samples.stack,
        fixed_shapes=True,
        channels_last=channels_last,
        workers=8,
    )


def vit(watch: Watch, tiny: bool) -> Task:
    def build() -> nn.Module:
        from transformers import ViTConfig, ViTForImageClassification

        small: dict[str, Any] = {
            "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 128,
            "image_size": 32, "patch_size": 8,
        }  # fmt: skip
        return ViTForImageClassification(ViTConfig(num_labels=made_samples.CLASSES, **(small if tiny else {})))

    return _images(watch, tiny, build, channels_last=False)


def convnext(watch: Watch, tiny: bool) -> Task:
    def build() -> nn.Module:
        from transformers import ConvNextConfig, ConvNextForImageClassification

        small: dict[str, Any] = {"hidden_sizes": [8, 16, 32, 64], "depths": [1, 1, 1, 1], "image_size": 32}
        config = ConvNextConfig(num_labels=made_samples.CLASSES, **(small if tiny else {}))
        return ConvNextForImageClassification(config)

    return _images(watch, tiny, build, channels_last=True)


def resnet(watch: Watch, tiny: bool) -> Task:
    def build() -> nn.Module:
        from transformers import ResNetConfig, ResNetForImageClassification

        small: dict[str, Any] = {"embedding_size": 8, "hidden_sizes": [16, 32, 64, 64], "depths": [1, 1, 1, 1]}
        return ResNetForImageClassification(ResNetConfig(num_labels=made_samples.CLASSES, **(small if tiny else {})))

    return _images(watch, tiny, build, channels_last=True)


# ---- models that are nobody's -------------------------------------------------------------------------------------


class Layer(nn.Module):
    """Mixes neighbouring steps and features, scaled by the kind of the sample."""

    def __init__(self, width: int, kinds: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.steps = nn.Conv1d(width, width, 5, padding=2, groups=width)
        self.wide, self.narrow = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.gate = nn.Embedding(kinds, width)

    def forward(self, x: torch.Tensor, kind: torch.Tensor) -> torch.Tensor:
        y = self.norm(x)
        y = y + self.steps(y.transpose(1, 2)).transpose(1, 2)
        return x + self.narrow(nn.functional.gelu(self.wide(y))) * torch.sigmoid(self.gate(kind))[:, None]


class Custom(nn.Module):
    """A model as people write them: a stack of layers of its own, a dictionary in, a dictionary out."""

    def __init__(self, features: int, width: int, layers: int) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(features, width), nn.Linear(width, 1)
        self.layers = nn.ModuleList(Layer(width, made_samples.CLASSES) for _ in range(layers))

    def forward(
        self, values: torch.Tensor, kind: torch.Tensor, labels: torch.Tensor | None = None
    ) -> dict[str, torch.Tensor]:
        x = self.first(values)
        for layer in self.layers:
            x = layer(x, kind)
        predicted = self.last(x).squeeze(-1)
        if labels is None:
            return {"predicted": predicted}
        return {"loss": nn.functional.mse_loss(predicted.float(), labels), "predicted": predicted}


def custom(watch: Watch, tiny: bool) -> Task:
    steps, features, width, layers = (16, 8, 16, 20) if tiny else (128, 64, 512, 20)

    def one() -> dict[str, torch.Tensor]:
        return {"values": torch.zeros(1, steps, features), "kind": torch.zeros(1, dtype=torch.int64)}

    def build() -> nn.Module:
        return Custom(features, width, layers)

    samples = 4 if tiny else 64
    return Task(
        build=build,
        data=made_samples.sequences(samples * UPDATES_IN_DATA, steps, features),
        operations=each(counted(build, one)),
        watch=watch,
        micro=samples,
        accumulation=1,
        learning_rate=1e-5,  # more makes the loss jump, and rounding errors grow
        counts_items=False,
        collate=made_samples.stack,
        fixed_shapes=True,
    )


def mlp(watch: Watch, tiny: bool) -> Task:
    width = 16
    return Task(
        build=lambda: MLP(2, width),
        data=made_samples.vectors(4 * 8 * UPDATES_IN_DATA, width),
        operations=each(6.0 * 2 * width**2),
        watch=watch,
        micro=4,
        accumulation=1,
        learning_rate=1e-3,
        bf16=False,
        counts_items=False,
        collate=made_samples.stack,
        fixed_shapes=True,
    )


WORKLOADS: dict[str, Callable[[Watch, bool], Task]] = {
    "sft-64": sft_64,
    "sft-8": sft_8,
    "lora": lora,
    "gpt2": gpt2,
    "bert": bert_base,
    "t5": t5_large,
    "whisper": whisper,
    "vit": vit,
    "convnext": convnext,
    "resnet": resnet,
    "mlp": mlp,
    "custom": custom,
}
