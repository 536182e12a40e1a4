"""Trainer: the methods and attributes that users call and override.

Each method documents when it is called and with what, and delegates to a part.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, Sampler

from ..core.checkpoint.manager import CheckpointManager
from ..core.events import CallbackHandler
from ..core.loop import follow_control
from ..core.outputs import EvalLoopOutput, PredictionOutput, TrainOutput
from ..core.state import TrainerControl, TrainerState
from ..core.trainer import BaseTrainer, derived
from ..core.user_code.constructor import make_model
from ..search.entry import hyperparameter_search
from ..search.session import Request
from ..speed.report import SpeedReport
from .accelerate.accelerate_state import accelerator_arguments
from .arguments import TrainingArguments
from .internals import TorchInternals
from .optim.creation import TorchOptim
from .optim.find_lr import LearningRateTest, find_lr


class Trainer(BaseTrainer):
    """Trains, evaluates and saves any PyTorch model.

    A subclass may override every method of this class, and use any other name for its own methods and attributes.
    """

    _loopwright: TorchInternals
    _loopwright_class: ClassVar[type[TorchInternals]] = TorchInternals
    args: TrainingArguments
    state: TrainerState
    control: TrainerControl
    callback_handler: CallbackHandler
    model: Any = None
    model_wrapped: Any = None
    optimizer: Any = None
    lr_scheduler: Any = None
    train_dataset: Any
    eval_dataset: Any
    data_collator: Any
    processing_class: Any
    compute_metrics: Any
    model_init: Any
    is_in_train: bool = False
    loss_is_scaled_for_ga: bool | None = None
    """Whether your loss is already divided by num_items_in_batch; set it in a subclass to skip the inference."""
    _signature_columns: list[str] | None = None
    """Columns of the data that are kept; set it in a subclass, or leave it to `_set_signature_columns_if_needed`."""

    # Attributes of other trainers that overrides may read.
    is_deepspeed_enabled = is_fsdp_enabled = is_fsdp_xla_enabled = False
    deepspeed = hp_search_backend = hp_name = objective = None
    current_flos = 0.0
    hub_model_id: str | None = None
    """The repository on the Hub, after `init_hf_repo`."""
    push_in_progress: Any = None
    """The queue of pushes, after the first one: `is_done()`, `wait_until_done()`, `cancel()`."""

    def __init__(
        self,
        model: nn.Module | None = None,
        args: TrainingArguments | None = None,
        data_collator: Callable[[Any], Any] | None = None,
        train_dataset: Any = None,
        eval_dataset: Any = None,
        processing_class: Any = None,
        model_init: Callable[..., nn.Module] | None = None,
        compute_loss_func: Callable[..., Any] | None = None,
        compute_metrics: Callable[..., dict[str, Any]] | Mapping[str, Any] | None = None,
        callbacks: list[Any] | None = None,
        optimizers: tuple[Any, Any] = (None, None),
        optimizer_cls_and_kwargs: tuple[Any, dict[str, Any]] | None = None,
        preprocess_logits_for_metrics: Callable[[Any, Any], Any] | None = None,
        **old_names: Any,
    ) -> None:
        """Check the arguments and place the model on its device.

        model: the model to train: any module whose forward, or `compute_loss`, returns a loss; or pass `model_init`.
        args: the training arguments; `loopwright args WORD` searches them.
        data_collator: makes a batch of a list of samples; by default it pads with `processing_class`, or stacks.
        train_dataset: samples by index, or a stream; a dict of names and values each, which `forward` receives. A dict
            of several datasets by name mixes them; see `train_dataset_weights`.
        eval_dataset: the same for evaluations, or a dict of several by name.
        processing_class: the tokenizer or processor, saved with the model.
        model_init: returns a new model for each call of `train()`.
        compute_loss_func: `f(outputs, labels, num_items_in_batch)` returns the loss instead of the model.
        compute_metrics: `f(EvalPrediction)` returns a dict of numbers; or a dict of metric objects by name.
        callbacks: instances or classes of `TrainerCallback`, in addition to the default ones.
        optimizers: an optimizer and a schedule, or None for those that the arguments name.
        optimizer_cls_and_kwargs: the class of the optimizer and its options, instead of those of `args.optim`.
        preprocess_logits_for_metrics: `f(logits, labels)` reduces the outputs of a batch before they are kept.
        """
        self._loopwright = self._loopwright_class(self)
        self._loopwright.construct(
            model=model,
            args=args,
            data_collator=data_collator,
            train_dataset=train_dataset,
            eval_dataset=eval_dataset,
            processing_class=processing_class,
            model_init=model_init,
            compute_loss_func=compute_loss_func,
            compute_metrics=compute_metrics,
            callbacks=callbacks,
            optimizers=optimizers,
            optimizer_cls_and_kwargs=optimizer_cls_and_kwargs,
            preprocess_logits_for_metrics=preprocess_logits_for_metrics,
            **old_names,
        )

    @derived
    def place_model_on_device(self) -> bool:
        """Whether the trainer moves the model to the device."""
        return self._loopwright.places_model

    @derived
    def tokenizer(self) -> Any:
        """The old name of `processing_class`."""
        return self.processing_class

    @derived
    def current_gradient_accumulation_steps(self) -> int:
        """Micro-batches of the current update; fewer at the end of an epoch."""
        return self._loopwright.current_accumulation

    @derived
    def gather_function(self) -> Callable[[Any], Any]:
        """All-gathers values; evaluation keeps the order of the data itself, and does not call this."""
        return self._loopwright.strategy.gather

    @derived
    def neftune_noise_alpha(self) -> float | None:
        """The scale of the noise on embeddings."""
        return self.args.neftune_noise_alpha

    @derived
    def _train_batch_size(self) -> int:
        """Samples per micro-batch of training."""
        return self.args.train_batch_size

    @property
    def _globalstep_last_logged(self) -> int:
        """The step of the last log point; an override of `_maybe_log_save_evaluate` that logs may set it."""
        return self._loopwright.run.progress.last_logged_step

    @_globalstep_last_logged.setter
    def _globalstep_last_logged(self, step: int) -> None:
        self._loopwright.end_log_interval(step)

    @derived
    def _total_loss_scalar(self) -> float:
        """The sum of the losses of all updates up to the last log point; after training, of all updates."""
        run = self._loopwright.run
        if "meter" not in vars(run):
            return 0.0
        return run.meter.logged_loss if self.is_in_train else run.meter.total_loss

    @derived
    def _eval_dataloaders(self) -> dict[str, DataLoader[Any]]:
        """The evaluation loaders whose workers persist, by name."""
        return self._loopwright.data.kept_loaders

    @derived
    def checkpoints(self) -> CheckpointManager:
        """The checkpoints of the output folder: which are complete, and where their files are."""
        return self._loopwright.run.checkpoints

    @derived
    def compiled(self) -> Any:
        """The compiled blocks, if torch_compile is set; `figures()` counts compilations."""
        return self._loopwright.compiled

    # ---- training ----------------------------------------------------------------------------------------------------

    def train(
        self,
        resume_from_checkpoint: str | bool | None = None,
        trial: Any = None,
        ignore_keys_for_eval: list[str] | None = None,
        **old_names: Any,
    ) -> TrainOutput:
        """Train to the end of the plan; returns the number of updates, the mean loss and the metrics of the run.

        `resume_from_checkpoint`: a folder, or one on the Hub (hf://owner/name/last-checkpoint); True for the newest
        checkpoint of the last run in output_dir; "auto" for the same if there is one; False to start over. By default
        an interrupted run is resumed if it is started by the same command, and any other run starts over.
        """
        return self._loopwright.train(resume_from_checkpoint, trial, ignore_keys_for_eval, **old_names)

    def find_lr(self, min_lr: float = 1e-7, max_lr: float = 1.0, num_steps: int = 100) -> LearningRateTest:
        """A learning rate range test: the loss at rates from `min_lr` to `max_lr`, and a suggested peak rate.

        Trains for up to `num_steps` steps, until the loss diverges, and then restores the model, the random states and
        the trainer. It is a heuristic: it says how large steps may be at the beginning, for this batch size and these
        first samples, with an optimizer that has no history. Warmup, schedule and long runs may need another rate;
        compare a few around the suggestion.
        """
        return find_lr(self._loopwright, min_lr, max_lr, num_steps)

    # ---- one micro-batch ---------------------------------------------------------------------------------------------

    def training_step(self, model: nn.Module, inputs: dict[str, Any], num_items_in_batch: Any = None) -> Tensor:
        """Forward and backward of one micro-batch; returns its part of the update's loss.

        Called once per micro-batch with the wrapped model, the collator's batch, and the number of targets of the whole
        update.
        """
        self._loopwright.loss.enter_training(model)
        inputs = self._prepare_inputs(inputs)
        with self.compute_loss_context_manager():
            loss = self._loopwright.loss.called_compute_loss(model, inputs, num_items_in_batch=num_items_in_batch)
        return self._loopwright.loss.backward(loss)

    def compute_loss(
        self, model: nn.Module, inputs: dict[str, Any], return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        """The loss of a batch: the model's, or that of `compute_loss_func` or label smoothing.

        Called by `training_step` and `prediction_step` with the batch on the device. An override may return the mean
        over its targets, or `(sum, count)`; with `return_outputs=True` also the outputs.
        """
        return self._loopwright.loss.compute_loss(model, inputs, return_outputs, num_items_in_batch)

    def compute_loss_context_manager(self) -> AbstractContextManager[Any]:
        """The context of forward and loss: autocast. Entered by `training_step` and `prediction_step`."""
        return self._loopwright.loss.compute_loss_context_manager()

    def autocast_smart_context_manager(self, cache_enabled: bool | None = True) -> AbstractContextManager[Any]:
        """The autocast context, which `compute_loss_context_manager` returns."""
        return self._loopwright.loss.autocast_smart_context_manager(cache_enabled)

    def _prepare_inputs(self, inputs: Any) -> Any:
        """The batch on the device, in a new container. Called once per micro-batch, by `training_step`."""
        return self._loopwright.loss._prepare_inputs(inputs)

    def _prepare_input(self, data: Any) -> Any:
        """One value of a batch on the device. Called by `_prepare_inputs` if a subclass overrides it."""
        return self._loopwright.loss._prepare_input(data)

    def get_batch_samples(self, epoch_iterator: Iterator[Any], num_batches: int, device: Any) -> tuple[list[Any], Any]:
        """The next micro-batches of one update, and their number of targets.

        Called once per update if overridden.
        """
        return self._loopwright.data.get_batch_samples(epoch_iterator, num_batches, device)

    def _get_num_items_in_batch(self, batch_samples: list[Any], device: Any) -> Any:
        """The targets of an update's micro-batches; None if they have no labels. Called once per update."""
        return self._loopwright.loss._get_num_items_in_batch(batch_samples, device)

    def floating_point_ops(self, inputs: dict[str, Any]) -> int:
        """Operations of forward and backward: 6 x tokens x parameters outside the embeddings.

        Called once per micro-batch if overridden.
        """
        return self._loopwright.floating_point_ops(inputs)

    # ---- data --------------------------------------------------------------------------------------------------------

    def get_train_dataloader(self) -> DataLoader[Any]:
        """The loader of the training data. Called once, when training begins."""
        return self._loopwright.data.get_train_dataloader()

    def get_eval_dataloader(self, eval_dataset: str | Dataset[Any] | None = None) -> DataLoader[Any]:
        """The loader of the evaluation data, or of one of its named sets. Called by every `evaluate`."""
        return self._loopwright.data.get_eval_dataloader(eval_dataset)

    def get_test_dataloader(self, test_dataset: Dataset[Any]) -> DataLoader[Any]:
        """The loader of the data to predict. Called by every `predict`."""
        return self._loopwright.data.get_test_dataloader(test_dataset)

    def _get_dataloader(
        self,
        dataset: Any,
        description: str,
        batch_size: int,
        sampler_fn: Callable[[Any], Any] | None = None,
        is_training: bool = False,
        dataloader_key: str | None = None,
    ) -> DataLoader[Any]:
        """A DataLoader over a dataset, with the sampler that `sampler_fn(dataset)` returns.

        Called by the three methods above with "Training", "Evaluation" or "test". The loader of a `dataloader_key` is
        kept for the next call if its workers persist.
        """
        return self._loopwright.data._get_dataloader(
            dataset, description, batch_size, sampler_fn, is_training, dataloader_key
        )

    def _get_train_sampler(self, train_dataset: Any = None) -> Sampler[Any] | None:
        """The sampler of the training data: seed, epoch and position determine the order.

        Called by `get_train_dataloader`.
        """
        return self._loopwright.data._get_train_sampler(train_dataset)

    def _get_eval_sampler(self, eval_dataset: Any) -> Sampler[Any] | None:
        """The sampler of evaluation data; None keeps the order of the dataset. Called by the evaluation loaders."""
        return self._loopwright.data._get_eval_sampler(eval_dataset)

    def num_examples(self, dataloader: DataLoader[Any]) -> int:
        """Number of samples of a loader's dataset, or an estimate. Called when the run is planned."""
        return self._loopwright.data.num_examples(dataloader)

    def _set_signature_columns_if_needed(self) -> None:
        """Set `_signature_columns` to the parameters of the model's forward. Called before columns are removed."""
        self._loopwright.data._set_signature_columns_if_needed()

    def _remove_unused_columns(self, dataset: Any, description: str | None = None) -> Any:
        """The dataset unchanged: columns are removed after loading, so that lazy transforms see all of them.

        Called for every loader.
        """
        return self._loopwright.data._remove_unused_columns(dataset, description)

    def _get_collator_with_removed_columns(
        self, data_collator: Callable[[Any], Any], description: str | None = None
    ) -> Callable[[Any], Any]:
        """The collator, wrapped to remove the columns the model does not accept. Called for every loader."""
        return self._loopwright.data._get_collator_with_removed_columns(data_collator, description)

    def set_initial_training_values(
        self, args: TrainingArguments, dataloader: Any, total_train_batch_size: int | None = None
    ) -> tuple[int, int, int, int, int, int | None, int]:
        """Epochs, updates per epoch, examples, samples of the run, samples per update, batches per epoch, updates.

        Called when the run is planned if overridden.
        """
        return self._loopwright.data.set_initial_training_values(args, dataloader, total_train_batch_size)

    def get_total_train_batch_size(self, args: TrainingArguments) -> int:
        """Effective batch size: samples of one update over all ranks."""
        return self._loopwright.data.get_total_train_batch_size(args)

    # ---- model -------------------------------------------------------------------------------------------------------

    def call_model_init(self, trial: Any = None) -> nn.Module:
        """A new model from `model_init`. Called by the constructor, and when training begins."""
        if "_loopwright" not in vars(self):  # called by a subclass before this class's constructor
            return make_model(self.model_init, trial)
        return self._loopwright.call_model_init(trial)

    def _move_model_to_device(self, model: nn.Module, device: torch.device) -> None:
        """Move the model. Called by the constructor, and when another model is assigned."""
        self._loopwright._move_model_to_device(model, device)

    def _wrap_model(self, model: nn.Module, training: bool = True, dataloader: Any = None) -> nn.Module:
        """The model as the training step calls it: wrapped for DDP or FSDP, the model itself on one device.

        Called once, when training begins.
        """
        return self._loopwright._wrap_model(model, training, dataloader)

    def get_tp_size(self) -> int:
        """Number of devices a tensor is split across."""
        return self._loopwright.get_tp_size()

    def get_cp_size(self) -> int:
        """Number of devices a sequence is split across."""
        return 1

    def get_sp_size(self) -> int:
        """Number of devices the tokens of a sequence are split across."""
        return 1

    # ---- optimizer and schedule --------------------------------------------------------------------------------------

    def create_optimizer_and_scheduler(self, num_training_steps: int) -> None:
        """Set `self.optimizer` and `self.lr_scheduler`, unless they were given. Called once, when training begins."""
        self._loopwright.optim.create_optimizer_and_scheduler(num_training_steps)

    def create_optimizer(self, model: nn.Module | None = None) -> Any:
        """The optimizer set in the arguments, over the trainable parameters.

        Called by `create_optimizer_and_scheduler`.
        """
        return self._loopwright.optim.create_optimizer(model)

    def create_scheduler(self, num_training_steps: int, optimizer: Any = None) -> Any:
        """The schedule set in the arguments. Called by `create_optimizer_and_scheduler`, after the optimizer."""
        return self._loopwright.optim.create_scheduler(num_training_steps, optimizer)

    @staticmethod
    def get_optimizer_cls_and_kwargs(
        args: TrainingArguments, model: nn.Module | None = None
    ) -> tuple[Any, dict[str, Any]]:
        """The class and keyword arguments of the optimizer set in the arguments. Called by `create_optimizer`."""
        return TorchOptim.get_optimizer_cls_and_kwargs(args, model)

    def get_decay_parameter_names(self, model: nn.Module) -> list[str]:
        """The parameters that weight decay applies to: neither biases nor norms. Called by `create_optimizer`."""
        return self._loopwright.optim.get_decay_parameter_names(model)

    def get_optimizer_group(self, param: Any = None) -> Any:
        """The group of a parameter, or the parameters of all groups."""
        return self._loopwright.optim.get_optimizer_group(param)

    def get_learning_rates(self) -> list[float]:
        """The learning rate of every parameter group."""
        return self._loopwright.optim.get_learning_rates()

    def _get_learning_rate(self) -> float:
        """The learning rate that is logged. Called after every update."""
        return self._loopwright.optim._get_learning_rate()

    def get_num_trainable_parameters(self) -> int:
        """The number of trainable parameters."""
        return self._loopwright.optim.get_num_trainable_parameters()

    # ---- evaluation and prediction -----------------------------------------------------------------------------------

    def evaluate(
        self, eval_dataset: Any = None, ignore_keys: list[str] | None = None, metric_key_prefix: str = "eval"
    ) -> dict[str, float]:
        """The metrics of a dataset, of the trainer's evaluation data, or of each of its named sets.

        Called by the user, and during training when `control.should_evaluate` is set.
        """
        return self._loopwright.evaluation.evaluate(eval_dataset, ignore_keys, metric_key_prefix)

    def predict(
        self, test_dataset: Any, ignore_keys: list[str] | None = None, metric_key_prefix: str = "test"
    ) -> PredictionOutput:
        """Predictions in the dataset's order, its labels if it has any, and metrics. Called by the user."""
        return self._loopwright.evaluation.predict(test_dataset, ignore_keys, metric_key_prefix)

    def evaluation_loop(
        self,
        dataloader: Any,
        description: str,
        prediction_loss_only: bool | None = None,
        ignore_keys: list[str] | None = None,
        metric_key_prefix: str = "eval",
    ) -> EvalLoopOutput:
        """Run `prediction_step` over a loader; returns predictions, labels, metrics and the number of samples.

        Called by `evaluate` and `predict`.
        """
        return self._loopwright.evaluation.evaluation_loop(
            dataloader, description, prediction_loss_only, ignore_keys, metric_key_prefix
        )

    def prediction_step(
        self, model: nn.Module, inputs: dict[str, Any], prediction_loss_only: bool, ignore_keys: list[str] | None = None
    ) -> tuple[Any, Any, Any]:
        """Loss, logits and labels of one batch. Called for every batch of an evaluation or prediction."""
        return self._loopwright.evaluation.prediction_step(model, inputs, prediction_loss_only, ignore_keys)

    def _evaluate(
        self, trial: Any, ignore_keys_for_eval: list[str] | None, skip_scheduler: bool = False
    ) -> dict[str, float]:
        """Evaluate within training; a schedule that follows a metric makes a step unless `skip_scheduler` is set.

        Called when `control.should_evaluate` is set.
        """
        return self._loopwright._evaluate(trial, ignore_keys_for_eval, skip_scheduler)

    def _determine_best_metric(self, metrics: dict[str, float], trial: Any = None) -> bool:
        """Store the metric in the state if it is the best so far; returns whether it is.

        Called after every `_evaluate`.
        """
        return self._loopwright._determine_best_metric(metrics, trial)

    # ---- logs and reports --------------------------------------------------------------------------------------------

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """Add the epoch, append the numbers to `state.log_history` and pass them to the callbacks.

        Called at log points, after evaluations and at the end of training.
        """
        self._loopwright.log(logs, start_time)

    def _maybe_log_save_evaluate(
        self,
        tr_loss: Tensor,
        grad_norm: Tensor | float | None,
        model: nn.Module,
        trial: Any,
        epoch: float,
        ignore_keys_for_eval: list[str] | None,
        start_time: float,
        learning_rate: float | None = None,
    ) -> None:
        """Log, evaluate and save if `control` requests it. Called after every update and epoch.

        `tr_loss` is the sum of the losses since the last log point. An override that logs it without calling this
        method subtracts it from itself and sets `_globalstep_last_logged`.
        """
        follow_control(self._loopwright)

    def log_metrics(self, split: str, metrics: dict[str, Any]) -> None:
        """Print the metrics of a split as a table. Called by the user."""
        self._loopwright.log_metrics(split, metrics)

    def metrics_format(self, metrics: dict[str, Any]) -> dict[str, Any]:
        """The metrics in readable form."""
        return self._loopwright.metrics_format(metrics)

    def save_metrics(self, split: str, metrics: dict[str, Any], combined: bool = True) -> None:
        """Write the metrics to {split}_results.json and all_results.json. Called by the user."""
        self._loopwright.save_metrics(split, metrics, combined)

    def save_state(self) -> None:
        """Write trainer_state.json into the output folder. Called by the user."""
        self._loopwright.save_state()

    def store_flos(self) -> None:
        """Called before numbers are logged; does nothing, because `state.total_flos` is always up to date."""

    def speed_report(self) -> SpeedReport:
        """The accelerations in use with their reasons, and the speed of training; print it, or use `as_dict()`."""
        return self._loopwright.pacing.speed_report()

    # ---- checkpoints -------------------------------------------------------------------------------------------------

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """Write the model with full weights, its processor and the arguments, ready to be loaded.

        Called by the user, and for every checkpoint if overridden.
        """
        self._loopwright.saving.save_model(output_dir, _internal_call)

    def _save(self, output_dir: str | None = None, state_dict: dict[str, Any] | None = None) -> None:
        """Write the files of `save_model` into a folder, on the rank that writes."""
        self._loopwright.saving._save(output_dir, state_dict)

    def _save_checkpoint(self, model: Any, trial: Any = None) -> None:
        """Write a checkpoint of the last finished update. Called when `control.should_save` is set."""
        self._loopwright.saving._save_checkpoint(model, trial)

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: nn.Module | None = None) -> None:
        """Load the weights of a checkpoint. Called when training resumes."""
        self._loopwright.saving._load_from_checkpoint(resume_from_checkpoint, model)

    def _issue_warnings_after_load(self, load_result: Any) -> None:
        """Report the weights that `load_state_dict` did not find, or found too many.

        Not called by the trainer, which refuses such weights; for overrides of `_load_from_checkpoint`.
        """
        self._loopwright.saving.report_unmatched(load_result)

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        """Load the states of optimizer and schedule. Called when training resumes, and not otherwise."""
        if checkpoint is not None:
            self._loopwright.saving._load_optimizer_and_scheduler(checkpoint)

    def _load_callback_state(self) -> None:
        """Restore callbacks from `state.stateful_callbacks`. Called when training resumes, after `state` is loaded."""
        self._loopwright.load_callback_state()

    def _load_best_model(self) -> None:
        """Load the weights of the best checkpoint into the model.

        Called after training, with `load_best_model_at_end`.
        """
        self._loopwright.saving._load_best_model()

    # ---- callbacks and processes -------------------------------------------------------------------------------------

    def add_callback(self, callback: Any) -> None:
        """Add a callback: a class or an instance."""
        self.callback_handler.add_callback(callback)

    def pop_callback(self, callback: Any) -> Any:
        """Remove a callback and return it."""
        return self.callback_handler.pop_callback(callback)

    def remove_callback(self, callback: Any) -> None:
        """Remove a callback."""
        self.callback_handler.remove_callback(callback)

    def _get_output_dir(self, trial: Any = None) -> str:
        """The output folder; that of a trial is below it."""
        return self._loopwright.trials.folder_of(trial)

    def is_local_process_zero(self) -> bool:
        """Whether this is the first rank of its machine."""
        return self.args.local_process_index == 0

    def is_world_process_zero(self) -> bool:
        """Whether this is rank 0."""
        return self.args.process_index == 0

    def end(self) -> None:
        """Wait for checkpoints that are still being written; trackers are finished when training ends."""
        self._loopwright.end()

    # ---- hub and search ----------------------------------------------------------------------------------------------

    def hyperparameter_search(
        self,
        hp_space: Callable[[Any], dict[str, Any]] | dict[str, Any] | None = None,
        compute_objective: Callable[[dict[str, float]], Any] | None = None,
        n_trials: int = 20,
        direction: str | list[str] = "minimize",
        backend: Any = None,
        hp_name: Callable[[Any], str] | None = None,
        **kwargs: Any,
    ) -> Any:
        """Train with different arguments and return the best trial, with its values, objective and checkpoint.

        hp_space: a function that receives the trial (`trial.suggest_float(...)`) and returns arguments and their
            values; or a dict such as `{"learning_rate": {"log_uniform": [1e-6, 1e-3]}}`.
        compute_objective: the objective from the metrics of an evaluation; by default their sum, or the loss.
        n_trials: the number of trials; those of an interrupted search in the same output folder count.
        direction: minimize or maximize; a list for several objectives.
        backend: optuna, ray, wandb, random, grid, asha or population; by default the first one installed.
        hp_name: returns the name of a trial, which is that of its folder; by default run-NUMBER.
        kwargs: `in_process=True` runs trials in this process; all others are options of the backend.
        """
        request = Request(hp_space, compute_objective, n_trials, direction, backend, hp_name, kwargs)
        return hyperparameter_search(self, request, sys._getframe(1))

    def _hp_search_setup(self, trial: Any) -> None:
        """Apply the values of a trial to the arguments. Called by `train(trial=...)`."""
        self._loopwright.trials.set_up(trial)

    def _report_to_hp_search(self, trial: Any, step: int, metrics: dict[str, float]) -> None:
        """Report an evaluation of a trial; the run stops if the trial is pruned. Called by `_evaluate`."""
        self._loopwright.trials.report(trial, step, metrics)

    def push_to_hub(
        self,
        commit_message: str | None = "End of training",
        blocking: bool = True,
        token: str | None = None,
        revision: str | None = None,
        **kwargs: Any,
    ) -> Any:
        """Save the model and push it with its card, results and logs to the Hub, in one commit. Called by every rank.

        Returns the commit, or with `blocking=False` a Future of it. `kwargs` are those of `create_model_card`.
        """
        return self._loopwright.pushing.push_to_hub(commit_message, blocking, token, revision, **kwargs)

    def init_hf_repo(self, token: str | None = None) -> None:
        """Create the repository on the Hub. Called by the constructor with `push_to_hub`, and by the first push."""
        self._loopwright.pushing.init_hf_repo(token)

    def _push_from_checkpoint(self, checkpoint_folder: str) -> None:
        """Push a complete checkpoint while training continues. Called after a save, with `push_to_hub`."""
        self._loopwright.pushing.push_from_checkpoint(checkpoint_folder)

    def _build_accelerator_args(self, **kwargs: Any) -> dict[str, Any]:
        """The arguments of an accelerate Accelerator with these settings. Not called by the trainer."""
        return accelerator_arguments(self.args, self.model, kwargs)

    def create_model_card(
        self,
        language: str | None = None,
        license: str | None = None,
        tags: str | list[str] | None = None,
        model_name: str | None = None,
        finetuned_from: str | None = None,
        tasks: str | list[str] | None = None,
        dataset_tags: str | list[str] | None = None,
        dataset: str | list[str] | None = None,
        dataset_args: str | list[str] | None = None,
    ) -> None:
        """Write README.md: measured results, data, arguments, speed and versions. Called by the user and by pushes.

        What you have written there is kept. With `dataset` (an id on the Hub), results are also written to
        `.eval_results/`, which the Hub shows.
        """
        self._loopwright.pushing.create_model_card(
            language=language,
            license=license,
            tags=tags,
            model_name=model_name,
            finetuned_from=finetuned_from,
            tasks=tasks,
            dataset_tags=dataset_tags,
            dataset=dataset,
            dataset_args=dataset_args,
        )
