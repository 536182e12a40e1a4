"""Methods that save and load checkpoints and models."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ..args.paths import working_folder
from ..core.checkpoint.folder import MODEL, OPTIMIZER, PROGRESS, RNG, SCHEDULER, STATE
from ..core.checkpoint.json_files import documents_writer, read_json
from ..core.checkpoint.schema import restoring
from ..core.checkpoint.storage import folder_for
from ..core.measure.host_memory import free_memory
from ..core.resuming.resume import Resuming
from ..core.user_code.overrides import adapt
from ..notices import logger
from .checkpoint import (
    bytes_of,
    load_model_values,
    load_optimizer_values,
    optimizer_variables,
    values_of,
    write_values,
)
from .part import KerasPart
from .rng import SAVED_RNG

STREAM = "tf_data"
"""The folder of a tf.data iterator's files in a checkpoint."""


class KerasSaving(KerasPart, Resuming):
    """Saving and resuming."""

    # ---- the model --------------------------------------------------------------------------------------------------

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """Save the model by its own `save_pretrained` or as a .keras file, and its weights as safetensors."""
        if self.args.should_save:
            place = output_dir or self.args.output_dir
            assert place is not None  # settled arguments name a folder
            with folder_for(place) as folder:
                self.trainer._save(folder)
        if self.args.push_to_hub and not _internal_call:
            self.internals.pushing.push_saved(is_in_place=output_dir in (None, self.args.output_dir))

    def _save(self, output_dir: str | None = None) -> None:
        folder = Path(output_dir or working_folder(self.args.output_dir))
        folder.mkdir(parents=True, exist_ok=True)
        write_values(folder / MODEL, values_of(list(self.model.variables)))
        if callable(getattr(self.model, "save_pretrained", None)):
            self.model.save_pretrained(str(folder))
        elif callable(getattr(self.model, "save", None)):
            self._save_keras(folder / "model.keras")
        self._save_companions(folder)

    def _save_keras(self, path: Path) -> None:
        try:
            self.model.save(str(path))
        except (NotImplementedError, TypeError, ValueError) as error:
            path.unlink(missing_ok=True)
            logger.warning(f"Keras cannot save the model as {path.name} ({error}); its weights are in {MODEL}")

    # ---- checkpoints ------------------------------------------------------------------------------------------------

    def _save_checkpoint(self, model: Any, trial: Any = None) -> None:
        """Publish a checkpoint of the last finished update."""
        self._note_best_checkpoint()
        if self.args.should_save:
            background = self.saves_in_background() and self._fits_in_memory()
            self.run.checkpoints.save(
                self.state.global_step,
                self._checkpoint_writer(),
                keep=self.args.save_total_limit,
                protect=self._protected_steps(),
                background=background and self.strategy.world_size == 1,
            )
        self.strategy.barrier()  # other workers may read it next

    def _checkpoint_writer(self) -> Callable[[Path], None]:
        """A function that writes a snapshot taken now; later changes are not included."""
        writers: list[Callable[[Path], None]] = []
        if self._saves_models_itself():
            save_model = adapt(self.trainer.save_model, "_internal_call")
            writers.append(lambda folder: save_model(str(folder), _internal_call=True))
        weights = values_of(list(self.model.variables))
        writers += [lambda folder: write_values(folder / MODEL, weights), self._save_companions]
        documents: dict[str, Any] = {STATE: self.internals.state_document()}
        if not self.args.save_only_model:
            slots = values_of(optimizer_variables(self.trainer.optimizer))
            writers.append(lambda folder: write_values(folder / f"{OPTIMIZER}.safetensors", slots))
            documents.update(self._resume_documents())
            files = self.internals.data.source_files()
            if files is not None:
                writers.append(lambda folder: _move(files, folder / STREAM))
        writers.append(documents_writer(documents))

        def write(folder: Path) -> None:
            for each in writers:
                each(folder)

        return write

    def _resume_documents(self) -> dict[str, Any]:
        return {
            PROGRESS: self._progress_document(),
            SCHEDULER: self.trainer.lr_scheduler.state_dict(),
            RNG: self.strategy.streams.to_json(self.strategy.rng_state()),
        }

    def checkpoint_bytes(self) -> int:
        """Approximate size of a checkpoint: the variables of the model and of the optimizer."""
        variables = list(self.model.variables)
        if not self.args.save_only_model:
            variables += optimizer_variables(self.trainer.optimizer)
        return sum(bytes_of(variable) for variable in variables)

    def _fits_in_memory(self) -> bool:
        return free_memory() is None or self.checkpoint_bytes() * 1.2 < (free_memory() or 0)

    # ---- resuming ---------------------------------------------------------------------------------------------------

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: Any = None) -> None:
        load_model_values(model or self.model, resume_from_checkpoint)

    def _load_weights_of(self, folder: str) -> None:
        load_model_values(self.model, folder)

    def resume(self, checkpoint: str) -> None:
        folder = Path(checkpoint)
        self._check_resumable(folder)
        self._adopt_state(self._saved_state(folder))
        self._tell_changes(folder)
        self._resume_progress(folder)
        load_optimizer_values(self.trainer.optimizer, folder)
        self._resume_schedule(read_json(folder / SCHEDULER), folder / SCHEDULER)
        if (folder / STREAM).is_dir():
            self.run.stream = folder / STREAM
        with restoring(folder / RNG, "the random state"):
            self.run.resume_rng = self.strategy.streams.from_json(read_json(folder / RNG, SAVED_RNG))
            # Restored now for an evaluation that a signal delayed, and again when training continues.
            self.strategy.load_rng_state(self.run.resume_rng)

    def _ordered_data(self) -> bool:
        return bool(self.run.source.ordered)


def _move(source: Path, target: Path) -> None:
    shutil.copytree(source, target, dirs_exist_ok=True)
    shutil.rmtree(source, ignore_errors=True)
