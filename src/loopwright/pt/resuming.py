"""The trainer's methods that go on from a checkpoint, whatever number of processes has written it."""

from __future__ import annotations

import dataclasses
import os
from pathlib import Path
from typing import Any

from torch import nn

from ..args.places import is_url
from ..core.base import BaseTrainer
from ..core.checkpoint.layout import ARGUMENTS, OPTIMIZER, PROGRESS, RNG, SCALER, SCHEDULER, STATE
from ..core.plan import Plan
from ..core.state import Progress, TrainerState
from ..errors import CheckpointError
from .boxes import BoxReader, slot_reader
from .checkpoint import decode_schedule, plain_module, read_json, read_optimizer
from .foreign import foreign_progress, is_foreign, read_foreign
from .loaders import ordered_sampler
from .records import own_random_states, record_of
from .seeding import rng_from_json

CHANGES = {
    ("learning_rate", "weight_decay", "adam_beta1", "adam_beta2", "adam_epsilon", "optim_args"):
        "the checkpoint's optimizer and schedule are loaded, so these stay as they were",
    ("seed", "data_seed", "train_sampling_strategy"):
        "samples come in another order from here on, so some of this epoch come twice and some not at all",
}  # fmt: skip
"""Arguments that do not mean on resuming what they mean at the start, and what becomes of them."""


class ResumingMethods(BaseTrainer):
    """Weights, optimizer, schedule, randomness and position of a checkpoint, back where they were."""

    args: Any
    strategy: Any
    _resume_rng: dict[str, Any] | None
    _resume_from: Path | None = None

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: nn.Module | None = None) -> None:
        """Load the weights of a checkpoint."""
        self.strategy.load_weights(plain_module(model or self.model), resume_from_checkpoint)

    def _resume(self, checkpoint: str) -> None:
        """Put state, progress, optimizer, schedule and randomness back to where the checkpoint was taken."""
        folder = Path(checkpoint)
        saved = TrainerState.from_dict(read_json(folder / STATE))
        foreign = is_foreign(folder)
        if not foreign and not (folder / PROGRESS).is_file():
            raise CheckpointError(
                f"{folder} holds nothing to resume from (no {PROGRESS}): it was saved with save_only_model=True, or it "
                "is an output folder and not a checkpoint in it (resume_from_checkpoint=True takes the newest one)"
            )
        self._resume_from = folder
        self._adopt_state(saved)
        self._tell_changes(folder)
        if (folder / PROGRESS).is_file():
            self._resume_progress(read_json(folder / PROGRESS))
        else:
            self._guess_progress()
        if foreign:
            self._resume_foreign(folder)
            return
        self._resume_optimizer(folder)
        self.lr_scheduler.load_state_dict(decode_schedule(read_json(folder / SCHEDULER)))
        if (folder / SCALER).is_file():
            self.strategy.precision.load_state_dict(read_json(folder / SCALER))
        self._resume_rng = self._random_states(folder)
        # Now, for an evaluation that a signal put off; and once more where training goes on.
        self.strategy.load_rng_state(self._resume_rng)

    def _resume_optimizer(self, folder: Path) -> None:
        """The optimizer's state; where it is in shards here or there, only the parts this process holds are read."""
        module = plain_module(self.model)
        if self.strategy.saves_itself:
            self.strategy.read_state(folder)
            return
        if not (folder / f"{OPTIMIZER}.json").is_file():
            raise CheckpointError(
                f"{folder.name} holds no {OPTIMIZER}.json: DeepSpeed has saved it in files of its own. Resume with "
                "deepspeed= and as many processes as then, or start anew from its weights"
            )
        if not self.strategy.is_sharded and (folder / f"{OPTIMIZER}.safetensors").is_file():
            self.strategy.load_optimizer(*read_optimizer(folder), self.optimizer, module)
            return
        with BoxReader(folder, OPTIMIZER).opened() as reader:
            described = read_json(folder / f"{OPTIMIZER}.json")
            self.strategy.load_optimizer(described, slot_reader(reader, module), self.optimizer, module)

    def _random_states(self, folder: Path) -> dict[str, Any]:
        """This process's random states; one that was not there when they were saved gets fresh ones of its own."""
        rank = self.strategy.data_rank
        record = record_of(folder, rank * self._copies_then(folder))
        if record is not None and record["rng"] is not None:
            return rng_from_json(record["rng"])
        if rank == 0:
            return rng_from_json(read_json(folder / RNG))
        return own_random_states(self.args.seed, rank, self.state.global_step)

    def _copies_then(self, folder: Path) -> int:
        """How many processes worked on the same data in the run that saved a checkpoint."""
        return int(read_json(folder / PROGRESS).get("copies", 1)) if (folder / PROGRESS).is_file() else 1

    def _tell_changes(self, folder: Path) -> None:
        """Say which arguments differ from the checkpoint's and what becomes of them."""
        if not (folder / ARGUMENTS).is_file():
            return
        before, now = read_json(folder / ARGUMENTS), self.args.to_dict()
        for names, effect in CHANGES.items():
            changed = [f"{n} ({before[n]} -> {now[n]})" for n in names if n in before and before[n] != now[n]]
            if changed:
                self.notices.tell_once(f"not as in {folder.name}: {', '.join(changed)}; {effect}")

    def plan_to_go_on(self, checkpoint: str) -> Plan:
        """The plan; with batches of another size, the updates done so far plus those of the samples left."""
        folder, plan, args = Path(checkpoint), self.plan, self.args
        if not (folder / PROGRESS).is_file() or not (folder / ARGUMENTS).is_file() or plan.batches_per_epoch is None:
            return plan
        if args.max_steps > 0 or plan.total_batch_size == self._samples_per_update(folder):
            return plan
        progress, step = Progress(**read_json(folder / PROGRESS)["progress"]), read_json(folder / STATE)["global_step"]
        left = -(-self._batches_left(progress) // (plan.accumulation * plan.world_size))
        done = (progress.epoch + 1) * plan.updates_per_epoch - left
        self.notices.tell_once(
            f"updates have another size than in {folder.name}: after its {step} there are {plan.max_steps - done} more"
        )
        return dataclasses.replace(plan, max_steps=step + plan.max_steps - done)

    def _samples_per_update(self, folder: Path) -> int:
        """The size of the updates of the run that saved a checkpoint."""
        before, progress = read_json(folder / ARGUMENTS), read_json(folder / PROGRESS)
        accumulation = progress.get("accumulation", before["gradient_accumulation_steps"])
        return int(before["per_device_train_batch_size"] * accumulation * progress.get("world_size", 1))

    def accumulation_to_go_on(self, checkpoint: str) -> int | None:
        """The accumulation that keeps updates as large as they were, with another number of processes than then."""
        folder, args = Path(checkpoint), self.args
        if not (folder / PROGRESS).is_file() or not (folder / ARGUMENTS).is_file():
            return None
        before = read_json(folder / ARGUMENTS)
        asked = ("per_device_train_batch_size", "gradient_accumulation_steps")
        micro_batches = args.per_device_train_batch_size * self.strategy.data_world
        samples = self._samples_per_update(folder)
        if any(before.get(name) != getattr(args, name) for name in asked) or samples % micro_batches:
            return None
        kept = samples // micro_batches
        if kept == args.gradient_accumulation_steps:
            return None
        self.notices.tell_once(
            f"updates stay at {samples} samples with {self.strategy.data_world} processes: "
            f"{kept} micro-batches each instead of {args.gradient_accumulation_steps}"
        )
        return kept

    def _ordered_data(self) -> bool:
        return ordered_sampler(self.train_dataloader) is not None  # type: ignore[attr-defined]

    def _batches_left(self, progress: Progress) -> int:
        """Micro-batches of this run's size in the rest of the epoch."""
        samples, size = (self.plan.examples or 0) - progress.samples_in_epoch, self.plan.batch_size
        return samples // size if self.args.dataloader_drop_last else -(-samples // size)

    def _resume_progress(self, document: dict[str, Any]) -> None:
        for name, value in dataclasses.asdict(Progress(**document["progress"])).items():
            setattr(self.progress, name, value)
        # Counted in samples: the size of batches may have changed.
        if self._ordered_data() and self.plan.batches_per_epoch is not None:
            self.progress.batches_in_epoch = self.plan.batches_per_epoch - self._batches_left(self.progress)
        self.state.samples_seen = self.progress.samples_seen
        self.meter.load_state_dict(document["meter"])
        self.load_part_states({**document.get("parts", {}), **self._own_parts(document)})

    def _own_parts(self, document: dict[str, Any]) -> dict[str, Any]:
        """What this process itself had put aside; with another number of processes a stream is read again instead."""
        before, now = document.get("world_size", 1), self.strategy.data_world
        if before != now:
            self.notices.tell_once(
                f"saved by {before} processes, resumed on {now}: those that were there go on with their random states, "
                "new ones begin with states made from the seed, their number and the step"
            )
            return {"stream": None}
        record = None if self._resume_from is None else record_of(
            self._resume_from, self.strategy.data_rank * self._copies_then(self._resume_from)
        )
        return {} if record is None else record["parts"]

    def _guess_progress(self) -> None:
        """transformers counts updates: the position follows from them, if batch and accumulation are the same."""
        plan, step = self.plan, self.state.global_step
        place = foreign_progress(
            step,
            batches_per_epoch=plan.batches_per_epoch,
            accumulation=plan.accumulation * plan.world_size,
            batch_size=plan.batch_size,
        )
        for name, value in place.items():
            setattr(self.progress, name, value)
        self.progress.last_logged_step = step
        self.notices.tell_once(f"resuming a checkpoint of transformers at step {step}: epoch {place['epoch']}")

    def _resume_foreign(self, folder: Path) -> None:
        found = read_foreign(folder)
        self.optimizer.load_state_dict(found["optimizer"])
        self.lr_scheduler.load_state_dict(found["scheduler"])
        if found["scaler"] is not None:
            self.strategy.precision.load_state_dict(found["scaler"])
        self._resume_rng = found["rng"]

    def _adopt_state(self, saved: TrainerState) -> None:
        """Take over a saved state, but keep this run's own length and intervals."""
        own = ("max_steps", "num_train_epochs", "train_batch_size", "logging_steps", "eval_steps", "save_steps",
               "is_local_process_zero", "is_world_process_zero")  # fmt: skip
        for each in dataclasses.fields(TrainerState):
            if each.name not in own:
                setattr(self.state, each.name, getattr(saved, each.name))
        self._restore_callbacks(saved.stateful_callbacks)

    def restore_weights(self, step: int) -> None:
        folder = Path(self.checkpoints.local(self.checkpoints.complete()[step]))
        place = dataclasses.replace(self.progress)
        rng = self.strategy.rng_state()
        self._load_from_checkpoint(str(folder))
        self._resume(str(folder))
        logged = self.progress.last_logged_step
        for each in dataclasses.fields(place):
            setattr(self.progress, each.name, getattr(place, each.name))
        self.progress.last_logged_step = logged
        self._resume_rng = None
        self.strategy.load_rng_state(rng)

    def _load_best_model(self) -> None:
        """Load the weights of the best checkpoint into the model."""
        best = self.state.best_model_checkpoint
        assert best is not None
        if not is_url(best) and not os.path.isdir(best):  # the run went on in a folder that was moved
            best = self.state.best_model_checkpoint = os.path.join(str(self.args.output_dir), os.path.basename(best))
        if self.state.best_global_step not in self.checkpoints.complete() and not os.path.isdir(best):
            self.notices.tell_once(f"the best checkpoint, {best}, could not be saved: the last weights are kept")
            return
        self.strategy.load_weights(plain_module(self.model), self.checkpoints.local(best))
