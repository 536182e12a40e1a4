"""Trains with NeuronTrainer as it is by default, in one process and then in two: `member.py FOLDER`."""

from __future__ import annotations

import functools
import json
import sys

import torch

import loopwright
from tests.models import CPU, llama, pad, samples
from tests.ranks import run_ranks


def train(folder: str) -> None:
    args = loopwright.NeuronTrainingArguments(folder, **{**CPU, "static_lengths": [32], "optim": "adamw_torch",
        "num_train_epochs": 2, "learning_rate": 1e-2})  # fmt: skip
    args.per_device_train_batch_size = 4 // args.world_size
    args.per_device_eval_batch_size = 4 // args.world_size
    data = samples((11, 3, 29, 8, 17, 5, 20))
    trainer = loopwright.NeuronTrainer(llama().float(), args, pad, data, data)
    trainer.train()
    metrics = trainer.evaluate()
    losses = [log["loss"] for log in trainer.state.log_history if "loss" in log]
    if args.process_index == 0:
        print(
            "FOUND " + json.dumps([type(trainer._loopwright.strategy).__name__, *losses, metrics["eval_loss"]]),
            flush=True,
        )


def main(folder: str) -> None:
    torch.set_num_threads(1)
    llama()  # imports what the processes need
    for world in (1, 2):
        run_ranks(world, functools.partial(train, f"{folder}/{world}"))


if __name__ == "__main__":
    main(sys.argv[1])
