"""Regression on arrays with a model of your own, a loss of your own and a callback.

    python examples/arrays.py                              # generated
    python examples/arrays.py --data table.csv             # numbers, with a heading; the last column is predicted
"""

from __future__ import annotations

import argparse

import numpy as np
from torch import nn

from loopwright import EarlyStoppingCallback, Trainer, TrainerCallback, TrainingArguments, set_seed

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--data", help="a CSV file")
parser.add_argument("--output", default="runs/arrays")
options = parser.parse_args()


class Net(nn.Module):
    def __init__(self, inputs: int) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(inputs, 64), nn.GELU(), nn.Linear(64, 1))

    def forward(self, x, labels=None):
        return {"prediction": self.layers(x).squeeze(-1)}


class RobustTrainer(Trainer):
    """The Huber loss, which large errors influence less than the squared one."""

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        outputs = model(inputs["x"])
        loss = nn.functional.huber_loss(outputs["prediction"], inputs["labels"])
        return (loss, outputs) if return_outputs else loss


class Celebrate(TrainerCallback):
    def on_evaluate(self, args, state, control, metrics, **kwargs):
        if metrics["eval_loss"] < 0.02:
            print(f"epoch {state.epoch:.0f}: eval_loss {metrics['eval_loss']:.4f}")


set_seed(0)
if options.data:
    table = np.loadtxt(options.data, delimiter=",", skiprows=1, dtype=np.float32)
else:
    x = np.random.default_rng(0).normal(size=(2000, 3)).astype(np.float32)
    table = np.column_stack([x, np.sin(x[:, 0]) + x[:, 1] * x[:, 2]]).astype(np.float32)
samples = [{"x": row[:-1], "labels": row[-1]} for row in table]
split = len(samples) // 5

trainer = RobustTrainer(
    model=Net(inputs=table.shape[1] - 1),
    args=TrainingArguments(
        output_dir=options.output,
        num_train_epochs=30,
        per_device_train_batch_size=64,
        learning_rate=1e-2,
        lr_scheduler_type="cosine",
        eval_strategy="epoch",
        save_strategy="epoch",
        save_total_limit=2,
        load_best_model_at_end=True,
        metric_for_best_model="loss",
        report_to="none",
        disable_tqdm=True,
    ),
    train_dataset=samples[split:],
    eval_dataset=samples[:split],
    callbacks=[EarlyStoppingCallback(early_stopping_patience=3), Celebrate()],
)
trainer.train()
print(f"eval_loss {trainer.evaluate()['eval_loss']:.4f}")
