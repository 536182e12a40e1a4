"""The trainer's methods that write checkpoints and models, and read them back."""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from torch import nn

from ..core.base import BaseTrainer
from ..core.checkpoint.layout import ARGUMENTS, PROGRESS, RNG, SCALER, SCHEDULER, STATE, folder_name
from ..core.overrides import adapt, is_overridden
from ..core.state import Progress, TrainerState
from ..errors import CheckpointError
from .checkpoint import (
    decode_optimizer,
    encode_optimizer,
    host_copy,
    load_model,
    model_writer,
    plain_module,
    read_json,
    read_optimizer,
    write_json,
    write_optimizer,
)
from .seeding import rng_from_json, rng_to_json


class SavingMethods(BaseTrainer):
    """Saving and resuming."""

    args: Any
    strategy: Any
    processing_class: Any
    data_collator: Any
    _resume_rng: dict[str, Any] | None

    # ---- the model --------------------------------------------------------------------------------------------------

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """Write the model, its processor and the arguments, ready to be loaded again."""
        if self.args.should_save:
            self._save(output_dir or self.args.output_dir)

    def _save(self, output_dir: str | None = None, state_dict: dict[str, Any] | None = None) -> None:
        folder = Path(output_dir or self.args.output_dir)
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
        background = self.args.async_save and not self._saves_models_itself()
        self.checkpoints.save(
            step,
            self._checkpoint_writer(copy=background),
            keep=self.args.save_total_limit,
            protect=[self.state.best_global_step],
            background=background,
        )

    def _saves_models_itself(self) -> bool:
        return is_overridden(self, "save_model") or is_overridden(self, "_save")

    def _checkpoint_writer(self, *, copy: bool) -> Callable[[Path], None]:
        """A function that writes everything as it is now; with `copy`, later changes do not show."""
        keep = host_copy if copy else dict
        writers: list[Callable[[Path], None]] = []
        if self._saves_models_itself():
            save_model = adapt(self.save_model, "_internal_call")
            writers.append(lambda folder: save_model(str(folder), _internal_call=True))
        else:
            module = plain_module(self.model)
            writers += [model_writer(module, keep(module.state_dict())), self._save_companions]
        documents: dict[str, Any] = {STATE: self._state_document()}
        if not self.args.save_only_model:
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

    def _state_document(self) -> dict[str, Any]:
        self.state.stateful_callbacks = self._callback_states()
        return dataclasses.asdict(self.state)

    def _resume_documents(self) -> dict[str, Any]:
        meter = self.meter.state_dict()
        documents = {
            PROGRESS: {"progress": dataclasses.asdict(self.progress), "meter": meter, "parts": self._part_states()},
            SCHEDULER: self.lr_scheduler.state_dict(),
            RNG: rng_to_json(self.strategy.rng_state()),
        }
        scaler = self.strategy.precision.state_dict()
        return {**documents, **({SCALER: scaler} if scaler is not None else {})}

    def _part_states(self) -> dict[str, Any]:
        """What other parts of the trainer want back when the run goes on."""
        return {}

    def _load_part_states(self, states: dict[str, Any]) -> None:
        """The counterpart of `_part_states`."""

    # ---- resuming ---------------------------------------------------------------------------------------------------

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: nn.Module | None = None) -> None:
        """Load the weights of a checkpoint."""
        load_model(plain_module(model or self.model), resume_from_checkpoint)

    def _resume(self, checkpoint: str) -> None:
        """Put state, progress, optimizer, schedule and randomness back to where the checkpoint was taken."""
        folder = Path(checkpoint)
        saved = TrainerState.from_dict(read_json(folder / STATE))
        if not (folder / PROGRESS).is_file():
            raise CheckpointError(
                f"{folder} holds weights but nothing to resume from (no {PROGRESS}); it was saved with "
                "save_only_model=True or by another trainer. Load its weights and train without resume_from_checkpoint"
            )
        self._adopt_state(saved)
        document = read_json(folder / PROGRESS)
        for name, value in dataclasses.asdict(Progress(**document["progress"])).items():
            setattr(self.progress, name, value)
        self.state.samples_seen = self.progress.samples_seen
        self.meter.load_state_dict(document["meter"])
        self._load_part_states(document.get("parts", {}))
        decode_optimizer(*read_optimizer(folder), self.optimizer, plain_module(self.model))
        self.lr_scheduler.load_state_dict(read_json(folder / SCHEDULER))
        if (folder / SCALER).is_file():
            self.strategy.precision.load_state_dict(read_json(folder / SCALER))
        self._resume_rng = rng_from_json(read_json(folder / RNG))

    def _adopt_state(self, saved: TrainerState) -> None:
        """Take over a saved state, but keep this run's own length and intervals."""
        own = ("max_steps", "num_train_epochs", "train_batch_size", "logging_steps", "eval_steps", "save_steps",
               "is_local_process_zero", "is_world_process_zero")  # fmt: skip
        for each in dataclasses.fields(TrainerState):
            if each.name not in own:
                setattr(self.state, each.name, getattr(saved, each.name))
        self._restore_callbacks(saved.stateful_callbacks)

    def _load_best_model(self) -> None:
        """Load the weights of the best checkpoint into the model."""
        best = self.state.best_model_checkpoint
        assert best is not None
        load_model(plain_module(self.model), best)


__all__ = ["SavingMethods", "write_json"]
