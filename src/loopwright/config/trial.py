"""A trial run: a few updates, an evaluation, a save and a load of a configuration, measured."""

from __future__ import annotations

import gc
import math
import statistics
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..callbacks.printer import PrinterCallback
from ..core.events import TrainerCallback
from ..core.host_memory import host_memory, host_peak
from .building import trainer_of
from .config import Config
from .run_control import RunControl

if TYPE_CHECKING:
    from ..args.base import BaseArguments
    from ..pt.trainer import Trainer
    from ..tasks.declaration import Materials

HEAVIEST = 2
"""The last of the two updates, from 0, that get the samples of the heaviest ones: the optimizer has its state then."""
SAVED = 2
"""The update, from 0, after which a checkpoint is saved."""
WARM = 4
"""Updates that are never timed: accelerations are proved in them."""
OUTLIER = 4.0
"""Multiple of the usual time of an update above which it is not a usual one, such as one that compiles."""
FEWEST, MANY = 6, 60
"""Timed updates."""
SHORT, ENOUGH, LIMIT = 6.0, 12.0, 30.0
"""Seconds of many timed updates that are enough, of few ones, and of all updates that are too many."""
FRAGMENTATION = 1.03
"""Factor on the memory of the process: that of a longer run grows a little, because freed memory is fragmented."""
EVALUATED = 8
"""Batches of the evaluation."""
SETTINGS = (
    "save_strategy=no",
    "eval_strategy=no",
    "load_best_model_at_end=false",
    "disable_tqdm=true",
    "log_level=error",
    "strict=false",
    "report_to=none",
    "resume_from_checkpoint=false",
)
"""Arguments of a trial: the trial itself decides when to save and evaluate."""


@dataclass
class Measured:
    """What a trial has measured, in seconds and bytes."""

    build_seconds: float = 0.0
    first_seconds: float = 0.0
    """Of getting ready and of the updates that are not timed."""
    first_updates: int = 0
    update_seconds: float = 0.0
    timed_updates: int = 0
    evaluation_seconds: float | None = None
    """Of the whole validation data, estimated from some batches."""
    save_seconds: float = 0.0
    """For which a save stops training."""
    end_seconds: float = 0.0
    """After the last update and evaluation."""
    memory: dict[str, int] = field(default_factory=dict)
    checkpoint_bytes: int = 0
    metrics: dict[str, float] = field(default_factory=dict)
    loaded_step: int | None = None
    speed: Any = None


class Remapped:
    """A dataset with some samples in the place of others."""

    def __init__(self, dataset: Any, places: dict[int, int]) -> None:
        self.dataset, self.places = dataset, places

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, index: int) -> Any:
        return self.dataset[self.places.get(index, index)]


class Part:
    """The first samples of a dataset."""

    def __init__(self, dataset: Any, count: int) -> None:
        self.dataset, self.count = dataset, min(count, len(dataset))

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> Any:
        return self.dataset[index]


class TrialClock(TrainerCallback):
    """Times the updates, requests a save and an evaluation, and stops the trial."""

    def __init__(self, wait: Callable[[], None]) -> None:
        self._wait = wait
        """Waits until the device has computed everything."""
        self.began = time.perf_counter()
        self.ends: list[float] = []
        """When each update ended."""
        self.save_seconds = 0.0
        self.evaluation_seconds: float | None = None
        self.metrics: dict[str, float] = {}
        self.evaluates = False
        self.saves_early = True
        """Whether a save may happen while updates continue, as in a run that saves more than once."""
        self.is_load = False
        """Whether the run only shows that a checkpoint can be loaded."""

    def on_step_begin(self, args: BaseArguments, state: Any, control: Any, **kwargs: Any) -> None:
        if len(self.ends) == SAVED + 1 and self.saves_early:
            self.save_seconds = time.perf_counter() - self.ends[-1]

    def on_step_end(self, args: BaseArguments, state: Any, control: Any, **kwargs: Any) -> None:
        if self.is_load:
            control.should_training_stop = True
            return
        self._tick()
        is_last = self._is_enough() or state.global_step >= state.max_steps
        if is_last:
            self._wait()
            self.ends[-1] = time.perf_counter()
            control.should_evaluate = self.evaluates
            control.should_training_stop = True
        if self.saves_early and len(self.ends) > SAVED:
            control.should_save = len(self.ends) == SAVED + 1
        elif is_last:
            control.should_save = True

    def _tick(self) -> None:
        if len(self.ends) < WARM:  # a device computes later updates while the next ones are being prepared
            self._wait()
        self.ends.append(time.perf_counter())

    def on_evaluate(self, args: BaseArguments, state: Any, control: Any, metrics: Any = None, **kwargs: Any) -> None:
        self.evaluation_seconds = time.perf_counter() - self.ends[-1]
        self.metrics = dict(metrics or {})

    @property
    def first(self) -> int:
        """Updates that do not count for the speed: accelerations are proved in them, or something is compiled."""
        count = len(self.ends)
        if count <= WARM:
            return min(1, count - 1)
        seconds = [after - before for before, after in pairwise(self.ends[WARM - 1 :])]
        usual = OUTLIER * statistics.median(seconds)
        slow = [number for number, each in enumerate(seconds[: len(seconds) // 2]) if each > usual]
        return WARM + slow[-1] + 1 if slow else WARM

    def times(self) -> tuple[float, float]:
        """Seconds until the updates that count, and of one of these."""
        first = self.first
        start = self.ends[first - 1] if first else self.began
        before, timed = start - self.began, self.ends[-1] - start
        if first > SAVED + 1:
            before -= self.save_seconds
        else:
            timed -= self.save_seconds
        return before, timed / (len(self.ends) - first)

    def _is_enough(self) -> bool:
        timed = len(self.ends) - WARM
        seconds = self.ends[-1] - self.ends[WARM - 1] if timed > 0 else 0.0
        is_slow = self.ends[-1] - self.began > LIMIT and len(self.ends) > SAVED + 1
        is_settled = seconds >= (SHORT if timed >= MANY else ENOUGH)
        return is_slow or (timed >= FEWEST and is_settled)


def run_trial(
    config: Config, materials: Materials, *, started: float, saves: Callable[[Trainer], int]
) -> tuple[Trainer, Measured]:
    """Train a little, save, evaluate and load.

    `started` is the time at which the command began; `saves` returns how often the real run saves.
    """
    found = Measured()
    trainer = trainer_of(config, materials)
    clock = TrialClock(lambda: _synchronize(trainer))
    clock.saves_early = saves(trainer) > 1
    for kind in (RunControl, PrinterCallback):
        trainer.remove_callback(kind)
    trainer.add_callback(clock)
    _put_heaviest_first(trainer)
    whole = trainer.eval_dataset
    if whole is not None:
        clock.evaluates = True
        trainer.eval_dataset = Part(whole, EVALUATED * trainer.args.eval_batch_size)
    gc.collect()
    before = host_memory()
    found.build_seconds = time.time() - started
    clock.began = time.perf_counter()
    trainer.train()
    ended = time.perf_counter()
    found.memory = memory_of(trainer, before)
    _take_times(found, clock, trainer, whole)
    found.end_seconds = max(0.0, ended - clock.ends[-1] - (clock.evaluation_seconds or 0.0))
    found.speed = trainer.speed_report()
    _load_again(trainer, clock, found)
    return trainer, found


def _take_times(found: Measured, clock: TrialClock, trainer: Trainer, whole: Any) -> None:
    found.first_updates = clock.first
    found.timed_updates = len(clock.ends) - clock.first
    found.first_seconds, found.update_seconds = clock.times()
    found.save_seconds, found.metrics = clock.save_seconds, clock.metrics
    if clock.evaluation_seconds is not None:
        found.evaluation_seconds = clock.evaluation_seconds * len(whole) / max(1, len(trainer.eval_dataset))


def _synchronize(trainer: Trainer) -> None:
    import torch

    if trainer.args.device.type == "cuda":
        torch.cuda.synchronize(trainer.args.device)


def _load_again(trainer: Trainer, clock: TrialClock, found: Measured) -> None:
    """Resume from the checkpoint for one update."""
    saved = trainer.checkpoints.complete()
    if not saved:
        return
    step = min(saved)
    folder = Path(str(saved[step]))
    found.checkpoint_bytes = sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())
    clock.is_load = True
    trainer.train(resume_from_checkpoint=str(folder))
    found.loaded_step = step


# ---- the heaviest updates --------------------------------------------------------------------------------------------


def _put_heaviest_first(trainer: Trainer) -> None:
    """Let early updates have the samples of the heaviest updates of the run: no other needs more memory.

    The order of the samples is known before training, so these updates are too. One has the most tokens with padding,
    one the most without.
    """
    lengths, sampler = _lengths(trainer.train_dataset), trainer._get_train_sampler()
    if lengths is None or sampler is None or max(lengths) == min(lengths):
        return
    count = trainer.args.train_batch_size * trainer.args.gradient_accumulation_steps
    steps = trainer.args.max_steps if trainer.args.max_steps > 0 else len(lengths)
    order = _first_items(sampler, min(len(lengths), steps * count))
    updates = [order[start : start + count] for start in range(0, len(order) - count + 1, count)]
    if len(updates) <= HEAVIEST:
        return
    padded = max(updates, key=lambda update: max(lengths[index] for index in update))
    whole = max(updates, key=lambda update: sum(lengths[index] for index in update))
    places = dict(zip(updates[HEAVIEST - 1] + updates[HEAVIEST], padded + whole, strict=True))
    trainer.train_dataset = Remapped(trainer.train_dataset, places)


def _first_items(sampler: Iterable[Any], count: int) -> list[int]:
    found: list[int] = []
    for item in sampler:
        found += item if isinstance(item, list) else [item]
        if len(found) >= count:
            break
    return found[:count]


def _lengths(samples: Any) -> list[int] | None:
    """The number of tokens of each sample; None if they are not in memory, or have none."""
    if not isinstance(samples, Sequence) or not len(samples) or "input_ids" not in samples[0]:
        return None
    return [len(sample["input_ids"]) for sample in samples]


# ---- memory ----------------------------------------------------------------------------------------------------------


def memory_of(trainer: Trainer, before: int) -> dict[str, int]:
    """The peak memory of a run and its parts; `before` is the memory of the process before training."""
    import torch

    parameters = list(trainer.model.parameters())
    weights = _bytes([*parameters, *trainer.model.buffers()])
    gradients = _bytes([each for each in parameters if each.requires_grad])
    optimizer = _bytes(
        value
        for state in trainer.optimizer.state.values()
        for value in state.values()
        if isinstance(value, torch.Tensor)
    )
    device = trainer.args.device
    if device.type == "cuda":
        peak, program = torch.cuda.max_memory_reserved(device), 0
    else:
        peak, program = int(host_peak() * FRAGMENTATION), max(0, before - weights)
    rest = max(0, peak - program - weights - gradients - optimizer)
    return {
        "program": program,
        "weights": weights,
        "gradients": gradients,
        "optimizer": optimizer,
        "activations": rest,
        "peak": peak,
    }


def _bytes(tensors: Iterable[Any]) -> int:
    storages = {each.untyped_storage().data_ptr(): each.untyped_storage().nbytes() for each in tensors}
    return sum(storages.values())


# ---- prediction ------------------------------------------------------------------------------------------------------


def occurrences(strategy: str, interval: float, steps: int, per_epoch: int) -> int:
    """How often a run of `steps` updates evaluates or saves."""
    if strategy == "epoch":
        return math.ceil(steps / max(1, per_epoch))
    if strategy != "steps" or not interval:
        return 0
    every = max(1, math.ceil(interval * steps) if interval < 1 else int(interval))
    return math.ceil(steps / every)
