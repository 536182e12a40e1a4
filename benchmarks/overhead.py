"""What a trainer costs on top of the model: function calls and thread time per update, all arms in one run.

    python benchmarks/overhead.py [--models mlp-2 ...] [--arms loop loopwright ...] [--json FILE]

Calls are the difference of two cProfile runs of different length, so set-up does not count and the number is the same
on every run. Thread time is the best of several interleaved rounds; on a busy machine only its ratio means something.
"""

from __future__ import annotations

import argparse
import cProfile
import io
import json
import logging
import pstats
import tempfile
import time
import warnings
from collections.abc import Callable
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader

BATCH, SHORT, LONG = 4, 10, 40


class MLP(nn.Module):
    """A stack of linear layers with a mean squared error."""

    def __init__(self, layers: int, width: int = 16) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(nn.Linear(width, width) for _ in range(layers)))

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        y = self.layers(x)
        return {"loss": nn.functional.mse_loss(y, labels), "y": y}


def llama(layers: int) -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=64, hidden_size=32, num_hidden_layers=layers, num_attention_heads=2, num_key_value_heads=1,
        intermediate_size=64, max_position_embeddings=32, use_cache=False,
    )  # fmt: skip
    return LlamaForCausalLM(config)


def vectors(n: int) -> list[dict[str, torch.Tensor]]:
    return [{"x": torch.randn(16), "labels": torch.randn(16)} for _ in range(n)]


def tokens(n: int) -> list[dict[str, torch.Tensor]]:
    rows = [torch.randint(0, 64, (8,)) for _ in range(n)]
    return [{"input_ids": row, "attention_mask": torch.ones_like(row), "labels": row} for row in rows]


MODELS: dict[str, tuple[Callable[[], nn.Module], Callable[[int], Any]]] = {
    "mlp-2": (lambda: MLP(2), vectors),
    "mlp-40": (lambda: MLP(40), vectors),
    "llama-2": (lambda: llama(2), tokens),
    "llama-16": (lambda: llama(16), tokens),
}


def collate(samples: list[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    return {name: torch.stack([sample[name] for sample in samples]) for name in samples[0]}


def hand_written(model: nn.Module, data: Any, steps: int) -> Callable[[], None]:
    """The loop a careful person writes: AdamW (fused), clipping, linear schedule, a loss read now and then."""
    parameters = list(model.parameters())
    optimizer = torch.optim.AdamW(parameters, lr=1e-4, fused=True)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 - step / steps)
    loader = DataLoader(data, batch_size=BATCH, shuffle=True, collate_fn=collate)

    def run() -> None:
        model.train()
        total = torch.zeros(())
        for step, batch in enumerate(loader):
            loss = model(**batch)["loss"]
            loss.backward()
            nn.utils.clip_grad_norm_(parameters, 1.0)
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
            total += loss.detach()
            if (step + 1) % 500 == 0:
                print(total.item() / 500)
                total.zero_()

    return run


def with_trainer(library: Any, model: nn.Module, data: Any) -> Callable[[], None]:
    """The arguments both trainers share; clipping and schedule are their defaults."""
    args = library.TrainingArguments(
        output_dir=tempfile.mkdtemp(),
        per_device_train_batch_size=BATCH,
        num_train_epochs=1,
        learning_rate=1e-4,
        save_strategy="no",
        use_cpu=True,
        disable_tqdm=True,
    )
    trainer = library.Trainer(model, args, train_dataset=data)
    return lambda: trainer.train()


def with_loopwright(model: nn.Module, data: Any, steps: int) -> Callable[[], None]:
    import loopwright

    return with_trainer(loopwright, model, data)


def with_transformers(model: nn.Module, data: Any, steps: int) -> Callable[[], None]:
    import transformers

    return with_trainer(transformers, model, data)


def with_lightning(model: nn.Module, data: Any, steps: int) -> Callable[[], None]:
    import lightning

    class Wrapped(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.inner = model

        def training_step(self, batch: Any, index: int) -> torch.Tensor:
            return self.inner(**batch)["loss"]

        def configure_optimizers(self) -> Any:
            optimizer = torch.optim.AdamW(self.parameters(), lr=1e-4)
            schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 - step / steps)
            return [optimizer], [{"scheduler": schedule, "interval": "step"}]

    trainer = lightning.Trainer(
        max_epochs=1, accelerator="cpu", logger=False, enable_checkpointing=False, enable_progress_bar=False,
        enable_model_summary=False, gradient_clip_val=1.0, default_root_dir=tempfile.mkdtemp(),
    )  # fmt: skip
    loader = DataLoader(data, batch_size=BATCH, shuffle=True, collate_fn=collate)
    return lambda: trainer.fit(Wrapped(), loader)


ARMS: dict[str, Callable[[nn.Module, Any, int], Callable[[], None]]] = {
    "loop": hand_written,
    "loopwright": with_loopwright,
    "transformers": with_transformers,
    "lightning": with_lightning,
}


def prepared(arm: str, model: str, steps: int) -> Callable[[], None]:
    build, data = MODELS[model]
    torch.manual_seed(0)
    return ARMS[arm](build(), data(steps * BATCH), steps)


def calls(run: Callable[[], None]) -> int:
    """Python and C function calls of one run."""
    profile = cProfile.Profile()
    with redirect_stdout(io.StringIO()), redirect_stderr(io.StringIO()):
        profile.runcall(run)
    return int(pstats.Stats(profile).total_calls)


def calls_per_update(arm: str, model: str) -> float:
    """What one more update costs in calls."""
    with redirect_stdout(io.StringIO()), redirect_stderr(io.StringIO()):
        prepared(arm, model, 2)()  # imports and caches
    short, long = (calls(prepared(arm, model, steps)) for steps in (SHORT, LONG))
    return (long - short) / (LONG - SHORT)


def seconds_per_update(arm: str, model: str) -> float:
    """What one more update costs in thread time."""
    times = []
    for steps in (SHORT, 3 * LONG):
        run = prepared(arm, model, steps)
        with redirect_stdout(io.StringIO()), redirect_stderr(io.StringIO()):
            start = time.thread_time()
            run()
            times.append(time.thread_time() - start)
    return (times[1] - times[0]) / (3 * LONG - SHORT)


Results = dict[str, dict[str, dict[str, float]]]


def measure(models: list[str], arms: list[str], rounds: int) -> Results:
    results: Results = {}
    for model in models:
        counted = {arm: calls_per_update(arm, model) for arm in arms}
        timed: dict[str, list[float]] = {arm: [] for arm in arms}
        for _ in range(rounds):
            for arm in arms:
                timed[arm].append(seconds_per_update(arm, model))
        results[model] = {arm: {"calls": counted[arm], "ms": min(timed[arm], default=0.0) * 1e3} for arm in arms}
    return results


def table(results: Results) -> str:
    lines = [f"{'model':<10}{'arm':<14}{'calls/update':>14}{'ratio':>8}{'ms/update':>12}{'ratio':>8}"]
    for model, arms in results.items():
        base = arms.get("loop")
        for arm, values in arms.items():
            ratios = [values[key] / base[key] if base and base[key] else float("nan") for key in ("calls", "ms")]
            lines.append(
                f"{model:<10}{arm:<14}{values['calls']:>14,.0f}{ratios[0]:>8.2f}{values['ms']:>12.3f}{ratios[1]:>8.2f}"
            )
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description="Function calls and thread time per update.")
    parser.add_argument("--models", nargs="*", default=list(MODELS), choices=list(MODELS))
    parser.add_argument("--arms", nargs="*", default=list(ARMS), choices=list(ARMS))
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    torch.set_num_threads(1)
    results = measure(options.models, options.arms, options.rounds)
    print(table(results))
    if options.json:
        from machine import described

        options.json.parent.mkdir(parents=True, exist_ok=True)
        options.json.write_text(json.dumps({**described(), "batch": BATCH, "results": results}, indent=1) + "\n")


if __name__ == "__main__":
    main()
