"""How long a save keeps training waiting: ours in the background and at once, transformers', a plain torch.save.

    python benchmarks/checkpoint.py [--width 1024] [--layers 28] [--saves 3] [--arms background now ...] [--json FILE]

Blocked is the time between asking for a checkpoint and going on with training, the median over the saves of a run; a
save that has to wait for the one before it counts that too. Slower is what a save adds to the whole run beside that:
updates that run while a checkpoint is being written share processor and memory with the writing. Ours are hashed and
flushed to the disk, the others' are not.
"""

from __future__ import annotations

import argparse
import io
import json
import logging
import shutil
import statistics
import tempfile
import time
import warnings
from collections.abc import Callable
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path
from typing import Any

import torch
from torch import nn

BATCH = 4
TARGET = 0.05
"""A save in the background may block for this share of the time one takes at once."""


class MLP(nn.Module):
    """A stack of square layers: nearly all of it is weights."""

    def __init__(self, layers: int, width: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(layers))

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        for layer in self.layers:
            x = x + 0.01 * torch.tanh(layer(x))
        return {"loss": nn.functional.mse_loss(x, labels), "y": x}


class Sizes:
    """What every arm trains and how often it saves."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.layers, self.width, self.saves, self.every = options.layers, options.width, options.saves, options.every

    @property
    def steps(self) -> int:
        return self.saves * self.every + self.every - 1

    def model(self) -> MLP:
        torch.manual_seed(0)
        return MLP(self.layers, self.width)

    def data(self) -> list[dict[str, torch.Tensor]]:
        return [{"x": torch.randn(self.width), "labels": torch.randn(self.width)} for _ in range(64)]


def timed(save: Callable[..., Any], into: list[float]) -> Callable[..., Any]:
    """The same call, its duration kept."""

    def run(*args: Any, **kwargs: Any) -> Any:
        started = time.perf_counter()
        try:
            return save(*args, **kwargs)
        finally:
            into.append(time.perf_counter() - started)

    return run


Run = tuple[list[float], float]
"""How long each save blocked, and the seconds of the whole run."""


def with_trainer(library: Any, sizes: Sizes, folder: str, saving: bool, **options: Any) -> Run:
    args = library.TrainingArguments(
        output_dir=folder,
        per_device_train_batch_size=BATCH,
        max_steps=sizes.steps,
        save_strategy="steps" if saving else "no",
        save_steps=sizes.every,
        save_total_limit=1,
        logging_strategy="no",
        use_cpu=True,
        disable_tqdm=True,
        report_to=[],
        **options,
    )
    trainer = library.Trainer(sizes.model(), args, train_dataset=sizes.data())
    blocked: list[float] = []
    trainer._save_checkpoint = timed(trainer._save_checkpoint, blocked)
    started = time.perf_counter()
    trainer.train()
    return blocked[: sizes.saves], time.perf_counter() - started


def background(sizes: Sizes, folder: str, saving: bool) -> Run:
    import loopwright

    return with_trainer(loopwright, sizes, folder, saving)


def now(sizes: Sizes, folder: str, saving: bool) -> Run:
    import loopwright

    return with_trainer(loopwright, sizes, folder, saving, **({"async_save": False} if saving else {}))


def with_transformers(sizes: Sizes, folder: str, saving: bool) -> Run:
    import transformers

    return with_trainer(transformers, sizes, folder, saving)


def plain(sizes: Sizes, folder: str, saving: bool) -> Run:
    """A hand-written loop with torch.save of weights and optimizer."""
    model, data = sizes.model(), sizes.data()
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-5, fused=True)
    blocked: list[float] = []

    def save(step: int) -> None:
        torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, f"{folder}/{step}.pt")
        Path(f"{folder}/{step - sizes.every}.pt").unlink(missing_ok=True)

    save_timed = timed(save, blocked)
    started = time.perf_counter()
    for step in range(1, sizes.steps + 1):
        rows = [data[(step * BATCH + i) % len(data)] for i in range(BATCH)]
        loss = model(**{name: torch.stack([row[name] for row in rows]) for name in rows[0]})["loss"]
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        if saving and step % sizes.every == 0:
            save_timed(step)
    return blocked, time.perf_counter() - started


ARMS: dict[str, Callable[[Sizes, str, bool], Run]] = {
    "background": background,
    "now": now,
    "transformers": with_transformers,
    "torch.save": plain,
}


def measured(arm: str, sizes: Sizes, *, saving: bool) -> Run:
    folder = tempfile.mkdtemp()
    try:
        with redirect_stdout(io.StringIO()), redirect_stderr(io.StringIO()):
            return ARMS[arm](sizes, folder, saving)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


Results = dict[str, dict[str, float]]


def measure(sizes: Sizes, arms: list[str], rounds: int) -> Results:
    """The arms in turn, several times; the best round of each counts."""
    blocked: dict[str, list[float]] = {arm: [] for arm in arms}
    slower: dict[str, list[float]] = {arm: [] for arm in arms}
    for _ in range(rounds):
        for arm in arms:
            _, quiet = measured(arm, sizes, saving=False)
            times, whole = measured(arm, sizes, saving=True)
            blocked[arm].append(statistics.median(times))
            slower[arm].append((whole - quiet - sum(times)) / sizes.saves)
    return {arm: {"blocked_s": min(blocked[arm]), "slower_s": max(min(slower[arm]), 0.0)} for arm in arms}


def table(results: Results) -> str:
    base = results.get("now", {}).get("blocked_s")
    lines = [f"{'arm':<16}{'blocked s':>12}{'of now':>10}{'slower s':>12}"]
    for arm, values in results.items():
        share = f"{values['blocked_s'] / base:.1%}" if base else "-"
        lines.append(f"{arm:<16}{values['blocked_s']:>12.3f}{share:>10}{values['slower_s']:>12.3f}")
    if base and "background" in results:
        met = results["background"]["blocked_s"] < TARGET * base
        lines.append(f"target: in the background less than {TARGET:.0%} of now: {'met' if met else 'missed'}")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description="How long a save keeps training waiting.")
    parser.add_argument("--width", type=int, default=1024)
    parser.add_argument("--layers", type=int, default=28)
    parser.add_argument("--saves", type=int, default=3, help="saves of a run")
    parser.add_argument("--every", type=int, default=25, help="updates between two saves")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--arms", nargs="*", default=list(ARMS), choices=list(ARMS))
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    torch.set_num_threads(1)
    sizes = Sizes(options)
    results = measure(sizes, options.arms, options.rounds)
    weights = sum(p.numel() for p in sizes.model().parameters())
    print(f"{weights:,} weights, AdamW, a checkpoint of about {weights * 12 / 2**20:,.0f} MiB")
    print(table(results))
    if options.json:
        from machine import described

        document = {**described(), "weights": weights, "saves": sizes.saves, "every": sizes.every, "results": results}
        options.json.parent.mkdir(parents=True, exist_ok=True)
        options.json.write_text(json.dumps(document, indent=1) + "\n")


if __name__ == "__main__":
    main()
