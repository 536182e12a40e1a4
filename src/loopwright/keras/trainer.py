"""KerasTrainer: every public method and override point, for all backends.

Each docstring states when the method is called; the work is done by the part it delegates to.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any, ClassVar

from ..core.events import CallbackHandler
from ..core.outputs import PredictionOutput, TrainOutput
from ..core.state import TrainerControl, TrainerState
from ..core.trainer import BaseTrainer, derived
from ..search.entry import hyperparameter_search
from ..search.session import Request
from .arguments import KerasTrainingArguments
from .internals import KerasInternals


class KerasTrainer(BaseTrainer):
    """Trains, evaluates and saves any Keras model.

    A subclass may override every method of this class, and use any other name for its own methods and attributes.
    """

    _loopwright: KerasInternals
    _loopwright_class: ClassVar[type[KerasInternals]]
    args: KerasTrainingArguments
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
    model_init: Any = None
    is_in_train: bool = False
    hub_model_id: str | None = None
    push_in_progress: Any = None
    hp_search_backend = hp_name = objective = None

    def __init__(
        self,
        model: Any = None,
        args: KerasTrainingArguments | None = None,
        train_dataset: Any = None,
        eval_dataset: Any = None,
        compute_metrics: Callable[..., dict[str, Any]] | None = None,
        tb_writer: Any = None,
        optimizers: tuple[Any, Any] = (None, None),
        *,
        data_collator: Callable[[list[Any]], Any] | None = None,
        callbacks: list[Any] | None = None,
        model_init: Callable[..., Any] | None = None,
        compute_loss_func: Callable[..., Any] | None = None,
        preprocess_logits_for_metrics: Callable[[Any, Any], Any] | None = None,
        processing_class: Any = None,
        **others: Any,
    ) -> None:
        """Check the arguments and create the model's variables on its devices.

        model: a Keras model, compiled with a loss or not; or pass `model_init`.
        args: the training arguments; `loopwright args WORD` searches them.
        train_dataset: samples by index, arrays by name, or a tf.data pipeline.
        eval_dataset: the same for evaluations, or a dict of several by name.
        compute_metrics: `f(EvalPrediction)` returns a dict of numbers.
        tb_writer: a tf.summary writer that gets the logs as well.
        optimizers: an optimizer and a schedule, or None for those that the arguments name.
        data_collator: makes a batch of a list of samples.
        callbacks: instances or classes of `TrainerCallback`, in addition to the default ones, or Keras callbacks.
        model_init: returns a new model for each call of `train()`.
        compute_loss_func: `f(outputs, labels, num_items_in_batch)` returns the loss instead of the model.
        preprocess_logits_for_metrics: `f(logits, labels)` reduces the outputs of a batch before they are kept.
        processing_class: the tokenizer or processor, saved with the model.
        """
        self._loopwright = self._loopwright_class(self)
        self._loopwright.construct(
            model=model,
            args=args,
            train_dataset=train_dataset,
            eval_dataset=eval_dataset,
            compute_metrics=compute_metrics,
            tb_writer=tb_writer,
            optimizers=optimizers,
            data_collator=data_collator,
            callbacks=callbacks,
            model_init=model_init,
            compute_loss_func=compute_loss_func,
            preprocess_logits_for_metrics=preprocess_logits_for_metrics,
            processing_class=processing_class,
            **others,
        )

    @derived
    def global_step(self) -> int:
        """Updates done; `trainer.state` has the rest."""
        return self.state.global_step

    @derived
    def epoch_logging(self) -> float:
        """The fractional epoch."""
        return float(self.state.epoch or 0.0)

    @derived
    def steps_per_epoch(self) -> int:
        """Updates of an epoch, once training has begun."""
        return int(self._loopwright.run.plan.updates_per_epoch)

    @derived
    def num_train_examples(self) -> int | None:
        """Samples of the training data, once training has begun; None if unknown."""
        return self._loopwright.run.plan.examples

    @derived
    def total_train_batch_size(self) -> int:
        """Samples of one update."""
        return int(self.args.train_batch_size * self.args.gradient_accumulation_steps)

    @derived
    def tokenizer(self) -> Any:
        """The old name of `processing_class`."""
        return self.processing_class

    # ---- training ----------------------------------------------------------------------------------------------------

    def train(
        self,
        resume_from_checkpoint: str | bool | None = None,
        trial: Any = None,
        ignore_keys_for_eval: list[str] | None = None,
        **old: Any,
    ) -> TrainOutput:
        """Train; returns the number of updates, the mean loss and the metrics of the run.

        `resume_from_checkpoint`: a folder; True for the newest checkpoint of the last run in output_dir; "auto" for
        the same if there is one; False to start over. By default an interrupted run is resumed if it is started by
        the same command, and any other run starts over.
        """
        return self._loopwright.train(resume_from_checkpoint, trial, ignore_keys_for_eval, **old)

    # ---- one update --------------------------------------------------------------------------------------------------

    def run_model(self, features: Any, labels: Any, training: bool) -> tuple[Any, Any]:
        """The loss and the outputs of a batch; the loss is None if the model has none or there are no labels.

        An override may return the mean over the batch, or a loss per example.
        """
        return self._loopwright.loss.run_model(features, labels, training)

    def compute_loss(
        self,
        features: Any,
        labels: Any,
        num_items_in_batch: Any = None,
        return_outputs: bool = False,
        training: bool = True,
    ) -> Any:
        """The loss of a batch: the model's own, or that of `compute_loss_func` or label smoothing.

        An override may return the mean over its items, a loss per example, or `(sum, count)` to be exact in every case.
        """
        return self._loopwright.loss.compute_loss(features, labels, num_items_in_batch, return_outputs, training)

    def _compute_nb_instances(self, batch: Any) -> int:
        """The targets of a micro-batch over all replicas: labels that are not -100. Called once per micro-batch."""
        return self._loopwright.loss._compute_nb_instances(batch)

    # ---- data --------------------------------------------------------------------------------------------------------

    def get_train_tfdataset(self) -> Any:
        """The batches of the training data; an override may return a batched tf.data pipeline.

        Called once, when training begins.
        """
        return self._loopwright.data.get_train_tfdataset()

    def get_eval_tfdataset(self, eval_dataset: Any = None) -> tuple[Any, int | None, int | None]:
        """The batches of the evaluation data, and the numbers of batches and samples (None if unknown).

        Called by every `evaluate`.
        """
        return self._loopwright.data.get_eval_tfdataset(eval_dataset)

    def get_test_tfdataset(self, test_dataset: Any) -> tuple[Any, int | None, int | None]:
        """The batches of the data to predict, and the numbers of batches and samples (None if unknown).

        Called by every `predict`.
        """
        return self._loopwright.data.get_test_tfdataset(test_dataset)

    # ---- model, optimizer and schedule -------------------------------------------------------------------------------

    def call_model_init(self, trial: Any = None) -> Any:
        """A fresh model from `model_init`, built in the strategy's scope."""
        return self._loopwright.call_model_init(trial)

    def create_optimizer_and_scheduler(self, num_training_steps: int) -> None:
        """Set `self.optimizer` and `self.lr_scheduler`, unless they were given. Called once, when training begins."""
        self._loopwright.optim.create_optimizer_and_scheduler(num_training_steps)

    def get_learning_rates(self) -> list[float]:
        """The learning rate of every parameter group."""
        return self._loopwright.optim.get_learning_rates()

    def _get_learning_rate(self) -> float:
        """The learning rate that is logged. Called after every update."""
        return self._loopwright.optim._get_learning_rate()

    # ---- evaluation and prediction -----------------------------------------------------------------------------------

    def evaluate(
        self, eval_dataset: Any = None, ignore_keys: list[str] | None = None, metric_key_prefix: str = "eval"
    ) -> dict[str, float]:
        """The metrics of a dataset; by default of eval_dataset, or of each of its named datasets.

        Called by the user, and during training whenever `control.should_evaluate` is set.
        """
        return self._loopwright.evaluation.evaluate(eval_dataset, ignore_keys, metric_key_prefix)

    def predict(
        self, test_dataset: Any, ignore_keys: list[str] | None = None, metric_key_prefix: str = "test"
    ) -> PredictionOutput:
        """Predictions in the dataset's order, its labels if it has any, and metrics. Called by the user."""
        return self._loopwright.evaluation.predict(test_dataset, ignore_keys, metric_key_prefix)

    def prediction_loop(
        self,
        dataset: Any,
        steps: int | None = None,
        num_examples: int | None = None,
        description: str = "Prediction",
        prediction_loss_only: bool | None = None,
    ) -> PredictionOutput:
        """Predictions, labels and metrics of batches. Called by `evaluate` and `predict` if overridden."""
        evaluation = self._loopwright.evaluation
        return evaluation.prediction_loop(dataset, steps, num_examples, description, prediction_loss_only)

    def prediction_step(self, features: Any, labels: Any, nb_instances_in_global_batch: Any) -> Any:
        """The outputs of one batch on one replica; its loss is added to `eval_loss`. Traced, and may be overridden."""
        return self._loopwright.evaluation.prediction_step(features, labels, nb_instances_in_global_batch)

    def _evaluate(self, trial: Any, ignore_keys_for_eval: list[str] | None) -> dict[str, float]:
        """Evaluate inside the training loop. Called whenever `control.should_evaluate` is set."""
        return self._loopwright._evaluate(trial, ignore_keys_for_eval)

    def _determine_best_metric(self, metrics: dict[str, float], trial: Any = None) -> bool:
        """Keep the metric in the state if it is the best so far; returns whether it is.

        Called after every `_evaluate`.
        """
        return self._loopwright._determine_best_metric(metrics, trial)

    # ---- logs --------------------------------------------------------------------------------------------------------

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """Add the epoch, append the numbers to `state.log_history` and pass them to the callbacks.

        Called at log points, after evaluations and at the end of training.
        """
        self._loopwright.log(logs, start_time)

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
        """No-op, called before logging: `state.total_flos` is always up to date."""

    def setup_wandb(self) -> None:
        """Called by the constructor. Metrics are sent to `report_to`; override it to start a run yourself."""

    def setup_comet(self) -> None:
        """Called by the constructor. Metrics are sent to `report_to`; override it to start a run yourself."""

    # ---- checkpoints -------------------------------------------------------------------------------------------------

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """Save the model by its own `save_pretrained` or as a .keras file, and its weights as safetensors."""
        self._loopwright.saving.save_model(output_dir, _internal_call)

    def _save(self, output_dir: str | None = None) -> None:
        """Write the files of `save_model` to a folder, on the rank that saves."""
        self._loopwright.saving._save(output_dir)

    def _save_checkpoint(self, model: Any, trial: Any = None) -> None:
        """Write a checkpoint of the last finished update. Called whenever `control.should_save` is set."""
        self._loopwright.saving._save_checkpoint(model, trial)

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: Any = None) -> None:
        """Load the weights of a checkpoint. Called when training resumes."""
        self._loopwright.saving._load_from_checkpoint(resume_from_checkpoint, model)

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

    def is_local_process_zero(self) -> bool:
        """Whether this is the first process of its node."""
        return self.args.local_process_index == 0

    def is_world_process_zero(self) -> bool:
        """Whether this is rank 0."""
        return self.args.process_index == 0

    def end(self) -> None:
        """Wait for background saves to finish."""
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
        """Train with different arguments and return the best trial; the arguments are those of `Trainer`."""
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
        """Save the model and push it with its card, results and logs in one commit. Called by the user."""
        return self._loopwright.pushing.push_to_hub(commit_message, blocking, token, revision, **kwargs)

    def init_hf_repo(self, token: str | None = None) -> None:
        """Create the repository on the Hub. Called by the constructor with `push_to_hub`, and by the first push."""
        self._loopwright.pushing.init_hf_repo(token)

    def _push_from_checkpoint(self, checkpoint_folder: str) -> None:
        """Push a complete checkpoint while training continues. Called after a save, with `push_to_hub`."""
        self._loopwright.pushing.push_from_checkpoint(checkpoint_folder)

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
        """Write README.md: measured results, data, arguments and versions. Called by the user and by pushes."""
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
