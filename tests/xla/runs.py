"""Small runs on XLA and on the CPU, from the same weights and data."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import nn

import loopwright
from tests.models import CPU, Tokens, bert_classes, gpt2, llama, made, pad, samples

RAGGED = (11, 3, 29, 8, 17, 5, 20, 9, 13, 4, 26)


class Dropped(Tokens):
    """With dropout, so that the device's random stream matters."""

    def logits(self, input_ids: Any) -> Any:
        hidden = torch.tanh(self.mix(self.embed(input_ids)))
        return self.head(nn.functional.dropout(hidden, 0.3, self.training))


MODELS: dict[str, tuple[Any, bool]] = {
    "own": (lambda: made(Tokens), False), "dropped": (lambda: made(Dropped), False), "llama": (llama, False),
    "wide": (lambda: made(Tokens, 16, 8), False), "bert": (bert_classes, True), "gpt2": (gpt2, False),
}  # fmt: skip


def trainer(name: str, folder: Any, *, cls: Any = loopwright.Trainer, kind: Any = None, **options: Any) -> Any:
    build, classes = MODELS[name]
    own = ("callbacks", "compute_metrics", "compute_loss_func")
    given = {key: options.pop(key) for key in own if key in options}
    base = {**CPU, "use_cpu": False, "static_lengths": [32], "num_train_epochs": 2, "per_device_train_batch_size": 4,
            "per_device_eval_batch_size": 4, "optim": "adamw_torch", "max_grad_norm": 1.0, "learning_rate": 1e-3,
            "lr_scheduler_type": "linear", "async_save": False}  # fmt: skip
    args = (kind or loopwright.TrainingArguments)(output_dir=str(folder), **{**base, **options})
    data = samples(RAGGED, classes=classes)
    return cls(model=build().float(), args=args, data_collator=pad, train_dataset=data, eval_dataset=data, **given)


def losses(trained: Any) -> list[float]:
    return [log[key] for log in trained.state.log_history for key in ("loss", "eval_loss") if key in log]


def apart(one: nn.Module, other: nn.Module) -> float:
    """The largest difference between the weights of two models."""
    pairs = zip(one.state_dict().values(), other.state_dict().values(), strict=True)
    return max(float((a.cpu() - b.cpu()).abs().max()) for a, b in pairs)


def saved(folder: Any, step: int) -> str:
    return str(Path(folder) / f"checkpoint-{step}")
