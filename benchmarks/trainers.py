"""The arms of a speed benchmark: one function per library, each training the same task under the same watch.

All start from the same weights, see the same samples in the same order and make the same updates. Only the arm that
groups samples by length has an order of its own; the result says so.
"""

from __future__ import annotations

import argparse
import itertools
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import numpy as np
import torch
from lengths import consumed, pad, shuffled
from torch import nn
from torch.utils.data import DataLoader
from watch import Watch, matmul_rate, peak_gib

SEED = 42
"""What both trainers use when they are not told."""
FOREVER = 100_000
"""Updates the run is planned for; the watch ends it long before."""
KEPT_LOSSES = 400


class NotInstalled(Exception):
    """A package an arm needs is not there."""


@dataclass
class Task:
    """What every arm of a benchmark trains."""

    build: Callable[[], nn.Module]
    data: Any
    """Samples that say how long they are: `Texts`, `Arrays`."""
    operations: Callable[[np.ndarray, np.ndarray], np.ndarray]
    """The necessary operations of samples of these lengths with these many targets, forward and backward."""
    watch: Watch
    micro: int = 8
    accumulation: int = 8
    learning_rate: float = 1e-5
    bf16: bool = True
    bf16_weights: bool = False
    counts_items: bool = True
    """Whether the model's loss divides by the number of targets it is told, instead of being a mean."""
    grouped_updates: int = 48
    """How many updates the length-grouped arm draws from; its sampler sorts a quarter of them, 50 at most."""
    liger_micro: int | None = None
    """The micro-batch the Liger kernels leave room for."""
    workers: int = 2
    collate: Callable[[list[dict[str, Any]]], dict[str, torch.Tensor]] = pad
    fixed_shapes: bool = False
    """Whether every micro-batch has the same shapes."""
    channels_last: bool = False
    """Whether convolutions on images are most of it."""
    widest: int | None = None
    """Width of the longest rows, to which the hand-written loop pads all of them if that costs little."""

    @property
    def device(self) -> str:
        return self.watch.device

    @property
    def samples(self) -> int:
        return self.micro * self.accumulation

    def model(self) -> nn.Module:
        """The same weights each time."""
        torch.manual_seed(SEED)
        with torch.device(self.device):
            model = self.build()
        for parameter in model.parameters() if self.bf16_weights else ():
            parameter.data = parameter.data.to(torch.bfloat16)  # not the tables of positions, which loading keeps exact
        return model


def watch_for(options: argparse.Namespace) -> Watch:
    """The watch of an arm under a benchmark's options."""
    found = "cuda" if torch.cuda.is_available() else "cpu"
    device = found if options.device == "auto" else options.device
    return Watch(device, options.warmup, options.warm_seconds, options.seconds, options.updates)


# ---- trainers with transformers' interface ------------------------------------------------------------------------


def arguments(library: Any, task: Task, **more: Any) -> Any:
    """What both trainers are given; everything else is their default."""
    shared = {
        "output_dir": tempfile.mkdtemp(),
        "per_device_train_batch_size": task.micro,
        "gradient_accumulation_steps": task.accumulation,
        "max_steps": FOREVER,
        "learning_rate": task.learning_rate,
        "lr_scheduler_type": "constant",
        "bf16": task.bf16,
        "logging_strategy": "no",
        "save_strategy": "no",
        "report_to": "none",
        "disable_tqdm": True,
        "use_cpu": task.device == "cpu",
    }
    return library.TrainingArguments(**{**shared, **more})


def watching(library: Any, watch: Watch, each_update: Callable[[], None]) -> Any:
    """A callback that ends the run when the watch says so."""

    class Watching(library.TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            each_update()
            if watch.update_done():
                control.should_training_stop = True

    return Watching()


def with_loopwright(task: Task, **more: Any) -> dict[str, Any]:
    import loopwright

    watch = task.watch
    trainer = loopwright.Trainer(
        task.model(),
        arguments(loopwright, task, **more),
        data_collator=task.collate,
        train_dataset=task.data,
        callbacks=[watching(loopwright, watch, lambda: None)],
    )
    watch.begin()
    trainer.train()
    watch.losses = trainer._loopwright.run.meter.losses  # one per update: nothing was logged on the way
    report = trainer.speed_report().as_dict()
    numbers = report["numbers"]
    return {
        "speed_report": report,
        "useful_share": numbers.get("useful_token_share"),
        "recompiles": numbers.get("recompiles"),
        "note": switched_on(report),
    }


def switched_on(report: dict[str, Any]) -> str:
    """What our report says is on."""
    return ", ".join(choice["name"] for choice in report["choices"] if choice["on"])


def with_transformers(task: Task, **more: Any) -> dict[str, Any]:
    return _with_transformers(task, task.model(), task.data, **more)


def _with_transformers(task: Task, model: nn.Module, data: Any, **more: Any) -> dict[str, Any]:
    import transformers

    if not task.counts_items:
        # Its forward takes **kwargs, so the trainer believes that it divides by the number of targets, and sums the
        # means of the micro-batches: a loss too large by the accumulation.
        model.accepts_loss_kwargs = False
    watch, totals = task.watch, []
    trainer = transformers.Trainer(
        model,
        arguments(transformers, task, **more),
        data_collator=task.collate,
        train_dataset=data,
        # Its running loss stays on the device; copying it there makes nobody wait.
        callbacks=[watching(transformers, watch, lambda: totals.append(trainer._tr_loss.clone()))],
    )
    watch.begin()
    trainer.train()
    watch.losses = np.diff([0.0, *torch.stack(totals).double().tolist()]).tolist()
    return {}


def with_transformers_wide(task: Task) -> dict[str, Any]:
    """The same with the larger micro-batch that Liger's kernels leave room for."""
    if task.liger_micro is None or find_spec("liger_kernel") is None:
        raise NotInstalled("there are no Liger kernels here, or none for this model")
    task.micro, task.accumulation = task.liger_micro, task.samples // task.liger_micro
    return with_transformers_best(task)


def with_transformers_best(task: Task) -> dict[str, Any]:
    """Samples grouped by length, Liger kernels where there are any, workers, no waiting for the NaN filter."""
    liger = task.liger_micro is not None and find_spec("liger_kernel") is not None
    updates = min(task.grouped_updates, len(task.data) // task.samples)
    if len(set(task.data.lengths)) > 1:
        task.watch.cycle = min(max(updates // 4, 1), 50)
    model, seen = task.model(), Counted(task.data.kind == "pair")
    model.register_forward_pre_hook(seen, with_kwargs=True)
    more: dict[str, Any] = {"use_liger_kernel": True} if liger else {}
    if task.device == "cuda":
        more |= {"dataloader_num_workers": 2 * task.workers, "accelerator_config": {"non_blocking": True}}
    _with_transformers(
        task, model, task.data.first(updates * task.samples),
        train_sampling_strategy="group_by_length", logging_nan_inf_filter=False, **more,
    )  # fmt: skip
    without = "" if liger or task.liger_micro is None else ", without Liger (not installed)"
    note = f"{task.micro} x {task.accumulation}, own sample order{', Liger' if liger else without}"
    return {"reordered": True, "note": note, "seen": seen}


class Counted:
    """What the model was given, counted on the device: for an order that is not known beforehand."""

    def __init__(self, pairs: bool) -> None:
        self.pairs = pairs
        self.lengths: list[torch.Tensor] = []
        self.targets: list[torch.Tensor] = []
        self.computed: list[int] = []

    def __call__(self, module: nn.Module, args: Any, kwargs: dict[str, Any]) -> None:
        mask, labels = kwargs["attention_mask"], kwargs["labels"]
        self.lengths.append(mask.sum(-1))
        self.targets.append((labels != -100).reshape(len(labels), -1).sum(-1))
        self.computed.append(mask.numel() + labels.numel() * self.pairs)


# ---- the others ---------------------------------------------------------------------------------------------------


class Order:
    """The micro-batches of all epochs, as the trainers would draw them."""

    def __init__(self, task: Task) -> None:
        self.n, self.micro = len(task.data), task.micro

    def __iter__(self) -> Iterator[list[int]]:
        for epoch in itertools.count():
            order = shuffled(self.n, epoch, SEED).tolist()
            yield from (order[i : i + self.micro] for i in range(0, self.n, self.micro))


def loader(task: Task) -> DataLoader:
    on_gpu = task.device == "cuda"
    return DataLoader(
        task.data, batch_sampler=Order(task), collate_fn=task.collate, pin_memory=on_gpu,
        num_workers=task.workers * on_gpu,
    )  # fmt: skip


def updates_of(task: Task) -> Iterator[tuple[list[dict[str, torch.Tensor]], int]]:
    """The micro-batches of each update and their number of targets, counted before they leave the host."""
    batches = iter(loader(task))
    while True:
        update = list(itertools.islice(batches, task.accumulation))
        yield update, sum(int((batch["labels"][..., 1:] != -100).sum()) for batch in update) if task.counts_items else 0


def loss_of(task: Task, model: nn.Module, batch: dict[str, Any], items: int) -> torch.Tensor:
    """The micro-batch's part of the update's loss."""
    if task.counts_items:
        return model(**batch, num_items_in_batch=items).loss
    return model(**batch).loss / task.accumulation


def with_loop(task: Task) -> dict[str, Any]:
    """The loop a careful person writes: padded, autocast, fused AdamW, clipping, no wait between updates."""
    model, watch = task.model(), task.watch
    parameters = list(model.parameters())
    optimizer = torch.optim.AdamW(parameters, lr=task.learning_rate, weight_decay=0.0, fused=True)
    totals: list[torch.Tensor] = []
    model.train()
    watch.begin()
    for update, items in updates_of(task):
        total = torch.zeros((), device=task.device)
        for batch in update:
            moved = {name: values.to(task.device, non_blocking=True) for name, values in batch.items()}
            with torch.autocast(task.device, torch.bfloat16, enabled=task.bf16):
                loss = loss_of(task, model, moved, items)
            loss.backward()
            total += loss.detach()
        nn.utils.clip_grad_norm_(parameters, 1.0)
        optimizer.step()
        optimizer.zero_grad()
        totals.append(total)
        if watch.update_done():
            break
    watch.losses = torch.stack(totals).tolist()
    return {}


def lightning_module() -> Any:
    """Lightning under either of its names."""
    for name in ("lightning", "pytorch_lightning"):
        if find_spec(name) is not None:
            return import_module(name)
    raise NotInstalled("lightning is not installed")


def with_lightning(task: Task) -> dict[str, Any]:
    lightning = lightning_module()
    model, watch, accumulation = task.model(), task.watch, task.accumulation
    totals: list[torch.Tensor] = []

    class Wrapped(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.inner = model

        def training_step(self, batch: Any, index: int) -> torch.Tensor:
            if index % accumulation == 0:
                totals.append(torch.zeros((), device=task.device))
            loss = loss_of(task, self.inner, batch["inputs"], batch["items"])
            totals[-1] += loss.detach()
            return loss * accumulation  # Lightning divides by it

        def configure_optimizers(self) -> Any:
            # It refuses to clip for a fused optimizer under bf16-mixed.
            return torch.optim.AdamW(self.parameters(), lr=task.learning_rate, weight_decay=0.0)

    class Watching(lightning.Callback):
        def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, index: int) -> None:
            if (index + 1) % accumulation == 0 and watch.update_done():
                trainer.should_stop = True

    batches = ({"inputs": batch, "items": items} for update, items in updates_of(task) for batch in update)
    trainer = lightning.Trainer(
        callbacks=[Watching()],
        max_steps=FOREVER, accelerator="gpu" if task.device == "cuda" else "cpu", devices=1, logger=False,
        enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False, gradient_clip_val=1.0,
        accumulate_grad_batches=accumulation, precision="bf16-mixed" if task.bf16 else "32-true",
        default_root_dir=tempfile.mkdtemp(),
    )  # fmt: skip
    watch.begin()
    trainer.fit(Wrapped(), Endless(batches))
    watch.losses = torch.stack(totals).tolist()
    return {}


class Endless:
    """Batches that are already made, as something Lightning can ask for an iterator more than once."""

    def __init__(self, batches: Iterator[Any]) -> None:
        self.batches = batches

    def __iter__(self) -> Iterator[Any]:
        return self.batches


ARMS: dict[str, Callable[[Task], dict[str, Any]]] = {
    "ours": with_loopwright,
    "ours-off": lambda task: with_loopwright(task, speed="off"),
    "ours-max": lambda task: with_loopwright(task, speed="max"),
    "transformers": with_transformers,
    "transformers-best": with_transformers_best,
    "transformers-wide": with_transformers_wide,
    "lightning": with_lightning,
    "loop": with_loop,
}
PADDED = ("ours-off", "transformers", "lightning", "loop")
"""Arms that compute every padding token of their micro-batches."""


# ---- numbers ------------------------------------------------------------------------------------------------------


def run(arm: str, task: Task) -> dict[str, Any]:
    """Train one arm and return what it reached."""
    task = replace(task, watch=replace(task.watch))
    peak = matmul_rate(task.device)
    found = ARMS[arm](task)
    return {"status": "ok", "note": "", **figures(arm, task, found, peak)}


def figures(arm: str, task: Task, found: dict[str, Any], peak: float | None) -> dict[str, Any]:
    """The numbers of one arm, from its watch and the samples it saw."""
    watch = task.watch
    tokens, operations, computed = seen_work(arm, task, found.pop("seen", None))
    opened, elapsed = watch.opened, watch.elapsed
    timed = watch.done - opened
    rate = sum(tokens[opened:]) / elapsed
    share = found.pop("useful_share", None)
    if computed is not None:
        share = sum(tokens[opened:]) / sum(computed[opened:])
    return {
        "tokens_per_s": rate,
        "samples_per_s": timed * task.samples / elapsed,
        "ms_per_update": 1e3 * elapsed / timed,
        "useful_share": share,
        "mfu": None if peak is None else sum(operations[opened:]) / elapsed / peak,
        "matmul_tflops": None if peak is None else peak / 1e12,
        "peak_gib": peak_gib(task.device),
        "first_update_s": watch.first - watch.begun,
        # What came on top of the updates of the warm-up: building, proving, compiling.
        "ready_s": max(watch.borders[0][1] - watch.begun - sum(tokens[:opened]) / rate, 0.0),
        "slowest_update_ms": 1e3 * watch.slowest,
        "windows": watch.rates(tokens) if watch.cycle == 1 else [],
        "updates": {"warmup": opened, "timed": timed},
        "micro_batch": f"{task.micro} x {task.accumulation}",
        "autocast": "bf16" if task.bf16 else None,
        "losses": list(watch.losses)[: min(watch.done, KEPT_LOSSES)],
        **found,
    }


def seen_work(arm: str, task: Task, seen: Counted | None) -> tuple[list[float], list[float], list[int] | None]:
    """Real tokens, necessary operations and, where known, computed tokens of each update of the run."""
    data, updates = task.data, task.watch.done
    computed: list[int] | None = None
    if seen is None:
        indices = consumed(len(data), updates * task.samples, SEED)
        lengths, targets = data.lengths[indices], data.supervised(indices)
        if arm in PADDED:
            computed = [data.computed(part, task.micro) for part in np.split(indices, updates)]
    else:
        lengths, targets = (torch.cat(each).cpu().numpy() for each in (seen.lengths, seen.targets))
        computed = np.reshape(seen.computed[: updates * task.accumulation], (updates, -1)).sum(1).tolist()
    lengths, targets = lengths[: updates * task.samples], targets[: updates * task.samples]
    tokens = lengths + targets if data.kind == "pair" else lengths
    sums = (each.reshape(updates, -1).sum(1).tolist() for each in (tokens, task.operations(lengths, targets)))
    return (*sums, computed)
