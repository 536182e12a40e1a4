"""KerasInternals: the implementation of Keras trainers."""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Callable, Mapping
from typing import Any, ClassVar

from keras import ops

from ..callbacks.defaults import default_callbacks
from ..core.internals import Internals
from ..core.measure.host_memory import MemoryMeter
from ..core.measure.ledger import COMPILING
from ..core.measure.pacing import Pacing
from ..core.update import Update
from ..core.user_code.constructor import make_model
from ..core.user_code.overrides import is_overridden
from ..errors import ModelError
from ..hub.part import HubPart
from .agreement import KerasAgreement
from .arguments import POLICIES, KerasTrainingArguments
from .callbacks import adapted
from .changes import KerasChanges
from .constructor_checks import check_constructor, old_names
from .data.batches import KerasData
from .data.host_batch import mapped
from .data.sources import Columns, is_columns
from .data.token_counter import WorkCounter
from .evaluation import KerasEvaluation
from .hooks import KerasHooks
from .loss.compiled_loss import KerasLoss, find_keras_loss
from .loss.loss_step import LossNote, LossStep
from .models import ModelInfo, check_policy, is_built, look_at, methods_of_fit
from .optim.optimizer_creation import KerasOptim
from .run import KerasRun
from .save import KerasSaving
from .strategy import KerasStrategy, UpdateRules


class KerasInternals(Internals):
    """Creates the parts of a trainer and prepares them for a run."""

    trainer: KerasHooks
    run: KerasRun
    run_class = KerasRun
    agreement_class = KerasAgreement
    pushing: HubPart
    pushing_class = HubPart
    strategy: KerasStrategy
    trainer_name: str
    """The trainer's name in messages."""
    info: ModelInfo
    keras_loss: KerasLoss | None

    data: KerasData
    data_class: ClassVar[type[KerasData]]
    loss: LossStep
    loss_class: ClassVar[type[LossStep]]
    evaluation: KerasEvaluation
    evaluation_class: ClassVar[type[KerasEvaluation]]
    saving: KerasSaving
    changes: KerasChanges
    pacing: Pacing
    optim: KerasOptim

    arguments_class: type[KerasTrainingArguments]
    args: KerasTrainingArguments

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
        self.trainer.compute_metrics = compute_metrics
        self.trainer.preprocess_logits_for_metrics = preprocess_logits_for_metrics
        is_one = isinstance(eval_dataset, Mapping) and is_columns(eval_dataset)  # not several named datasets
        self.trainer.train_dataset = train_dataset
        self.trainer.eval_dataset = Columns(eval_dataset) if is_one else eval_dataset
        self.trainer.data_collator, self.trainer.processing_class = data_collator, processing_class
        self.trainer.tb_writer = tb_writer
        self.trainer.label_names = args.label_names
        self.trainer.optimizer, self.trainer.lr_scheduler = optimizers
        self.trainer.train_loss, self.trainer.eval_loss = LossNote(), LossNote()
        self.memory = MemoryMeter(self.strategy.reset_peak_memory, self.strategy.memory_figures)
        writers = [] if tb_writer is None else [self._writer_callback(tb_writer)]
        given = [*default_callbacks(args), *writers, *map(adapted, callbacks or [])]
        self.set_up(args, given, processing_class=processing_class)
        if args.should_save:
            self.check_output_dir()
        self.adopt_model(self.trainer.call_model_init() if model is None else model)
        self.pushing.create_repository()
        self.trainer.setup_wandb()
        self.trainer.setup_comet()
        self.callback_handler.fire("on_init_end")

    def given_to_constructor(self) -> dict[str, Any]:
        """What a trainer for a trial is created from, besides its arguments and callbacks."""
        names = (
            "train_dataset", "eval_dataset", "compute_metrics", "tb_writer", "data_collator", "model_init",
            "compute_loss_func", "preprocess_logits_for_metrics", "processing_class",
        )  # fmt: skip
        return {name: getattr(self.trainer, name) for name in names}

    def make_parts(self) -> None:
        self.data, self.loss = self.data_class(self), self.loss_class(self)
        self.evaluation = self.evaluation_class(self)
        self.saving, self.changes, self.pacing = KerasSaving(self), KerasChanges(self), Pacing(self)
        self.optim = KerasOptim(self)

    def _make_strategy(self, args: KerasTrainingArguments) -> KerasStrategy:
        raise NotImplementedError

    def _writer_callback(self, writer: Any) -> Any:
        """A callback that logs to a tf.summary writer. Imports TensorFlow."""
        raise NotImplementedError

    def _placed_model(self, model: Any, info: ModelInfo) -> Any:
        """The model, with its variables created in the strategy's scope."""
        return model

    def adopt_model(self, model: Any) -> None:
        """Inspect the model's inputs and move its variables into the strategy's scope."""
        info = look_at(model)
        check_policy(model, POLICIES[self.args.mixed_precision])
        self._check_compiled(model, info)
        self.keras_loss = find_keras_loss(model, info.family)
        model = self._placed_model(model, info)
        if getattr(model, "config", None) is not None and hasattr(model.config, "use_cache"):
            model.config.use_cache = self.args.use_cache
        self.trainer.model, self.info = model, info
        self.trainer.model_wrapped = self.strategy.setup_model(model)
        self.evaluation.compiled_prediction = None
        self.callback_handler.context["model"] = model
        self.loss.bind_overrides()

    def _check_compiled(self, model: Any, info: ModelInfo) -> None:
        """Raise if the model's own methods for `fit` would be ignored; warn about options that are."""
        own_loss = any(is_overridden(self.trainer, name) for name in ("run_model", "compute_loss", "training_step"))
        ignored = [] if info.takes_labels or own_loss else methods_of_fit(model, info.family)
        if ignored and self.trainer.compute_loss_func is None:
            raise ModelError(
                f"{type(model).__name__} overrides {' and '.join(ignored)}, which only fit calls; override "
                f"compute_loss or run_model of {self.trainer_name} instead, or pass compute_loss_func="
            )
        if getattr(model, "_compile_metrics", None) is not None:
            self.notices.warn_once(
                "the metrics that the model was compiled with are not computed; pass compute_metrics= instead"
            )
        found = None if info.takes_labels else find_keras_loss(model, info.family)
        if found is not None and found.reductions:
            self.notices.warn_once(
                f"the model's loss has reduction={' and '.join(sorted(found.reductions))}, but it is divided by its "
                "items, so that it does not depend on how an update is split"
            )

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
            self.adopt_model(self.trainer.call_model_init(*self.run.given_to_model_init))
            self.trainer.optimizer = self.trainer.lr_scheduler = None
        self.run.source = self.data.training_source()
        self._build_model()
        if checkpoint is not None:
            self.trainer._load_from_checkpoint(checkpoint)
        self.run.plan = self.data.make_plan(self.run.source)
        if checkpoint is not None:
            self.run.plan = self.saving.plan_to_go_on(checkpoint)
        self._start_state()
        self.optim.prepare()
        self.loss.bind_overrides()
        self.strategy.prepare(self.loss.micro_gradients, self.rules())
        if checkpoint is not None:
            self.saving.resume(checkpoint)
        else:
            self.begin_anew()
        self.saving.check_saving()
        self.evaluation.check_metric_name()
        self._tell_late_events()

    def model_sizes(self) -> tuple[int, int]:
        trained = {id(each) for each in self.model.trainable_variables}
        sizes = [(math.prod(each.shape), id(each) in trained) for each in self.model.weights]
        return sum(size for size, is_trained in sizes if is_trained), sum(size for size, _ in sizes)

    def place(self) -> str:
        precision = {"no": "fp32"}.get(self.args.mixed_precision, self.args.mixed_precision)
        return f"{self.strategy.place()}, {precision}"

    def begin_anew(self) -> None:
        """Called if there is no checkpoint to resume from."""

    def rules(self) -> UpdateRules:
        """What a compiled update has built in."""
        return UpdateRules(self.args.max_grad_norm, str(self.args.on_nonfinite))

    def _build_model(self) -> None:
        """Call an unbuilt model on a batch, so that its variables exist before a checkpoint is loaded."""
        if is_built(self.model):
            return
        with self.strategy.streams.untouched():
            first = self.run.source.first()
        if first is None:
            return
        with self.strategy.scope():
            self.trainer.run_model(mapped(ops.convert_to_tensor, first.features), None, False)

    def _start_state(self) -> None:
        super()._start_state()
        self.run.work = WorkCounter(self.model, tokens=self.args.include_num_input_tokens_seen)

    def _tell_late_events(self) -> None:
        late = [name for name in ("on_substep_end", "on_pre_optimizer_step") if self.callback_handler.listens(name)]
        if late:
            self.notices.warn_once(f"a step is one compiled call: {' and '.join(late)} run after it, not inside it")

    # ---- one update -------------------------------------------------------------------------------------------------

    def run_micro_batches(self, update: Update) -> Any:
        self._begin_update(update)
        compiled, started = self.strategy.compilations, time.perf_counter()
        loss = self.strategy.run_update(update)
        if self.strategy.compilations != compiled:
            self.run.ledger.move(COMPILING, time.perf_counter() - started)
        for _ in range(len(update.batches) - 1):
            self.callback_handler.fire("on_substep_end")
        return loss

    def may_be_undone(self) -> bool:
        return False  # an update is one call
