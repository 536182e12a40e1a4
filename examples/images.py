"""Classify images with a model of your own: a small convolutional network.

    python examples/images.py                          # generated shapes
    python examples/images.py --data photos            # photos/cat/1.png, photos/dog/1.png, ... (needs Pillow)
"""

from __future__ import annotations

import argparse
from pathlib import Path

import numpy as np
from generated import images
from torch import nn

from loopwright import Trainer, TrainingArguments, set_seed

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--data", help="a folder with a subfolder per class")
parser.add_argument("--output", default="runs/images")
options = parser.parse_args()


class Net(nn.Module):
    def __init__(self, channels: int, classes: int) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Conv2d(channels, 16, 3, stride=2), nn.BatchNorm2d(16), nn.ReLU(),
            nn.Conv2d(16, 32, 3, stride=2), nn.BatchNorm2d(32), nn.ReLU(),
            nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(32, classes),
        )  # fmt: skip

    def forward(self, pixel_values, labels=None):
        logits = self.layers(pixel_values)
        loss = None if labels is None else nn.functional.cross_entropy(logits, labels)
        return {"loss": loss, "logits": logits} if loss is not None else {"logits": logits}


def read_folder(folder: Path) -> list[dict]:
    from PIL import Image

    classes = sorted(path.name for path in folder.iterdir() if path.is_dir())
    files = [(path, label) for label, name in enumerate(classes) for path in sorted((folder / name).iterdir())]
    pixels = [np.asarray(Image.open(path).convert("RGB").resize((64, 64)), dtype=np.float32) / 255 for path, _ in files]
    return [{"pixel_values": a.transpose(2, 0, 1), "labels": b} for a, (_, b) in zip(pixels, files, strict=True)]


set_seed(0)
samples = read_folder(Path(options.data)) if options.data else images(1500)
order = np.random.default_rng(0).permutation(len(samples))
train, test = ([samples[i] for i in part] for part in np.split(order, [len(samples) * 9 // 10]))
model = Net(channels=samples[0]["pixel_values"].shape[0], classes=1 + max(row["labels"] for row in samples))

trainer = Trainer(
    model=model,
    args=TrainingArguments(
        output_dir=options.output,
        num_train_epochs=8,
        per_device_train_batch_size=32,
        learning_rate=1e-2,
        eval_strategy="epoch",
        save_strategy="epoch",
        save_total_limit=1,
        report_to="none",
    ),
    train_dataset=train,
    eval_dataset=test,
    compute_metrics=lambda e: {"accuracy": float((e.predictions.argmax(-1) == e.label_ids).mean())},
)
trainer.train()
print(f"accuracy {trainer.evaluate()['eval_accuracy']:.3f}")
