"""Trains with the test device, in one process and then in two: `member.py LIBRARY FOLDER`."""

from __future__ import annotations

import functools
import json
import os
import sys
from pathlib import Path
from typing import Any

import torch

import loopwright
from tests.native_device import collectives, device
from tests.native_device.contract import MODELS, losses, trainer_on
from tests.ranks import run_ranks

SITUATIONS: dict[str, tuple[str, dict[str, Any]]] = {
    "data-parallel": ("own", {}),
    "a model of transformers": ("bert tokens", {"max_grad_norm": 1.0}),
    "accumulated": ("own", {"gradient_accumulation_steps": 2}),
    "sharded": ("own", {"fsdp": "full_shard"}),
    "layers split": ("own", {"parallelism_config": {"tp_size": 2, "tp_plan": {"mix": "colwise", "head": "rowwise"}}}),
}
SPREAD = ("fsdp", "parallelism_config")


def report(situation: str, folder: Path) -> None:
    name, options = SITUATIONS[situation]
    world = int(os.environ.get("WORLD_SIZE", "1"))
    parts = 1 if "parallelism_config" in options else world  # of the data
    rows = {"per_device_train_batch_size": 4 // parts, "per_device_eval_batch_size": 4 // parts}
    options = options if world > 1 else {key: value for key, value in options.items() if key not in SPREAD}
    run = trainer_on(device.NAME, name, folder, optim="adamw_torch", eval_strategy="epoch", save_strategy="epoch",
                     **rows, **options)  # fmt: skip
    run.train()
    run.save_model(str(folder / "whole"))  # all processes, however the weights are spread
    if run.args.process_index == 0:
        model = loopwright.load_model(MODELS[name][0](), folder / "whole")
        weights = [float(each) for tensor in model.state_dict().values() for each in tensor.reshape(-1)]
        strategy = type(run._loopwright.strategy).__name__
        found = {"world": world, "situation": situation, "strategy": strategy, "losses": losses(run)}
        print("FOUND " + json.dumps({**found, "weights": weights}), flush=True)


def train(library: str, folder: Path) -> None:
    device.register(Path(library))
    collectives.register()
    for situation in SITUATIONS:
        report(situation, folder / situation)


def main(library: str, folder: str) -> None:
    torch.set_num_threads(1)
    for make, _ in MODELS.values():
        make()  # imports what the processes need
    for world in (1, 2):
        run_ranks(world, functools.partial(train, library, Path(folder) / str(world)))


if __name__ == "__main__":
    main(*sys.argv[1:])
