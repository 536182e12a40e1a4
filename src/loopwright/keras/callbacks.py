"""Adapters: Keras callbacks in loopwright's trainers, and loopwright's reporters in `fit`."""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from ..core.events import TrainerCallback
from ..errors import ArgumentsError
from ..reporters.base import Row
from ..reporters.callback import ReporterCallback, reported_names, run_info
from ..reporters.registry import reporter_callbacks
from ..reporters.sender import Sender

if TYPE_CHECKING:
    from ..args.base import BaseArguments


def _is_base(cls: type) -> bool:
    return f"{cls.__module__.split('.')[0]}.{cls.__name__}" in ("keras.Callback", "tf_keras.Callback")


def _is_keras_callback(thing: Any) -> bool:
    return any(map(_is_base, type(thing).__mro__))


def adapted(callback: Any) -> Any:
    """The callback; a Keras callback is wrapped in an adapter."""
    return KerasCallbackAdapter(callback) if _is_keras_callback(callback) else callback


class KerasCallbackAdapter(TrainerCallback):
    """Runs a `keras.callbacks.Callback` under TFTrainer or JAXTrainer.

    Its batches are updates. Its validation is the trainer's evaluation: the metrics are passed to `on_epoch_end` as
    `val_...`, and to `on_test_end` without the prefix. `model.stop_training` stops the run.
    """

    def __init__(self, callback: Any) -> None:
        if not _is_keras_callback(callback):
            kind = type(callback).__name__
            raise ArgumentsError(f"KerasCallbackAdapter needs a keras.callbacks.Callback, not {kind}")
        self.callback = callback
        self._validation: dict[str, float] = {}
        self._logs: dict[str, float] = {}
        self._update = 0

    def on_train_begin(self, args: BaseArguments, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        callback = self.callback
        steps = getattr(kwargs.get("train_dataloader"), "batches", None)
        callback.set_params({"epochs": state.num_train_epochs, "steps": steps, "verbose": 0})
        if hasattr(model, "stop_training"):
            model.optimizer = kwargs.get("optimizer")  # Keras callbacks read and set the learning rate there
        callback.set_model(model)
        model.stop_training = False
        self._schedule = kwargs.get("lr_scheduler")
        with self._following_rate():
            callback.on_train_begin({})

    def on_epoch_begin(self, args: BaseArguments, state: Any, control: Any, **kwargs: Any) -> None:
        self._update = 0
        with self._following_rate():
            self.callback.on_epoch_begin(int(state.epoch or 0), {})

    def on_step_begin(self, args: BaseArguments, state: Any, control: Any, **kwargs: Any) -> None:
        with self._following_rate("on_train_batch_begin"):
            self.callback.on_train_batch_begin(self._update, {})

    def on_step_end(self, args: BaseArguments, state: Any, control: Any, **kwargs: Any) -> None:
        with self._following_rate("on_train_batch_end"):
            self.callback.on_train_batch_end(self._update, dict(self._logs))
        self._update += 1
        self._maybe_stop(control, kwargs.get("model"))

    def on_log(self, args: BaseArguments, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
        kept = ("loss", "learning_rate", "grad_norm")
        self._logs.update({name: value for name, value in (logs or {}).items() if name in kept})

    def on_evaluate(self, args: BaseArguments, state: Any, control: Any, metrics: Any = None, **kwargs: Any) -> None:
        plain = {name.removeprefix("eval_"): value for name, value in (metrics or {}).items()}
        self.callback.on_test_begin({})
        self.callback.on_test_end(dict(plain))
        self._validation = {f"val_{name}": value for name, value in plain.items()}
        if self._ended is not None:  # the evaluation of the epoch that has just ended
            self._end_epoch(control, kwargs.get("model"))

    _ended: int | None = None

    def on_epoch_end(self, args: BaseArguments, state: Any, control: Any, **kwargs: Any) -> None:
        self._ended = max(round(state.epoch or 0) - 1, 0)
        if not control.should_evaluate:
            self._end_epoch(control, kwargs.get("model"))

    def _end_epoch(self, control: Any, model: Any) -> None:
        epoch, self._ended = self._ended, None
        with self._following_rate():
            self.callback.on_epoch_end(epoch, {**self._logs, **self._validation})
        self._maybe_stop(control, model)

    def on_predict(self, args: BaseArguments, state: Any, control: Any, **kwargs: Any) -> None:
        self.callback.on_predict_begin({})
        self.callback.on_predict_end({})

    def on_train_end(self, args: BaseArguments, state: Any, control: Any, **kwargs: Any) -> None:
        self.callback.on_train_end(dict(self._logs))

    _schedule: Any = None

    @contextmanager
    def _following_rate(self, method: str | None = None) -> Iterator[None]:
        """Train on with the learning rate that the callback sets; `method` is one that most callbacks do not have."""
        own = method is None or any(method in vars(each) and not _is_base(each) for each in type(self.callback).__mro__)
        optimizer = getattr(self.callback.model, "optimizer", None)
        if optimizer is None or not hasattr(self._schedule, "set_rate") or not own:
            yield
            return
        from .optim.optimizers import number  # imports Keras, which reporters do not need

        optimizer.learning_rate = self._schedule.get_last_lr()[0]  # the one of the next update
        before = number(optimizer.learning_rate)
        yield
        if (rate := number(optimizer.learning_rate)) != before:
            self._schedule.set_rate(rate)

    def _maybe_stop(self, control: Any, model: Any) -> None:
        if getattr(model, "stop_training", False):
            control.should_training_stop = True


def fit_reporters(report_to: Any, *, args: BaseArguments | None = None, every: int = 1) -> list[Any]:
    """Keras callbacks that send the logs of `fit` to the trackers of `report_to`: `fit(callbacks=fit_reporters(...))`.

    They report at intervals of batches and at the end of each epoch, under the trainer's names (train/loss, eval/loss).
    """
    found: list[Any] = reporter_callbacks(report_to)
    return [reporter_in_fit(callback.reporter, args=args, every=every) for callback in found]


def reporter_in_fit(reporter: Any, *, args: BaseArguments | None = None, every: int = 1) -> Any:
    """A Keras callback that sends the logs of `fit` to one reporter; its step counts batches over all epochs."""
    import keras

    class FitReporter(keras.callbacks.Callback):
        """Sends logs to a reporter, in a thread of its own."""

        def on_train_begin(self, logs: Any = None) -> None:
            self.step = 0
            self.sender = Sender(reporter)
            self.sender.begin(run_info(args, None, self.model, run_id=uuid.uuid4().hex), [], None)
            self.sender.wait_started(ReporterCallback.start_seconds)

        def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
            self.step += 1
            if self.step % every == 0:
                self._send(logs)

        def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
            self._send({**(logs or {}), "epoch": epoch + 1})

        def on_train_end(self, logs: Any = None) -> None:
            self.sender.finish("finished")

        def _send(self, logs: Any) -> None:
            named = {name.replace("val_", "eval_", 1): float(value) for name, value in (logs or {}).items()}
            values = reported_names(named) if getattr(reporter, "renames", True) else named
            self.sender.send(Row(self.step, "fit", values))

    return FitReporter()
