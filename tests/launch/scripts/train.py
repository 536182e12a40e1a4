"""A training run in double precision whose trouble is asked for on the command line; writes down what it did.

Started on W processes it accumulates so that the samples of each update are the same for every W.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import time
from pathlib import Path

import torch
from torch import nn

from loopwright import Trainer, TrainerCallback, TrainingArguments

parser = argparse.ArgumentParser()
parser.add_argument("--output", required=True)
parser.add_argument("--rows", type=int, default=64)
parser.add_argument("--micro-batches", type=int, default=4, help="of an update, over all processes")
parser.add_argument("--batch", type=int, default=2)
parser.add_argument("--save-steps", type=int, default=1)
parser.add_argument("--seconds", type=float, default=0.0, help="of an update at least, until OUTPUT/hurry exists")
parser.add_argument("--timeout", type=int, default=60)
parser.add_argument("--workers", type=int, default=0)
parser.add_argument("--sleep", help="RANK:STEP at which this rank's data takes forever")
parser.add_argument("--die", help="RANK:STEP at which this rank is killed, once")
parser.add_argument("--error", help="RANK:STEP at which this rank raises")
options = parser.parse_args()
RANK, WORLD = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
FOLDER = Path(options.output)


class Rows(torch.utils.data.Dataset):
    def __len__(self) -> int:
        return options.rows

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        generator = torch.Generator().manual_seed(index)
        x = torch.randn(4, generator=generator, dtype=torch.float64)
        return {"x": x, "labels": x.sum() + 0.1 * index, "ids": torch.tensor(index)}


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.hidden, self.out = nn.Linear(4, 8).double(), nn.Linear(8, 1).double()

    def forward(self, x: torch.Tensor, labels: torch.Tensor, ids: torch.Tensor) -> dict[str, torch.Tensor]:
        if self.training:
            seen.extend(ids.tolist())
        prediction = self.out(torch.tanh(self.hidden(x))).squeeze(-1)
        return {"loss": nn.functional.mse_loss(prediction, labels)}


seen: list[int] = []


def is_at(where: str | None, step: int) -> bool:
    return where is not None and where == f"{RANK}:{step}"


class Trouble(TrainerCallback):
    """Does what the command line asks for, and notes each finished update."""

    def on_step_begin(self, args, state, control, **kwargs):
        del seen[:]
        step = state.global_step + 1
        mark = FOLDER / f"died-{RANK}-{step}"
        if is_at(options.sleep, step):
            stuck_in_the_data()
        if is_at(options.error, step):
            raise ValueError(f"rank {RANK} cannot go on at step {step}")
        if is_at(options.die, step) and not mark.exists():
            mark.touch()
            os.kill(os.getpid(), signal.SIGKILL)

    def on_step_end(self, args, state, control, **kwargs):
        if not (FOLDER / "hurry").exists():
            time.sleep(options.seconds)
        parts = [list(seen)] * WORLD
        if WORLD > 1:
            torch.distributed.all_gather_object(parts, list(seen))
        line = {
            "step": state.global_step,
            "rank": RANK,
            "world": WORLD,
            "ids": sum(parts, []),
            "lr": trainer._loopwright.run.learning_rate,
            "host": os.uname().nodename,
            "time": time.time(),
        }
        with open(FOLDER / f"updates-{RANK}-{os.getpid()}.jsonl", "a") as file:
            file.write(json.dumps(line) + "\n")


def stuck_in_the_data() -> None:
    time.sleep(600)


FOLDER.mkdir(parents=True, exist_ok=True)
args = TrainingArguments(
    options.output,
    num_train_epochs=1,
    per_device_train_batch_size=options.batch,
    use_cpu=True,
    disable_tqdm=True,
    gradient_accumulation_steps=max(1, options.micro_batches // WORLD),
    learning_rate=1e-2,
    save_steps=options.save_steps,
    save_strategy="steps",
    logging_steps=1,
    seed=7,
    ddp_timeout=options.timeout,
    report_to="none",
    dataloader_num_workers=options.workers,
)
trainer = Trainer(Net(), args, train_dataset=Rows(), callbacks=[Trouble()])
trainer.train()
if trainer.is_world_process_zero():
    torch.save(trainer.model.state_dict(), FOLDER / "weights.pt")
    result = {"steps": trainer.state.global_step, "log": trainer.state.log_history}
    (FOLDER / "done.json").write_text(json.dumps(result))
print("training is over", flush=True)
