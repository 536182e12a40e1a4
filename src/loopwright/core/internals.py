"""Internals: the library's part of a trainer, with the methods that need no framework."""

from __future__ import annotations

import dataclasses
import logging
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from pathlib import Path
from typing import Any

from ..args.base import BaseArguments
from ..args.paths import fixed_folder, is_url
from ..errors import BusyError
from ..notices import Notices, logger
from .checkpoint.manager import CheckpointManager
from .checkpoint.ownership.run_id import FINISHED
from .distributed.agreement import Agreement
from .events import CallbackHandler
from .hooks import Hooks
from .logs.console import report_beginning, report_saves, report_stop
from .loop import run_training
from .measure.ledger import SAVING
from .measure.ledger_file import read_ledger
from .measure.meter import Meter
from .outputs import TrainOutput, speed_metrics
from .part import PushPart
from .resuming.beginning import begin_run
from .resuming.run_record import job_id, launch_id
from .run import Run
from .shutdown.ending import record_end, status_after
from .shutdown.signals import Interrupted, SignalWatch
from .state import TrainerControl, TrainerState
from .trainer import BaseTrainer
from .trial import Trials
from .updating import Updating
from .user_code.error_notes import add_note_of_call
from .user_code.overrides import refuse_dead_overrides


class Internals(Updating):
    """Runs training through a strategy; subclasses add a framework.

    A trainer holds one instance under its only private name and has no other attribute of the library, so a user's
    subclass may use any other name. Methods and attributes of the trainer are accessed as `self.trainer`, so that
    overrides take effect.
    """

    run_class: type[Run] = Run
    agreement_class: type[Agreement] = Agreement
    pushing_class: type[PushPart] = PushPart
    is_training: bool = False
    """Whether `train()` is running."""
    overrides_actions: bool = False
    """Whether a subclass of the user logs, evaluates and saves itself."""
    agree: Callable[[CallbackHandler, str], None] | None = None
    """With several ranks: lets them adopt each other's flags after an event."""

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
        self.trainer.callback_handler = CallbackHandler(callbacks, **context)
        self.new_run()
        self.make_parts()
        self.pushing = self.pushing_class(self)
        self.agreement, self.trials = self.agreement_class(self), Trials(self)
        if args.log_level != "passive":
            logging.getLogger(args.logger_name).setLevel(args.get_process_log_level())
            if not logger.hasHandlers():  # Python's last resort shows warnings only
                logger.addHandler(logging.StreamHandler())
        idle = args.without_effect()
        if idle:
            self.notices.warn_once(f"without effect in this run: {', '.join(idle)}")

    def new_run(self) -> None:
        """Reset `self.run` for a new run."""
        place = self.args.output_dir  # fixed: the user's code may change the working directory while a run trains
        self.run = self.run_class(
            checkpoints=CheckpointManager(place if is_url(place) else fixed_folder(place), notices=self.notices),
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
        if BaseTrainer.train_instead is not None:
            return BaseTrainer.train_instead(self.trainer)
        if self.is_training:
            raise BusyError(
                f"train() was called while this trainer is training (step {self.state.global_step}), by a callback or "
                "another thread; wait until it returns, or create another Trainer"
            )
        with self.trials.active(trial):
            self.new_run()
            self.run.ignore_keys_for_eval, self.run.trial = ignore_keys_for_eval, trial
            with self.run.signals, self._running(), self.strategy.alarm, self.watched(), self.data.ended_with_errors():
                self._get_ready(resume_from_checkpoint)
                run_training(self)
                return self._finish_training()

    @contextmanager
    def _running(self) -> Iterator[None]:
        """The context of a run: records how it ended, and releases everything but its numbers."""
        self.trainer.is_in_train = self.is_training = True
        try:
            yield
        except BaseException as error:  # anything, also Ctrl-C: recorded, and re-raised with a note
            self.run.status = status_after(error, self.run)
            if isinstance(error, Exception):
                add_note_of_call(error, "train()", self.moment())
            raise
        finally:
            with suppress(Exception):  # after an error: write the deferred logs if the device still responds
                self.write_late_logs()
            try:
                with self.run.ledger.during(SAVING):
                    self.run.checkpoints.wait()
                self.pushing.close()
                self.finish_with_model()
                self.data.release()
                self.run.close()
                self.keep_time()
                self.callback_handler.leave_training()
            finally:
                record_end(self.run)
                self.run.checkpoints.release()
                self.trainer.is_in_train = self.is_training = False

    def _get_ready(self, resume_from_checkpoint: str | bool | None) -> None:
        try:
            self.agreement.before_training(resume_from_checkpoint)
            self.run.resumed_from = begin_run(self, resume_from_checkpoint)
            self.prepare_training(self.run.resumed_from)
            self.pushing.begin()
        except Interrupted:  # in an evaluation that checks the metric
            self.leave()
        self.run.may_leave, self.run.has_begun = False, True
        self.start_clock()
        self.changes.begin_following()

    def act_by_override(self) -> bool:
        """Let a user's override log, evaluate and save; returns whether there is one."""
        return False

    def watched(self) -> AbstractContextManager[Any]:
        """A context in which the ranks report their positions to each other; empty for a single process."""
        return nullcontext()

    def finish_with_model(self) -> None:
        """Remove the hooks and wrappers that training added to the model."""
        self.pacing.close()

    def prepare_training(self, checkpoint: str | None) -> None:
        """Build loader, plan, model, optimizer and schedule, in this order, and load the checkpoint into them."""
        raise NotImplementedError

    def report_beginning(self) -> None:
        """Show the sizes of the run to the user."""
        report_beginning(self)

    def model_sizes(self) -> tuple[int, int] | None:
        """Numbers of trainable and of all parameters; None if they are not known."""
        return None

    def place(self) -> str:
        """The device and the precision of the run, for the user."""
        return ""

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
        self.trials.name_trial()
        self.run.meter = Meter(
            self.strategy.read,
            filter_nonfinite=self.args.logging_nan_inf_filter,
            mean=None if self.is_alone else self.strategy.reduce,
            gather=None if self.is_alone else self.strategy.numbers_of_ranks,
        )

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

    def start_clock(self) -> None:
        self.run.started = time.time()
        self.run.pace = self.pacing.make_meter()
        self.run.first_step = self.state.global_step
        self.run.first_sample = self.run.progress.samples_seen
        self.run.first_token = self.state.num_input_tokens_seen
        self._start_ledger()

    def _start_ledger(self) -> None:
        """Continue the time ledger of the run's earlier starts."""
        file, current = self.run.ledger_file, self.run.checkpoints.current
        folder = Path(fixed_folder(self.args.output_dir)) if self.state.is_world_process_zero else None
        file.run, file.launch = None if current is None else current.run, launch_id() or job_id()
        file.begin(
            None if folder is None else read_ledger(folder),
            step=self.state.global_step,
            is_resumed=self.run.resumed_from is not None,
            waited=self.run.pace.all_waited,
        )
        if folder is not None and self.args.should_save:
            file.folder = folder
            self.keep_time()

    def _warn_if_short(self) -> None:
        """Say that the data ended before the planned number of updates, unless a callback stopped the run."""
        done, planned = self.state.global_step, self.run.plan.max_steps
        if done < planned and not self.control.should_training_stop:
            self.notices.warn_once(
                f"training ended after {done:,} of {planned:,} steps: {self.run.progress.epoch:,} epochs of the "
                "training data had fewer batches than its length says. Correct the length, or set max_steps for data "
                "without a length"
            )

    def _finish_training(self) -> TrainOutput:
        self._warn_if_short()
        report_stop(self)
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
        with self.run.ledger.during(SAVING):
            self.run.checkpoints.wait()
            self.run.checkpoints.raise_if_failed()
            report_saves(self)
            if self.args.load_best_model_at_end and self.state.best_model_checkpoint is not None:
                self.trainer._load_best_model()
        self.callback_handler.fire("on_train_end")
        self.run.status = FINISHED
        self.pushing.finish()
        return TrainOutput(self.state.global_step, loss, metrics)

    def resume_request(self, resume: str | bool | None, old_names: dict[str, Any]) -> str | bool | None:
        if "model_path" in old_names:
            logger.warning("train(model_path=...) is now train(resume_from_checkpoint=...)")
            resume = old_names.pop("model_path")
        if old_names:
            raise TypeError(f"train() got unexpected arguments: {', '.join(old_names)}")
        return self.args.resume_from_checkpoint if resume is None else resume
