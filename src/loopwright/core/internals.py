"""Internals: the library's part of a trainer, with methods that need no framework."""

from __future__ import annotations

import dataclasses
import logging
import os
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext, suppress
from itertools import islice
from typing import Any

from ..args.base import BaseArguments
from ..args.paths import working_folder
from ..errors import CheckpointError, DataError, LoopwrightError, NotAvailable
from ..notices import Notices, logger
from .changes import ChangingMethods
from .checkpoint.manager import CheckpointManager
from .events import CallbackHandler
from .hooks import Hooks
from .loop import run_training
from .meter import Meter
from .outputs import TrainOutput, speed_metrics
from .overrides import refuse_dead_overrides
from .plan import Plan
from .run_record import is_restart, read_record, write_record
from .signals import Interrupted, SignalWatch
from .spikes import SpikeWatch
from .state import Progress, TrainerControl, TrainerState
from .strategy import Strategy
from .throughput import ThroughputMeter
from .trainer import BaseTrainer
from .update import Place, Update


class Internals(ChangingMethods):
    """Trains whatever its strategy can run; a subclass brings the framework.

    A trainer holds one of these under its only private name, and has no other attribute of the library: a user's
    subclass may use any name. Attributes and methods of the trainer are reached through `self.trainer`, so that
    overrides count.
    """

    strategy: Strategy
    split_at: int = -1
    """The update after which `toggle_step_timing` begins or ends looking where the time goes."""
    plan: Plan
    _places: dict[int, Place]
    handler_class: type[CallbackHandler] = CallbackHandler
    is_alone: bool = True
    """Whether this process holds all the data of an update."""
    step: Callable[..., Any]
    """Forward and backward of one micro-batch: the trainer's `training_step`, or what replays it as a graph."""
    _undone: bool = False
    """Whether a signal has undone an update whose batches were already read."""

    def __init__(self, trainer: Hooks) -> None:
        self.trainer = trainer

    def set_up(self, args: BaseArguments, callbacks: list[Any], **context: Any) -> None:
        """The parts every trainer has; called by the constructor of a subclass."""
        refuse_dead_overrides(type(self.trainer), BaseTrainer)
        self.trainer.args = args
        self.notices = Notices(strict=args.strict, quiet=not args.should_log)
        self.trainer.state = TrainerState(
            is_local_process_zero=args.local_process_index == 0, is_world_process_zero=args.process_index == 0
        )
        self.trainer.control = TrainerControl()
        self._places = {}
        self._late = []
        self.progress = Progress()
        self.pace = ThroughputMeter()
        self.trainer.callback_handler = self.handler_class(
            callbacks, args=args, state=self.state, control=self.control, **context
        )
        self.checkpoints = CheckpointManager(args.output_dir, notices=self.notices)
        self.spikes = SpikeWatch()
        self.signals = SignalWatch(enabled=args.enable_jit_checkpoint)
        if args.log_level != "passive":
            logger.setLevel(args.get_process_log_level())
            if not logger.hasHandlers():  # Python's last resort shows warnings only
                logger.addHandler(logging.StreamHandler())
        idle = args.without_effect()
        if idle:
            self.notices.warn_once(f"without effect in this run: {', '.join(idle)}")

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
        self.ignore_keys_for_eval = ignore_keys_for_eval
        if BaseTrainer.train_instead is not None:
            return BaseTrainer.train_instead(self.trainer)
        self._check_output_dir()
        checkpoint = self._checkpoint_to_go_on_from(resume_from_checkpoint)
        if self.args.should_save:
            write_record(working_folder(self.args.output_dir))
        older = {} if checkpoint is not None else self.checkpoints.complete()
        if older:
            self.notices.warn_once(
                f"{self.args.output_dir} holds checkpoints of an earlier run up to step {max(older)}, and resuming "
                "would pick the highest step; choose another output_dir, or delete them"
            )
        self.trainer.is_in_train = True
        try:
            with self.strategy.alarm, self.signals, self.watched():
                self.prepare_training(checkpoint)
                self.start_clock()
                self.begin_following()
                run_training(self)
                return self._finish_training()
        finally:
            with suppress(Exception):  # after an error: what was logged before it, if the device still answers
                self.write_late_logs()
            self._late.clear()
            self.checkpoints.wait()
            self.finish_with_model()
            self.release_data()
            self.callback_handler.leave_training()
            self.trainer.is_in_train = False

    def watched(self) -> AbstractContextManager[Any]:
        """While entered, several processes see where each of them stands; one alone needs no watching."""
        return nullcontext()

    def _find_checkpoint(self, request: str | bool | None) -> str | None:
        """The checkpoint to go on from; of several processes the first one looks, so that all take the same one."""
        if self.is_alone:
            return self.checkpoints.find(request)
        found: str | None = None
        problem: Exception | None = None
        if self.strategy.rank == 0:
            try:
                found = self.checkpoints.find(request)
            except LoopwrightError as error:
                problem = error
        found, problem = self.strategy.broadcast((found, problem))
        if problem is not None:
            raise problem
        if self.strategy.agree(found is not None and not os.path.isdir(found)):
            raise CheckpointError(f"{found} does not exist on every node; resume from a shared folder")
        return found

    def release_data(self) -> None:
        """Let go of whatever loads the training data."""

    def finish_with_model(self) -> None:
        """Take away what training put on the model."""

    def prepare_training(self, checkpoint: str | None) -> None:
        """Build loader, plan, model, optimizer and schedule, in this order, and load the checkpoint into them."""
        raise NotImplementedError

    def _start_state(self) -> None:
        """A fresh state, progress and meter in the objects callbacks already hold."""
        for mine, fresh in ((self.state, TrainerState()), (self.progress, Progress())):
            for each in dataclasses.fields(fresh):
                if not each.name.startswith("is_"):
                    setattr(mine, each.name, getattr(fresh, each.name))
        plan = self.plan
        self._asked_accumulation = self._first_accumulation = self.args.gradient_accumulation_steps
        self._is_resized = False
        self.state.max_steps, self.state.num_train_epochs = plan.max_steps, plan.epochs
        self.state.train_batch_size = self.args.train_batch_size
        self.state.compute_steps(self.args, plan.max_steps)
        self.meter = Meter(
            self.strategy.read,
            filter_nonfinite=self.args.logging_nan_inf_filter,
            mean=None if self.is_alone else self.strategy.reduce,
        )
        self.spikes = SpikeWatch()
        self._places = {}
        self.learning_rate = 0.0

    def epoch_batches(self, epoch: int) -> Iterator[Any]:
        """The micro-batches of an epoch from where progress stands."""
        raise NotImplementedError

    def make_update(self, batches: list[Any]) -> Update:
        """The update made of these micro-batches, its targets counted."""
        raise NotImplementedError

    def sync_update(self, batches: list[Any]) -> Update | None:
        """This process's part of an update, or None when no process has any data left."""
        raise NotImplementedError

    def updates(self, epoch: int) -> Iterator[Update]:
        """The updates of an epoch from where progress stands."""
        self._held, self._undone = None, False
        batches = self.epoch_batches(epoch)
        found = self.progress.batches_in_epoch > 0
        pace, clock = self.pace, time.perf_counter
        while True:
            if self.args.gradient_accumulation_steps != self._asked_accumulation:
                self.follow_accumulation()
            self.follow_overrides()
            if (found or self._held is None) and self._may_be_undone():
                self._held = self.strategy.hold()
            asked = clock()
            micro_batches = self._next_batches(batches)
            pace.last_wait = clock() - asked
            pace.waited += pace.last_wait
            if self.is_alone:
                if not micro_batches:
                    break
                update = self.make_update(micro_batches)
            elif (shared := self.sync_update(micro_batches)) is None:
                break
            else:
                update = shared
            found = True
            yield update
        if not found:
            self._no_batches(epoch)

    def _may_be_undone(self) -> bool:
        """Whether a signal can find an update half done: between two of its micro-batches."""
        return self.plan.accumulation > 1 or bool(self.args.auto_find_batch_size) or not self.is_alone

    def _next_batches(self, batches: Iterator[Any]) -> list[Any]:
        """The micro-batches of the next update: fewer at the end of the data, none when it is over."""
        return list(islice(batches, self.plan.accumulation))

    def _no_batches(self, epoch: int) -> None:
        if epoch == 0:
            raise DataError(
                "the training data returned no batch; with dataloader_drop_last the dataset may be too small"
            )
        self.notices.warn_once(f"the training data returned no batch in epoch {epoch}; stopping training")
        self.control.should_training_stop = True

    def part_states(self) -> dict[str, Any]:
        """What parts of the trainer want back when the run goes on, as JSON values."""
        return {"spikes": self.spikes.state_dict()}

    def load_part_states(self, states: dict[str, Any]) -> None:
        """The counterpart of `part_states`."""
        if "spikes" in states:
            self.spikes.load_state_dict(states["spikes"])

    def run_micro_batches(self, update: Update) -> Any:
        """Forward and backward of every micro-batch; returns the update's loss. There is no other such loop."""
        self.begin_update(update)
        strategy, events = self.strategy, self.callback_handler
        while True:
            total = inputs = loss = None
            try:
                with self.around_update():
                    for index in range(len(update.batches)):
                        with strategy.micro_batch(update, index):
                            inputs, items = self.begin_micro_batch(update, index)
                            loss = self.step(self.trainer.model_wrapped, inputs, num_items_in_batch=items)
                            total = strategy.add(total, loss)
                        if index + 1 < len(update.batches):
                            events.fire("on_substep_end")
                return self.end_update(update, total)
            except Interrupted:
                self._undone = True
                strategy.undo(self._held)
                self.save_and_exit()
            except (RuntimeError, MemoryError) as error:
                total = inputs = loss = None  # what failed may hold the memory that is missing
                if not self.recover(error, update):
                    raise

    def begin_update(self, update: Update) -> None:
        """Before the micro-batches of an update: take up what was changed since the last one."""
        if self.split is not None:
            self.split.data_is_there()
        self._follow_optimizer()
        self.follow_changes()

    def around_update(self) -> AbstractContextManager[Any]:
        """The context of all micro-batches of an update."""
        return nullcontext()

    def begin_micro_batch(self, update: Update, index: int) -> tuple[Any, Any]:
        """The inputs of a micro-batch, and the number of items its loss is divided by."""
        raise NotImplementedError

    def end_update(self, update: Update, loss: Any) -> Any:
        """After the micro-batches of an update: its loss, from the sum of their losses."""
        return loss

    def recover(self, error: Exception, update: Update) -> bool:
        """After an error: whether the update may be tried again, in smaller micro-batches."""
        return False

    def apply_update(self, loss: Any) -> None:
        """Clip, optimizer step, schedule."""
        strategy, events = self.strategy, self.callback_handler
        if self.split is not None:
            self.split.gradients_are_done()
        self._follow_optimizer()
        limit = self.args.max_grad_norm
        norm = strategy.clip_gradients(limit, want_norm=not limit and self._wants_norm())
        events.fire("on_pre_optimizer_step")
        self._follow_optimizer(is_clipped=True)
        moved = strategy.optimizer_step(self._veto(loss, norm) if self.args.on_nonfinite != "continue" else None)
        events.fire("on_optimizer_step")
        self.learning_rate = self.trainer._get_learning_rate()
        if moved and not self.schedule_follows_metric:
            self.trainer.lr_scheduler.step()
        self.meter.add(loss, norm if moved else None)  # loss scaling left this step out: its norm overflowed
        strategy.zero_grad()

    def _follow_optimizer(self, *, is_clipped: bool = False) -> None:
        trainer = self.trainer
        if trainer.optimizer is not self._optimizer_then or trainer.lr_scheduler is not self._schedule_then:
            self.follow_optimizer(is_clipped=is_clipped)

    def _veto(self, loss: Any, norm: Any) -> Any:
        """A device flag that forbids this step because loss or gradients are not finite."""
        return self.strategy.nonfinite(loss, norm, sticky=self.args.on_nonfinite == "raise")

    def finish_update(self, update: Update) -> None:
        """Count the update."""
        progress, state, pace = self.progress, self.state, self.pace
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
        if state.global_step == self.split_at:
            self.toggle_step_timing(update)
        state.samples_seen = progress.samples_seen
        state.total_flos += update.flos
        state.num_input_tokens_seen += update.tokens
        state.epoch = self.plan.epoch_after(progress.epoch, progress.batches_in_epoch)
        if self.args.torch_empty_cache_steps and state.global_step % self.args.torch_empty_cache_steps == 0:
            self.strategy.free_memory()
        if self.checkpoints.failure is not None:
            self.checkpoints.raise_if_failed()
        if self.args.on_nonfinite == "raise" and self.strategy.reads_are_free:
            self._stop_if_nonfinite()

    def toggle_step_timing(self, update: Update) -> None:
        """Begin, or end after this update, looking where the time of an update goes."""

    def make_pace(self) -> ThroughputMeter:
        """What measures the speed of a run."""
        return ThroughputMeter()

    def _remember_place(self, update: Update) -> None:
        """Which samples an update took, kept until its numbers are known to be finite."""
        step, progress = self.state.global_step + 1, self.progress
        for known in [each for each in self._places if each <= progress.last_logged_step]:
            del self._places[known]
        self._places[step] = Place(progress.epoch, progress.samples_in_epoch, update.samples)

    def finish_epoch(self) -> None:
        """Close the epoch, unless training stops inside it: then a longer run can still go on from there."""
        whole = self.plan.batches_in(self.progress.epoch)
        inside = whole is None or self.progress.batches_in_epoch < whole
        if not (self.control.should_training_stop and inside):
            self.progress.close_epoch()
        self.tell_unfollowed()

    def _get_learning_rate(self) -> float:
        raise NotImplementedError

    def _wants_norm(self) -> bool:
        """Whether this update's gradient norm is needed when it is not clipped."""
        logged = self.args.logging_strategy != "steps" or (self.state.global_step + 1) % self.state.logging_steps == 0
        return logged or self.args.on_nonfinite != "continue"

    def start_clock(self) -> None:
        self._started = time.time()
        self.pace = self.make_pace()
        self._first_step = self.state.global_step
        self._first_sample = self.progress.samples_seen
        self._first_token = self.state.num_input_tokens_seen

    def _finish_training(self) -> TrainOutput:
        self.write_late_logs()
        steps = self.state.global_step - self._first_step
        loss = self.meter.mean_loss()
        self.live_numbers()  # what came after the last log point belongs into the numbers of the run
        if self.args.on_nonfinite == "raise":
            self._stop_if_nonfinite()
        samples = self.progress.samples_seen - self._first_sample
        metrics = speed_metrics("train", self._started, num_samples=samples, num_steps=steps)
        self.trainer.store_flos()
        metrics["total_flos"] = self.state.total_flos
        metrics["train_loss"] = loss
        self._add_memory_metrics("train", metrics)
        self._log(metrics)
        self.checkpoints.wait()
        self.checkpoints.raise_if_failed()
        if self.args.load_best_model_at_end and self.state.best_model_checkpoint is not None:
            self.trainer._load_best_model()
        self.callback_handler.fire("on_train_end")
        return TrainOutput(self.state.global_step, loss, metrics)

    def _checkpoint_to_go_on_from(self, request: str | bool | None) -> str | None:
        """What was asked for; a run that its launcher starts again goes on from the newest checkpoint it has saved."""
        restarted = is_restart(read_record(working_folder(self.args.output_dir)))
        if request is not False and self.strategy.agree(restarted):
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
