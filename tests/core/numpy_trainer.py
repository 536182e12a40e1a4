"""NumpyTrainer: the smallest trainer there is on the core, and all that a framework has to bring to it."""

from __future__ import annotations

import dataclasses
import os
import random
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import load_file, save_file

from loopwright.args.base import BaseArguments
from loopwright.callbacks.flow import DefaultFlowCallback
from loopwright.callbacks.metrics_file import MetricsFileCallback
from loopwright.core.changes import Changes
from loopwright.core.checkpoint.folder import (
    ARGUMENTS,
    MODEL,
    OPTIMIZER,
    PROGRESS,
    RNG,
    SCHEDULER,
    STATE,
    folder_name,
)
from loopwright.core.checkpoint.json_files import read_json, write_json
from loopwright.core.checkpoint.schema import named, number, record
from loopwright.core.evaluation.entry import Evaluation
from loopwright.core.evaluation.loop import EvalPlan, EvalStep, run_evaluation
from loopwright.core.internals import Internals
from loopwright.core.measure.pacing import Pacing
from loopwright.core.order import Order
from loopwright.core.outputs import EvalLoopOutput, PredictionOutput, TrainOutput, speed_metrics
from loopwright.core.part import DataPart, LossPart
from loopwright.core.plan import Plan, make_plan
from loopwright.core.randomness import NUMPY_RNG, PYTHON_RNG
from loopwright.core.resuming.resume import Resuming
from loopwright.core.schedules import build_schedule
from loopwright.core.shutdown.signals import Interrupted
from loopwright.core.trainer import BaseTrainer
from loopwright.core.update import MicroBatch, Update
from tests.core.numpy_strategy import Array, LinearModel, Loss, Momentum, NumpyStrategy

Sample = tuple[Array, Array]
Batch = dict[str, Array]


def stack(samples: Sequence[Sample]) -> Batch:
    """A batch of samples."""
    return {"inputs": np.stack([each[0] for each in samples]), "targets": np.stack([each[1] for each in samples])}


class ScheduledRate:
    """Tells the optimizer the learning rate of each update."""

    def __init__(self, optimizer: Momentum, base: float, schedule: Callable[[int], float]) -> None:
        self.optimizer, self.base, self.schedule, self.updates = optimizer, base, schedule, 0
        optimizer.learning_rate = base * schedule(0)

    def step(self) -> None:
        self.updates += 1
        self.optimizer.learning_rate = self.base * self.schedule(self.updates)

    def state_dict(self) -> dict[str, Any]:
        return {"updates": self.updates, "base": self.base}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.updates, self.base = state["updates"], state["base"]
        self.optimizer.learning_rate = self.base * self.schedule(self.updates)


class NumpyData(DataPart):
    """Samples by index, in the order of seed and epoch."""

    trainer: Any

    def plan_again(self) -> Plan:
        args, samples = self.args, len(self.trainer.train_dataset)
        size = args.per_device_train_batch_size
        return make_plan(
            batch_size=size,
            accumulation=args.gradient_accumulation_steps,
            batches_per_epoch=samples // size if args.dataloader_drop_last else -(-samples // size),
            examples=samples,
            max_steps=args.max_steps,
            num_train_epochs=args.num_train_epochs,
        )

    def epoch_batches(self, epoch: int) -> Iterator[Batch]:
        if self.run.resume_rng is not None:
            self.strategy.load_rng_state(self.run.resume_rng)
            self.run.resume_rng = None
        args, dataset, size = self.args, self.trainer.train_dataset, self.run.plan.batch_size
        seed = args.seed if args.data_seed is None else args.data_seed
        order = Order(len(dataset), seed, str(args.train_sampling_strategy)).epoch(epoch)
        left = order[self.run.progress.samples_in_epoch :].tolist()
        end = len(left) - len(left) % size if args.dataloader_drop_last else len(left)
        return (stack([dataset[i] for i in left[first : first + size]]) for first in range(0, end, size))


class NumpyLoss(LossPart):
    """A mean over the targets of an update."""

    trainer: Any

    def make_update(self, batches: list[Batch]) -> Update:
        items = [len(batch["targets"]) for batch in batches]
        return Update(batches, items, sum(items), samples=sum(items), micro_batches=len(batches))

    def micro_batch(self, update: Update, index: int) -> MicroBatch:
        if index and self.run.signals.wants_save:
            raise Interrupted
        return MicroBatch(update, index, update.batches[index], update.total_items)

    def training_step(self, model: LinearModel, inputs: Batch, num_items_in_batch: int) -> float:
        loss = self.trainer.compute_loss(model, inputs, num_items_in_batch)
        self.strategy.backward(loss)
        return float(loss.value)

    def write_incident(self, step: int) -> str:
        """Write the place of a step's samples in the order of their epoch."""
        folder = Path(self.args.output_dir) / f"incident-step-{step}"
        folder.mkdir(exist_ok=True)
        write_json(folder / "incident.json", self.run.places[step]._asdict())
        return str(folder)


class NumpyEvaluation(Evaluation):
    """Evaluation and prediction."""

    trainer: Any

    def _eval_batches(self, eval_dataset: Any) -> Iterator[Batch]:
        named = isinstance(eval_dataset, str)
        dataset = self.trainer.eval_dataset if eval_dataset is None or named else eval_dataset
        dataset, size = dataset[eval_dataset] if named else dataset, self.args.per_device_eval_batch_size
        return (stack(dataset[first : first + size]) for first in range(0, len(dataset), size))

    _test_batches = _eval_batches

    def _go_through(
        self, make_loader: Callable[[], Any], description: str, *, loss_only: Any, ignore_keys: Any, prefix: str
    ) -> EvalLoopOutput:
        started = time.time()
        plan = EvalPlan(self.trainer.compute_metrics, bool(loss_only), keep_always=self._wants_predictions)
        with self._evaluating():
            steps = map(self._eval_step, make_loader())
            output = run_evaluation(
                steps, plan, to_host=lambda value: value, read=self.strategy.read, prefix=prefix
            )
        output.metrics.update(speed_metrics(prefix, started, num_samples=output.num_samples))
        return output

    @contextmanager
    def _evaluating(self) -> Iterator[None]:
        """The model in its other mode, and every random stream left as it was found."""
        states = self.strategy.rng_state()
        self.strategy.evaluating()
        try:
            yield
        finally:
            self.strategy.training()
            self.strategy.load_rng_state(states)

    def _eval_step(self, batch: Batch) -> EvalStep:
        samples = len(batch["targets"])
        loss = self.trainer.compute_loss(self.model, batch, samples)
        self.callback_handler.fire("on_prediction_step")
        if self.internals.wants_to_leave:
            raise Interrupted
        return EvalStep(loss.value, self.model(batch["inputs"]), batch["targets"], batch["inputs"], samples, samples)


DESCRIPTION = record({"learning_rate": number(0), "momentum": number(0, 1)})
SAVED_RNG = record({"python": PYTHON_RNG, "numpy": NUMPY_RNG})


class NumpySaving(Resuming):
    """Checkpoints of numpy arrays."""

    trainer: Any
    strategy: NumpyStrategy

    def _ordered_data(self) -> bool:
        return True

    def saves_in_background(self) -> bool:
        # This framework is not in loopwright's package, so its own methods would look like a user's.
        is_own = type(self.trainer)._save_checkpoint is NumpyTrainer._save_checkpoint
        return self.args.async_save and is_own and not self.callback_handler.is_heard_by_user("on_save")

    def _save_checkpoint(self, model: LinearModel, trial: Any = None) -> None:
        step, state = self.state.global_step, self.state
        if state.best_global_step == step:
            state.best_model_checkpoint = os.path.join(str(self.args.output_dir), folder_name(step))
        self.run.checkpoints.save(
            step,
            self._checkpoint_writer(),
            keep=self.args.save_total_limit,
            protect=[state.best_global_step],
            background=self.saves_in_background(),
        )

    def _checkpoint_writer(self) -> Callable[[Path], None]:
        """A function that writes everything as it is now; what happens until it is called does not show."""
        strategy, progress = self.strategy, dataclasses.asdict(self.run.progress)
        described, velocity = strategy.optimizer_state(self.trainer.optimizer, self.model)
        tensors = {MODEL: strategy.model_state(self.model), f"{OPTIMIZER}.safetensors": velocity}
        documents = {
            STATE: self.internals.state_document(),
            ARGUMENTS: self.args.to_dict(),
            PROGRESS: {
                "progress": progress,
                "meter": self.run.meter.state_dict(),
                "parts": self.internals.part_states(),
                "resized": self.run.is_resized,
            },
            f"{OPTIMIZER}.json": described,
            SCHEDULER: self.trainer.lr_scheduler.state_dict(),
            RNG: strategy.rng_state(),
        }

        def write(folder: Path) -> None:
            for name, arrays in tensors.items():
                save_file(arrays, folder / name)
            for name, values in documents.items():
                write_json(folder / name, values)

        return write

    def checkpoint_bytes(self) -> int:
        return 2 * sum(value.nbytes for value in self.model.parameters.values())

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: Any = None) -> None:
        self.strategy.load_weights(self.model, resume_from_checkpoint)

    def _load_weights_of(self, folder: str) -> None:
        self.strategy.load_weights(self.model, folder)

    def resume(self, checkpoint: str) -> None:
        folder, trainer = Path(checkpoint), self.trainer
        self._adopt_state(self._saved_state(folder))
        self._tell_changes(folder)
        self._resume_progress(folder)
        tensors = load_file(folder / f"{OPTIMIZER}.safetensors")
        described = read_json(folder / f"{OPTIMIZER}.json", DESCRIPTION)
        self.strategy.load_optimizer(described, tensors, trainer.optimizer, self.model)
        self._resume_schedule(read_json(folder / SCHEDULER, named()), folder / SCHEDULER)
        self.run.resume_rng = read_json(folder / RNG, SAVED_RNG)
        # Now, for an evaluation that a signal put off; and once more where training goes on.
        self.strategy.load_rng_state(self.run.resume_rng)


class NumpyChanges(Changes):
    """Takes any optimizer a callback assigns."""

    def follow_optimizer(self, *, is_clipped: bool = False) -> None:
        self.strategy.setup_optimizer(self.trainer.optimizer)
        self.begin_following()


class NumpyInternals(Internals):
    """What is behind a NumpyTrainer."""

    trainer: Any
    strategy: NumpyStrategy
    loss: NumpyLoss

    def make_parts(self) -> None:
        self.data, self.loss, self.evaluation = NumpyData(self), NumpyLoss(self), NumpyEvaluation(self)
        self.saving, self.changes, self.pacing = NumpySaving(self), NumpyChanges(self), Pacing(self)

    def construct(self, args: BaseArguments, callbacks: Sequence[Any]) -> None:
        """What the constructor of the trainer does."""
        random.seed(args.seed)
        np.random.seed(args.seed)
        self.strategy = NumpyStrategy(lambda folder: load_file(Path(folder) / MODEL))
        self.set_up(args, [DefaultFlowCallback(), MetricsFileCallback(), *callbacks])
        self.check_output_dir()
        self.trainer.model_wrapped = self.strategy.setup_model(self.model)
        self.callback_handler.context["model"] = self.model
        self.callback_handler.fire("on_init_end")

    def prepare_training(self, checkpoint: str | None) -> None:
        if checkpoint is not None:
            self.trainer._load_from_checkpoint(checkpoint)
        self.run.plan = self.data.plan_again()
        if checkpoint is not None:
            self.run.plan = self.saving.plan_to_go_on(checkpoint)
        self._start_state()
        self.run.step = self.trainer.training_step
        self._prepare_optimizer()
        if checkpoint is not None:
            self.saving.resume(checkpoint)
        self.saving.check_saving()
        self.strategy.training()
        self.strategy.zero_grad()

    def _prepare_optimizer(self) -> None:
        args, updates = self.args, self.data.plan_again().max_steps  # the schedule stays that of the run's beginning
        optimizer = self.strategy.setup_optimizer(Momentum(self.model.parameters, args.learning_rate))
        schedule = build_schedule(args.lr_scheduler_type, args.get_warmup_steps(updates), updates)
        self.trainer.optimizer = optimizer
        self.trainer.lr_scheduler = ScheduledRate(optimizer, args.learning_rate, schedule)
        self.callback_handler.context.update(optimizer=optimizer, lr_scheduler=self.trainer.lr_scheduler)

    def _get_learning_rate(self) -> float:
        return float(self.trainer.optimizer.learning_rate)


class NumpyTrainer(BaseTrainer):
    """What a user of it calls and overrides."""

    _loopwright: NumpyInternals
    is_in_train = False
    optimizer = lr_scheduler = None

    def __init__(
        self,
        model: LinearModel,
        args: BaseArguments,
        train_dataset: Sequence[Sample] = (),
        eval_dataset: Any = None,
        compute_metrics: Any = None,
        callbacks: Sequence[Any] = (),
    ) -> None:
        self.model, self.compute_metrics = model, compute_metrics
        self.train_dataset, self.eval_dataset = train_dataset, eval_dataset
        self._loopwright = NumpyInternals(self)
        self._loopwright.construct(args, callbacks)

    def train(self, resume_from_checkpoint: str | bool | None = None) -> TrainOutput:
        return self._loopwright.train(resume_from_checkpoint)

    def training_step(self, model: LinearModel, inputs: Batch, num_items_in_batch: int) -> float:
        return self._loopwright.loss.training_step(model, inputs, num_items_in_batch)

    def compute_loss(self, model: LinearModel, inputs: Batch, num_items_in_batch: int) -> Loss:
        return model.loss(inputs["inputs"], inputs["targets"], num_items_in_batch)

    def evaluate(self, eval_dataset: Any = None, ignore_keys: Any = None, metric_key_prefix: str = "eval") -> Any:
        return self._loopwright.evaluation.evaluate(eval_dataset, ignore_keys, metric_key_prefix)

    def predict(self, test_dataset: Sequence[Sample]) -> PredictionOutput:
        return self._loopwright.evaluation.predict(test_dataset)

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        self._loopwright.log(logs, start_time)

    def _evaluate(self, trial: Any, ignore_keys_for_eval: Any) -> Any:
        return self._loopwright._evaluate(trial, ignore_keys_for_eval)

    def _determine_best_metric(self, metrics: dict[str, float], trial: Any = None) -> bool:
        return self._loopwright._determine_best_metric(metrics, trial)

    def _get_learning_rate(self) -> float:
        return self._loopwright._get_learning_rate()

    def _save_checkpoint(self, model: Any, trial: Any = None) -> None:
        self._loopwright.saving._save_checkpoint(model, trial)

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: Any = None) -> None:
        self._loopwright.saving._load_from_checkpoint(resume_from_checkpoint, model)

    def _load_best_model(self) -> None:
        self._loopwright.saving._load_best_model()

    def is_world_process_zero(self) -> bool:
        return True

    def store_flos(self) -> None:
        """Operations are not counted."""
