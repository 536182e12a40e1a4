"""Actions of the loop besides training: log, evaluate, save, roll back, stop."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from ..args.paths import working_folder
from ..args.problems import short
from ..errors import MetricError, NonFiniteError, OutputError
from ..notices import logger
from .checkpoint.json_files import write_json
from .evaluation.metrics import better, full_name, readable, table, write_results
from .logs.console import report_saves
from .logs.deferred_logs import LogPoint, can_defer_logs
from .logs.json_values import as_logs
from .measure.host_memory import MemoryMeter
from .measure.ledger import EVALUATION, SAVING
from .measure.meter import Reading
from .measure.pacing import Pacing
from .outputs import speed_metrics
from .part import DataPart, LossPart, PushPart
from .resuming.saved_state import SavedState
from .run import Run
from .shutdown.ending import leave, save_and_exit
from .shutdown.signals import Interrupted
from .strategy import Strategy
from .update import Place, Update
from .user_code.overrides import adapt, takes

if TYPE_CHECKING:
    from .changes import Changes
    from .distributed.agreement import Agreement
    from .evaluation.entry import Evaluation
    from .resuming.resume import Resuming
    from .trial import Trials


def cannot_be_written(folder: str, reason: str) -> OutputError:
    """The error for an output folder that a run cannot use."""
    return OutputError(
        f"the output folder {folder!r} cannot be written ({reason}); choose another output_dir or change its "
        "permissions"
    )


class LoopActions(SavedState):
    """Does what the flags of `control` request: the part of a trainer outside the loop."""

    run: Run
    """State of the current training run; between two runs, the closed state of the last one."""
    data: DataPart
    loss: LossPart
    evaluation: Evaluation
    saving: Resuming
    changes: Changes
    pacing: Pacing
    pushing: PushPart
    agreement: Agreement
    trials: Trials
    memory: MemoryMeter
    strategy: Strategy
    is_probing: bool = False
    """Whether the loss is being computed only to find out how it is scaled."""

    # ---- log, evaluate, save --------------------------------------------------------------------------------------

    def log_now(self) -> None:
        """Read the numbers since the last log point and log them."""
        step = self.state.global_step
        if step <= self.run.progress.last_logged_step:
            return
        updates, self.run.progress.last_logged_step = step - self.run.progress.last_logged_step, step
        if self.strategy.logs_later and can_defer_logs(self):
            self.control.should_log = False
            self.run.late_logs.append(LogPoint(step, updates, self.run.learning_rate, self.run.meter.hand_over()))
            self.strategy.defer(self.write_late_logs)
            return
        self._log_interval(step, updates, self.run.learning_rate, self.run.meter.read())

    def end_log_interval(self, step: int) -> None:
        """Start a new interval after numbers that a user's override has logged."""
        updates, self.run.progress.last_logged_step = step - self.run.progress.last_logged_step, step
        reading = self.run.meter.read()
        if reading.nonfinite:
            self._report_nonfinite(step, updates, reading)

    def write_late_logs(self) -> None:
        """Write the deferred logs, oldest first."""
        while self.run.late_logs:
            point = self.run.late_logs.pop(0)
            self._log_interval(point.step, point.updates, point.learning_rate, point.read())

    def _log_interval(self, step: int, updates: int, learning_rate: float, reading: Reading) -> None:
        logs: dict[str, float] = {"loss": reading.loss}
        if reading.grad_norm is not None:
            logs["grad_norm"] = reading.grad_norm
        logs["learning_rate"] = learning_rate
        logs.update(reading.named)
        if reading.nonfinite:
            logs["nonfinite_steps"] = reading.nonfinite
            self._report_nonfinite(step, updates, reading)
        self.trainer.store_flos()
        self._log_with_pace(logs)
        if self.args.on_spike == "rollback" and self.run.spikes.is_spike(reading.loss):
            self.roll_back(step - updates)

    def _log_with_pace(self, logs: dict[str, float]) -> None:
        """Log; callbacks also get the throughput of the interval, which the log history leaves out."""
        self.callback_handler.pace = self.pacing.live_numbers()
        try:
            self.log_numbers(logs, start_time=self.run.started)
        finally:
            self.callback_handler.pace = None
        if self.run.step_timer is not None:
            self.run.step_timer.restart()

    @contextmanager
    def _off_the_clock(self, part: str) -> Iterator[None]:
        """Exclude evaluation and saving from the time of updates; the time ledger counts them as this part."""
        self.write_late_logs()
        if not self.strategy.reads_are_free:
            # Evaluation and saving wait for the device in any case; this wait is part of the time of the updates
            # before.
            self.run.meter.settle()
        with self.run.pace.left_out(), self.run.ledger.during(part):
            self.keep_time(older_than=1.0)
            yield
        if self.run.step_timer is not None:
            self.run.step_timer.restart()

    def keep_time(self, *, older_than: float = 0.0) -> None:
        """Write the time ledger, unless it was written in the last few seconds."""
        if self.run.ledger_file.age >= older_than:
            plan, status = self.run.planned_updates or 0, self.run.status
            self.run.ledger_file.write(step=self.state.global_step, max_steps=plan, status=status)

    def roll_back(self, step: int) -> None:
        """Restore the newest checkpoint up to this step, and continue with the data that comes next."""
        self.run.checkpoints.wait()
        good = [each for each in self.run.checkpoints.complete() if each <= step]
        if not good:
            self.notices.warn_once(
                f"the loss spiked after step {step}, and there is no earlier checkpoint to roll back to"
            )
            return
        jumped = self.state.global_step
        self.saving.restore_weights(max(good))
        self.run.ledger.roll_back(max(good))
        for callback in self.callback_handler.callbacks:
            if callable(getattr(callback, "rewind", None)):
                callback.rewind(self.args, self.state)
        logger.warning(
            f"the loss spiked between steps {step} and {jumped}: rolling back to checkpoint-{max(good)} and skipping "
            "the samples since then"
        )

    def _remember_place(self, update: Update) -> None:
        """Record the samples of an update until its numbers are known to be finite."""
        step, progress = self.state.global_step + 1, self.run.progress
        for known in [each for each in self.run.places if each <= progress.last_logged_step]:
            del self.run.places[known]
        self.run.places[step] = Place(progress.epoch, progress.samples_in_epoch, update.samples)

    def _stop_if_nonfinite(self) -> None:
        self.run.meter.settle()
        if self.run.meter.bad:
            self.log_now()

    def _report_nonfinite(self, step: int, updates: int, reading: Reading) -> None:
        first = step - (updates - (reading.first_nonfinite or 0)) + 1
        policy = self.args.on_nonfinite
        if policy == "raise":
            report = self._incident(first)
            raise NonFiniteError(
                f"loss or gradients became NaN or infinite at step {first}; the weights are those after step "
                f"{first - 1}, and a report on that step {report}. Inspect that batch, lower the learning "
                'rate, or set on_nonfinite="skip" to skip such steps'
            )
        if self.run.meter.nonfinite > reading.nonfinite:
            return  # reported at an earlier log point
        done = "skipped" if policy == "skip" else "applied anyway"
        self.notices.warn_once(
            f"loss or gradients were NaN or infinite, first at step {first}; with on_nonfinite={policy!r}, such "
            f"steps are {done}. The number of them is logged as nonfinite_steps"
        )

    def _incident(self, step: int) -> str:
        """Where the report on a step is, for a message; a full disk must not hide the error."""
        try:
            return f"is in {self.loss.write_incident(step)}"
        except OSError as error:
            return f"could not be written ({error})"

    def log_numbers(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """Call `trainer.log`: rows of training with the start of training by position, others without it."""
        log = self.trainer.log
        if start_time is None:
            log(logs)
        elif takes(log, logs, start_time):
            log(logs, start_time)
        else:
            adapt(log, "start_time")(logs, start_time=start_time)

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """Add the epoch, append the numbers to the log history and pass them to the callbacks."""
        if self.is_probing:
            return
        self.run.may_leave = False
        logs = as_logs(logs)
        if self.state.epoch is not None:
            logs["epoch"] = self.state.epoch
        if self.args.include_num_input_tokens_seen != "no":
            logs["num_input_tokens_seen"] = self.state.num_input_tokens_seen
            if start_time is not None:
                tokens = self.state.num_input_tokens_seen - self.run.first_token
                logs.update(speed_metrics("train", start_time, num_tokens=tokens))
        with self.run.checkpoints.writing():
            self.state.log_history.append({**logs, "step": self.state.global_step})
            self.callback_handler.fire("on_log", logs=logs)

    @property
    def wants_to_leave(self) -> bool:
        """Whether a signal was received that may interrupt the evaluation that runs now."""
        return bool(self.run.signals.received) and self.trainer.is_in_train and self.run.may_leave

    def leave(self) -> NoReturn:
        """After a signal before the first update: exit, without anything to save."""
        leave(self)

    def save_and_exit(self) -> NoReturn:
        """After a signal: save the last finished update and the pending requests, and exit."""
        save_and_exit(self)

    def resume_pending(self) -> None:
        """Set the control flags that were pending when a signal stopped the run."""
        for wish in self.run.progress.pending:
            setattr(self.control, wish, True)
        self.run.progress.pending = []

    def evaluate_now(self) -> None:
        """Evaluate within training, and request a checkpoint if the metric is the best so far."""
        try:
            with self._off_the_clock(EVALUATION):
                self.run.may_leave = True
                metrics = self.trainer._evaluate(self.run.trial, self.run.ignore_keys_for_eval)
        except Interrupted:
            self.save_and_exit()
        finally:
            self.run.may_leave = False
        is_best = self.trainer._determine_best_metric(metrics=metrics, trial=self.run.trial)
        if self.args.save_strategy == "best":
            # Keep a request by a timer or a trigger file; the flow of steps and epochs makes none here.
            self.control.should_save = self.control.should_save or is_best
        elif is_best and self.args.load_best_model_at_end:
            # Evaluation and saving may have different intervals; the best model is saved in any case.
            self.control.should_save = True

    def save_now(self) -> None:
        """Save a checkpoint within training."""
        if self.args.on_nonfinite == "raise":
            self._stop_if_nonfinite()
        started = time.monotonic()
        with self._off_the_clock(SAVING):
            self.agreement.before_save()
            self.pushing.before_save()
            adapt(self.trainer._save_checkpoint, "trial")(self.model, trial=self.run.trial)
        if not self.run.checkpoints.was_skipped:
            self.run.ledger.save(self.state.global_step)
        self.keep_time()
        self.state.last_save_seconds = max(time.monotonic() - started, self.run.checkpoints.last_seconds)
        report_saves(self)
        self._tell_saved()
        self.pushing.after_save()

    def _tell_saved(self) -> None:
        """Fire on_save. If the user's code gets it, the checkpoint is complete; changes to its files are adopted."""
        checkpoints = self.run.checkpoints
        if checkpoints.is_saving:
            self.callback_handler.fire("on_save")
        elif self.strategy.any_rank(checkpoints.was_skipped):
            self.callback_handler.fire_unfulfilled("on_save")
        else:
            self.callback_handler.fire("on_save")
            if self.saving.leads_saving and self.saving.is_followed_by_user():
                checkpoints.adopt_changes(self.state.global_step)

    def _evaluate(self, trial: Any, ignore_keys_for_eval: Any, skip_scheduler: bool = False) -> dict[str, float]:
        metrics: dict[str, float] = adapt(self.trainer.evaluate, "ignore_keys")(ignore_keys=ignore_keys_for_eval)
        if trial is not None:
            self.trainer._report_to_hp_search(trial, self.state.global_step, metrics)
        skips = skip_scheduler or not self.state.global_step  # at eval_on_start no update was made
        if self.run.schedule_follows_metric and not skips:
            self.trainer.lr_scheduler.step(metrics[self._metric_name(metrics)])
        return metrics

    def _metric_name(self, metrics: dict[str, float]) -> str:
        """The full name of the metric that selects the best model."""
        wanted = self.args.best_model_metric or "loss"
        name = full_name(wanted)
        if name not in metrics:
            known = ", ".join(sorted(metrics))
            raise MetricError(f"metric_for_best_model={wanted!r} is not one of the metrics of the evaluation: {known}")
        return name

    def _determine_best_metric(self, metrics: dict[str, float], trial: Any = None) -> bool:
        """Store the metric if it is the best so far; returns whether it is."""
        if self.args.best_model_metric is None:
            return False
        value = metrics[self._metric_name(metrics)]
        if not isinstance(value, (int, float)):
            raise MetricError(
                f"metric_for_best_model={self.args.best_model_metric!r} is {short(value)}, which cannot be "
                "compared; return a number from compute_metrics"
            )
        if not better(value, self.state.best_metric, greater_is_better=bool(self.args.greater_is_better)):
            return False
        self.state.best_metric = value
        self.state.best_global_step = self.state.global_step
        return True

    def check_output_dir(self) -> None:
        """Create the output folder, and check that it can be written."""
        if not self.args.should_save:
            return
        folder = str(self.args.output_dir)
        try:
            os.makedirs(working_folder(folder), exist_ok=True)
            self.run.checkpoints.storage.check_writable()
        except OSError as error:
            raise cannot_be_written(folder, error.strerror or str(error)) from error

    # ---- helpers for scripts -----------------------------------------------------------------------------------------

    def log_metrics(self, split: str, metrics: dict[str, Any]) -> None:
        """Print the metrics of a split as a table."""
        if self.trainer.is_world_process_zero():
            print(table(split, metrics))

    def metrics_format(self, metrics: dict[str, Any]) -> dict[str, Any]:
        """The metrics in readable form."""
        return readable(metrics)

    def save_metrics(self, split: str, metrics: dict[str, Any], combined: bool = True) -> None:
        """Write the metrics to {split}_results.json and all_results.json."""
        if self.trainer.is_world_process_zero():
            folder = working_folder(self.args.output_dir)
            os.makedirs(folder, exist_ok=True)
            write_results(folder, split, metrics, combined=combined)

    def save_state(self) -> None:
        """Write trainer_state.json into the output folder."""
        if self.trainer.is_world_process_zero():
            folder = working_folder(self.args.output_dir)
            os.makedirs(folder, exist_ok=True)
            write_json(Path(folder) / "trainer_state.json", self.state_document())

    def end(self) -> None:
        """Wait for saves and pushes in progress; trackers are finished when training ends."""
        self.run.checkpoints.wait()
        self.pushing.wait()

    def add_memory_metrics(self, split: str, metrics: dict[str, Any]) -> None:
        if not self.args.skip_memory_metrics:
            metrics.update(self.memory.figures(split))
