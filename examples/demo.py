"""Train a small language model on the sources of Python's own standard library, offline, in about a minute.

    make demo                          or:  python examples/demo.py --steps 1000

The script is written as for transformers' Trainer; only the import differs.
"""

from __future__ import annotations

import argparse
import sys
import sysconfig
import time
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import Dataset

from loopwright import Trainer, TrainingArguments, set_seed

WINDOW = 128  # bytes the model looks back over


# Data: every machine with Python has some megabytes of Python on it.


def read_sources(limit: int) -> tuple[bytes, bytes]:
    """Up to `limit` bytes of the standard library to train on, and other files of it to evaluate on."""
    files = sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))
    kept_back = files[::12]
    return _join([path for path in files if path not in kept_back])[:limit], _join(kept_back)[: limit // 30]


def _join(files: list[Path]) -> bytes:
    # One byte for a level of indentation, so that the window holds code and not spaces.
    return b"\n".join(path.read_bytes().replace(b"    ", b"\t") for path in files)


class Windows(Dataset):
    """Consecutive stretches of text: the bytes, and for each the byte that follows it."""

    def __init__(self, text: bytes) -> None:
        self.bytes = torch.frombuffer(bytearray(text), dtype=torch.uint8)

    def __len__(self) -> int:
        return (len(self.bytes) - 1) // WINDOW

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        stretch = self.bytes[index * WINDOW : (index + 1) * WINDOW + 1].long()
        return {"input_ids": stretch[:-1], "labels": stretch[1:]}


# Model: any nn.Module whose forward returns a dict with the loss will do.


class Block(nn.Module):
    """Attention over what came before, then a small network for each position."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width, bias=False), nn.Linear(width, width, bias=False)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        heads = self.qkv(self.norm1(x)).view(batch, length, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        attended = F.scaled_dot_product_attention(*heads, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).reshape(batch, length, width))
        return x + self.mlp(self.norm2(x))


class TinyGPT(nn.Module):
    """A GPT over the 256 bytes; about 0.8 million parameters."""

    def __init__(self, width: int = 128, depth: int = 3, heads: int = 4) -> None:
        super().__init__()
        # A position sees its own byte and the three before it: a model this small has no minute to spend on finding
        # out that neighbours matter.
        self.bytes = nn.ModuleList(nn.Embedding(256, width) for _ in range(4))
        self.positions = nn.Embedding(WINDOW, width)
        self.blocks = nn.Sequential(*(Block(width, heads) for _ in range(depth)))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, 256, bias=False)
        for module in self.modules():
            if isinstance(module, (nn.Linear, nn.Embedding)):
                nn.init.normal_(module.weight, std=0.02)

    def forward(self, input_ids: Tensor, labels: Tensor | None = None) -> dict[str, Tensor]:
        length = input_ids.shape[1]
        x = self.positions.weight[:length]
        for back, embedding in enumerate(self.bytes):
            x = x + embedding(F.pad(input_ids, (back, 0))[:, :length])
        logits = self.head(self.norm(self.blocks(x)))
        if labels is None:
            return {"logits": logits}
        return {"loss": F.cross_entropy(logits.flatten(0, 1), labels.flatten()), "logits": logits}

    @torch.no_grad()
    def write(self, prompt: str, length: int, temperature: float = 0.7) -> str:
        """Continue a prompt, one byte at a time."""
        self.eval()
        device = self.head.weight.device
        text = torch.tensor([list(prompt.encode())], device=device)
        for _ in range(length):
            logits = self(text[:, -WINDOW:])["logits"][:, -1] / temperature
            text = torch.cat([text, torch.multinomial(logits.softmax(-1), 1)], dim=1)
        return bytes(text[0].tolist()).decode(errors="replace").expandtabs(4)


# What is shown at the end.


def chart(points: list[tuple[int, float]], marks: list[tuple[int, float]], width: int = 72, height: int = 12) -> str:
    """The loss over the steps, drawn with characters; `marks` are the evaluations."""
    last = max(step for step, _ in points + marks)
    low = min(value for _, value in points + marks)
    span = max(value for _, value in points + marks) - low or 1.0
    rows = [[" "] * width for _ in range(height)]
    for symbol, series in ((".", points), ("E", marks)):
        for step, value in series:
            row = round((height - 1) * (1 - (value - low) / span))
            rows[row][round((width - 1) * step / last)] = symbol
    lines = [f"{low + span * (1 - index / (height - 1)):6.2f} |{''.join(row)}" for index, row in enumerate(rows)]
    return "\n".join([*lines, " " * 7 + "+" + "-" * width, f"{'step 0':>13}{last:>{width - 5}}"])


def report(trainer: Trainer, metrics: dict[str, float], seconds: float) -> None:
    history = trainer.state.log_history
    training = [(entry["step"], entry["loss"]) for entry in history if "loss" in entry]
    evaluations = [(entry["step"], entry["eval_loss"]) for entry in history if "eval_loss" in entry]
    folder = Path(trainer.args.output_dir)
    print("\nWhat it writes now, after `def `:\n")
    written = trainer.model.write("def ", 300)
    print(written)
    trainer.log({"sample": written})  # the report shows texts that are logged
    print("\nLoss per byte (. training, E evaluation on files it has not seen):\n")
    print(chart(training, evaluations))
    print(f"\nEvaluation loss {metrics['eval_loss']:.3f} nats per byte, after {seconds:.0f} seconds of training.")
    print(f"Results are in {folder}:")
    for path in sorted(folder.iterdir()):
        print(f"  {path.name}{'/' if path.is_dir() else ''}")
    print(f"\nThe report of the run, to open in a browser: {(folder / 'report.html').resolve()}")


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=500, help="updates to make")
    parser.add_argument("--output-dir", default=None, help="where results go (default: a new folder in runs/)")
    return parser.parse_args()


def main() -> None:
    options = parse()
    set_seed(0)
    train, held_back = read_sources(limit=4_000_000)
    model = TinyGPT()
    size = sum(weight.numel() for weight in model.parameters())
    print(f"Training a GPT of {size:,} parameters on {len(train):,} bytes of Python's standard library.")
    args = TrainingArguments(
        output_dir=options.output_dir or f"runs/demo-{time.strftime('%Y%m%d-%H%M%S')}",
        max_steps=options.steps,
        per_device_train_batch_size=16,
        per_device_eval_batch_size=64,
        learning_rate=3e-3,
        lr_scheduler_type="cosine",
        warmup_steps=options.steps // 10,
        weight_decay=0.1,
        adam_beta2=0.98,
        logging_steps=max(1, options.steps // 50),
        eval_strategy="steps",
        eval_steps=max(1, options.steps // 4),
        save_steps=max(1, options.steps // 4),
        save_total_limit=2,
        report_to="none",
    )
    trainer = Trainer(model, args, train_dataset=Windows(train), eval_dataset=Windows(held_back))
    start = time.perf_counter()
    trainer.train()
    seconds = time.perf_counter() - start
    metrics = trainer.evaluate()
    trainer.save_model()
    report(trainer, metrics, seconds)


if __name__ == "__main__":
    sys.exit(main())
