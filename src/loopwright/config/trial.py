"""A trial run: a few updates, an evaluation, a save and a load of a configuration, measured."""

from __future__ import annotations

import gc
import math
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..callbacks.printer import PrinterCallback
from ..core.events import TrainerCallback
from ..core.measure.host_memory import host_memory, host_peak
from ..core.measure.ledger import COMPILING, DATA, EVALUATION, PROVING, SAVING, UPDATES, Seconds
from .building import trainer_of
from .config import Config
from .run_control import RunControl
from .update_times import WARM, UpdateTimes, times_of

if TYPE_CHECKING:
    from ..args.base import BaseArguments
    from ..pt.trainer import Trainer
    from ..tasks.declaration import Materials

HEAVIEST = 2
"""The last of the two updates, from 0, that get the samples of the heaviest ones: the optimizer has its state then."""
SAVED = 2
"""The update, from 0, after which a checkpoint is saved."""
FEWEST, MANY = 6, 60
"""Timed updates."""
SHORT, ENOUGH, LIMIT = 6.0, 12.0, 30.0
"""Seconds of many usual updates that are enough, of few ones, and of all updates that are too many."""
FRAGMENTATION = 1.06
"""Factor on the memory of the process: that of a longer run grows a little, because freed memory is fragmented."""
STRIDE = 8
"""Updates between two moments at which the trial waits for a device that computes later than the host."""
INTERPRETER = 1.0
"""Seconds in which Python itself begins and ends with these libraries: no command can measure its own end."""
CACHED = 0.3
"""Share of the time of compiling that remains if the code is in the compile cache, as it is after the trial."""
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

    start_seconds: float = 0.0
    """From the beginning of the command to the first update."""
    once_seconds: float = 0.0
    """Of proving and compiling."""
    slower_seconds: float = 0.0
    """By which the first updates, and others that are slow once, were slower than usual ones."""
    closing_seconds: float = 0.0
    """After the last update: reading its loss, counting operations, and what else the ledger counts as updates."""
    update_seconds: float = 0.0
    evaluation_seconds: float | None = None
    """Of the whole validation data, estimated from some batches."""
    first_evaluation_seconds: float = 0.0
    """By which the first evaluation was slower than a later one."""
    save_seconds: float = 0.0
    """For which a save stops training that continues after it."""
    last_save_seconds: float = 0.0
    """Of a save at the end, until it is complete."""
    end_seconds: float = 0.0
    """After the run, until the command has ended."""
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
    """Follows the time ledger of the updates, requests a save and an evaluation, and stops the trial."""

    def __init__(self, wait: Callable[[], None], spent: Callable[[], Seconds]) -> None:
        self._wait = wait
        """Waits until the device has computed everything."""
        self._spent = spent
        """The time ledger of the trial now."""
        self.began = time.perf_counter()
        self.before: Seconds = {}
        """The ledger when the first update began."""
        self.marks: list[Seconds] = []
        """The ledger at the end of each update."""
        self.stops: list[int] = []
        """Numbers of updates after which the device had computed everything."""
        self.stride = 1
        """Updates between two stops."""
        self._lost = 0.0
        """Seconds of timed updates that say nothing about usual ones."""
        self.save_seconds = 0.0
        self.evaluations: list[float] = []
        """Seconds of each evaluation: a first one, which loads kernels, and one at the end."""
        self.metrics: dict[str, float] = {}
        self.evaluates = False
        self.has_heavy = False
        """Whether early updates got the samples of the heaviest ones."""
        self.saves_early = True
        """Whether a save may happen while updates continue, as in a run that saves more than once."""
        self.is_load = False
        """Whether the run only shows that a checkpoint can be loaded."""

    def on_train_begin(self, args: BaseArguments, state: Any, control: Any, **kwargs: Any) -> None:
        self.before = self.before or self._spent()

    def on_step_begin(self, args: BaseArguments, state: Any, control: Any, **kwargs: Any) -> None:
        if len(self.marks) == SAVED + 1 and self.saves_early:
            self.save_seconds = self._spent()[SAVING] - self.marks[-1][SAVING]

    def on_step_end(self, args: BaseArguments, state: Any, control: Any, **kwargs: Any) -> None:
        if self.is_load:
            control.should_training_stop = True
            return
        self._mark(len(self.marks) < WARM or (len(self.marks) + 1 - WARM) % self.stride == 0)
        is_last = self._is_enough() or state.global_step >= state.max_steps
        if is_last:
            self._stop_here()
            control.should_training_stop = True
        if is_last or len(self.marks) == SAVED + 1:
            control.should_evaluate = self.evaluates
        if self.saves_early and len(self.marks) > SAVED:
            control.should_save = len(self.marks) == SAVED + 1
        elif is_last:
            control.should_save = True

    def _mark(self, is_stop: bool) -> None:
        """Note the end of an update; at a stop, when the device has computed it too."""
        if is_stop:
            self._wait()
        self.marks.append(self._spent())
        if is_stop:
            self.stops.append(len(self.marks))

    def _stop_here(self) -> None:
        """Wait until the device has computed the latest update too."""
        if self.stops[-1:] != [len(self.marks)]:
            self.marks.pop()
            self._mark(is_stop=True)

    def on_evaluate(self, args: BaseArguments, state: Any, control: Any, metrics: Any = None, **kwargs: Any) -> None:
        self.evaluations.append(self._spent()[EVALUATION] - self.marks[-1][EVALUATION])
        self.metrics = dict(metrics or {})

    def seconds(self) -> list[float]:
        """The seconds of each update with its wait for data, without proofs, compiling and saves."""
        sums = [mark[UPDATES] + mark[DATA] for mark in (self.before, *self.marks)]
        return [after - before for before, after in pairwise(sums)]

    def times(self) -> UpdateTimes:
        """The time of a usual update, and by how much the others were slower."""
        heavy = range(HEAVIEST - 1, HEAVIEST + 1) if self.has_heavy else ()  # they are not slower, only larger
        return times_of(self.seconds(), self.stops, heavy)

    def _is_enough(self) -> bool:
        if time.perf_counter() - self.began > LIMIT and len(self.marks) > SAVED + 1:
            return True
        timed = len(self.marks) - WARM
        needed = SHORT if timed >= MANY else ENOUGH
        if timed < FEWEST or self._timed_seconds() - self._lost < needed:
            return False
        self._stop_here()
        # Only now, since it reads all updates. An update that is slow once does not make the others enough.
        self._lost = times_of(self.seconds(), self.stops, heavy=range(WARM)).slower
        return self._timed_seconds() - self._lost >= needed

    def _timed_seconds(self) -> float:
        return sum(self.marks[-1][part] - self.marks[WARM - 1][part] for part in (UPDATES, DATA))


def run_trial(
    config: Config, materials: Materials, *, started: float, saves: Callable[[Trainer], int]
) -> tuple[Trainer, Measured]:
    """Train a little, save, evaluate and load.

    `started` is the time at which the command began; `saves` returns how often the real run saves.
    """
    found = Measured()
    trainer = trainer_of(config, materials)
    found.start_seconds = time.time() - started  # the run does not do what follows
    clock = TrialClock(lambda: _synchronize(trainer), lambda: _spent(trainer))
    clock.saves_early, clock.stride = saves(trainer) > 1, STRIDE if trainer.args.device.type == "cuda" else 1
    for kind in (RunControl, PrinterCallback):
        trainer.remove_callback(kind)
    trainer.add_callback(clock)
    clock.has_heavy = _put_heaviest_first(trainer)
    whole = trainer.eval_dataset
    if whole is not None:
        clock.evaluates = True
        trainer.eval_dataset = Part(whole, EVALUATED * trainer.args.eval_batch_size)
    gc.collect()
    before = host_memory()
    clock.began = time.perf_counter()
    trainer.train()
    found.memory = memory_of(trainer, before)
    take_times(found, clock, trainer, whole)
    found.speed = trainer.speed_report()
    _load_again(trainer, clock, found)
    return trainer, found


def take_times(found: Measured, clock: TrialClock, trainer: Trainer, whole: Any) -> None:
    """Set the seconds from the time ledger of a trial; `whole` is the validation data, of which it had a part."""
    found.start_seconds += sum(clock.before.values())
    times, end, last = clock.times(), _spent(trainer), clock.marks[-1]
    found.update_seconds, found.slower_seconds = times.usual, times.slower
    found.once_seconds = end[PROVING] + end[COMPILING] * cached_share()
    found.closing_seconds = sum(end[part] - last[part] for part in (UPDATES, DATA))
    found.last_save_seconds, found.end_seconds = end[SAVING] - last[SAVING], INTERPRETER
    found.save_seconds, found.metrics = clock.save_seconds, clock.metrics
    if clock.evaluations:
        usual = clock.evaluations[-1]
        found.first_evaluation_seconds = max(0.0, clock.evaluations[0] - usual)
        found.evaluation_seconds = usual * len(whole) / max(1, len(trainer.eval_dataset))


def cached_share() -> float:
    """The share of the trial's time of compiling that the next run needs: it finds in the cache what was compiled."""
    utils = sys.modules.get("torch._dynamo.utils")  # not imported here, which would take seconds
    counts = {} if utils is None else utils.counters["inductor"]
    hits, misses = counts.get("fxgraph_cache_hit", 0), counts.get("fxgraph_cache_miss", 0)
    return (hits + CACHED * misses) / (hits + misses) if hits + misses else 1.0


def _spent(trainer: Trainer) -> Seconds:
    return dict(trainer._loopwright.run.ledger.settle().seconds)


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


def _put_heaviest_first(trainer: Trainer) -> bool:
    """Let early updates have the samples of the heaviest updates of the run: no other needs more memory.

    Returns whether samples were moved.

    The order of the samples is known before training, so these updates are too. One has the most tokens with padding,
    one the most without.
    """
    lengths, sampler = _lengths(trainer.train_dataset), trainer._get_train_sampler()
    if lengths is None or sampler is None or max(lengths) == min(lengths):
        return False
    count = trainer.args.train_batch_size * trainer.args.gradient_accumulation_steps
    steps = trainer.args.max_steps if trainer.args.max_steps > 0 else len(lengths)
    order = _first_items(sampler, min(len(lengths), steps * count))
    updates = [order[start : start + count] for start in range(0, len(order) - count + 1, count)]
    if len(updates) <= HEAVIEST:
        return False
    padded = max(updates, key=lambda update: max(lengths[index] for index in update))
    whole = max(updates, key=lambda update: sum(lengths[index] for index in update))
    places = dict(zip(updates[HEAVIEST - 1] + updates[HEAVIEST], padded + whole, strict=True))
    trainer.train_dataset = Remapped(trainer.train_dataset, places)
    return True


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
        # Of tensors: torch keeps more in its cache, which depends on the order of shapes, and frees it when needed.
        peak, program = torch.cuda.max_memory_allocated(device), 0
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
