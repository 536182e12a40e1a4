"""The loop a good engineer writes for one model: compiled as a whole, fused AdamW, autocast, loader with workers.

Models whose batches all have one shape are replayed as CUDA graphs, also where padding a short side of the batch to its
longest makes one shape of them; where lengths differ, batches are padded to multiples of 64 and compiled for any
length. Clipping is that of the trainers.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import nn
from trainers import Task, loader

MULTIPLE = 64


def with_hand(task: Task, *, backend: str = "inductor", graphs: bool = True, compiled: bool = True) -> dict[str, Any]:
    """Train in a hand-written loop; returns what it used."""
    torch.set_float32_matmul_precision("high")
    if not task.fixed_shapes:
        widened = Widened(task.collate, task.widest or MULTIPLE)
        task = replace(task, collate=widened, fixed_shapes=task.widest is not None)
    graphs = graphs and compiled and task.fixed_shapes and task.device == "cuda" and backend == "inductor"
    model, watch = task.model(), task.watch
    if task.channels_last:
        model = model.to(memory_format=torch.channels_last)
    model.train()
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(parameters, lr=task.learning_rate, weight_decay=0.0, fused=True)
    forward: Callable[..., Any] = model
    if compiled:
        mode = "reduce-overhead" if graphs else None
        dynamic = None if task.fixed_shapes else True
        forward = torch.compile(model, backend=backend, dynamic=dynamic, **({"mode": mode} if mode else {}))
    totals: list[torch.Tensor] = []
    watch.begin()
    for update, items in updates(task):
        total = torch.zeros((), device=task.device)
        for batch in update:
            if graphs:
                torch.compiler.cudagraph_mark_step_begin()
            with torch.autocast(task.device, torch.bfloat16, enabled=task.bf16):
                loss = part_of_loss(task, forward(**batch, **items)["loss"], bool(items))
            loss.backward()
            total += loss.detach()
        nn.utils.clip_grad_norm_(parameters, 1.0)
        optimizer.step()
        optimizer.zero_grad()
        totals.append(total)
        if watch.update_done():
            break
    watch.losses = torch.stack(totals).tolist()
    used = ["whole model compiled"] * compiled + ["CUDA graphs"] * graphs + ["fused AdamW"]
    return {"note": ", ".join(used + ["channels last"] * task.channels_last)}


def updates(task: Task) -> Iterator[tuple[list[dict[str, torch.Tensor]], dict[str, torch.Tensor]]]:
    """The micro-batches of each update on the device; with several of them, the number of targets of all."""
    batches = iter(loader(task))
    while True:
        update = list(itertools.islice(batches, task.accumulation))
        items = {}
        if task.counts_items and task.accumulation > 1:
            count = sum(int((batch["labels"][..., 1:] != -100).sum()) for batch in update)
            items = {"num_items_in_batch": torch.tensor(count, device=task.device)}
        yield [moved(task, batch) for batch in update], items


def moved(task: Task, batch: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    found = {name: values.to(task.device, non_blocking=True) for name, values in batch.items()}
    if task.channels_last:
        found["pixel_values"] = found["pixel_values"].to(memory_format=torch.channels_last)
    return found


def part_of_loss(task: Task, loss: torch.Tensor, is_share: bool) -> torch.Tensor:
    """The micro-batch's part of the update's loss."""
    return loss if is_share or task.accumulation == 1 else loss / task.accumulation


class Widened:
    """A collator that pads further, to a multiple of a width, so that few shapes occur."""

    FILL = {"labels": -100}

    def __init__(self, collate: Callable[[list[dict[str, Any]]], dict[str, torch.Tensor]], multiple: int) -> None:
        self.collate, self.multiple = collate, multiple

    def __call__(self, samples: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
        return {name: self.wide(name, values) for name, values in self.collate(samples).items()}

    def wide(self, name: str, values: torch.Tensor) -> torch.Tensor:
        if values.ndim != 2:
            return values
        return nn.functional.pad(values, (0, -values.shape[1] % self.multiple), value=self.FILL.get(name, 0))
