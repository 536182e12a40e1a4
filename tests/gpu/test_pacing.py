"""Live numbers on a GPU: no wait, a time split from events, MFU; also runs without pytest, as a script."""

from __future__ import annotations

import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

if __name__ == "__main__":
    sys.path[:0] = [str(Path(__file__).parents[2] / "src"), str(Path(__file__).parents[2])]

from loopwright import Trainer, TrainerCallback, TrainingArguments
from loopwright.callbacks.metrics_file import read_metrics
from loopwright.speed.measure.peaks import device_peak
from loopwright.speed.measure.step_timing import FIRST
from tests.gpu.script import needs_gpu, run_tests

pytestmark = needs_gpu()

WIDTH, VOCAB, LENGTH = 1024, 512, 256


class Blocks(nn.Module):
    """Token ids through some matrix products large enough to keep a GPU busy."""

    def __init__(self, layers: int = 8) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(VOCAB, WIDTH), nn.Linear(WIDTH, VOCAB, bias=False)
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(layers))

    def forward(self, input_ids: Tensor, attention_mask: Tensor, labels: Tensor) -> dict[str, Tensor]:
        x = self.embed(input_ids)
        for layer in self.layers:
            x = x + torch.relu(layer(x))
        return {"loss": nn.functional.cross_entropy(self.head(x).flatten(0, 1).float(), labels.flatten())}


class NoWaiting(TrainerCallback):
    """Every wait of the host between two log points is an error, sampled updates included."""

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        torch.cuda.set_sync_debug_mode("error" if state.global_step % args.logging_steps else "default")

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step % args.logging_steps == 0:
            torch.cuda.set_sync_debug_mode("default")


def data(count: int) -> list[dict[str, Tensor]]:
    ids = torch.randint(0, VOCAB, (count, LENGTH), generator=torch.Generator().manual_seed(0))
    mask = torch.ones(LENGTH, dtype=torch.int64)
    mask[LENGTH // 2 :] = 0
    return [{"input_ids": row, "attention_mask": mask, "labels": row} for row in ids]


def train(updates: int = FIRST + 9, **options: Any) -> tuple[Trainer, str, float]:
    folder = tempfile.mkdtemp()
    args = TrainingArguments(folder, **{"per_device_train_batch_size": 32, "max_steps": updates, "logging_steps": 5,
                                        "save_strategy": "no", "disable_tqdm": True, "bf16": True, "speed": "off",
                                        **options})  # fmt: skip
    torch.manual_seed(0)
    trainer = Trainer(Blocks(), args, train_dataset=data(32 * updates), callbacks=[NoWaiting()])
    started = time.perf_counter()
    try:
        trainer.train()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    return trainer, folder, time.perf_counter() - started


def test_events_split_an_update_without_a_wait() -> None:
    report = train()[0].speed_report()
    print(report)
    assert report.sampled_updates == 1 and report.update_seconds
    assert {"forward", "backward", "optimizer"} <= set(report.split)
    assert report.split["backward"] > report.split["forward"] > 0
    # The events' own sum is the length of an update as the wall clock sees it, to a factor.
    assert 0.2 < report.update_seconds * report.numbers["steps_per_second"] < 5


def test_every_log_point_says_how_well_the_device_is_used() -> None:
    trainer, folder, seconds = train()
    rows = [row["pace"] for row in read_metrics(folder) if "loss" in row]
    print(rows[-1], f"{seconds:.1f} s")
    for row in rows:
        assert row["useful_token_share"] == 0.5 and row["peak_memory_gib"] > 0.05
        assert abs(row["computed_tokens_per_second"] / row["tokens_per_second"] - 2) < 1e-3
    if device_peak(trainer._loopwright.device, "bf16") is None:
        assert all("mfu" not in row for row in rows)
        return
    weights = WIDTH * (8 * WIDTH + VOCAB)
    assert (
        trainer._loopwright.pacing.operations is not None
        and abs(trainer._loopwright.pacing.operations.per_token / (6 * weights) - 1) < 1e-6
    )
    assert all(0 < row["mfu"] < 1 for row in rows)
    # All updates of the run cannot have taken longer than the run.
    assert sum(5 / row["steps_per_second"] for row in rows) < seconds


if __name__ == "__main__":
    sys.exit(run_tests(globals()))
