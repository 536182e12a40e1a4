"""TFInternals: what is behind a trainer of Keras models."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import tensorflow as tf
from keras import ops

from ..args.paths import working_folder
from ..callbacks.defaults import default_callbacks
from ..core.outputs import TrainOutput
from ..errors import ModelError
from .arguments import POLICIES, TFTrainingArguments
from .checkpoint import old_checkpoint
from .constructor_checks import SummaryWriterCallback, check_constructor, old_names, takes_trial
from .evaluation import EvaluationMethods
from .host_batch import HostBatch, mapped
from .incident import write_incident
from .keras_callbacks import adapted
from .keras_loss import find_keras_loss
from .loss_step import LossNote
from .models import check_policy, in_scope, is_built, look_at, rebuilt
from .optimizer_creation import OptimizerMethods
from .rng import set_seed, untouched_rng
from .save import SavingMethods
from .sources import Columns, is_columns
from .strategy import TFStrategy, UpdateRules
from .token_counter import MemoryMeter, WorkCounter


class TFInternals(OptimizerMethods, EvaluationMethods, SavingMethods):
    """The parts of a trainer, and how they are made ready for a run."""


    def construct(
        self,
        model: Any = None,
        args: TFTrainingArguments | None = None,
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
        args = TFTrainingArguments("tmp_trainer") if args is None else args
        processing_class, loss_only = old_names(processing_class, others)
        check_constructor(model, model_init, optimizers, args, (train_dataset, eval_dataset), compute_metrics)
        if loss_only is not None:
            args = dataclasses.replace(args, prediction_loss_only=loss_only)
        set_seed(args.seed, deterministic=args.full_determinism)
        if args.tf32 is not None:
            tf.config.experimental.enable_tensor_float_32_execution(args.tf32)
        self.trainer.model_init, self.trainer.compute_loss_func = model_init, compute_loss_func
        self.trainer.compute_metrics, self.trainer.preprocess_logits_for_metrics = (
            compute_metrics,
            preprocess_logits_for_metrics,
        )
        columns = isinstance(eval_dataset, Mapping) and is_columns(eval_dataset)  # one set, not several named ones
        self.trainer.train_dataset, self.trainer.eval_dataset = (
            train_dataset,
            Columns(eval_dataset) if columns else eval_dataset,
        )
        self.trainer.data_collator, self.trainer.processing_class, self.trainer.tb_writer = (
            data_collator,
            processing_class,
            tb_writer,
        )
        self.trainer.label_names = args.label_names
        self.trainer.optimizer, self.trainer.lr_scheduler = optimizers
        self.trainer.train_loss, self.trainer.eval_loss, self.memory = LossNote(), LossNote(), MemoryMeter()
        self.strategy = self._make_strategy(args)
        writers = [SummaryWriterCallback(tb_writer)] if tb_writer is not None else []
        given = [*default_callbacks(args), *writers, *map(adapted, callbacks or [])]
        self.set_up(args, given, processing_class=processing_class)
        if args.should_save:
            self._check_output_dir()
        self._adopt_model(self.trainer.call_model_init() if model is None else model)
        self.trainer.setup_wandb()
        self.trainer.setup_comet()
        self.callback_handler.fire("on_init_end")

    def _make_strategy(self, args: Any) -> Any:
        return TFStrategy(args.strategy, rank=args.process_index, world_size=args.world_size, xla=args.xla)

    def _adopt_model(self, model: Any) -> None:
        """Find out what the model takes, and see that its variables belong to the strategy."""
        info = look_at(model)
        check_policy(model, POLICIES[self.args.mixed_precision])
        self.keras_loss = find_keras_loss(model, info.family)
        if self.strategy.spreads and is_built(model) and not in_scope(model, self.args.strategy):
            model = rebuilt(model, self.args.strategy, info.family)
            self.notices.tell_once(
                "the model was built outside args.strategy.scope(): trainer.model is a copy of it, built inside"
            )
        if getattr(model, "config", None) is not None and hasattr(model.config, "use_cache"):
            model.config.use_cache = self.args.use_cache
        self.trainer.model, self.info = model, info
        self.trainer.model_wrapped = self.strategy.setup_model(model)
        self._predict = None
        self.callback_handler.context["model"] = model
        self._bind_overrides()

    def call_model_init(self, trial: Any = None) -> Any:
        """A fresh model from `model_init`, built in the strategy's scope."""
        assert self.trainer.model_init is not None
        with self.strategy.scope():
            model = (
                self.trainer.model_init(trial) if takes_trial(self.trainer.model_init) else self.trainer.model_init()
            )
        if model is None:
            raise ModelError("model_init() returned None; it must return the model")
        return model

    # ---- getting ready ----------------------------------------------------------------------------------------------

    def train(
        self,
        resume_from_checkpoint: str | bool | None = None,
        trial: Any = None,
        ignore_keys_for_eval: list[str] | None = None,
        **old: Any,
    ) -> TrainOutput:
        """Train to the end of the plan and return the steps done, the mean loss and the run's metrics."""
        asked = resume_from_checkpoint if resume_from_checkpoint is not None else self.args.resume_from_checkpoint
        self._old_checkpoint = old_checkpoint(asked)
        if self._old_checkpoint is not None:
            resume_from_checkpoint = False
        return super().train(resume_from_checkpoint, trial, ignore_keys_for_eval, **old)

    def prepare_training(self, checkpoint: str | None) -> None:
        args = self.args
        if not args.skip_memory_metrics:
            self.memory.start()
        if self.trainer.model_init is not None:
            set_seed(args.seed)
            self._adopt_model(self.trainer.call_model_init())
            self.trainer.optimizer = self.trainer.lr_scheduler = None
        self.source = self._training_source()
        self._build_model()
        if checkpoint is not None:
            self.trainer._load_from_checkpoint(checkpoint)
        self.plan = self._make_plan(self.source)
        if checkpoint is not None:
            self.plan = self.plan_to_go_on(checkpoint)
        self._start_state()
        self._prepare_optimizer()
        self._bind_overrides()
        self.strategy.full_rows = self.plan.batch_size
        self.strategy.prepare(self._micro_gradients, self._apply, self._rules())
        if checkpoint is not None:
            self._resume(checkpoint)
        elif self._old_checkpoint is not None:
            self._resume_old(self._old_checkpoint)
        self.check_saving()
        self.check_metric_name()
        self._tell_late_events()

    def _rules(self) -> UpdateRules:
        return UpdateRules(self.args.max_grad_norm, str(self.args.on_nonfinite))

    def follow_changes(self) -> None:
        """Compile updates anew for another max_grad_norm or on_nonfinite."""
        if self._rules() != self.strategy.rules:
            self.strategy.prepare(self._micro_gradients, self._apply, self._rules())

    def tell_unfollowed(self) -> None:
        trained = getattr(self.strategy, "trained_variables", None)
        if trained is not None and list(map(id, trained)) != list(map(id, self.model.trainable_variables)):
            self.notices.tell_once(
                "layers were frozen, unfrozen or added during training, and updates stay compiled for the variables "
                "they began with; call train() again after such a change"
            )

    def _build_model(self) -> None:
        """Call a model that makes its variables when it first sees data, so that there is something to load into."""
        if is_built(self.model):
            return
        with untouched_rng():
            first = self.source.first()
        if first is None:
            return
        with self.strategy.scope():
            self.trainer.run_model(mapped(ops.convert_to_tensor, first.features), None, False)

    def _start_state(self) -> None:
        super()._start_state()
        self._resume_rng = self._stream = self._epoch_rng = None
        self.work = WorkCounter(self.model, tokens=self.args.include_num_input_tokens_seen)

    def _tell_late_events(self) -> None:
        late = [name for name in ("on_substep_end", "on_pre_optimizer_step") if self.callback_handler.listens(name)]
        if late:
            self.notices.tell_once(f"an update is one compiled call: {' and '.join(late)} come after it, not inside it")

    def _add_memory_metrics(self, split: str, metrics: dict[str, Any]) -> None:
        if not self.args.skip_memory_metrics:
            metrics.update(self.memory.figures(split))

    # ---- updates that were not finite -------------------------------------------------------------------------------

    def write_incident(self, step: int) -> str:
        place = self._places.get(step)
        found = self.samples_at(place) if place is not None else None
        folder = write_incident(
            working_folder(self.args.output_dir),
            step=step,
            sample_ids=found[0] if found else None,
            batches=found[1] if found else None,
            model=self.model,
            run=self._run_again,
        )
        return str(folder)

    def _run_again(self, batch: HostBatch) -> tuple[list[Any], Any]:
        items = tf.constant(float(max(self.trainer._compute_nb_instances((batch.features, batch.labels)), 1)))
        found = tf.function(self._micro_gradients)(_tensors(batch.features), _tensors(batch.labels), None, items)
        return found[0], found[1]


def _tensors(value: Any) -> Any:
    return tf.nest.map_structure(lambda leaf: None if leaf is None else tf.convert_to_tensor(leaf), value)
