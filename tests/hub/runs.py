"""Small runs that push."""

from __future__ import annotations

import hashlib
import json
from typing import Any

import torch
from torch import nn

from loopwright import Trainer, TrainingArguments

from .server import TOKEN, Commit

DATA = [{"x": torch.full((4,), i / 8), "labels": torch.tensor([i / 4])} for i in range(16)]


class Model(nn.Module):
    """A regression with dropout, so that a resumed run needs its random states."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.first, self.drop, self.last = nn.Linear(4, 8), nn.Dropout(0.2), nn.Linear(8, 1)

    def forward(self, x: Any, labels: Any = None) -> dict[str, Any]:
        outputs = self.last(self.drop(torch.tanh(self.first(x))))
        return {"loss": nn.functional.mse_loss(outputs, labels), "logits": outputs}


def arguments(folder: Any = "run", **options: Any) -> TrainingArguments:
    usual = {
        "use_cpu": True, "disable_tqdm": True, "report_to": [], "logging_steps": 1, "max_steps": 6, "save_steps": 2,
        "per_device_train_batch_size": 4, "learning_rate": 0.05,
        "push_to_hub": True, "hub_model_id": "me/model", "hub_token": TOKEN,
    }  # fmt: skip
    return TrainingArguments(str(folder), **{**usual, **options})


def trainer_of(folder: Any = "run", kind: type[Trainer] = Trainer, **options: Any) -> Trainer:
    callbacks = options.pop("callbacks", None)
    return kind(Model(), arguments(folder, **options), train_dataset=DATA, eval_dataset=DATA[:4], callbacks=callbacks)


def checked(commit: Commit, folder: str) -> int:
    """The step of a checkpoint in a commit, after all files of its manifest were found in it, intact."""
    manifest = json.loads(commit.files[f"{folder}/manifest.json"])
    for name, expected in manifest["files"].items():
        content = commit.files[f"{folder}/{name}"]
        assert hashlib.sha256(content).hexdigest() == expected["sha256"], name
    return int(manifest["step"])


def final_weights(folder: Any, step: int = 6) -> dict[str, Any]:
    from safetensors.torch import load_file

    return load_file(f"{folder}/checkpoint-{step}/model.safetensors")
