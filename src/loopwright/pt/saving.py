"""The trainer's methods that write checkpoints and models, and read them back."""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from ..args.places import is_url, working_folder
from ..core.checkpoint.documents import read_json
from ..core.checkpoint.layout import ARGUMENTS, PROGRESS, RNG, SCALER, SCHEDULER, STATE, folder_name
from ..core.checkpoint.space import check_space
from ..core.checkpoint.storage import folder_for
from ..core.overrides import adapt, is_overridden
from ..core.packing import PackedPlan
from ..core.resuming import ResumingMethods
from ..core.state import TrainerState
from ..errors import CheckpointError
from .checkpoint import (
    HostCopies,
    copied,
    decode_optimizer,
    decode_schedule,
    encode_optimizer,
    encode_schedule,
    load_model,
    model_writer,
    plain_module,
    read_optimizer,
    rehearsed,
    write_optimizer,
)
from .foreign import foreign_progress, is_foreign, read_foreign, write_foreign
from .loaders import ordered_sampler
from .memory import free_memory
from .packing import sizes_of_updates
from .seeding import rng_from_json, rng_to_json


class SavingMethods(ResumingMethods):
    """Saving and resuming."""

    args: Any
    strategy: Any
    processing_class: Any
    data_collator: Any
    _resume_rng: dict[str, Any] | None
    _copies: HostCopies
    """What a save in the background writes while training goes on."""
    device: Any
    compiled: Any

    # ---- the model --------------------------------------------------------------------------------------------------

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """Write the model, its processor and the arguments, ready to be loaded again."""
        if self.args.should_save:
            with folder_for(output_dir or self.args.output_dir) as folder:
                self._save(folder)

    def _save(self, output_dir: str | None = None, state_dict: dict[str, Any] | None = None) -> None:
        folder = Path(output_dir or working_folder(self.args.output_dir))
        folder.mkdir(parents=True, exist_ok=True)
        module = plain_module(self.model)
        model_writer(module, module.state_dict() if state_dict is None else state_dict)(folder)
        self._save_companions(folder)

    def _save_companions(self, folder: Path) -> None:
        """What belongs to a model besides weights: its processor and the arguments."""
        processor = self.processing_class or getattr(self.data_collator, "tokenizer", None)
        if processor is not None and hasattr(processor, "save_pretrained"):
            processor.save_pretrained(str(folder))
        (folder / ARGUMENTS).write_text(self.args.to_json_string(), encoding="utf-8")

    # ---- checkpoints ------------------------------------------------------------------------------------------------

    def _save_checkpoint(self, model: Any, trial: Any = None) -> None:
        """Publish a checkpoint of the last finished update."""
        if not self.args.should_save:
            return
        step = self.state.global_step
        if self.state.best_global_step == step:
            self.state.best_model_checkpoint = os.path.join(str(self.args.output_dir), folder_name(step))
        background = self.args.async_save and not self._saves_models_itself() and self._fits_in_memory()
        self.checkpoints.wait()  # the copies of the save before this one are about to be written over
        self.checkpoints.save(
            step,
            self._checkpoint_writer(copy=background),
            format=self.args.checkpoint_format,
            keep=self.args.save_total_limit,
            protect=[self.state.best_global_step],
            background=background,
        )
        self._keep_compiled()

    def _keep_compiled(self) -> None:
        """Put what was compiled beside the checkpoints, not into them."""
        if self.compiled is not None and self.args.should_save:
            self.compiled.keep(self.args.output_dir, self.device)

    def _saves_models_itself(self) -> bool:
        return is_overridden(self, "save_model") or is_overridden(self, "_save")

    def _checkpoint_writer(self, *, copy: bool) -> Callable[[Path], None]:
        """A function that writes everything as it is now; with `copy`, later changes do not show."""
        keep = self._copies if copy else dict
        writers: list[Callable[[Path], None]] = []
        if self._saves_models_itself():
            save_model = adapt(self.save_model, "_internal_call")
            writers.append(lambda folder: save_model(str(folder), _internal_call=True))
        else:
            module = plain_module(self.model)
            writers += [model_writer(module, keep(module.state_dict())), self._save_companions]
        documents: dict[str, Any] = {STATE: self._state_document()}
        if self.args.save_only_model:
            pass
        elif self.args.checkpoint_format == "transformers":
            writers.append(self._foreign_writer(copy=copy))
            documents[PROGRESS] = self._resume_documents()[PROGRESS]  # theirs has no place for the position
        else:
            described, tensors = encode_optimizer(self.optimizer, plain_module(self.model))
            tensors = keep(tensors)
            writers.append(lambda folder: write_optimizer(folder, described, tensors))
            documents.update(self._resume_documents())
        texts = {name: json.dumps(values, indent=1, sort_keys=True) + "\n" for name, values in documents.items()}

        def write(folder: Path) -> None:
            for each in writers:
                each(folder)
            for name, text in texts.items():
                (folder / name).write_text(text, encoding="utf-8")

        return write

    def _foreign_writer(self, *, copy: bool) -> Callable[[Path], None]:
        parts = {"optimizer": self.optimizer.state_dict(), "scheduler": self.lr_scheduler.state_dict(),
                 "scaler": self.strategy.precision.state_dict(), "rng": self.strategy.rng_state()}  # fmt: skip
        parts = copied(parts) if copy else parts
        return lambda folder: write_foreign(folder, args=self.args, **parts)

    def _fits_in_memory(self) -> bool:
        """Whether the host has room for a copy of everything a checkpoint holds."""
        return free_memory() is None or self.checkpoint_bytes() * 1.2 < (free_memory() or 0) + self._copies.size

    def checkpoint_bytes(self) -> int:
        """About how large a checkpoint is: weights, buffers and, unless left out, two numbers per trained weight."""
        module = plain_module(self.model)
        weights = sum(tensor.numel() * tensor.element_size() for tensor in module.state_dict().values())
        if self.args.save_only_model:
            return weights
        known = sum(
            value.numel() * value.element_size()
            for slots in self.optimizer.state.values()
            for value in slots.values()
            if isinstance(value, Tensor)
        )
        trained = sum(p.numel() * p.element_size() for p in module.parameters() if p.requires_grad)
        return weights + (known or 2 * trained)

    def check_saving(self) -> None:
        """Before step 1: will checkpoints fit, and can the optimizer's state be written at all?"""
        args = self.args
        if args.save_strategy == "no" or not args.should_save:
            return
        saves = {"steps": self.plan.max_steps // max(int(self.state.save_steps), 1) + 1, "epoch": self.plan.epochs}
        held = saves.get(str(args.save_strategy), 1)
        warning = check_space(
            working_folder(args.output_dir),
            size=self.checkpoint_bytes(),
            keep=args.save_total_limit,
            saves=min(held, 1) if is_url(args.output_dir) else held,  # one at a time is staged here
        )
        if warning:
            self.notices.tell_once(warning)
        if not args.save_only_model:
            encode_optimizer(rehearsed(self.optimizer), plain_module(self.model))
            encode_schedule(self.lr_scheduler.state_dict())

    def _resume_documents(self) -> dict[str, Any]:
        meter = self.meter.state_dict()
        documents = {
            PROGRESS: {"progress": dataclasses.asdict(self.progress), "meter": meter, "parts": self.part_states()},
            SCHEDULER: encode_schedule(self.lr_scheduler.state_dict()),
            RNG: rng_to_json(self.strategy.rng_state()),
        }
        scaler = self.strategy.precision.state_dict()
        return {**documents, **({SCALER: scaler} if scaler is not None else {})}

    # ---- resuming ---------------------------------------------------------------------------------------------------

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: nn.Module | None = None) -> None:
        """Load the weights of a checkpoint."""
        load_model(plain_module(model or self.model), resume_from_checkpoint)

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
        self._adopt_state(saved)
        self._tell_changes(folder)
        if (folder / PROGRESS).is_file():
            self._resume_progress(read_json(folder / PROGRESS))
        else:
            self._guess_progress()
        if foreign:
            self._resume_foreign(folder)
            return
        decode_optimizer(*read_optimizer(folder), self.optimizer, plain_module(self.model))
        self.lr_scheduler.load_state_dict(decode_schedule(read_json(folder / SCHEDULER)))
        if (folder / SCALER).is_file():
            self.strategy.precision.load_state_dict(read_json(folder / SCALER))
        self._resume_rng = rng_from_json(read_json(folder / RNG))
        # Now, for an evaluation that a signal put off; and once more where training goes on.
        self.strategy.load_rng_state(self._resume_rng)

    def _ordered_data(self) -> bool:
        return ordered_sampler(self.train_dataloader) is not None  # type: ignore[attr-defined]

    def _sizes_of_updates(self) -> tuple[str, ...]:
        return tuple(sizes_of_updates(self.args))

    def _guess_progress(self) -> None:
        """transformers counts updates: the position follows from them, if batch and accumulation are the same."""
        plan, step = self.plan, self.state.global_step
        if isinstance(plan, PackedPlan):
            raise CheckpointError(
                f"a checkpoint of transformers at step {step} counts updates, and with packing={self.args.packing!r} "
                "these do not say which samples are done; resume without packing, or load its weights and start anew"
            )
        place = foreign_progress(
            step, batches_per_epoch=plan.batches_per_epoch, accumulation=plan.accumulation, batch_size=plan.batch_size
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

    def _load_weights_of(self, folder: str) -> None:
        load_model(plain_module(self.model), folder)
