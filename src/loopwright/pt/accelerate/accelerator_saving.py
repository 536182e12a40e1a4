"""What `trainer.accelerator` saves, loads and logs, over the trainer's own checkpoints and logs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ...errors import ArgumentsError, NotAvailable
from ..hooks import TorchHooks


class AcceleratorSaving:
    """States in folders, objects that are part of every checkpoint, and numbers for the trackers."""

    _trainer: TorchHooks

    def register_for_checkpointing(self, *objects: Any) -> None:
        """Save these objects in every checkpoint and restore them when training resumes.

        Each has `state_dict()` and `load_state_dict()`. Resumed runs register the same objects in the same order,
        before `train()` or in a callback.
        """
        for each in objects:
            self._trainer._loopwright.saving.registered.add(each)

    def save_state(self, output_dir: Any = None, safe_serialization: bool = True, **options: Any) -> str:
        """Write a checkpoint of the last finished update into a folder, by default `checkpoint-N` of `output_dir`.

        `train(resume_from_checkpoint=folder)` continues from it. Called on all ranks.
        """
        _refuse("save_state", {**options, **({} if safe_serialization else {"safe_serialization": False})})
        internals = self._trainer._loopwright
        if internals.run.planned_updates is None:
            raise NotAvailable(
                "trainer.accelerator.save_state: training has not begun, so there is no optimizer to save; use "
                "trainer.save_model() for the model"
            )
        return internals.saving.save_state(None if output_dir is None else str(output_dir))

    def load_state(self, input_dir: Any = None, **options: Any) -> None:
        """Restore weights, optimizer, schedule, random states and registered objects from a checkpoint.

        The position in the data stays; `train(resume_from_checkpoint=folder)` also continues at that of the
        checkpoint. By default the newest one. Called on all ranks.
        """
        _refuse("load_state", options)
        internals = self._trainer._loopwright
        if not internals.is_training:
            place = "True" if input_dir is None else repr(str(input_dir))
            raise NotAvailable(
                "trainer.accelerator.load_state: no training is running; use "
                f"trainer.train(resume_from_checkpoint={place})"
            )
        internals.saving.load_state(True if input_dir is None else str(input_dir))

    def log(self, values: Mapping[str, Any], step: int | None = None, log_kwargs: dict[str, Any] | None = None) -> None:
        """Log numbers: they are part of `state.log_history`, and go to the trackers of `report_to`."""
        _refuse("log", {} if not log_kwargs else {"log_kwargs": log_kwargs})
        now = self._trainer.state.global_step
        if step is not None and step != now:
            raise ArgumentsError(
                f"trainer.accelerator.log: step={step}, but numbers are logged at the current step, {now}; leave step "
                "out, and log it as one of the values if it is another count"
            )
        self._trainer.log(dict(values))

    def end_training(self) -> None:
        """Trackers are finished when training ends."""


def _refuse(method: str, options: dict[str, Any]) -> None:
    if options:
        names = ", ".join(f"{name}={value!r}" for name, value in options.items())
        raise NotAvailable(f"trainer.accelerator.{method}: {names} is not available; leave it out")
