"""Generation in evaluation, mixed lengths, batches of 8: a causal model of 0.5B parameters and T5-base.

    python benchmarks/generation.py [--tiny] [--models causal t5] [--arms ours transformers] [--json FILE]

Both arms predict the same prompts with the same weights in one process; an arm whose tokens differ from those of
transformers is void. `again_s` is a second call, in which loopwright has nothing left to prove. The causal model counts
upwards from its last token until the end of its vocabulary, so that its answers have known lengths and its choices are
far apart in bf16; T5 has random weights in fp32. Results are written after every arm.
"""

from __future__ import annotations

import argparse
import json
import logging
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from lengths import Lengths

PAD, BATCH = 0, 8
ARMS = ("ours", "transformers")
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


@dataclass(frozen=True)
class Task:
    """Prompts, and a model that answers them."""

    build: Callable[[], Any]
    prompts: list[list[int]]
    longest: int
    """The most new tokens of an answer."""
    has_encoder: bool

    def collate(self, items: list[dict[str, list[int]]]) -> dict[str, torch.Tensor]:
        rows = [item["input_ids"] for item in items]
        width = max(map(len, rows))
        gaps = [width - len(row) for row in rows]
        if self.has_encoder:
            ids = [row + [PAD] * gap for row, gap in zip(rows, gaps, strict=True)]
        else:
            ids = [[PAD] * gap + row for row, gap in zip(rows, gaps, strict=True)]
        tokens = torch.tensor(ids)
        return {"input_ids": tokens, "attention_mask": (tokens != PAD).long()}


def causal(tiny: bool, batches: int) -> Task:
    """A model of the size of Qwen2.5-0.5B; the answer of a prompt ends after 8 to 64 tokens."""
    longest, words = (12, 512) if tiny else (64, 151_936)
    lengths = Lengths(2.0, 0.8, 4, 32) if tiny else Lengths(5.0, 0.8, 16, 1024)
    rng = np.random.default_rng(0)
    prompts = [rng.integers(3, words, n).tolist() for n in lengths.draw(batches * BATCH, 0)]
    for prompt, answer in zip(prompts, rng.integers(longest // 8, longest, len(prompts)), strict=True):
        prompt[-1] = words - 1 - int(answer)

    def build() -> Any:
        from transformers import Qwen2Config, Qwen2ForCausalLM

        torch.manual_seed(0)
        size = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
        if not tiny:
            size = {"hidden_size": 896, "intermediate_size": 4864, "num_hidden_layers": 24, "num_attention_heads": 14}
        config = Qwen2Config(
            vocab_size=words, num_key_value_heads=2, tie_word_embeddings=False, pad_token_id=PAD,
            eos_token_id=words - 1, bos_token_id=None, **size,
        )  # fmt: skip
        with torch.device(DEVICE):
            model = Qwen2ForCausalLM(config).to(torch.bfloat16 if DEVICE == "cuda" else torch.float32)
            table = torch.randn(words, config.hidden_size)
        with torch.no_grad():
            model.get_input_embeddings().weight.copy_(table)
            model.get_output_embeddings().weight.copy_(table.roll(1, 0))  # of every token, the one before it
        model.generation_config.max_new_tokens = longest
        return model.eval()

    return Task(build, prompts, longest, has_encoder=False)


def t5(tiny: bool, batches: int) -> Task:
    """T5-v1.1-base, in fp32."""
    longest, words = (12, 512) if tiny else (48, 32_128)
    lengths = Lengths(2.0, 0.8, 4, 32) if tiny else Lengths(5.0, 0.8, 8, 512)
    rng = np.random.default_rng(1)
    prompts = [rng.integers(3, words, n).tolist() for n in lengths.draw(batches * BATCH, 1)]

    def build() -> Any:
        from transformers import T5Config, T5ForConditionalGeneration

        torch.manual_seed(0)
        size = {"d_model": 32, "d_kv": 16, "d_ff": 64, "num_layers": 2, "num_heads": 2}
        if not tiny:
            size = {"d_model": 768, "d_kv": 64, "d_ff": 2048, "num_layers": 12, "num_heads": 12}
        config = T5Config(
            vocab_size=words, feed_forward_proj="gated-gelu", tie_word_embeddings=False, pad_token_id=PAD,
            eos_token_id=1, decoder_start_token_id=PAD, **size,
        )  # fmt: skip
        with torch.device(DEVICE):
            model = T5ForConditionalGeneration(config)
        model.generation_config.max_length = longest
        return model.eval()

    return Task(build, prompts, longest, has_encoder=True)


MODELS = {"causal": causal, "t5": t5}


def trainer_of(arm: str, task: Task, model: Any, folder: str) -> Any:
    if arm == "ours":
        from loopwright import Seq2SeqTrainer, Seq2SeqTrainingArguments

        extra = {} if task.has_encoder else {"generation_max_length": task.longest}
    else:
        from transformers import Seq2SeqTrainer, Seq2SeqTrainingArguments

        extra = {}
    args = Seq2SeqTrainingArguments(
        folder, predict_with_generate=True, per_device_eval_batch_size=BATCH, disable_tqdm=True, report_to=[],
        use_cpu=DEVICE == "cpu", **extra,
    )  # fmt: skip
    return Seq2SeqTrainer(model, args, task.collate)


def answers(arm: str, task: Task, predictions: np.ndarray) -> np.ndarray:
    """The new tokens, padded; transformers keeps the prompts of decoder-only models, as wide as in their batch."""
    if task.has_encoder or arm == "ours":
        return np.where(predictions == -100, PAD, predictions)
    found = np.full((len(predictions), task.longest), PAD)
    for start in range(0, len(predictions), BATCH):
        width = max(map(len, task.prompts[start : start + BATCH]))
        rows = predictions[start : start + BATCH, width : width + task.longest]
        found[start : start + BATCH, : rows.shape[1]] = np.where(rows == -100, PAD, rows)
    return found


def measure(arm: str, task: Task, model: Any, expected: np.ndarray | None) -> tuple[dict[str, Any], np.ndarray]:
    data = [{"input_ids": prompt} for prompt in task.prompts]
    with tempfile.TemporaryDirectory() as folder:
        trainer = trainer_of(arm, task, model, folder)
        model.generate(**{k: v.to(DEVICE) for k, v in task.collate(data[:2]).items()}, max_new_tokens=2)  # warm
        seconds = []
        for _ in range(2 if arm == "ours" else 1):
            if DEVICE == "cuda":
                torch.cuda.reset_peak_memory_stats()
            started = time.perf_counter()
            output = trainer.predict(data)
            seconds.append(time.perf_counter() - started)
        found = answers(arm, task, output.predictions)
    tokens = int((found != PAD).sum())
    result = {"status": "ok", "seconds": seconds[0], "again_s": seconds[-1], "samples": len(data), "tokens": tokens,
              "samples_per_s": len(data) / seconds[0], "again_samples_per_s": len(data) / seconds[-1]}  # fmt: skip
    if DEVICE == "cuda":
        result["peak_gib"] = torch.cuda.max_memory_allocated() / 2**30
    if arm == "ours":
        state = trainer._loopwright.evaluation._joined
        result |= {"joined": bool(state._is_on), "reason": state.reason}
    if expected is not None:
        rows = int((found[:, : expected.shape[1]] != expected[:, : found.shape[1]]).any(1).sum())
        result |= {"rows_with_other_tokens": rows, "status": "void" if rows else "ok"}
    return result, found


def main() -> int:
    parser = argparse.ArgumentParser(description="Generation in evaluation, both arms in one run.")
    parser.add_argument("--models", nargs="+", choices=MODELS, default=[*MODELS])
    parser.add_argument("--arms", nargs="+", choices=ARMS, default=["transformers", "ours"])
    parser.add_argument("--batches", type=int, default=16)
    parser.add_argument("--tiny", action="store_true", help="models of two layers, to try the script itself")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "src"))
    logging.basicConfig(level=logging.WARNING)
    device = torch.cuda.get_device_name() if DEVICE == "cuda" else "cpu"
    report: dict[str, Any] = {"device": device, "torch": torch.__version__, "batch": BATCH, "results": {}}
    for name in options.models:
        task = MODELS[name](options.tiny, options.batches)
        model, expected = task.build(), None
        results = report["results"][name] = {}
        for arm in sorted(options.arms, key=lambda arm: arm != "transformers"):
            results[arm], found = measure(arm, task, model, expected)
            expected = found if expected is None else expected
            if len(results) == 2:
                results["ratio"] = results["ours"]["samples_per_s"] / results["transformers"]["samples_per_s"]
            if options.json:
                options.json.write_text(json.dumps(report, indent=2) + "\n")
            print(name, arm, json.dumps(results[arm]), flush=True)
        del model
    return int(any(arm.get("status") == "void" for each in report["results"].values() for arm in each.values()
                   if isinstance(arm, dict)))  # fmt: skip


if __name__ == "__main__":
    sys.exit(main())
