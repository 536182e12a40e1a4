"""Evaluation and prediction in proved layouts on a GPU, against the collator's batches.

Also runs without pytest: `python3 tests/gpu/test_evaluation_gpu.py`. Words after the name choose tests.
"""

from __future__ import annotations

import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

if __name__ == "__main__":
    sys.path[:0] = [str(Path(__file__).parents[2] / "src"), str(Path(__file__).parents[2])]

from loopwright import Trainer, TrainingArguments
from loopwright.pt.evaluation.host_copies import HostCopy
from loopwright.speed.attention import dispatch
from tests.gpu.script import needs_gpu, run_tests

pytestmark = needs_gpu()


def rows(count: int, vocabulary: int, *, classes: bool) -> list[dict[str, Any]]:
    generator = torch.Generator().manual_seed(1)
    made = []
    for _ in range(count):
        length = int(torch.randint(8, 200, (), generator=generator))
        ids = torch.randint(5, vocabulary, (length,), generator=generator)
        made.append({"input_ids": ids, "labels": ids[0] % 2 if classes else ids.clone()})
    return made


def pad(batch: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
    ids = [row["input_ids"] for row in batch]
    labels = [row["labels"] for row in batch]
    padded = nn.utils.rnn.pad_sequence
    return {
        "input_ids": padded(ids, batch_first=True),
        "attention_mask": padded([torch.ones_like(each) for each in ids], batch_first=True),
        "labels": padded(labels, batch_first=True, padding_value=-100) if labels[0].dim() else torch.stack(labels),
    }


def llama(vocabulary: int = 20_000) -> nn.Module:
    import transformers

    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=vocabulary, hidden_size=256, intermediate_size=512, num_hidden_layers=4, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=512, initializer_range=0.1, use_cache=False,
    )  # fmt: skip
    return transformers.LlamaForCausalLM(config)


CLASSES = 256
"""Most of the distance of one logit is a shift that all samples share: it averages out over many."""


def bert() -> nn.Module:
    import transformers

    torch.manual_seed(0)
    config = transformers.BertConfig(
        vocab_size=5000, hidden_size=256, intermediate_size=512, num_hidden_layers=4, num_attention_heads=4,
        num_labels=CLASSES, initializer_range=0.1,
    )  # fmt: skip
    return transformers.BertForSequenceClassification(config)


def trainer_of(model: nn.Module, data: Any, speed: str, **more: Any) -> Trainer:
    given = {"bf16": True, "report_to": "none", "disable_tqdm": True, "save_strategy": "no", **more}
    args = TrainingArguments(tempfile.mkdtemp(), speed=speed, per_device_eval_batch_size=8, **given)
    return Trainer(model, args, eval_dataset=data, train_dataset=data, data_collator=pad)


def on(trainer: Trainer) -> dict[str, bool]:
    rows = trainer.speed_report().as_dict()["choices"]
    print("       ", "\n        ".join(f"{row['name']} {row['on']}: {row['reason']}" for row in rows), flush=True)
    return {row["name"]: row["on"] for row in rows}


def test_the_loss_without_logits_in_rows() -> None:
    data = rows(400, 20_000, classes=False)
    plain = trainer_of(llama(), data, "off").evaluate()["eval_loss"]
    trainer = trainer_of(llama(), data, "max")
    found = [trainer.evaluate()["eval_loss"] for _ in range(2)]
    choices = on(trainer)
    assert choices["evaluation: flat"] and choices["evaluation: fused loss"]
    assert found[0] == found[1]
    assert abs(found[0] - plain) <= 1e-3 * plain, (found, plain)


def test_predictions_come_in_order() -> None:
    data = rows(600, 5000, classes=True)
    plain = trainer_of(bert(), data, "off").predict(data)
    exact = trainer_of(bert(), data, "off", bf16=False).predict(data).predictions
    trainer = trainer_of(bert(), data, "max")
    found = [trainer.predict(data) for _ in range(2)]
    assert on(trainer)["predictions: unpadded"]
    np.testing.assert_array_equal(found[0].predictions, found[1].predictions)
    np.testing.assert_array_equal(found[0].label_ids, plain.label_ids)
    assert found[0].predictions.dtype == plain.predictions.dtype
    far, usual = (np.abs(each.predictions - exact) / exact.std() for each in (found[0], plain))
    moved = np.abs(np.roll(plain.predictions, 1, axis=0) - exact) / exact.std()
    say = ", ".join(f"{name} {each.mean():.2e}, at most {each.max():.2e}" for name, each in
                    (("loopwright", far), ("as written", usual), ("another sample", moved)))  # fmt: skip
    print("        distance to single precision:", say, flush=True)
    assert far.mean() <= 1.25 * usual.mean() and far.max() <= 2 * usual.max() < moved.max() / 10


def test_evaluations_between_updates() -> None:
    data = rows(128, 20_000, classes=False)
    losses = []
    for speed in ("off", "max"):
        trainer = trainer_of(
            llama(), data, speed, max_steps=4, eval_strategy="steps", eval_steps=2, learning_rate=0.0,
            per_device_train_batch_size=8,
        )  # fmt: skip
        trainer.train()
        losses.append([row["eval_loss"] for row in trainer.state.log_history if "eval_loss" in row])
    assert on(trainer)["evaluation: flat"]
    assert np.allclose(losses[0], losses[1], rtol=1e-3), losses


def test_a_planted_kernel_is_refused() -> None:
    exact = dispatch.by_kernel
    data = rows(200, 20_000, classes=False)
    plain = trainer_of(llama(), data, "off").evaluate()["eval_loss"]
    try:
        dispatch.by_kernel = lambda query, *rest: exact(query * 1.05, *rest)  # type: ignore[assignment]
        trainer = trainer_of(llama(), data, "max")
        found = trainer.evaluate()["eval_loss"]
    finally:
        dispatch.by_kernel = exact
    assert not on(trainer).get("evaluation: flat")
    assert abs(found - plain) <= 1e-3 * plain


def test_copies_do_not_wait() -> None:
    """The copy of a result is begun while the device still computes it."""
    large = torch.randn(8192, 8192, device="cuda")
    torch.cuda.synchronize()
    started = time.perf_counter()
    for _ in range(20):
        large = large @ large * 1e-4
    copy = HostCopy((large[:4], None))
    begun = time.perf_counter() - started
    found = copy.result()[0]
    waited = time.perf_counter() - started
    assert torch.equal(found, large[:4].cpu()) and found.device.type == "cpu"
    print(f"        begun after {1000 * begun:.1f} ms of {1000 * waited:.1f}", flush=True)
    assert begun < 0.5 * waited


if __name__ == "__main__":
    sys.exit(run_tests(globals()))
