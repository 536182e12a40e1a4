"""Resuming from a checkpoint: state, progress and plan; changed arguments; the best model."""

from __future__ import annotations

import dataclasses
import os
from pathlib import Path
from typing import Any

from ...args.paths import is_url, working_folder
from ...errors import CheckpointError
from ...notices import logger
from ..checkpoint.best import name_of, own_checkpoint
from ..checkpoint.folder import ARGUMENTS, PROGRESS, STATE, folder_name, step_in_name
from ..checkpoint.json_files import read_json
from ..checkpoint.manifest import read_manifest
from ..checkpoint.schema import anything, check, count, flag, label, like, list_of, maybe, record, restoring, text
from ..checkpoint.space import check_space
from ..logs.console import report_best
from ..logs.log_history import LogHistory
from ..measure.meter import saved_meter
from ..measure.spikes import SAVED_SPIKES
from ..part import Part
from ..plan import Plan
from ..sampling.packing import PackedPlan
from ..state import SAVED_PROGRESS, SAVED_STATE, STATE_OF_OTHERS, Progress, TrainerState
from ..user_code.overrides import is_overridden
from .changed_arguments import changed_arguments, changed_intervals

SAVED_ARGUMENTS = record({"per_device_train_batch_size": count(1), "gradient_accumulation_steps": count(1)})
"""arguments.json: any values; these two are computed with."""
PROGRESS_DOCUMENT = record(
    {"progress": SAVED_PROGRESS, "meter": saved_meter, "parts": record({}, {"spikes": SAVED_SPIKES})},
    {
        "resized": flag,
        "world_size": count(1),
        "copies": count(1),
        "accumulation": count(1),
        "asked_accumulation": count(1),
        "scheduled_updates": maybe(count()),
        "optimizer": list_of(list_of(text)),
    },
)

POSITION = ("last_epoch", "_step_count", "updates")
RATES = ("base_lrs", "_last_lr", "base", "rate")
"""Names in the states of schedules; a schedule has some of them."""


class Resuming(Part):
    """The framework-independent part of saving and resuming."""

    # ---- implemented by a framework ----------------------------------------------------------------------------------

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: Any = None) -> None:
        """Load the weights of a checkpoint."""
        raise NotImplementedError

    def _load_weights_of(self, folder: str) -> None:
        """Load the weights in a folder into the model."""
        raise NotImplementedError

    def resume(self, checkpoint: str) -> None:
        """Restore state, progress, optimizer, schedule and random states from the checkpoint."""
        raise NotImplementedError

    def _ordered_data(self) -> bool:
        """Whether loopwright determines the order of the training data."""
        raise NotImplementedError

    def _sizes_of_updates(self) -> tuple[str, ...]:
        """Arguments that determine the number of samples of an update."""
        return ("per_device_train_batch_size", "gradient_accumulation_steps")

    def checkpoint_bytes(self) -> int:
        """The approximate size of a checkpoint."""
        raise NotImplementedError

    # ---- before the first step --------------------------------------------------------------------------------------

    def check_saving(self) -> None:
        """Warn if the checkpoints will not fit on the disk."""
        args = self.args
        if args.save_strategy == "no" or not args.should_save:
            return
        plan = self.run.plan
        saves = {"steps": plan.max_steps // max(int(self.state.save_steps), 1) + 1, "epoch": plan.epochs}
        held = saves.get(str(args.save_strategy), 1)
        warning = check_space(
            working_folder(args.output_dir),
            size=self.checkpoint_bytes(),
            keep=args.save_total_limit,
            saves=min(held, 1) if is_url(args.output_dir) else held,  # staged locally one at a time
        )
        if warning:
            self.notices.warn_once(warning)

    def _saves_models_itself(self) -> bool:
        """Whether the user overrides the code that writes the model."""
        return is_overridden(self.trainer, "save_model") or is_overridden(self.trainer, "_save")

    def saves_in_background(self) -> bool:
        """Whether checkpoints are written while training continues: not if code of the user follows on a save.

        A callback with `on_save` or an override of `_save_checkpoint` may read the checkpoint, or add files to it.
        """
        return self.args.async_save and not self._saves_models_itself() and not self.is_followed_by_user()

    def is_followed_by_user(self) -> bool:
        """Whether code of the user runs after a save that may read or change the checkpoint."""
        if self.args.push_to_hub and is_overridden(self.trainer, "_push_from_checkpoint"):
            return True
        is_heard = self.callback_handler.is_heard_by_user("on_save")
        methods = ("_save_checkpoint", "_maybe_log_save_evaluate")
        return is_heard or any(hasattr(self.trainer, each) and is_overridden(self.trainer, each) for each in methods)

    @property
    def leads_saving(self) -> bool:
        """Whether this rank publishes checkpoints and models."""
        return self.args.should_save

    # ---- documents --------------------------------------------------------------------------------------------------

    def _saved_state(self, folder: Path) -> TrainerState:
        """trainer_state.json of a checkpoint; its step must be that of the manifest."""
        is_own = (folder / PROGRESS).is_file()
        values = read_json(folder / STATE, SAVED_STATE if is_own else STATE_OF_OTHERS)
        manifest = read_manifest(folder)
        if manifest is not None and manifest.step != values["global_step"]:
            raise CheckpointError(
                f"{folder.name}/{STATE}: global_step is {values['global_step']}, but its manifest is of step "
                f"{manifest.step}. The file was damaged or changed; resume from another checkpoint"
            )
        state = TrainerState.from_dict(values)
        state.best_model_checkpoint = self._own_best_checkpoint(state, folder)
        return state

    def _own_best_checkpoint(self, state: TrainerState, folder: Path) -> str | None:
        """The best checkpoint that a saved state names, if it is one of this run."""
        best = state.best_model_checkpoint
        if best is None:
            return None
        step = step_in_name(Path(name_of(best)))
        if step not in (None, state.best_global_step) and not self._may_be_older(step, state, folder):
            raise CheckpointError(
                f"{folder.name}/{STATE}: best_model_checkpoint is {best!r}, but best_global_step is "
                f"{state.best_global_step}. The file was damaged or changed; resume from another checkpoint"
            )
        found = own_checkpoint(best, output_dir=str(self.args.output_dir), resumed=folder)
        if found is None:
            self.notices.warn_once(
                f"{folder.name}/{STATE} names {best!r} as the best model, which is not a checkpoint of this run; it is "
                "ignored, and the best model is one saved from now on"
            )
        return found

    def _may_be_older(self, step: int | None, state: TrainerState, folder: Path) -> bool:
        """Whether the best checkpoint may be of an earlier step than the best evaluation, which was not saved."""
        best, is_own = state.best_global_step, (folder / PROGRESS).is_file()
        if step is None or best is None:  # other trainers and versions may have no best_global_step
            return not is_own
        return step < best and not (is_own and self._saved_arguments(folder).get("load_best_model_at_end"))

    def _saved_progress(self, folder: Path) -> dict[str, Any]:
        """progress.json of a checkpoint; its position must agree with trainer_state.json."""
        document: dict[str, Any] = read_json(folder / PROGRESS, PROGRESS_DOCUMENT)
        place, state = document["progress"], self._saved_state(folder)
        problem = None
        if place["last_logged_step"] > state.global_step:
            problem = f"last_logged_step is {place['last_logged_step']}, after step {state.global_step}"
        elif abs(place["epoch"] - (state.epoch or 0)) > 1 + 1e-6:
            problem = f"epoch is {place['epoch']}, but {STATE} has {state.epoch}"
        if problem is not None:
            raise CheckpointError(
                f"{folder.name}/{PROGRESS}: {problem}. The file was damaged or changed; resume from another checkpoint"
            )
        return document

    def _saved_arguments(self, folder: Path) -> dict[str, Any]:
        found: dict[str, Any] = read_json(folder / ARGUMENTS, SAVED_ARGUMENTS)
        return found

    def _progress_document(self) -> dict[str, Any]:
        rate = self.run.learning_rate  # logged if the epoch of the last update is still to end
        known = {"learning_rate": rate} if isinstance(rate, float) else {}
        return {
            "progress": {**dataclasses.asdict(self.run.progress), **known},
            "meter": self.run.meter.state_dict(),
            "parts": self.internals.part_states(),
        }

    def _save_companions(self, folder: Path) -> None:
        """Save the files that belong to a model besides its weights: processor and arguments."""
        processor = self.trainer.processing_class or getattr(self.trainer.data_collator, "tokenizer", None)
        if processor is not None and hasattr(processor, "save_pretrained"):
            processor.save_pretrained(str(folder))
        (folder / ARGUMENTS).write_text(self.args.to_json_string(), encoding="utf-8")

    def _note_best_checkpoint(self) -> None:
        """Record the best checkpoint in the state: that about to be written, or one written before its evaluation."""
        best = self.state.best_global_step
        if best is None:
            return
        place = os.path.join(str(self.args.output_dir), folder_name(best))
        if best != self.state.global_step and place != self.state.best_model_checkpoint:
            self.run.checkpoints.wait()
            if best not in self.run.checkpoints.complete():
                return
        self.state.best_model_checkpoint = place

    def _protected_steps(self) -> list[int | None]:
        """The steps whose checkpoints no limit removes: that of the best evaluation, and the best one saved so far."""
        saved = self.state.best_model_checkpoint
        return [self.state.best_global_step, None if saved is None else step_in_name(Path(name_of(saved)))]

    def _check_resumable(self, folder: Path) -> None:
        """Refuse a folder that holds a model but no progress to resume from."""
        if not (folder / PROGRESS).is_file():
            raise CheckpointError(
                f"{folder} holds nothing to resume from (no {PROGRESS}): it was saved with save_only_model=True, or it "
                "is an output folder and not a checkpoint in it (resume_from_checkpoint=True takes the newest one)"
            )

    def _tell_changes(self, folder: Path) -> None:
        """Warn about arguments that differ from the checkpoint's, and how each group is handled."""
        intervals = changed_intervals(self._saved_state(folder), self.state)
        if intervals:
            logger.warning(f"different from {folder.name}, the new values apply: {intervals}")
        if not (folder / ARGUMENTS).is_file():
            return
        before, known = self._saved_arguments(folder), self.internals.trials.changed
        for changed, effect in changed_arguments(before, self.args.to_dict(), known):
            self.notices.warn_once(f"different from {folder.name}: {changed}; {effect}")

    def plan_to_go_on(self, checkpoint: str) -> Plan:
        """The plan of a resumed run; with another effective batch size, the updates done plus those for the rest."""
        folder, plan, args = Path(checkpoint), self.run.plan, self.args
        if not (folder / PROGRESS).is_file() or not (folder / ARGUMENTS).is_file() or plan.batches_per_epoch is None:
            return plan
        document, step = self._saved_progress(folder), self._saved_state(folder).global_step
        are_alike = self._updates_are_as_large(folder)
        if are_alike and not document.get("resized"):
            return plan
        progress = Progress.from_dict(document["progress"])
        shifted = self._shifted(plan, step, epoch=progress.epoch, batches_left=self._batches_left(progress))
        if args.max_steps <= 0 and not are_alike:
            self.notices.warn_once(
                f"the effective batch size differs from {folder.name}: after its {step} steps there are "
                f"{shifted.max_steps - step} more"
            )
        return shifted

    def _shifted(self, plan: Plan, step: int, *, epoch: int, batches_left: int) -> Plan:
        """The plan, adjusted for a run that reached this position in `step` updates, not in the planned number."""
        left = -(-batches_left // (plan.accumulation * plan.world_size))
        if self.args.max_steps > 0:
            epochs = plan.epochs_to(plan.max_steps, done=step, epoch=epoch, left=left)
            return dataclasses.replace(plan, epochs=epochs)
        done = plan.updates_before(epoch + 1) - left
        return dataclasses.replace(plan, max_steps=step + plan.max_steps - done)

    def replanned(self) -> Plan:
        plan, progress = self.internals.data.plan_again(), self.run.progress
        whole = plan.batches_in(progress.epoch)
        if whole is None:
            return plan
        left = max(whole - progress.batches_in_epoch, 0)
        return self._shifted(plan, self.state.global_step, epoch=progress.epoch, batches_left=left)

    def _updates_are_as_large(self, folder: Path) -> bool:
        """Whether updates have the same size as in the run that saved the checkpoint."""
        before = self._saved_arguments(folder)
        return all(before.get(name) == getattr(self.args, name) for name in self._sizes_of_updates())

    def _batches_left(self, progress: Progress) -> int:
        """Micro-batches of this run's size in the rest of the epoch."""
        if isinstance(self.run.plan, PackedPlan):
            return len(self.run.plan.packing.ends(progress.epoch, progress.samples_in_epoch))
        samples, size = (self.run.plan.examples or 0) - progress.samples_in_epoch, self.run.plan.batch_size
        return samples // size if self.args.dataloader_drop_last else -(-samples // size)

    def _resume_progress(self, folder: Path) -> None:
        document = self._saved_progress(folder)
        for name, value in dataclasses.asdict(Progress.from_dict(document["progress"])).items():
            setattr(self.run.progress, name, value)
        self._check_position(folder)
        # Computed from samples: the batch size may have changed.
        whole = self.run.plan.batches_in(self.run.progress.epoch)
        if self._ordered_data() and whole is not None:
            self.run.progress.batches_in_epoch = whole - self._batches_left(self.run.progress)
        self.state.samples_seen = self.run.progress.samples_seen
        self.run.meter.load_state_dict(document["meter"])
        self.run.learning_rate = document["progress"].get("learning_rate", 0.0)
        self.run.is_resized = bool(document.get("resized"))
        parts = {**document["parts"], **self._own_parts(document)}
        missing = sorted(self.internals.part_states().keys() - parts.keys())
        if missing:
            self.notices.warn_once(f"{folder.name}/{PROGRESS} has no state of: {', '.join(missing)}")
        with restoring(self._place_of_parts(folder), "the state of the run"):
            self.internals.load_part_states(parts)
        self.internals.agreement.after_resuming(self._place_of_parts(folder))

    def _place_of_parts(self, folder: Path) -> Path:
        """The file with the states of this process."""
        return folder / PROGRESS

    def _check_position(self, folder: Path) -> None:
        plan, position = self.run.plan, self.run.progress.samples_in_epoch
        # A loader or sampler of the user may return more samples than the data has.
        known = plan.examples if self._ordered_data() else None
        if known is not None and position > known + plan.total_batch_size:
            raise CheckpointError(
                f"{folder.name}/{PROGRESS}: samples_in_epoch is {position}, but the training data has {plan.examples} "
                "samples. The file or the data was changed; resume with the same data"
            )

    def _resume_schedule(self, state: Any, path: Path) -> None:
        """Restore the schedule from a state like the one it has now."""
        schedule = self.trainer.lr_scheduler
        own = schedule.state_dict()
        position = {name: count(most=1000 * (self.state.global_step + 1)) for name in POSITION if name in own}
        check(state, record({**{name: anything for name in RATES if name in own}, **position}), path)
        check(state, like(own, complete=False), path)
        missing = sorted(own.keys() - state.keys())
        if missing:
            self.notices.warn_once(f"{label(path)} has no {', '.join(missing)}; the values of this run are used")
        with restoring(path, "the schedule"):
            for name in state:
                if name not in own and callable(getattr(schedule, name, None)):
                    raise ValueError(f"{name} is a method")
            schedule.load_state_dict(state)

    def _own_parts(self, document: dict[str, Any]) -> dict[str, Any]:
        """Part states saved by this rank, where each rank saves its own."""
        return {}

    def _adopt_state(self, saved: TrainerState) -> None:
        """Load a saved state, except this run's length and intervals."""
        own = (
            "max_steps",
            "num_train_epochs",
            "train_batch_size",
            "logging_steps",
            "eval_steps",
            "save_steps",
            "is_local_process_zero",
            "is_world_process_zero",
            "is_hyper_param_search",
            "trial_name",
            "trial_params",
        )
        for each in dataclasses.fields(TrainerState):
            if each.name not in own:
                setattr(self.state, each.name, getattr(saved, each.name))
        self.state.log_history = LogHistory(saved.log_history)
        self.internals.encoded_history()  # now, so that the first save takes no longer than others
        self._load_callback_state()

    def _load_callback_state(self) -> None:
        """Restore the callbacks from the state of the checkpoint."""
        self.internals.restore_callbacks(self.state.stateful_callbacks)

    def restore_weights(self, step: int) -> None:
        folder = Path(self.run.checkpoints.local(self.run.checkpoints.complete()[step]))
        place = dataclasses.replace(self.run.progress)
        rng = self.strategy.rng_state()
        self.trainer._load_from_checkpoint(str(folder))
        self.resume(str(folder))
        logged = self.run.progress.last_logged_step
        for each in dataclasses.fields(place):
            setattr(self.run.progress, each.name, getattr(place, each.name))
        self.run.progress.last_logged_step = logged
        self.run.resume_rng = None
        self.strategy.load_rng_state(rng)
        # The skipped samples belong to no update. A run limited by max_steps needs more data; a run limited by epochs
        # has fewer updates, so the plan is recomputed.
        self.run.is_resized = True
        self.run.plan = self.replanned()
        self.state.max_steps, self.state.num_train_epochs = self.run.plan.max_steps, self.run.plan.epochs

    def put_back_rng(self) -> None:
        """Restore the random states of the checkpoint, once."""
        if self.run.resume_rng is not None:
            self.strategy.load_rng_state(self.run.resume_rng)
            self.run.resume_rng = None

    def _load_best_model(self) -> None:
        """Load the weights of the best checkpoint into the model."""
        best = self.state.best_model_checkpoint
        assert best is not None
        if not is_url(best) and not os.path.isdir(best):  # the run was moved, or the working directory was changed
            best = self.state.best_model_checkpoint = str(self.run.checkpoints.storage.place(os.path.basename(best)))
        if not self.run.checkpoints.holds(best):
            self.notices.warn_once(f"the best checkpoint, {best}, could not be saved; keeping the last weights")
            return
        self._load_weights_of(self.run.checkpoints.local(best))
        report_best(self.internals, best)
