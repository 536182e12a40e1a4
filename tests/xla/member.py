"""One of several processes on lazy XLA: `torchrun member.py FOLDER`. The first one prints what it found."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import torch

import loopwright
from tests.models import Tokens, summed
from tests.xla.runs import MODELS, losses, trainer


class Counted(loopwright.Trainer):
    """Returns the sum and the count of its targets, which are divided once, over all processes."""

    def compute_loss(self, model, inputs, return_outputs=False, **kwargs):  # type: ignore[no-untyped-def]
        labels = inputs.pop("labels")
        outputs = model(**inputs)
        loss = summed(outputs["logits"], labels)
        return (loss, outputs) if return_outputs else loss


class HalfUsed(Tokens):
    """A part of it takes part in the loss of the first process only."""

    def __init__(self, *sizes: int) -> None:
        super().__init__(*sizes)
        self.sometimes = torch.nn.Parameter(torch.zeros(13))
        self.uses = True

    def logits(self, input_ids: Any) -> Any:
        found = super().logits(input_ids)
        return found + self.sometimes if self.uses else found


def half_used() -> Any:
    torch.manual_seed(0)
    model = HalfUsed()
    model.uses = os.environ.get("RANK", "0") == "0"
    return model


MODELS["unused"] = (half_used, False)


SITUATIONS: dict[str, tuple[str, dict[str, Any]]] = {
    "own": ("own", {}),
    "bert": ("bert", {}),
    "accumulated": ("own", {"gradient_accumulation_steps": 2}),
    "skipping": ("own", {"on_nonfinite": "skip"}),
    "counted": ("own", {"cls": Counted}),
    "unused": ("unused", {}),
}


def report(situation: str, folder: str) -> None:
    name, options = SITUATIONS[situation]
    rows = 4 // int(os.environ.get("WORLD_SIZE", "1"))
    options = {**options, "per_device_train_batch_size": rows, "per_device_eval_batch_size": rows,
               "eval_strategy": "epoch"}  # fmt: skip
    run = trainer(name, folder, save_strategy="steps", save_steps=2, **options)
    run.train()
    predictions = run.predict(run.eval_dataset).predictions
    again = trainer(name, f"{folder}/again", **options)
    again.train(resume_from_checkpoint=str(Path(folder) / "checkpoint-2"))
    weights = [parameter.cpu().tolist() for parameter in run.model.parameters()]
    ours = run._loopwright
    found = {
        "situation": situation, "strategy": type(ours.strategy).__name__, "device": ours.device.type,
        "spans": getattr(ours.strategy, "spans", None), "losses": losses(run), "again": losses(again),
        "predictions": predictions.tolist(), "weights": weights,
        "alike": not ours.strategy.any_rank(ours.strategy.broadcast(weights) != weights),
    }  # fmt: skip
    if run.args.process_index == 0:
        print("FOUND " + json.dumps(found), flush=True)


def main(folder: str) -> None:
    torch.set_num_threads(1)
    for situation in SITUATIONS:
        report(situation, f"{folder}/{situation}")


if __name__ == "__main__":
    main(sys.argv[1])
