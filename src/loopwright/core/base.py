"""BaseTrainer: the override points of every trainer, with bodies that need no framework."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from itertools import islice
from typing import Any

from ..args.base import BaseArguments
from ..errors import DataError, MetricError, NonFiniteError, NotAvailable, OutputError
from ..notices import Notices, logger
from .batches import Update
from .checkpoint.manager import CheckpointManager
from .events import CallbackHandler
from .loop import run_training
from .meter import Meter, Reading
from .metrics import better, readable, table, write_results
from .outputs import TrainOutput, speed_metrics
from .overrides import adapt, refuse_dead_overrides
from .plan import Plan
from .state import Progress, TrainerControl, TrainerState, callback_states, restore_callback_states
from .strategy import Strategy


class BaseTrainer:
    """Trains whatever its strategy can run; a subclass brings the framework."""

    args: BaseArguments
    strategy: Strategy
    plan: Plan
    meter: Meter
    optimizer: Any = None
    lr_scheduler: Any = None
    model: Any = None
    model_wrapped: Any = None
    is_in_train: bool = False
    schedule_follows_metric: bool = False
    """Whether the learning rate moves after evaluations instead of updates."""
    ignore_keys_for_eval: list[str] | None = None

    def _set_up(self, args: BaseArguments, callbacks: list[Any], **context: Any) -> None:
        """The parts every trainer has; called by the constructor of a subclass."""
        refuse_dead_overrides(type(self), BaseTrainer)
        self.args = args
        self.notices = Notices(strict=args.strict, quiet=not args.should_log)
        self.state = TrainerState(
            is_local_process_zero=args.local_process_index == 0, is_world_process_zero=args.process_index == 0
        )
        self.control = TrainerControl()
        self.progress = Progress()
        self.callback_handler = CallbackHandler(
            callbacks, args=args, state=self.state, control=self.control, **context
        )
        self.checkpoints = CheckpointManager(args.output_dir, notices=self.notices)
        idle = args.without_effect()
        if idle:
            self.notices.tell_once(f"without effect in this run: {', '.join(idle)}")

    # ---- training -------------------------------------------------------------------------------------------------

    def train(
        self,
        resume_from_checkpoint: str | bool | None = None,
        trial: Any = None,
        ignore_keys_for_eval: list[str] | None = None,
        **old_names: Any,
    ) -> TrainOutput:
        """Train to the end of the plan and return the steps done, the mean loss and the run's metrics."""
        resume_from_checkpoint = self._resume_request(resume_from_checkpoint, old_names)
        if trial is not None:
            raise NotAvailable("train(trial=...): hyper-parameter search is not available yet, see docs/availability.md")
        self.ignore_keys_for_eval = ignore_keys_for_eval
        self._check_output_dir()
        checkpoint = self.checkpoints.find(resume_from_checkpoint)
        self.is_in_train = True
        try:
            self.prepare_training(checkpoint)
            self._start_clock()
            run_training(self)
            return self._finish_training()
        finally:
            self.checkpoints.wait()
            self.is_in_train = False

    def prepare_training(self, checkpoint: str | None) -> None:
        """Build loader, plan, model, optimizer and schedule, in this order, and load the checkpoint into them."""
        raise NotImplementedError

    def epoch_batches(self, epoch: int) -> Iterator[Any]:
        """The micro-batches of an epoch from where progress stands."""
        raise NotImplementedError

    def make_update(self, batches: list[Any]) -> Update:
        """The update made of these micro-batches, its targets counted."""
        raise NotImplementedError

    def updates(self, epoch: int) -> Iterator[Update]:
        """The updates of an epoch from where progress stands."""
        batches = self.epoch_batches(epoch)
        found = self.progress.batches_in_epoch > 0
        while micro_batches := self._next_batches(batches):
            found = True
            yield self.make_update(micro_batches)
        if not found:
            self._no_batches(epoch)

    def _next_batches(self, batches: Iterator[Any]) -> list[Any]:
        """The micro-batches of the next update: fewer at the end of the data, none when it is over."""
        return list(islice(batches, self.plan.accumulation))

    def _no_batches(self, epoch: int) -> None:
        if epoch == 0:
            raise DataError("the training data gave no batch; with dataloader_drop_last the dataset may be too small")
        self.notices.tell_once(f"the training data gave no batch in epoch {epoch}: training stops here")
        self.control.should_training_stop = True

    def update_step(self, update: Update) -> None:
        """One optimizer step: micro-batches, clip, step, schedule."""
        strategy, events = self.strategy, self.callback_handler
        loss = self.run_micro_batches(update)
        limit = self.args.max_grad_norm
        norm = strategy.clip_gradients(limit, want_norm=not limit and self._wants_norm())
        events.fire("on_pre_optimizer_step")
        moved = strategy.optimizer_step(self._veto(loss, norm) if self.args.on_nonfinite != "continue" else None)
        events.fire("on_optimizer_step")
        self.learning_rate = self._get_learning_rate()
        if moved and not self.schedule_follows_metric:
            self.lr_scheduler.step()
        self.meter.add(loss, norm)
        strategy.zero_grad()

    def _veto(self, loss: Any, norm: Any) -> Any:
        """A device flag that forbids this step because loss or gradients are not finite."""
        return self.strategy.nonfinite(loss, norm, sticky=self.args.on_nonfinite == "raise")

    def micro_step(self, update: Update, index: int) -> Any:
        """Forward and backward of one micro-batch."""
        raise NotImplementedError

    def run_micro_batches(self, update: Update) -> Any:
        """Forward and backward of all micro-batches; returns the update's loss."""
        return self.strategy.run_update(self.micro_step, update)

    def finish_update(self, update: Update) -> None:
        """Count the update."""
        progress, state = self.progress, self.state
        progress.batches_in_epoch += update.micro_batches
        progress.samples_in_epoch += update.samples
        progress.samples_seen += update.samples
        state.global_step += 1
        state.samples_seen = progress.samples_seen
        state.epoch = self.plan.epoch_after(progress.epoch, progress.batches_in_epoch)
        if self.args.torch_empty_cache_steps and state.global_step % self.args.torch_empty_cache_steps == 0:
            self.strategy.free_memory()
        if self.checkpoints.failure is not None:
            self.checkpoints.raise_if_failed()
        if self.args.on_nonfinite == "raise" and self.strategy.reads_are_free:
            self._stop_if_nonfinite()

    def _stop_if_nonfinite(self) -> None:
        self.meter.settle()
        if self.meter.bad:
            self.log_now()

    def finish_epoch(self) -> None:
        """Close the epoch, unless training stops inside it: then a longer run can still go on from there."""
        whole = self.plan.batches_per_epoch
        inside = whole is None or self.progress.batches_in_epoch < whole
        if not (self.control.should_training_stop and inside):
            self.progress.close_epoch()

    def _get_learning_rate(self) -> float:
        raise NotImplementedError

    def _wants_norm(self) -> bool:
        """Whether anybody looks at this update's gradient norm when it is not clipped."""
        logged = self.args.logging_strategy != "steps" or (self.state.global_step + 1) % self.state.logging_steps == 0
        return logged or self.args.on_nonfinite != "continue"

    def _start_clock(self) -> None:
        self._started = time.time()
        self._first_step = self.state.global_step
        self._first_sample = self.progress.samples_seen

    def _finish_training(self) -> TrainOutput:
        steps = self.state.global_step - self._first_step
        loss = self.meter.mean_loss()
        if self.args.on_nonfinite == "raise":
            self._stop_if_nonfinite()
        samples = self.progress.samples_seen - self._first_sample
        metrics = speed_metrics("train", self._started, num_samples=samples, num_steps=steps)
        self.store_flos()
        metrics["total_flos"] = self.state.total_flos
        metrics["train_loss"] = loss
        self._add_memory_metrics("train", metrics)
        self._log(metrics)
        self.checkpoints.wait()
        if self.args.load_best_model_at_end and self.state.best_model_checkpoint is not None:
            self._load_best_model()
        self.callback_handler.fire("on_train_end")
        return TrainOutput(self.state.global_step, loss, metrics)

    def _resume_request(self, resume: str | bool | None, old_names: dict[str, Any]) -> str | bool | None:
        if "model_path" in old_names:
            logger.warning("train(model_path=...) is now train(resume_from_checkpoint=...)")
            resume = old_names.pop("model_path")
        if old_names:
            raise TypeError(f"train() got unexpected arguments: {', '.join(old_names)}")
        return self.args.resume_from_checkpoint if resume is None else resume

    # ---- log, evaluate, save --------------------------------------------------------------------------------------

    def log_now(self) -> None:
        """Read the numbers since the last log point and log them."""
        step = self.state.global_step
        if step <= self.progress.last_logged_step:
            return
        reading = self.meter.read()
        self._interval_length = step - self.progress.last_logged_step
        self.progress.last_logged_step = step
        logs: dict[str, float] = {"loss": reading.loss}
        if reading.grad_norm is not None:
            logs["grad_norm"] = reading.grad_norm
        logs["learning_rate"] = self.learning_rate
        if reading.nonfinite:
            logs["nonfinite_updates"] = reading.nonfinite
            self._report_nonfinite(step, reading)
        self.store_flos()
        self._log(logs, start_time=self._started)

    def _report_nonfinite(self, step: int, reading: Reading) -> None:
        first = step - (self._interval_length - (reading.first_nonfinite or 0)) + 1
        policy = self.args.on_nonfinite
        if policy == "raise":
            raise NonFiniteError(
                f"loss or gradients became NaN or infinite at step {first}; the weights are those after step {first - 1}. "
                'Look at that batch, lower the learning rate, or set on_nonfinite="skip" to leave such updates out'
            )
        done = "were left out" if policy == "skip" else "were applied all the same"
        self.notices.tell_once(
            f"loss or gradients were NaN or infinite, first at step {first}; on_nonfinite={policy!r}: such updates {done}. "
            "Every log says how many there were (nonfinite_updates)"
        )

    def _log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        adapt(self.log, "start_time")(logs, start_time=start_time)

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """Add the epoch, remember the numbers and hand them to the callbacks."""
        if self.state.epoch is not None:
            logs["epoch"] = self.state.epoch
        if self.args.include_num_input_tokens_seen != "no":
            logs["num_input_tokens_seen"] = self.state.num_input_tokens_seen
            if start_time is not None:
                tokens = self.state.num_input_tokens_seen - getattr(self, "_first_token", 0)
                logs.update(speed_metrics("train", start_time, num_tokens=tokens))
        self.state.log_history.append({**logs, "step": self.state.global_step})
        self.callback_handler.fire("on_log", logs=logs)

    def evaluate_now(self) -> None:
        """Evaluate as the training loop does, and see whether this is the best so far."""
        metrics = self._evaluate(None, self.ignore_keys_for_eval)
        is_best = self._determine_best_metric(metrics=metrics, trial=None)
        if self.args.save_strategy == "best":
            self.control.should_save = is_best

    def save_now(self) -> None:
        """Save a checkpoint as the training loop does."""
        if self.args.on_nonfinite == "raise":
            self._stop_if_nonfinite()
        started = time.monotonic()
        self._save_checkpoint(self.model, None)
        self.state.last_save_seconds = max(time.monotonic() - started, self.checkpoints.last_seconds)
        self.callback_handler.fire("on_save")

    def _evaluate(self, trial: Any, ignore_keys_for_eval: list[str] | None) -> dict[str, float]:
        metrics: dict[str, float] = adapt(self.evaluate, "ignore_keys")(ignore_keys=ignore_keys_for_eval)
        if self.schedule_follows_metric:
            self.lr_scheduler.step(metrics[self._metric_name(metrics)])
        return metrics

    def evaluate(self, eval_dataset: Any = None, ignore_keys: Any = None, metric_key_prefix: str = "eval") -> Any:
        raise NotImplementedError

    def _metric_name(self, metrics: dict[str, float]) -> str:
        """The full name of the metric that decides which model is best."""
        wanted = self.args.metric_for_best_model or "loss"
        name = wanted if wanted.startswith("eval_") else f"eval_{wanted}"
        if name not in metrics:
            known = ", ".join(sorted(metrics))
            raise MetricError(f"metric_for_best_model={wanted!r} is not among the metrics of the evaluation: {known}")
        return name

    def _determine_best_metric(self, metrics: dict[str, float], trial: Any = None) -> bool:
        """Remember the metric if it is the best so far; returns whether it is."""
        if self.args.metric_for_best_model is None:
            return False
        value = metrics[self._metric_name(metrics)]
        if not better(value, self.state.best_metric, greater_is_better=bool(self.args.greater_is_better)):
            return False
        self.state.best_metric = value
        self.state.best_global_step = self.state.global_step
        return True

    def _save_checkpoint(self, model: Any, trial: Any = None) -> None:
        raise NotImplementedError

    def _load_best_model(self) -> None:
        raise NotImplementedError

    def _callback_states(self) -> dict[str, Any]:
        return callback_states([*self.callback_handler.callbacks, self.control])

    def _restore_callbacks(self, states: dict[str, Any]) -> None:
        if not self.args.restore_callback_states_from_checkpoint:
            return
        states = {name: state for name, state in states.items() if name != "TrainerControl"}
        left = restore_callback_states(self.callback_handler.callbacks, states)
        if left:
            self.notices.tell_once(f"the checkpoint holds state of callbacks that are not there now: {', '.join(left)}")

    def _check_output_dir(self) -> None:
        if not self.args.should_save:
            return
        folder = str(self.args.output_dir)
        try:
            os.makedirs(folder, exist_ok=True)
            probe = os.path.join(folder, f".loopwright-write-test-{os.getpid()}")
            with open(probe, "w", encoding="utf-8"):
                pass
            os.remove(probe)
        except OSError as error:
            raise OutputError(
                f"the output folder {folder!r} cannot be written ({error.strerror}); "
                "choose another output_dir or change its permissions"
            ) from error

    # ---- small things users call ------------------------------------------------------------------------------------

    def log_metrics(self, split: str, metrics: dict[str, Any]) -> None:
        """Print the metrics of a split as a table."""
        if self.is_world_process_zero():
            print(table(split, metrics))

    def metrics_format(self, metrics: dict[str, Any]) -> dict[str, Any]:
        """The metrics in readable form."""
        return readable(metrics)

    def save_metrics(self, split: str, metrics: dict[str, Any], combined: bool = True) -> None:
        """Write the metrics to {split}_results.json and all_results.json."""
        if self.is_world_process_zero():
            os.makedirs(str(self.args.output_dir), exist_ok=True)
            write_results(str(self.args.output_dir), split, metrics, combined=combined)

    def save_state(self) -> None:
        """Write trainer_state.json into the output folder."""
        if self.is_world_process_zero():
            os.makedirs(str(self.args.output_dir), exist_ok=True)
            self.state.stateful_callbacks = self._callback_states()
            self.state.save_to_json(os.path.join(str(self.args.output_dir), "trainer_state.json"))

    def store_flos(self) -> None:
        """Bring the count of floating point operations into the state."""

    def _add_memory_metrics(self, split: str, metrics: dict[str, Any]) -> None:
        """Add memory figures when skip_memory_metrics=False."""

    def add_callback(self, callback: Any) -> None:
        self.callback_handler.add_callback(callback)

    def pop_callback(self, callback: Any) -> Any:
        return self.callback_handler.pop_callback(callback)

    def remove_callback(self, callback: Any) -> None:
        self.callback_handler.remove_callback(callback)

    def is_local_process_zero(self) -> bool:
        return self.args.local_process_index == 0

    def is_world_process_zero(self) -> bool:
        return self.args.process_index == 0

    def _not_yet(self, what: str) -> Callable[..., Any]:
        raise NotAvailable(f"{what} is not available yet, see docs/availability.md")

    def hyperparameter_search(self, *args: Any, **kwargs: Any) -> Any:
        """Search for good arguments (not available yet)."""
        self._not_yet("hyperparameter_search")

    def push_to_hub(self, *args: Any, **kwargs: Any) -> Any:
        """Push the model to a hub (not available yet)."""
        self._not_yet("push_to_hub")

    def init_hf_repo(self, token: str | None = None) -> None:
        """Create the hub repository (not available yet)."""
        self._not_yet("init_hf_repo")

    def create_model_card(self, *args: Any, **kwargs: Any) -> None:
        """Write a model card (not available yet)."""
        self._not_yet("create_model_card")
