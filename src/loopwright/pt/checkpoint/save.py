"""Writing checkpoints and models."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from functools import cached_property
from pathlib import Path
from typing import Any

from torch import Tensor

from ...args.paths import working_folder
from ...core.checkpoint.folder import MODEL, OPTIMIZER, PROGRESS, RNG, SCALER, SCHEDULER, STATE, folder_name
from ...core.checkpoint.json_files import documents_writer
from ...core.checkpoint.one_folder import OneFolder
from ...core.checkpoint.storage import folder_for
from ...core.checkpoint.writers import Part, publish_together
from ...core.user_code.overrides import adapt, is_overridden
from ...errors import CheckpointError
from ..measure.memory_metrics import free_memory
from ..rng import rng_to_json
from .callback_tensors import STEM, tensors_of, whole_writer
from .described_values import check_plain
from .format import why_not_transformers_files
from .full_tensor import stream_tensors, whole_tensors
from .rank_state import SavingCrew, is_visible_to_all, keep_records
from .resume import TorchResuming
from .round_trip import check_checkpoint, check_companions, export_warning
from .shards import save_config, shard_writer
from .tensors import (
    HostSnapshot,
    copied,
    encode_optimizer,
    encode_schedule,
    plain_module,
    rehearsed,
    write_json,
    write_optimizer,
)
from .transformers_format import write_arguments, write_foreign
from .weights import adapter_writer, export_writer, is_adapter, is_exact, is_saved_by_others, native_writer


class TorchSaving(TorchResuming):
    """Writes checkpoints and models."""

    def __init__(self, internals: Any) -> None:
        super().__init__(internals)
        self.copies = HostSnapshot()
        """Copies that a background save writes while training continues."""
        self._format: str | None = None

    # ---- the model --------------------------------------------------------------------------------------------------

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """Write the model with full weights, its processor and the arguments, ready to be loaded."""
        place = output_dir or self.args.output_dir
        assert place is not None  # resolved arguments always have a folder
        if self.strategy.is_sharded:
            self._save_gathered(place)
        elif self.args.should_save:
            with folder_for(place) as folder:
                self.trainer._save(folder)
        if self.args.push_to_hub and not _internal_call:
            self.internals.pushing.push_saved(is_in_place=place == self.args.output_dir)

    def _save_gathered(self, place: str) -> None:
        """Write full weights gathered from the shards of all ranks; a collective."""
        module, leads = plain_module(self.model), self.args.should_save
        with folder_for(place) if leads else nullcontext("") as name:
            folder = Path(name)
            if leads:
                folder.mkdir(parents=True, exist_ok=True)
            if hasattr(module, "save_pretrained") or is_overridden(self.trainer, "_save"):
                state = whole_tensors(self.strategy.model_state(module), keep=leads)
                if leads:
                    self.trainer._save(str(folder), state_dict=state)
            else:
                stream_tensors(folder / MODEL if leads else None, self.strategy.model_state(module))
                if leads:
                    self._save_companions(folder)
        self.strategy.barrier()

    def _save(self, output_dir: str | None = None, state_dict: dict[str, Any] | None = None) -> None:
        folder = Path(output_dir or working_folder(self.args.output_dir))
        folder.mkdir(parents=True, exist_ok=True)
        module = plain_module(self.model)
        export_writer(module, self.strategy.model_state(module) if state_dict is None else state_dict)(folder)
        self._save_companions(folder)

    def _save_companions(self, folder: Path) -> None:
        super()._save_companions(folder)
        if self.args.usual_format == "transformers" and self.args.checkpoint_format != "native":
            write_arguments(folder, self.args, self.notices.inform_once)

    # ---- checkpoints ------------------------------------------------------------------------------------------------

    def _save_checkpoint(self, model: Any, trial: Any = None) -> None:
        """Write and publish a checkpoint of the last finished update."""
        if self.is_alone and not self.args.should_save:
            return
        self._note_best_checkpoint()
        module = plain_module(self.model)
        by_others = self.strategy.saves_itself or is_saved_by_others(module)
        background = self.saves_in_background() and not by_others and self._fits_in_memory()
        background = background if self.is_alone else not self.strategy.any_rank(not background)
        self.run.checkpoints.wait()  # the copies of the previous save are about to be overwritten
        self.run.checkpoints.save(
            self.state.global_step,
            self._checkpoint_writer(copy=background),
            format=self.format,
            keep=self.args.save_total_limit,
            protect=self._protected_steps(),
            background=background,
            crew=self.crew,
            records=keep_records,
        )
        self.keep_compiled()

    def save_state(self, place: str | None) -> str:
        """Write a checkpoint into a folder, or a regular one; returns where it is."""
        step = self.state.global_step
        if place is None:
            self.trainer._save_checkpoint(self.model)
            self.run.checkpoints.wait()
            self.run.checkpoints.raise_if_failed()
            return str(self.run.checkpoints.storage.place(folder_name(step)))
        self.run.checkpoints.wait()
        storage, write = OneFolder(place), self._checkpoint_writer(copy=False)
        kind, run = self.format, self.run.checkpoints.run_id
        if self.crew is not None:
            publish_together(storage, step, write, format=kind, run=run, crew=self.crew, keep=keep_records)
        elif self.leads_saving:
            storage.save(step, write, format=kind, run=run)
        return place

    def keep_compiled(self) -> None:
        """Write the compile cache to the user's cache folder."""
        if self.internals.compiled is not None and self.args.should_save:
            self.internals.compiled.keep()

    @cached_property
    def crew(self) -> SavingCrew | None:
        """The ranks that write checkpoints together; None for a single process."""
        if self.is_alone and not self.strategy.is_sharded:
            return None
        strategy, gather, leader = self.strategy, self.processes.saving.gather, 0
        if self.args.save_on_each_node:
            shared = is_visible_to_all(working_folder(self.args.output_dir), strategy.rank, gather)
            if shared:
                self.notices.warn_once(
                    "save_on_each_node: all nodes share the output folder, so only one of them saves"
                )
            leader = 0 if shared else strategy.rank - self.args.local_process_index
        return SavingCrew(strategy.rank, leader, gather)

    @property
    def leads_saving(self) -> bool:
        """Whether this rank publishes checkpoints and models."""
        return self.args.should_save if self.crew is None else self.crew.rank == self.crew.leader

    def _checkpoint_writer(self, *, copy: bool) -> Callable[[Path], Part]:
        """A function that writes the current state; with `copy`, later changes do not affect it."""
        keep, leads = self.copies if copy else dict, self.leads_saving
        writers: list[Callable[[Path], Any]] = []
        if self._saves_models_itself():
            save_model = adapt(self.trainer.save_model, "_internal_call")
            writers.append(lambda folder: save_model(str(folder), _internal_call=True))
        elif self.strategy.is_sharded and not self._saves_whole():
            writers += self._shard_writers(keep, leads=leads)
        else:
            writers += self._whole_writers(keep, leads=leads)
        documents: dict[str, Any] = {STATE: self.internals.state_document()}
        writers += self._callback_writers(keep, leads=leads)
        if self.args.save_only_model:
            pass
        elif self.format == "transformers":
            described, _ = encode_optimizer(self.trainer.optimizer, plain_module(self.model))
            check_plain(described)
            writers += [self._foreign_writer(copy=copy)] if leads else []
            # Their format holds neither the position nor the names of the parameters.
            names = [group["params"] for group in described["groups"]]
            documents[PROGRESS] = {**self._resume_documents()[PROGRESS], "optimizer": names}
        else:
            if self.strategy.saves_itself:
                writers.append(self.strategy.write_state)
            elif (leads and not self.strategy.is_sharded) or self._saves_whole():
                described, tensors = self.strategy.optimizer_state(self.trainer.optimizer, plain_module(self.model))
                tensors = keep(self._gathered_tensors(tensors, leads=leads))
                writers += [lambda folder: write_optimizer(folder, described, tensors)] if leads else []
            documents.update(self._resume_documents())
        if leads and not self.args.save_only_model:
            self.registered.report_missing(self.notices.warn_once)
            writers.append(self.registered.writer(keep))
        record = None if self.is_alone else self._own_record()
        write_documents = documents_writer(documents if leads else {})

        def write(folder: Path) -> Part:
            written = [part for each in writers if isinstance(part := each(folder), Part)]
            write_documents(folder)
            files = [name for part in written for name in part.files]
            return Part(files, {name: each for part in written for name, each in part.tensors.items()}, record)

        return write

    def _callback_writers(self, keep: Any, *, leads: bool) -> list[Callable[[Path], Any]]:
        """Writers of the tensors of callbacks, such as averaged weights."""
        tensors = tensors_of(self.callback_handler.callbacks, self.model)
        if not tensors:
            return []
        if self.strategy.is_sharded and not self._saves_whole():
            return [shard_writer(STEM, tensors, keep, rank=self.strategy.rank, world=self.strategy.world_size)]
        whole = self._gathered_tensors(tensors, leads=leads)
        return [whole_writer(whole, keep)] if leads else []

    def _own_record(self) -> dict[str, Any]:
        """The state of this rank, in every format; a collective."""
        rng = None if self.args.save_only_model else rng_to_json(self.strategy.rng_state())
        return {"rng": rng, "parts": {**self.internals.part_states(), "buffers": self.own_buffers()}}

    def _saves_whole(self) -> bool:
        """Whether shards are gathered for a checkpoint: by the strategy, or because nodes have separate folders."""
        if not self.strategy.is_sharded:
            return False
        apart = self.args.save_on_each_node and self.strategy.any_rank(self.crew is not None and self.crew.leader != 0)
        return apart or self.strategy.saves_whole

    def _gathered_tensors(self, tensors: Any, *, leads: bool) -> Any:
        return whole_tensors(tensors, keep=leads) if self.strategy.is_sharded else tensors

    def _whole_writers(self, keep: Any, *, leads: bool) -> list[Callable[[Path], Any]]:
        """Writers for the leading rank, which writes full weights."""
        if not leads and not self.strategy.is_sharded:
            return []
        module = plain_module(self.model)
        state = self.strategy.model_state(module)
        if is_adapter(module):  # a quantized base has strings in its state dict
            state = {name: value for name, value in state.items() if isinstance(value, Tensor)}
        tensors = keep(self._gathered_tensors(state, leads=leads))
        if not leads:
            return []
        # With `auto`, weights that transformers' files lack are written beside them.
        is_native = self.format == "native" or (self.args.checkpoint_format == "auto" and not is_exact(module))
        if not is_native and not is_adapter(module):
            return [export_writer(module, tensors), self._save_companions]
        writer = native_writer if is_native else adapter_writer
        needed = self._needed_weights(module) if is_adapter(module) else set(tensors)
        return [writer(module, tensors, needed=needed, tell=self.notices.warn_once), self._save_companions]

    def _needed_weights(self, module: Any) -> set[str]:
        """Names a checkpoint must hold even if the other weights are saved elsewhere, as with adapters."""
        if self.modules is not None and self.modules.module is module:
            return self.modules.changed_weights()
        return {name for name, each in module.state_dict(keep_vars=True).items() if each.requires_grad}

    def _shard_writers(self, keep: Any, *, leads: bool) -> list[Callable[[Path], Any]]:
        """Writers with which each rank writes its shards of weights and optimizer."""
        module, (rank, world) = plain_module(self.model), (self.strategy.rank, self.strategy.world_size)
        described: dict[str, Any] = {}
        slots: dict[str, Tensor] = {}
        if not self.args.save_only_model:
            described, slots = self.strategy.optimizer_state(self.trainer.optimizer, module)
        writers: list[Callable[[Path], Any]] = []
        for stem, tensors in (("model", self.strategy.model_state(module)), (OPTIMIZER, slots)):
            writers.append(shard_writer(stem, tensors, keep, rank=rank, world=world))
        if leads:
            writers.append(lambda folder: write_json(folder / f"{OPTIMIZER}.json", described) if described else None)
            writers += [lambda folder: save_config(module, folder), self._save_companions]
        return writers

    @property
    def format(self) -> str:
        """The files that checkpoints of this run have: native or transformers."""
        if self._format is None:
            self._format = self._chosen_format()
        return self._format

    def _chosen_format(self) -> str:
        args = self.args
        usual = args.usual_format if args.checkpoint_format == "auto" else args.checkpoint_format
        if args.checkpoint_format != "auto" or usual == "native":
            return usual
        module, trainer, strategy = plain_module(self.model), self.trainer, self.strategy
        is_sharded = strategy.is_sharded or strategy.saves_itself
        optimizer, schedule = trainer.optimizer, trainer.lr_scheduler
        obstacle = why_not_transformers_files(args, module, optimizer, schedule, is_sharded=is_sharded)
        if obstacle is None:
            return usual
        if args.save_strategy != "no":
            self.notices.inform_once(f"checkpoints have loopwright's own files, not those of transformers: {obstacle}")
        return "native"

    def _foreign_writer(self, *, copy: bool) -> Callable[[Path], None]:
        parts = {"optimizer": self.trainer.optimizer.state_dict(), "scheduler": self.trainer.lr_scheduler.state_dict(),
                 "scaler": self.strategy.precision.state_dict(), "rng": self.strategy.rng_state()}  # fmt: skip
        parts = copied(parts, self.copies) if copy else parts
        return lambda folder: write_foreign(folder, args=self.args, **parts)

    def _fits_in_memory(self) -> bool:
        """Whether host memory has space for a copy of a checkpoint."""
        return free_memory() is None or self.checkpoint_bytes() * 1.2 < (free_memory() or 0) + self.copies.size

    def checkpoint_bytes(self) -> int:
        """Approximate size of a checkpoint: weights, buffers and, unless excluded, two values per trained weight."""
        module = plain_module(self.model)
        weights = sum(tensor.numel() * tensor.element_size() for tensor in module.state_dict().values())
        if self.args.save_only_model:
            return weights
        known = sum(
            value.numel() * value.element_size()
            for slots in self.trainer.optimizer.state.values()
            for value in slots.values()
            if isinstance(value, Tensor)
        )
        trained = sum(p.numel() * p.element_size() for p in module.parameters() if p.requires_grad)
        return weights + (known or 2 * trained)

    def check_saving(self) -> None:
        """Check before the first step that checkpoints fit, and that the optimizer's state can be written."""
        args, module, self._format = self.args, plain_module(self.model), None
        if not self.strategy.saves_itself:
            self._check_round_trip(module)
        super().check_saving()
        if args.save_strategy == "no" or not args.should_save:
            return
        if not args.save_only_model and not self.strategy.saves_itself:
            described, _ = encode_optimizer(rehearsed(self.trainer.optimizer), module)
            if self.format == "transformers":
                check_plain(described)
            encode_schedule(self.trainer.lr_scheduler.state_dict())

    def _check_round_trip(self, module: Any) -> None:
        """Check that weights can be restored from a checkpoint, and from the files of `save_model`."""
        args = self.args
        if args.save_strategy != "no" and not args.save_only_model and not self._saves_models_itself():
            check_checkpoint(module)
        if args.save_strategy != "no" and args.should_save:
            check_companions(module)
        warning = export_warning(module)
        if warning and args.save_strategy != "no" and self.format == "transformers":
            raise CheckpointError(warning)
        if warning:
            self.notices.warn_once(warning)

    def _resume_documents(self) -> dict[str, Any]:
        strategy = self.strategy
        size = {
            "world_size": strategy.data_world,
            "copies": strategy.copies,
            "accumulation": self.run.plan.accumulation,
            "asked_accumulation": self.run.first_accumulation,
            "resized": self.run.is_resized,
            "scheduled_updates": self.run.scheduled_updates,
        }
        documents = {
            PROGRESS: {**self._progress_document(), **size},
            SCHEDULER: encode_schedule(self.trainer.lr_scheduler.state_dict()),
            RNG: rng_to_json(self.strategy.rng_state()),
        }
        scaler = self.strategy.precision.state_dict()
        return {**documents, **({SCALER: scaler} if scaler is not None else {})}
