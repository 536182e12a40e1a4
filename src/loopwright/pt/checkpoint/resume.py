"""Resuming from a checkpoint, written by any number of ranks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from torch import nn

from ...core.checkpoint.folder import ARGUMENTS, OPTIMIZER, PROGRESS, RNG, SCALER, SCHEDULER
from ...core.checkpoint.schema import check_part, flag, label, like, named, restoring
from ...core.resuming.resume import PROGRESS_DOCUMENT, Resuming
from ...core.sampling.packing import PackedPlan
from ...errors import CheckpointError
from ..data.loaders import ordered_sampler
from ..data.packing import sizes_of_updates
from ..optim.optimizers.decay import groups_of_transformers
from ..part import TorchPart
from ..rng import SAVED_RNG, rng_from_json
from .callback_tensors import STEM, load_tensors, restore_with_tensors, tensors_of
from .module_state import ModuleState
from .rank_state import own_random_states, place_of_record, record_of
from .registered import Registered
from .shards import BoxReader, SlotReader, sharded_slots
from .tensors import (
    decode_schedule,
    parameter_names,
    plain_module,
    read_description,
    read_json,
    read_optimizer,
    some,
)
from .transformers_format import foreign_progress, foreign_random_states, in_order, is_foreign, read_foreign
from .weights import partly_saved_names


class TorchResuming(TorchPart, Resuming):
    """Restores weights, optimizer, schedule, random states and position from a checkpoint."""

    modules: ModuleState | None = None
    _restored: frozenset[str] = frozenset()
    """Names of the weights in the checkpoint of an adapter."""

    def __init__(self, internals: Any) -> None:
        super().__init__(internals)
        self.registered = Registered()
        """Objects of the user that are part of every checkpoint."""

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: nn.Module | None = None) -> None:
        """Load the weights of a checkpoint."""
        self.strategy.load_weights(plain_module(model or self.model), resume_from_checkpoint)
        self._restored = partly_saved_names(Path(resume_from_checkpoint))

    def report_unmatched(self, load_result: Any) -> None:
        """Warn about the names that `load_state_dict(..., strict=False)` returned; tied weights are tied again."""
        module = plain_module(self.model)
        missing, expected = list(load_result.missing_keys), getattr(module, "_keys_to_ignore_on_save", None)
        if missing and expected and set(missing) == set(expected) and hasattr(module, "tie_weights"):
            module.tie_weights()
        elif missing:
            self.notices.warn_once(f"the checkpoint has no value of these weights: {some(missing)}")
        unexpected = list(load_result.unexpected_keys)
        if unexpected:
            self.notices.warn_once(f"the checkpoint has weights that the model lacks: {some(unexpected)}")

    def _load_weights_of(self, folder: str) -> None:
        """Load the best model: its weights, the averages of callbacks, and the saved state of its modules."""
        self.strategy.load_weights(plain_module(self.model), folder)
        if list(Path(folder).glob(f"{STEM}*.safetensors")):
            self._load_callback_tensors(Path(folder))
            if self.args.restore_callback_states_from_checkpoint:
                # Averages that began later than this checkpoint hold nothing that was measured.
                restore_with_tensors(self.callback_handler.callbacks, self._saved_state(Path(folder)))
        if self.modules is not None and (Path(folder) / PROGRESS).is_file():
            path = Path(folder) / PROGRESS
            with restoring(path, "the state of the modules"):
                self._resume_modules(read_json(path, PROGRESS_DOCUMENT)["parts"])

    def _load_callback_tensors(self, folder: Path) -> None:
        if self.args.restore_callback_states_from_checkpoint:
            tensors = tensors_of(self.callback_handler.callbacks, self.model)
            with restoring(folder / STEM, "the tensors of callbacks"):
                load_tensors(folder, tensors, self.notices.warn_once)

    # ---- modules ----------------------------------------------------------------------------------------------------

    def start_modules(self) -> None:
        """Record the state of modules outside their state dict, so that changes by training are saved."""
        module = plain_module(self.model)
        if self.modules is None or self.modules.module is not module:
            self.modules = ModuleState(module)
        self.modules.start_flags()
        self.modules.restored |= self._restored

    def part_states(self) -> dict[str, Any]:
        if self.modules is None:
            return {}
        flags = self.modules.changed_flags()
        return {"modules": self.modules.state_dict(self.notices.warn_once), **({"trained": flags} if flags else {})}

    def own_buffers(self) -> dict[str, Any]:
        """Buffers of this rank that differ from those of rank 0, as JSON values; a collective."""
        if self.modules is None:
            return {}
        of_ranks = self.processes.host.gather(self.modules.buffer_hashes())
        return self.modules.own_buffers(of_ranks[0], self.notices.warn_once)

    def load_part_states(self, states: dict[str, Any]) -> None:
        self._resume_modules(states)
        if self.modules is not None and "trained" in states:
            self.modules.load_flags(check_part(states["trained"], named(flag)))
        if self.modules is not None and "buffers" in states:
            self.modules.load_own_buffers(check_part(states["buffers"], named()))

    def load_state(self, checkpoint: str | bool) -> None:
        """Restore everything but the state of the run: its step, its position in the data and its logs stay."""
        self.run.checkpoints.wait()
        folder = Path(self.run.checkpoints.find(checkpoint) or "")
        self.trainer._load_from_checkpoint(str(folder))
        self.trainer._load_optimizer_and_scheduler(str(folder))
        self.registered.resume(folder, self.notices.warn_once)
        if not is_foreign(folder):
            self._resume_scaler(folder / SCALER)
            self.strategy.load_rng_state(self._random_states(folder))

    def _resume_modules(self, states: dict[str, Any]) -> None:
        if self.modules is not None and states.get("modules"):
            self.modules.load_state_dict(states["modules"], self.notices.warn_once)

    def resume(self, checkpoint: str) -> None:
        """Restore state, progress, optimizer, schedule and random states from the checkpoint."""
        folder = Path(checkpoint)
        saved = self._saved_state(folder)
        foreign = is_foreign(folder)
        if not foreign:
            self._check_resumable(folder)
        self.run.resume_from = folder
        self._adopt_state(saved)
        self._tell_changes(folder)
        if (folder / PROGRESS).is_file():
            self._resume_progress(folder)
        else:
            self._guess_progress()
        self._load_callback_tensors(folder)
        self.trainer._load_optimizer_and_scheduler(checkpoint)
        self.registered.resume(folder, self.notices.warn_once)
        if foreign:
            return
        self._resume_scaler(folder / SCALER)
        self._resume_random_states(folder)

    def _resume_scaler(self, path: Path) -> None:
        """Restore the loss scale, if the checkpoint has one."""
        precision = self.strategy.precision
        if path.is_file():
            state = read_json(path, like(precision.state_dict() or {}))
            with restoring(path, "the loss scale"):
                precision.load_state_dict(state)
        elif precision.state_dict() is not None:
            self.notices.warn_once(f"{label(path)} does not exist, so the loss scale starts at its initial value")

    def _place_of_parts(self, folder: Path) -> Path:
        return self._own_record_or(folder, PROGRESS)

    def _own_record_or(self, folder: Path, other: str) -> Path:
        """The file with the state of this rank, if there is one; else the other file."""
        own = place_of_record(folder, self.strategy.data_rank * self._copies_then(folder))
        return own if own.is_file() else folder / other

    def _resume_random_states(self, folder: Path) -> None:
        with restoring(self._own_record_or(folder, RNG), "the random state"):
            self.run.resume_rng = self._random_states(folder)
            # Now, for an evaluation that was pending at a signal; and again where training resumes.
            self.strategy.load_rng_state(self.run.resume_rng)

    def _load_callback_state(self) -> None:
        self.trainer._load_callback_state()

    def _load_optimizer_and_scheduler(self, checkpoint: str) -> None:
        """Restore the states of optimizer and schedule."""
        folder = Path(checkpoint)
        if is_foreign(folder):
            self._resume_foreign(folder)
            return
        self._resume_optimizer(folder)
        with restoring(folder / SCHEDULER, "the schedule"):
            schedule = decode_schedule(read_json(folder / SCHEDULER, named()))
        self._resume_schedule(schedule, folder / SCHEDULER)

    def _resume_optimizer(self, folder: Path) -> None:
        """Load the optimizer's state; if it is sharded here or in the checkpoint, read only this rank's shards."""
        module = plain_module(self.model)
        if self.strategy.saves_itself:
            self.strategy.read_state(folder)
            return
        if not (folder / f"{OPTIMIZER}.json").is_file():
            raise CheckpointError(
                f"{folder.name} has no state of the optimizer: it was removed, or DeepSpeed saved it in its own files. "
                "Start a new run from its weights, or resume with deepspeed= and the same number of ranks"
            )
        if not self.strategy.is_sharded and (folder / f"{OPTIMIZER}.safetensors").is_file():
            described, tensors = read_optimizer(folder)
            with restoring(folder / f"{OPTIMIZER}.json", "the optimizer"):
                self.strategy.load_optimizer(described, tensors, self.trainer.optimizer, module)
            return
        with BoxReader(folder, OPTIMIZER).opened() as reader:
            described = read_description(folder, reader.names())
            slots: Any = SlotReader(reader, module)  # a mapping of tensors
            with restoring(folder / f"{OPTIMIZER}.json", "the optimizer"):
                self.strategy.load_optimizer(described, slots, self.trainer.optimizer, module)

    def _random_states(self, folder: Path) -> dict[str, Any]:
        """This rank's random states; a rank that did not exist at the save gets new ones."""
        rank = self.strategy.data_rank
        record = record_of(folder, rank * self._copies_then(folder))
        if record is not None and record["rng"] is not None:
            return rng_from_json(record["rng"])
        if rank == 0:
            return rng_from_json(read_json(folder / RNG, SAVED_RNG))
        if rank < self._ranks_then(folder):
            raise CheckpointError(
                f"{label(self._place_of_parts(folder))} has no random state of rank {rank}, which has saved one; the "
                "file is missing or was changed. Resume from another checkpoint"
            )
        return own_random_states(self.args.seed, rank, self.state.global_step)

    def _copies_then(self, folder: Path) -> int:
        """Number of ranks per part of the data in the run that saved the checkpoint."""
        return int(self._saved_progress(folder).get("copies", 1)) if (folder / PROGRESS).is_file() else 1

    def _ranks_then(self, folder: Path) -> int:
        """Number of parts of the data in the run that saved the checkpoint."""
        return int(self._saved_progress(folder).get("world_size", 1)) if (folder / PROGRESS).is_file() else 1

    def _updates_are_as_large(self, folder: Path) -> bool:
        """Whether updates have the same size as in the run that saved the checkpoint."""
        before = self._saved_arguments(folder)
        if self.args.batch_packing or before.get("batch_packing"):  # sample counts vary, so arguments are compared
            return super()._updates_are_as_large(folder)
        return bool(self.run.plan.total_batch_size == self._samples_per_update(folder))

    def _sizes_of_updates(self) -> tuple[str, ...]:
        return tuple(sizes_of_updates(self.args))

    def _samples_per_update(self, folder: Path) -> int:
        """Effective batch size of the run that saved the checkpoint."""
        before, progress = self._saved_arguments(folder), self._saved_progress(folder)
        accumulation = progress.get("accumulation", before["gradient_accumulation_steps"])
        return int(before["per_device_train_batch_size"] * accumulation * progress.get("world_size", 1))

    def accumulation_to_go_on(self, checkpoint: str) -> int | None:
        """The accumulation that preserves the effective batch size with other ranks; None: that of the arguments."""
        folder, args = Path(checkpoint), self.args
        if not (folder / PROGRESS).is_file() or not (folder / ARGUMENTS).is_file() or args.batch_packing:
            return None
        before = self._saved_arguments(folder)
        # The value in its arguments may have been set by a callback, which this run has not called yet.
        then = self._saved_progress(folder).get("asked_accumulation", before["gradient_accumulation_steps"])
        before["gradient_accumulation_steps"] = then
        asked = ("per_device_train_batch_size", "gradient_accumulation_steps")
        micro_batches = args.per_device_train_batch_size * self.strategy.data_world
        samples = self._samples_per_update(folder)
        if any(before.get(name) != getattr(args, name) for name in asked) or samples % micro_batches:
            return None
        kept = samples // micro_batches
        if kept == args.gradient_accumulation_steps:
            return None
        self.notices.warn_once(
            f"the effective batch size is kept at {samples} samples with {self.strategy.data_world} ranks: {kept} "
            f"micro-batches per step instead of {args.gradient_accumulation_steps}"
        )
        return kept

    def updates_scheduled(self, checkpoint: str) -> int | None:
        """Number of updates the schedule was made for, if the run has changed their size since; else None."""
        folder = Path(checkpoint)
        if not (folder / PROGRESS).is_file() or not (folder / ARGUMENTS).is_file():
            return None
        document, before = self._saved_progress(folder), self._saved_arguments(folder)
        is_as_long = all(before.get(name) == getattr(self.args, name) for name in ("num_train_epochs", "max_steps"))
        return document["scheduled_updates"] if document.get("resized") and is_as_long else None

    def _ordered_data(self) -> bool:
        return ordered_sampler(self.run.loader) is not None

    def _own_parts(self, document: dict[str, Any]) -> dict[str, Any]:
        """This rank's part states; with another number of ranks, the stream is read from its start instead."""
        before, now = document.get("world_size", 1), self.strategy.data_world
        if before != now:
            self.notices.warn_once(
                f"saved by {before} ranks, resumed on {now}: existing ranks restore their RNG state; new ranks are "
                "seeded from (seed, rank, step)"
            )
            return {"stream": None}
        folder = self.run.resume_from
        if folder is None:
            return {}
        record = record_of(folder, self.strategy.data_rank * self._copies_then(folder))
        if record is not None and self.strategy.data_rank and "buffers" not in record["parts"]:
            raise CheckpointError(
                f"{label(self._place_of_parts(folder))} has no buffers of this rank, so running statistics would be "
                "those of rank 0. The file was changed; resume from another checkpoint"
            )
        return {} if record is None else record["parts"]

    def _guess_progress(self) -> None:
        """Derive the position from the update count of transformers, assuming the same batch size and accumulation."""
        plan, step = self.run.plan, self.state.global_step
        if isinstance(plan, PackedPlan):
            raise CheckpointError(
                f"a transformers checkpoint at step {step} counts steps, which with batch_packing="
                f"{self.args.batch_packing!r} do not identify the samples used; resume without packing, or start "
                "a new run from its weights"
            )
        place = foreign_progress(
            step,
            batches_per_epoch=plan.batches_per_epoch,
            accumulation=plan.accumulation * plan.world_size,
            batch_size=plan.batch_size,
        )
        for name, value in place.items():
            setattr(self.run.progress, name, value)
        self.run.progress.last_logged_step = step
        self.notices.warn_once(f"resuming a transformers checkpoint at step {step}: epoch {place['epoch']}")

    def _resume_foreign(self, folder: Path) -> None:
        found = read_foreign(folder)
        with restoring(folder, "the optimizer, the schedule or the loss scale of transformers"):
            is_own = (folder / PROGRESS).is_file()
            names = self._saved_progress(folder).get("optimizer") if is_own else self._their_groups(found["optimizer"])
            if names is not None:  # without them, parameters are matched by their order
                now = parameter_names(self.trainer.optimizer, plain_module(self.model))
                found["optimizer"] = in_order(found["optimizer"], names, now, self.trainer.optimizer.param_groups)
            self.trainer.optimizer.load_state_dict(sharded_slots(found["optimizer"], self.trainer.optimizer))
            self.trainer.lr_scheduler.load_state_dict(found["scheduler"])
            if found["scaler"] is not None:
                self.strategy.precision.load_state_dict(found["scaler"])
        rng = self._foreign_random_states(folder)
        if rng is not None:
            with restoring(self._own_record_or(folder, ""), "the random state of transformers"):
                self.run.resume_rng = rng
                self.strategy.load_rng_state(rng)  # now and again, as above

    def _their_groups(self, saved: dict[str, Any]) -> list[list[str]] | None:
        """The names in the groups of transformers' own optimizer, if these differ from the groups of this run."""
        sizes, own = ([len(each["params"]) for each in groups]
                      for groups in (saved["param_groups"], self.trainer.optimizer.param_groups))  # fmt: skip
        names = groups_of_transformers(plain_module(self.model))
        return names if sizes != own and sizes == [len(each) for each in names] else None

    def _foreign_random_states(self, folder: Path) -> dict[str, Any] | None:
        """This rank's random states in a checkpoint with files of transformers; None if rank 0 has none there."""
        rank, before = self.strategy.data_rank, self._copies_then(folder)
        record = record_of(folder, rank * before)
        if record is not None and record["rng"] is not None:
            return rng_from_json(record["rng"])
        found = foreign_random_states(folder, rank * before)
        return own_random_states(self.args.seed, rank, self.state.global_step) if found is None and rank else found
