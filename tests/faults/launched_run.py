"""A run of several processes for `loopwright launch`; every rank writes down how it ended.

    loopwright launch -n 2 tests/faults/launched_run.py FOLDER OPTIONS
"""

from __future__ import annotations

import json
import os
import sys
from typing import Any

import torch
from torch import nn

from tests.faults import runs


class Plain(runs.Net):
    """A model without state that ranks compute on their own."""

    def __init__(self, *, normed: bool) -> None:
        super().__init__()
        del self.mean
        self.norm = nn.BatchNorm1d(8) if normed else nn.Identity()

    def forward(self, x: torch.Tensor, labels: torch.Tensor, ids: torch.Tensor) -> dict[str, torch.Tensor]:
        y = self.out(self.dropout(self.norm(torch.tanh(self.hidden(x))))).squeeze(-1)
        return {"loss": nn.functional.mse_loss(y, labels), "y": y}


def main(folder: str, options: dict[str, Any]) -> None:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    rank = int(os.environ.get("RANK", 0))
    notes = folder if rank == 0 else f"{folder}-rank{rank}"
    model, resume = Plain(normed=options.pop("normed", False)), options.pop("resume")
    trainer = runs.make(folder, model=model, notes=notes, per_device_train_batch_size=2, ddp_timeout=60, **options)
    runs.finish(trainer, resume, notes=notes)


if __name__ == "__main__":
    main(sys.argv[1], json.loads(sys.argv[2]))
