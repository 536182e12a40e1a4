"""Internals: the library's part of a trainer, with the methods that need no framework."""

from __future__ import annotations

import dataclasses
import logging
import os
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext, suppress
from typing import Any, cast

from ..args.base import BaseArguments
from ..args.paths import working_folder
from ..errors import CheckpointError, DataError, LoopwrightError, NotAvailable
from ..notices import Notices, logger
from .actions import LoopActions
from .agreement import Agreement
from .checkpoint.manager import CheckpointManager
from .events import CallbackHandler
from .hooks import Hooks
from .loop import run_training
from .meter import Meter
from .outputs import TrainOutput, speed_metrics
from .overrides import refuse_dead_overrides
from .run import Run
from .run_record import is_restart, read_record, write_record
from .signals import Interrupted, SignalWatch
from .state import TrainerControl, TrainerState
from .strategy import StepwiseStrategy, Strategy
from .trainer import BaseTrainer
from .update import Update, whole_batch


class Internals(LoopActions):
    """Runs training through a strategy; subclasses add a framework.

    A trainer holds one instance under its only private name and has no other attribute of the library, so a user's
    subclass may use any other name. Methods and attributes of the trainer are accessed as `self.trainer`, so that
    overrides take effect.
    """

    strategy: Strategy
    run_class: type[Run] = Run
    handler_class: type[CallbackHandler] = CallbackHandler
    agreement_class: type[Agreement] = Agreement
    is_alone: bool = True
    """Whether this process holds all the data of an update."""

    def __init__(self, trainer: Hooks) -> None:
        self.trainer = trainer

    def set_up(self, args: BaseArguments, callbacks: list[Any], **context: Any) -> None:
        """Create the parts every trainer has; called by the constructor of a subclass."""
        refuse_dead_overrides(type(self.trainer), BaseTrainer)
        self.trainer.args = args
        self.notices = Notices(strict=args.strict, quiet=not args.should_log)
        self.trainer.state = TrainerState(
            is_local_process_zero=args.local_process_index == 0, is_world_process_zero=args.process_index == 0
        )
        self.trainer.control = TrainerControl()
        self.trainer.callback_handler = self.handler_class(
            callbacks, args=args, state=self.state, control=self.control, **context
        )
        self.new_run()
        self.make_parts()
        self.agreement = self.agreement_class(self)
        if args.log_level != "passive":
            logger.setLevel(args.get_process_log_level())
            if not logger.hasHandlers():  # Python's last resort shows warnings only
                logger.addHandler(logging.StreamHandler())
        idle = args.without_effect()
        if idle:
            self.notices.warn_once(f"without effect in this run: {', '.join(idle)}")

    def new_run(self) -> None:
        """Reset `self.run` for a new run."""
        self.run = self.run_class(
            checkpoints=CheckpointManager(self.args.output_dir, notices=self.notices),
            signals=SignalWatch(enabled=self.args.enable_jit_checkpoint, shared=not self.is_alone),
        )

    def make_parts(self) -> None:
        """Create data, loss, evaluation, saving, changes and pacing; called once, by `set_up`."""
        raise NotImplementedError

    # ---- training -------------------------------------------------------------------------------------------------

    def train(
        self,
        resume_from_checkpoint: str | bool | None = None,
        trial: Any = None,
        ignore_keys_for_eval: list[str] | None = None,
        **old_names: Any,
    ) -> TrainOutput:
        """Train to the end of the plan and return the steps done, the mean loss and the run's metrics."""
        resume_from_checkpoint = self.resume_request(resume_from_checkpoint, old_names)
        if trial is not None:
            raise NotAvailable(
                "train(trial=...): hyper-parameter search is not available yet, see docs/availability.md"
            )
        if BaseTrainer.train_instead is not None:
            return BaseTrainer.train_instead(self.trainer)
        self.new_run()
        self.run.ignore_keys_for_eval = ignore_keys_for_eval
        self.trainer.is_in_train = True
        try:
            with self.strategy.alarm, self.run.signals, self.watched(), self.data.ended_with_errors():
                try:
                    self.agreement.before_training(resume_from_checkpoint)
                    self.prepare_training(self._begin_run(resume_from_checkpoint))
                    self.run.is_ready = True
                    self.start_clock()
                    self.changes.begin_following()
                    run_training(self)
                    return self._finish_training()
                except Interrupted:  # in an evaluation of a callback, or of getting ready
                    self.leave()
        finally:
            with suppress(Exception):  # after an error: write the deferred logs if the device still responds
                self.write_late_logs()
            self.run.checkpoints.wait()
            self.finish_with_model()
            self.data.release()
            self.run.close()
            self.callback_handler.leave_training()
            self.trainer.is_in_train = False

    def _begin_run(self, resume_from_checkpoint: str | bool | None) -> str | None:
        """Claim the output folder; returns the checkpoint to resume from."""
        self._check_output_dir()
        checkpoint = self._checkpoint_to_go_on_from(resume_from_checkpoint)
        if self.args.should_save:
            write_record(working_folder(self.args.output_dir))
        older = {} if checkpoint is not None else self.run.checkpoints.complete()
        if older:
            self.notices.warn_once(
                f"{self.args.output_dir} holds checkpoints of an earlier run up to step {max(older)}, and resuming "
                "would pick the highest step; choose another output_dir, or delete them"
            )
        return checkpoint

    def watched(self) -> AbstractContextManager[Any]:
        """A context in which the ranks report their positions to each other; empty for a single process."""
        return nullcontext()

    def _find_checkpoint(self, request: str | bool | None) -> str | None:
        """The checkpoint to resume from. Rank 0 searches for it, so that all ranks use the same one."""
        if self.is_alone:
            return self.run.checkpoints.find(request)
        found: str | None = None
        problem: Exception | None = None
        if self.strategy.rank == 0:
            try:
                found = self.run.checkpoints.find(request)
            except LoopwrightError as error:
                problem = error
        found, problem = self.strategy.broadcast((found, problem))
        if problem is not None:
            raise problem
        if self.strategy.any_rank(found is not None and not os.path.isdir(found)):
            raise CheckpointError(f"{found} does not exist on every node; resume from a shared folder")
        return found

    def finish_with_model(self) -> None:
        """Remove the hooks and wrappers that training added to the model."""
        self.pacing.close()

    def prepare_training(self, checkpoint: str | None) -> None:
        """Build loader, plan, model, optimizer and schedule, in this order, and load the checkpoint into them."""
        raise NotImplementedError

    def _start_state(self) -> None:
        """Reset the state, keeping the object that callbacks hold, and create the meter of the run."""
        fresh, plan = TrainerState(), self.run.plan
        for each in dataclasses.fields(fresh):
            if not each.name.startswith("is_"):
                setattr(self.state, each.name, getattr(fresh, each.name))
        self.run.asked_accumulation = self.run.first_accumulation = self.args.gradient_accumulation_steps
        self.state.max_steps, self.state.num_train_epochs = plan.max_steps, plan.epochs
        self.state.train_batch_size = self.args.train_batch_size
        self.state.compute_steps(self.args, plan.max_steps)
        self.run.meter = Meter(
            self.strategy.read,
            filter_nonfinite=self.args.logging_nan_inf_filter,
            mean=None if self.is_alone else self.strategy.reduce,
        )

    def updates(self, epoch: int) -> Iterator[Update]:
        """The updates of an epoch, starting at the run's current position."""
        self.run.snapshot, self.run.undone = None, False
        batches = self.data.epoch_batches(epoch)
        found = self.run.progress.batches_in_epoch > 0
        pace, clock = self.run.pace, time.perf_counter
        while True:
            if self.args.gradient_accumulation_steps != self.run.asked_accumulation:
                self.changes.follow_accumulation()
            self.changes.follow_overrides()
            if (found or self.run.snapshot is None) and self.may_be_undone():
                self.run.snapshot = self.strategy.snapshot()
            asked = clock()
            micro_batches = self.data.next_batches(batches)
            pace.last_wait = clock() - asked
            pace.waited += pace.last_wait
            if self.is_alone:
                if not micro_batches:
                    break
                update = self.loss.make_update(micro_batches)
            elif (shared := self.loss.sync_update(micro_batches)) is None:
                break
            else:
                update = shared
            found = True
            yield update
        if not found:
            self._no_batches(epoch)

    def may_be_undone(self) -> bool:
        """Whether a signal can interrupt an update between two of its micro-batches."""
        return self.run.plan.accumulation > 1 or bool(self.args.auto_find_batch_size) or not self.is_alone

    def _no_batches(self, epoch: int) -> None:
        if epoch == 0:
            raise DataError(
                "the training data returned no batch; with dataloader_drop_last the dataset may be too small"
            )
        self.notices.warn_once(f"the training data returned no batch in epoch {epoch}; stopping training")
        self.control.should_training_stop = True

    def part_states(self) -> dict[str, Any]:
        """State of the run and its parts for a checkpoint, as JSON values."""
        states = {"spikes": self.run.spikes.state_dict()}
        for part in (self.saving, self.data, self.loss):
            states.update(part.part_states())
        return states

    def load_part_states(self, states: dict[str, Any]) -> None:
        """The counterpart of `part_states`."""
        if "spikes" in states:
            self.run.spikes.load_state_dict(states["spikes"])
        for part in (self.saving, self.data, self.loss):
            part.load_part_states(states)

    def run_micro_batches(self, update: Update) -> Any:
        """Forward and backward of every micro-batch; returns the loss of the update."""
        self._begin_update(update)
        run, events = self.run, self.callback_handler
        strategy = cast(StepwiseStrategy, self.strategy)  # backends with compiled updates override this method
        while True:
            total = loss = None
            try:
                with self.loss.around_update():
                    strategy.begin_update(update)
                    for index in range(len(update.batches)):
                        micro = run.micro_batch = self.loss.micro_batch(update, index)
                        with strategy.micro_batch(micro):
                            loss = run.step(self.trainer.model_wrapped, micro.inputs, num_items_in_batch=micro.items)
                            total = strategy.add(total, loss, micro)
                        if not micro.is_last:
                            events.fire("on_substep_end")
                return self.loss.end_update(update, total)
            except Interrupted:
                run.undone = True
                strategy.restore(run.snapshot)
                self.save_and_exit()
            except (RuntimeError, MemoryError) as error:
                total = loss = None  # these tensors may hold the memory that is missing
                micro = run.micro_batch = whole_batch()
                if not self.loss.recover(error, update):
                    raise

    def _begin_update(self, update: Update) -> None:
        """Apply changes made since the last update; called before the micro-batches of an update."""
        if self.run.split is not None:
            self.run.split.data_is_there()
        self._follow_optimizer()
        self.changes.follow_changes()
        if not self.run.has_agreed:
            self.agreement.before_updates()
        self.loss.begin_update(update)

    def apply_update(self, loss: Any) -> None:
        """Clip gradients, then step the optimizer and the schedule."""
        self.run.may_leave = False
        strategy, events = self.strategy, self.callback_handler
        if self.run.split is not None:
            self.run.split.gradients_are_done()
        self._follow_optimizer()
        limit = self.args.max_grad_norm
        norm = strategy.clip_gradients(limit, want_norm=not limit and self._wants_norm())
        events.fire("on_pre_optimizer_step")
        self._follow_optimizer(is_clipped=True)
        moved = strategy.optimizer_step(self._veto(loss, norm) if self.args.on_nonfinite != "continue" else None)
        events.fire("on_optimizer_step")
        self.run.learning_rate = self.trainer._get_learning_rate()
        if moved and not self.run.schedule_follows_metric:
            self.trainer.lr_scheduler.step()
        self.run.meter.add(loss, norm if moved else None)  # a step skipped by loss scaling has an overflowed norm
        strategy.zero_grad()

    def _follow_optimizer(self, *, is_clipped: bool = False) -> None:
        trainer = self.trainer
        if trainer.optimizer is not self.run.optimizer or trainer.lr_scheduler is not self.run.schedule:
            self.changes.follow_optimizer(is_clipped=is_clipped)

    def _veto(self, loss: Any, norm: Any) -> Any:
        """A device flag that prevents this step if loss or gradients are not finite."""
        return self.strategy.nonfinite(loss, norm, sticky=self.args.on_nonfinite == "raise")

    def finish_update(self, update: Update) -> None:
        """Count the update."""
        progress, state, pace = self.run.progress, self.state, self.run.pace
        if self.args.on_nonfinite == "raise":
            self._remember_place(update)
        progress.batches_in_epoch += update.micro_batches
        progress.samples_in_epoch += update.samples
        progress.samples_seen += update.samples
        pace.updates += 1
        pace.samples += update.samples
        pace.micro_batches += update.micro_batches
        pace.real_tokens += update.real_tokens
        pace.computed_tokens += update.computed_tokens
        pace.squared_lengths += update.squared_lengths
        state.global_step += 1
        if state.global_step == self.run.split_at:
            self.pacing.toggle_step_timing(update)
        state.samples_seen = progress.samples_seen
        state.total_flos += update.flos
        state.num_input_tokens_seen += update.tokens
        state.epoch = self.run.plan.epoch_after(progress.epoch, progress.batches_in_epoch)
        if self.args.torch_empty_cache_steps and state.global_step % self.args.torch_empty_cache_steps == 0:
            self.strategy.free_memory()
        if self.run.checkpoints.failure is not None:
            self.run.checkpoints.raise_if_failed()
        self.run.may_leave = True
        if self.args.on_nonfinite == "raise" and self.strategy.reads_are_free:
            self._stop_if_nonfinite()

    def finish_epoch(self) -> None:
        """Close the epoch, unless training stops inside it: a longer run can then resume within it."""
        whole = self.run.plan.batches_in(self.run.progress.epoch)
        inside = whole is None or self.run.progress.batches_in_epoch < whole
        if not (self.control.should_training_stop and inside):
            self.run.progress.close_epoch()
        self.changes.tell_unfollowed()

    def _wants_norm(self) -> bool:
        """Whether this update's gradient norm is needed when it is not clipped."""
        logged = self.args.logging_strategy != "steps" or (self.state.global_step + 1) % self.state.logging_steps == 0
        return logged or self.args.on_nonfinite != "continue"

    def start_clock(self) -> None:
        self.run.started = time.time()
        self.run.pace = self.pacing.make_meter()
        self.run.first_step = self.state.global_step
        self.run.first_sample = self.run.progress.samples_seen
        self.run.first_token = self.state.num_input_tokens_seen

    def _finish_training(self) -> TrainOutput:
        self.write_late_logs()
        steps = self.state.global_step - self.run.first_step
        loss = self.run.meter.mean_loss()
        self.pacing.live_numbers()  # include the updates after the last log point in the numbers of the run
        if self.args.on_nonfinite == "raise":
            self._stop_if_nonfinite()
        samples = self.run.progress.samples_seen - self.run.first_sample
        metrics = speed_metrics("train", self.run.started, num_samples=samples, num_steps=steps)
        self.trainer.store_flos()
        metrics["total_flos"] = self.state.total_flos
        metrics["train_loss"] = loss
        self.add_memory_metrics("train", metrics)
        self.log_numbers(metrics)
        self.run.checkpoints.wait()
        self.run.checkpoints.raise_if_failed()
        if self.args.load_best_model_at_end and self.state.best_model_checkpoint is not None:
            self.trainer._load_best_model()
        self.callback_handler.fire("on_train_end")
        return TrainOutput(self.state.global_step, loss, metrics)

    def _checkpoint_to_go_on_from(self, request: str | bool | None) -> str | None:
        """The requested checkpoint; for a run restarted by its launcher, the newest one it has saved."""
        restarted = is_restart(read_record(working_folder(self.args.output_dir)))
        if request is not False and self.strategy.any_rank(restarted):
            newest = self._find_checkpoint("auto")
            if newest is not None:
                if self.args.should_log:
                    logger.warning(f"restarted by the launcher, resuming from {newest}")
                return newest
        return self._find_checkpoint(request)

    def resume_request(self, resume: str | bool | None, old_names: dict[str, Any]) -> str | bool | None:
        if "model_path" in old_names:
            logger.warning("train(model_path=...) is now train(resume_from_checkpoint=...)")
            resume = old_names.pop("model_path")
        if old_names:
            raise TypeError(f"train() got unexpected arguments: {', '.join(old_names)}")
        return self.args.resume_from_checkpoint if resume is None else resume
