"""Updating: the updates of an epoch; and one update: its micro-batches, its optimizer step, and how it is counted."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any, cast

from ..errors import DataError
from .actions import LoopActions
from .distributed.agreement import Agreement
from .logs.console import report_saves
from .shutdown.signals import Interrupted
from .strategy import StepwiseStrategy
from .update import Update, whole_batch
from .user_code.error_notes import add_note, add_note_of_step, describe, moment


class Updating(LoopActions):
    """The updates of an epoch, and what happens in one."""

    agreement: Agreement
    is_alone: bool = True
    """Whether this process holds all the data of an update."""

    def moment(self, ahead: int = 0) -> str:
        """The position of the run, for notes; with `ahead=1`, that of the update that is being computed."""
        return moment(self.state.global_step + ahead, self.state.epoch)

    def updates(self, epoch: int) -> Iterator[Update]:
        """The updates of an epoch, starting at the run's current position."""
        self.run.snapshot, self.run.undone = None, False
        batches = self._open_epoch(epoch)
        has_batches = self.run.progress.batches_in_epoch > 0
        while True:
            if self.args.gradient_accumulation_steps != self.run.asked_accumulation:
                self.changes.follow_accumulation()
            self.changes.follow_overrides()
            # Before the first update of an epoch, opening the data has taken one: it has drawn random numbers since.
            if self.may_be_undone() and (has_batches or self.run.snapshot is None):
                self.run.snapshot = self.strategy.snapshot()
            update = self._make_update(self._next_batches(batches))
            if update is None:
                break
            has_batches = True
            yield update
        if not has_batches:
            self._no_batches(epoch)

    def _open_epoch(self, epoch: int) -> Iterator[Any]:
        try:
            return self.data.epoch_batches(epoch)
        except Exception as error:  # a dataset's __iter__ may raise anything; re-raised with a note
            add_note(error, "the loader of the training data", when=self.moment(ahead=1))
            raise

    def _next_batches(self, batches: Iterator[Any]) -> list[Any]:
        """The micro-batches of the next update, empty after the last one; measures the time of waiting for them."""
        pace, waiting_since = self.run.pace, time.perf_counter()
        if waiting_since >= self.run.ledger_file.due:
            self.keep_time()
        micro_batches = self.data.next_batches(batches)
        pace.last_wait = time.perf_counter() - waiting_since
        pace.waited += pace.last_wait
        return micro_batches

    def _make_update(self, micro_batches: list[Any]) -> Update | None:
        """The update of these micro-batches; None if there are none, on any rank."""
        if not self.is_alone:
            return self.loss.sync_update(micro_batches)
        if not micro_batches:
            return None
        try:
            return self.loss.make_update(micro_batches)
        except Exception as error:  # the loss may be computed to examine it; re-raised with a note
            cause = self.loss.explain(error, micro_batches[0])
            add_note_of_step(error, self.moment(ahead=1), describe(micro_batches[0]), cause=cause)
            raise

    def may_be_undone(self) -> bool:
        """Whether a signal can interrupt an update between two of its micro-batches."""
        return self.run.plan.accumulation > 1 or bool(self.args.auto_find_batch_size) or not self.is_alone

    def _no_batches(self, epoch: int) -> None:
        if epoch == 0:
            raise DataError(
                "the training data returned no batch; with dataloader_drop_last the dataset may be too small"
            )
        self.notices.warn_once(
            f"the training data returned no batch in epoch {epoch}; stopping training after step "
            f"{self.state.global_step:,} of {self.run.plan.max_steps:,}. Use data that can be read again, or lower "
            "max_steps"
        )
        self.control.should_training_stop = True

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
            except Exception as error:  # of the model, the loss or a callback; re-raised with a note
                inputs, cause = describe(run.micro_batch.inputs), self.loss.explain(error, run.micro_batch.inputs)
                total = loss = None  # these tensors may hold the memory that is missing
                micro = run.micro_batch = whole_batch()
                if not isinstance(error, (RuntimeError, MemoryError)) or not self.loss.recover(error, update):
                    add_note_of_step(error, self.moment(ahead=1), inputs, cause=cause)
                    raise

    def _begin_update(self, update: Update) -> None:
        """Apply changes made since the last update; called before the micro-batches of an update."""
        if self.run.step_timer is not None:
            self.run.step_timer.data_is_there()
        self._follow_optimizer()
        self.changes.follow_changes()
        if not self.run.has_agreed:
            self.agreement.before_updates()
        self.loss.begin_update(update)

    def apply_update(self, loss: Any) -> None:
        """Clip gradients, then step the optimizer and the schedule."""
        strategy, events = self.strategy, self.callback_handler
        if self.run.step_timer is not None:
            self.run.step_timer.gradients_are_done()
        self._follow_optimizer()
        limit = self.args.max_grad_norm
        norm = strategy.clip_gradients(limit, want_norm=not limit and self._wants_norm())
        events.fire("on_pre_optimizer_step")
        self._follow_optimizer(is_clipped=True)
        try:
            stepped = strategy.optimizer_step(self._veto(loss, norm) if self.args.on_nonfinite != "continue" else None)
        except Exception as error:  # the optimizer may be the user's; re-raised with a note
            add_note(error, f"the step of the optimizer {type(self.trainer.optimizer).__name__}", when=self.moment(1))
            raise
        events.fire("on_optimizer_step")
        self.run.learning_rate = self.trainer._get_learning_rate()
        if stepped and not self.run.schedule_follows_metric:
            try:
                self.trainer.lr_scheduler.step()
            except Exception as error:  # the schedule may be the user's; re-raised with a note
                name = type(self.trainer.lr_scheduler).__name__
                add_note(error, f"the step of the schedule {name}", when=self.moment(1))
                raise
        # A step skipped by loss scaling has an overflowed norm.
        self.run.meter.add(loss, norm if stepped else None, self.run.named)
        self.run.named = None
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
        progress.add(update.micro_batches, update.samples)
        pace.updates += 1
        pace.samples += update.samples
        pace.micro_batches += update.micro_batches
        pace.real_tokens += update.real_tokens
        pace.computed_tokens += update.computed_tokens
        pace.squared_lengths += update.squared_lengths
        state.global_step += 1
        if state.global_step == self.run.step_timer_at:
            self.pacing.toggle_step_timing(update)
        state.samples_seen = progress.samples_seen
        state.total_flos += update.flos
        state.num_input_tokens_seen += update.tokens
        state.epoch = self.run.plan.epoch_after(progress.epoch, progress.batches_in_epoch)
        if self.args.torch_empty_cache_steps and state.global_step % self.args.torch_empty_cache_steps == 0:
            self.strategy.free_memory()
        if self.run.checkpoints.failure is not None:
            self.run.checkpoints.raise_if_failed()
        if self.run.checkpoints.published:
            report_saves(self)
        if self.args.on_nonfinite == "raise" and self.strategy.reads_are_free:
            self._stop_if_nonfinite()

    def finish_epoch(self) -> None:
        """Close the epoch, unless training stops inside it: a longer run can then resume within it."""
        whole = self.run.plan.batches_in(self.run.progress.epoch)
        inside = whole is None or self.run.progress.batches_in_epoch < whole
        if not (self.control.should_training_stop and inside):
            self.run.progress.close_epoch()
        else:
            self.run.progress.has_ended = True
        self.changes.warn_about_ignored_changes()

    def _wants_norm(self) -> bool:
        """Whether this update's gradient norm is needed when it is not clipped."""
        args, step = self.args, self.state.global_step + 1
        is_logged = args.logging_strategy != "steps" or step % self.state.logging_steps == 0
        if is_logged or args.on_nonfinite != "continue" or (step == 1 and args.logging_first_step):
            return True
        # A callback of the user may log after any update.
        return any(not type(each).__module__.startswith("loopwright.") for each in self.callback_handler.callbacks)
