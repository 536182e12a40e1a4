"""KerasInternals: the implementation of Keras trainers."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

from keras import ops

from ..callbacks.defaults import default_callbacks
from ..core.constructor import make_model
from ..core.host_memory import MemoryMeter
from .arguments import POLICIES, KerasTrainingArguments
from .callbacks import adapted
from .compiled_loss import find_keras_loss
from .constructor_checks import check_constructor, old_names
from .evaluation import EvaluationMethods
from .host_batch import mapped
from .loss_step import LossNote
from .models import ModelInfo, check_policy, is_built, look_at
from .optimizer_creation import OptimizerMethods
from .save import SavingMethods
from .sources import Columns, is_columns
from .strategy import UpdateRules
from .token_counter import WorkCounter


class KerasInternals(OptimizerMethods, EvaluationMethods, SavingMethods):
    """Creates the parts of a trainer and prepares them for a run."""

    arguments_class: type[KerasTrainingArguments]

    def construct(
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
        kind = self.arguments_class
        args = kind("tmp_trainer") if args is None else args
        processing_class, loss_only = old_names(self.trainer_name, kind, processing_class, others)
        check_constructor(
            model, model_init, optimizers, args, (train_dataset, eval_dataset), compute_metrics, arguments=kind
        )
        if loss_only is not None:
            args = dataclasses.replace(args, prediction_loss_only=loss_only)
        self.strategy = self._make_strategy(args)
        self.strategy.streams.seed(args.seed, deterministic=args.full_determinism)
        if args.tf32 is not None:
            self.strategy.set_tf32(args.tf32)
        self.trainer.model_init, self.trainer.compute_loss_func = model_init, compute_loss_func
        self.trainer.compute_metrics, self.trainer.preprocess_logits_for_metrics = (
            compute_metrics,
            preprocess_logits_for_metrics,
        )
        columns = isinstance(eval_dataset, Mapping) and is_columns(eval_dataset)  # one dataset, not several named ones
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
        self.trainer.train_loss, self.trainer.eval_loss = LossNote(), LossNote()
        self.memory = MemoryMeter(self.strategy.reset_peak_memory, self.strategy.memory_figures)
        writers = [] if tb_writer is None else [self._writer_callback(tb_writer)]
        given = [*default_callbacks(args), *writers, *map(adapted, callbacks or [])]
        self.set_up(args, given, processing_class=processing_class)
        if args.should_save:
            self._check_output_dir()
        self._adopt_model(self.trainer.call_model_init() if model is None else model)
        self.trainer.setup_wandb()
        self.trainer.setup_comet()
        self.callback_handler.fire("on_init_end")

    def _make_strategy(self, args: Any) -> Any:
        raise NotImplementedError

    def _writer_callback(self, writer: Any) -> Any:
        """A callback that logs to a tf.summary writer. Imports TensorFlow."""
        raise NotImplementedError

    def _micro_gradients(self, *args: Any) -> Any:
        """Gradients, loss and items of one micro-batch, in the form the strategy expects."""
        raise NotImplementedError

    def _placed_model(self, model: Any, info: ModelInfo) -> Any:
        """The model, with its variables created in the strategy's scope."""
        return model

    def _adopt_model(self, model: Any) -> None:
        """Inspect the model's inputs and move its variables into the strategy's scope."""
        info = look_at(model)
        check_policy(model, POLICIES[self.args.mixed_precision])
        self.keras_loss = find_keras_loss(model, info.family)
        model = self._placed_model(model, info)
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
            return make_model(self.trainer.model_init, trial)

    # ---- getting ready ----------------------------------------------------------------------------------------------

    def prepare_training(self, checkpoint: str | None) -> None:
        args = self.args
        if not args.skip_memory_metrics:
            self.memory.start()
        if self.trainer.model_init is not None:
            self.strategy.streams.seed(args.seed)
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
        self.strategy.prepare(self._micro_gradients, self._rules())
        if checkpoint is not None:
            self._resume(checkpoint)
        else:
            self._begin_anew()
        self.check_saving()
        self.check_metric_name()
        self._tell_late_events()

    def _begin_anew(self) -> None:
        """Called if there is no checkpoint to resume from."""

    def _rules(self) -> UpdateRules:
        return UpdateRules(self.args.max_grad_norm, str(self.args.on_nonfinite))

    def follow_changes(self) -> None:
        """Recompile updates if max_grad_norm or on_nonfinite has changed."""
        if self._rules() != self.strategy.rules:
            self.strategy.prepare(self._micro_gradients, self._rules())

    def tell_unfollowed(self) -> None:
        if list(map(id, self.strategy.trained)) != list(map(id, self.model.trainable_variables)):
            self.notices.warn_once(
                "layers were frozen, unfrozen or added during training, but updates are compiled for the original "
                "variables; call train() again after such a change"
            )

    def _build_model(self) -> None:
        """Call an unbuilt model on a batch, so that its variables exist before a checkpoint is loaded."""
        if is_built(self.model):
            return
        with self.strategy.streams.untouched():
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
            self.notices.warn_once(f"an update is one compiled call: {' and '.join(late)} run after it, not inside it")
