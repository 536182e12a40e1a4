"""How long a save keeps training waiting: ours in the background and at once, transformers', a plain torch.save.

    python benchmarks/checkpoint.py [--width 1024] [--layers 28] [--saves 3] [--arms background now ...] [--json FILE]

Blocked is the time between asking for a checkpoint and going on with training, the median over the saves of a run; a
save that has to wait for the one before it counts that too. The updates right after a save share processor and memory
with the writing in the background: they are compared with the other updates of the run. Ours are hashed and flushed to
the disk, the others' are not.
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


AFTER = 4
"""Updates right after a save."""


class Times:
    """How long saves blocked and updates took, in the order they came."""

    def __init__(self) -> None:
        self.saves: list[float] = []
        self.updates: list[float] = []
        self.after: list[float] = []
        self._began = 0.0
        self._known = self._since_save = 0

    def begin(self) -> None:
        self._began = time.perf_counter()

    def end(self) -> None:
        took = time.perf_counter() - self._began
        self._since_save = 0 if len(self.saves) > self._known else self._since_save + 1
        self._known = len(self.saves)
        near = bool(self.saves) and self._since_save < AFTER
        (self.after if near else self.updates).append(took)


def with_trainer(library: Any, sizes: Sizes, folder: str, **options: Any) -> Times:
    args = library.TrainingArguments(
        output_dir=folder,
        per_device_train_batch_size=BATCH,
        max_steps=sizes.steps,
        save_steps=sizes.every,
        save_total_limit=1,
        logging_strategy="no",
        use_cpu=True,
        disable_tqdm=True,
        report_to=[],
        **options,
    )
    times = Times()

    class Clock(library.TrainerCallback):
        def on_step_begin(self, *args: Any, **kwargs: Any) -> None:
            times.begin()

        def on_step_end(self, *args: Any, **kwargs: Any) -> None:
            times.end()

    trainer = library.Trainer(sizes.model(), args, train_dataset=sizes.data(), callbacks=[Clock()])
    trainer._save_checkpoint = timed(trainer._save_checkpoint, times.saves)
    trainer.train()
    del times.saves[sizes.saves :]  # the one at the end of training
    return times


def background(sizes: Sizes, folder: str) -> Times:
    import loopwright

    return with_trainer(loopwright, sizes, folder)


def now(sizes: Sizes, folder: str) -> Times:
    import loopwright

    return with_trainer(loopwright, sizes, folder, async_save=False)


def with_transformers(sizes: Sizes, folder: str) -> Times:
    import transformers

    return with_trainer(transformers, sizes, folder)


def plain(sizes: Sizes, folder: str) -> Times:
    """A hand-written loop with torch.save of weights and optimizer."""
    model, data, times = sizes.model(), sizes.data(), Times()
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-5, fused=True)

    def save(step: int) -> None:
        torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, f"{folder}/{step}.pt")
        Path(f"{folder}/{step - sizes.every}.pt").unlink(missing_ok=True)

    save_timed = timed(save, times.saves)
    for step in range(1, sizes.steps + 1):
        rows = [data[(step * BATCH + i) % len(data)] for i in range(BATCH)]
        batch = {name: torch.stack([row[name] for row in rows]) for name in rows[0]}
        times.begin()
        model(**batch)["loss"].backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        times.end()
        if step % sizes.every == 0:
            save_timed(step)
    return times


ARMS: dict[str, Callable[[Sizes, str], Times]] = {
    "background": background,
    "now": now,
    "transformers": with_transformers,
    "torch.save": plain,
}


def measured(arm: str, sizes: Sizes) -> dict[str, float]:
    folder = tempfile.mkdtemp()
    try:
        with redirect_stdout(io.StringIO()), redirect_stderr(io.StringIO()):
            times = ARMS[arm](sizes, folder)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    values = {"blocked_s": times.saves, "update_s": times.updates, "update_after_save_s": times.after}
    return {name: statistics.median(each) for name, each in values.items()}


Results = dict[str, dict[str, float]]


def measure(sizes: Sizes, arms: list[str], rounds: int) -> Results:
    """The arms in turn, several times; of each the round that blocked least, since a busy machine only adds."""
    found: dict[str, list[dict[str, float]]] = {arm: [] for arm in arms}
    for _ in range(rounds):
        for arm in arms:
            found[arm].append(measured(arm, sizes))
    return {arm: min(rounds_of, key=lambda values: values["blocked_s"]) for arm, rounds_of in found.items()}


def table(results: Results) -> str:
    base = results.get("now", {}).get("blocked_s")
    lines = [f"{'arm':<16}{'blocked s':>12}{'of now':>10}{'update s':>12}{'after a save':>14}"]
    for arm, values in results.items():
        share = f"{values['blocked_s'] / base:.1%}" if base else "-"
        lines.append(
            f"{arm:<16}{values['blocked_s']:>12.3f}{share:>10}{values['update_s']:>12.3f}"
            f"{values['update_after_save_s']:>14.3f}"
        )
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
    parser.add_argument("--threads", type=int, help="of torch; by default as many as it takes")
    parser.add_argument("--arms", nargs="*", default=list(ARMS), choices=list(ARMS))
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    if options.threads:
        torch.set_num_threads(options.threads)
    sizes = Sizes(options)
    results = measure(sizes, options.arms, options.rounds)
    weights = sum(p.numel() for p in sizes.model().parameters())
    print(f"{weights:,} weights, AdamW, a checkpoint of about {weights * 12 / 2**20:,.0f} MiB")
    print(table(results))
    if options.json:
        from machine import described

        document = {**described(), "weights": weights, "saves": sizes.saves, "every": sizes.every,
                    "threads": torch.get_num_threads(), "results": results}  # fmt: skip
        options.json.parent.mkdir(parents=True, exist_ok=True)
        options.json.write_text(json.dumps(document, indent=1) + "\n")


if __name__ == "__main__":
    main()
