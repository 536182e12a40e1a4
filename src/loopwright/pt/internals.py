"""TorchInternals: the library's part of a trainer of PyTorch models."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any, ClassVar

import torch
from torch import nn

from ..args.from_transformers import converted, is_from_transformers
from ..args.names import DebugOption
from ..args.reading import read_dict
from ..callbacks.defaults import default_callbacks
from ..core.checkpoint.ownership.run_id import FAILED
from ..core.internals import Internals
from ..core.user_code.constructor import adopt_tokenizer, make_model
from ..core.user_code.overrides import accepts, is_overridden
from ..hub.part import HubPart
from ..speed.measure.peaks import device_name
from .accelerate.accelerate_state import initialize_accelerate
from .accelerate.accelerator import Accelerator
from .acceleration import Acceleration
from .arguments import TrainingArguments
from .checkpoint.rank_state import own_random_states
from .checkpoint.save import TorchSaving
from .constructor_checks import PARAMETERS, check_constructor, default_collator
from .data.columns import find_labels, forward_parameters, innermost, takes_anything, takes_loss_flag
from .data.pipeline import TorchData
from .device_traits import kind_of
from .distributed.agreement import TorchAgreement
from .distributed.heartbeat import HangDetector, patience_for
from .distributed.sync import FlagAgreement, SharedEvaluation, SharedLoss
from .evaluation.fast import FastEvaluation
from .evaluation.metric_inputs import metrics_function
from .hooks import TorchHooks
from .kernels import Kernels
from .loss.targets import LabelSmoother
from .measure.memory_metrics import meter_of
from .measure.throughput import TorchPacing
from .measure.token_counter import TorchWorkCounter, operations_per_token, tokens_in
from .model.changes import TorchChanges
from .model.experts import report_router_loss
from .model.neftune import add_embedding_noise
from .model.options import (
    buffers_and_parameters_on,
    check_has_values,
    checkpoint_activations,
    compile_as_asked,
    convert_to_fp8,
    move_model,
    set_use_cache,
)
from .model.overflow import DebugUnderflowOverflow
from .model.quantized import check_trainable, keep_differentiable
from .model.special_tokens import align_special_tokens
from .optim.creation import TorchOptim
from .overridden_actions import act_by_override
from .precision import choose_precision, set_tf32
from .rng import enable_full_determinism, set_seed
from .run import TorchRun
from .strategies.base import ManyProcesses
from .strategies.choose import choose_strategy, requested_parallelism, unused_options
from .strategies.single import SingleDevice


class TorchInternals(Internals):
    """The parts of a trainer, and their preparation for a run."""

    trainer: TorchHooks
    run: TorchRun
    run_class = TorchRun
    agreement: TorchAgreement
    agreement_class = TorchAgreement
    pushing: HubPart
    pushing_class = HubPart
    strategy: SingleDevice
    device: torch.device

    data: TorchData
    data_class: ClassVar[type[TorchData]] = TorchData
    loss: SharedLoss
    loss_class: ClassVar[type[SharedLoss]] = SharedLoss
    evaluation: SharedEvaluation
    evaluation_class: ClassVar[type[SharedEvaluation]] = SharedEvaluation
    fast_evaluation: FastEvaluation
    saving: TorchSaving
    changes: TorchChanges
    pacing: TorchPacing
    optim: TorchOptim
    acceleration: Acceleration
    kernels: Kernels

    args: TrainingArguments
    arguments_class: ClassVar[type[TrainingArguments]] = TrainingArguments
    """The class to which arguments of transformers are converted."""

    _noise: Any = None
    _watched_values: DebugUnderflowOverflow | None = None
    """The check of all values of a forward pass, with debug=underflow_overflow."""
    fp8: Any = None
    """The layers converted to fp8, if requested."""
    compiled: Any = None
    """The compiled blocks, if torch_compile is set."""

    @property
    def processes(self) -> ManyProcesses:
        """The strategy, as one with several ranks."""
        assert isinstance(self.strategy, ManyProcesses)
        return self.strategy

    def construct(
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
        """Implementation of the trainer's constructor."""
        args = self.arguments_class("tmp_trainer") if args is None else args
        if is_from_transformers(args):
            args = converted(args, self.arguments_class)
        processing_class = adopt_tokenizer("Trainer", PARAMETERS, processing_class, old_names)
        check_constructor(
            model,
            model_init,
            optimizers,
            optimizer_cls_and_kwargs,
            args,
            (train_dataset, eval_dataset),
            compute_metrics=compute_metrics,
            callbacks=callbacks,
            functions={
                "data_collator": data_collator,
                "compute_loss_func": compute_loss_func,
                "preprocess_logits_for_metrics": preprocess_logits_for_metrics,
                "model_init": model_init,
            },
        )
        self.memory = meter_of(args.device)
        if not args.skip_memory_metrics:
            self.memory.start()
        enable_full_determinism(args.seed) if args.full_determinism else set_seed(args.seed)
        set_tf32(args.tf32)
        self.device = args.device
        self.trainer.model_init, self.trainer.compute_loss_func = model_init, compute_loss_func
        self.trainer.compute_metrics = metrics_function(compute_metrics, self.device)
        self.trainer.preprocess_logits_for_metrics = preprocess_logits_for_metrics
        self.trainer.train_dataset, self.trainer.eval_dataset = train_dataset, eval_dataset
        self.trainer.processing_class = processing_class
        self.trainer.optimizer, self.trainer.lr_scheduler = optimizers
        self.trainer.optimizer_cls_and_kwargs = optimizer_cls_and_kwargs
        self.trainer.data_collator = data_collator or default_collator(processing_class)
        self._start_strategy(args)
        self.set_up(args, [*default_callbacks(args), *(callbacks or [])], processing_class=processing_class)
        self.kernels.check_installed()
        self._report_unused_options()
        if args.should_save:
            self.check_output_dir()
        self.adopt_model(self.trainer.call_model_init() if model is None else model)
        if not args.skip_memory_metrics:
            self.memory.keep("init")
        self.pushing.create_repository()
        self.callback_handler.fire("on_init_end")

    def _start_strategy(self, args: TrainingArguments) -> None:
        """Choose parallelism and precision, and set what scripts read about them."""
        self.strategy = choose_strategy(args, self.device, choose_precision(args, self.device))
        self.is_alone = self.strategy.world_size == 1
        self.trainer.accelerator = Accelerator(self.strategy, args, self.trainer)
        wanted = requested_parallelism(args)
        self.trainer.is_fsdp_enabled, self.trainer.is_deepspeed_enabled = "fsdp" in wanted, "deepspeed" in wanted
        if args.shares_state:
            initialize_accelerate(args)
        if not self.is_alone:
            self.agree = FlagAgreement(self.processes.host.all_gather_numbers)

    def _report_unused_options(self) -> None:
        for text in unused_options(self.args):
            self.notices.warn_once(text)
        if DebugOption.TPU_METRICS_DEBUG in self.args.debug and kind_of(self.device).metrics is None:
            self.notices.warn_once(f"debug='tpu_metrics_debug' has no effect on {self.device}: it needs an XLA device")

    def given_to_constructor(self) -> dict[str, Any]:
        """What a trainer for a trial is created from, besides its arguments and callbacks."""
        names = (
            "data_collator", "train_dataset", "eval_dataset", "processing_class", "model_init", "compute_loss_func",
            "compute_metrics", "optimizer_cls_and_kwargs", "preprocess_logits_for_metrics",
        )  # fmt: skip
        return {name: getattr(self.trainer, name) for name in names}

    def make_parts(self) -> None:
        self.data, self.loss = self.data_class(self), self.loss_class(self)
        self.evaluation, self.saving = self.evaluation_class(self), TorchSaving(self)
        self.fast_evaluation = FastEvaluation(self)
        self.changes, self.pacing = TorchChanges(self), TorchPacing(self)
        self.optim, self.acceleration, self.kernels = TorchOptim(self), Acceleration(self), Kernels(self)

    def adopt_model(self, model: nn.Module) -> None:
        """Place the model and inspect the parameters of its forward."""
        check_has_values(model, may_be_empty=self.strategy.makes_empty)
        self.trainer.model = model
        self.trainer.is_model_parallel = len(buffers_and_parameters_on(model)) > 1
        set_use_cache(model, self.args.use_cache)
        keep_differentiable(model, self.notices.warn_once)
        if self.trainer.place_model_on_device:
            self.trainer._move_model_to_device(model, self.device)
        if self.strategy.is_sharded:
            self.agreement.begin_alike(model)
        self.trainer.model_wrapped = self.strategy.setup_model(model, place=False)
        self.trainer.label_names = find_labels(model) if self.args.label_names is None else list(self.args.label_names)
        self.trainer.can_return_loss = takes_loss_flag(model)
        self.loss.forward_takes = forward_parameters(model)
        self.loss.forward_takes_any = takes_anything(model)
        self.loss.splitter = self.loss.make_splitter()
        # A forward of *args, **kwargs hides what it accepts, so num_items_in_batch is not passed.
        takes_items = self.loss.forward_takes is not None and accepts(innermost(model).forward, "num_items_in_batch")
        self.trainer.model_accepts_loss_kwargs = bool(getattr(innermost(model), "accepts_loss_kwargs", takes_items))
        self.trainer.label_smoother = self._make_label_smoother(model)
        self.callback_handler.context["model"] = model
        self.run.accounting = self.loss.make_accounting()
        self.loss.bind_overrides()
        self.fast_evaluation.forget()

    def _make_label_smoother(self, model: nn.Module) -> LabelSmoother | None:
        """The label smoother, if one is requested and the model's labels are class numbers."""
        if not self.args.label_smoothing_factor:
            return None
        if not _is_multi_label(model):
            return LabelSmoother(epsilon=self.args.label_smoothing_factor)
        text = (
            "Label smoothing is not compatible with multi-label classification, whose labels are not class numbers; "
            f"label_smoothing_factor={self.args.label_smoothing_factor} is not used"
        )
        if self.args.strict:
            self.notices.warn_once(text)  # raises
        warnings.warn(text, stacklevel=2)
        return None

    def _move_model_to_device(self, model: nn.Module, device: torch.device) -> None:
        move_model(model, device)

    def call_model_init(self, trial: Any = None) -> nn.Module:
        """A new model from `model_init`."""
        assert self.trainer.model_init is not None
        with torch.device("meta") if self.strategy.makes_empty else nullcontext():
            return make_model(self.trainer.model_init, trial)

    def get_tp_size(self) -> int:
        """Number of devices a tensor is split across."""
        return int(self.strategy.copies)

    @property
    def places_model(self) -> bool:
        """Whether the model is moved to the device."""
        if self.strategy.is_sharded:  # each rank moves only its shard
            return False
        return self.args.place_model_on_device is not False and not self.trainer.is_model_parallel

    @property
    def current_accumulation(self) -> int:
        """Micro-batches of the current update; fewer at the end of an epoch."""
        return self.args.gradient_accumulation_steps if self.run.micro_batches is None else self.run.micro_batches

    # ---- preparing a run ---------------------------------------------------------------------------------------------

    def prepare_training(self, checkpoint: str | None) -> None:
        args = self.args
        if not args.skip_memory_metrics:
            self.memory.start()
        if self.trainer.model_init is not None:
            set_seed(args.seed)
            self.adopt_model(self.trainer.call_model_init(*self.run.given_to_model_init))
            self.trainer.optimizer = self.trainer.lr_scheduler = None
        elif self.model is not self.strategy.model:
            self.changes.adopt_assigned_model()
        check_trainable(self.model)
        self.run.accounting = self.loss.make_accounting()  # checks of static shapes may compute the loss
        if checkpoint is not None:
            self.trainer._load_from_checkpoint(checkpoint)
            self.run.kept_accumulation = self.saving.accumulation_to_go_on(checkpoint)
        align_special_tokens(self.model, self.trainer.processing_class, self.notices.warn_once)
        if not self.loss.has_custom_loss():
            report_router_loss(self.model, self.notices.warn_once)
        self.optim.freeze()
        self._switch_on_model_options()
        self.run.loader = self.data.share_loader(self.trainer.get_train_dataloader())
        self.run.plan = self.data.make_plan(self.run.loader)
        if checkpoint is not None:
            self.run.plan = self.saving.plan_to_go_on(checkpoint)
            self.run.scheduled_then = self.saving.updates_scheduled(checkpoint)
        self._start_state()
        self.optim.prepare()
        self.run.accounting = self.loss.make_accounting()
        self.loss.bind_overrides()
        self.kernels.prepare()
        self.run.speed = self.acceleration.start()
        self.saving.start_modules()
        if checkpoint is not None:
            self.saving.resume(checkpoint)
        elif self.strategy.data_rank:  # rank 0 draws the same numbers as a single process
            self.strategy.load_rng_state(own_random_states(args.seed, self.strategy.data_rank, 0))
        self.saving.check_saving()
        self.evaluation.check_metric_name()
        self.strategy.training()
        self.strategy.zero_grad()

    def model_sizes(self) -> tuple[int, int]:
        sizes = [(getattr(each, "ds_numel", each.numel()), each.requires_grad) for each in self.model.parameters()]
        return sum(size for size, is_trained in sizes if is_trained), sum(size for size, _ in sizes)

    def place(self) -> str:
        name = device_name(self.device)
        return f"{self.device}{f' ({name})' if name else ''}, {self.pacing.number_format()}"

    def act_by_override(self) -> bool:
        return act_by_override(self)

    def watched(self) -> AbstractContextManager[Any]:
        if self.is_alone:
            return nullcontext()
        self.processes.alarm.before_exit = lambda: self.run.checkpoints.end(FAILED)
        return HangDetector(
            rank=self.strategy.rank,
            world=self.strategy.world_size,
            step=lambda: self.state.global_step,
            patience=patience_for(self.args.ddp_timeout),
            connect=self.processes.store.clone,
            heard=lambda: self.processes.alarm.heard,
        )

    def _switch_on_model_options(self) -> None:
        args = self.args
        if args.gradient_checkpointing:
            checkpoint_activations(self.model, read_dict(args.gradient_checkpointing_kwargs))
        if self.trainer.neftune_noise_alpha is not None:
            self._noise = add_embedding_noise(self.model, self.trainer.neftune_noise_alpha)
        if DebugOption.UNDERFLOW_OVERFLOW in args.debug:
            self._watched_values = DebugUnderflowOverflow(self.model, is_paused=lambda: self.is_probing)
        if args.fp8:
            self.fp8 = convert_to_fp8(self.model, args, self.notices)
        if args.torch_compile:
            self.compiled = compile_as_asked(self.model, args, self.notices)
        if not self.strategy.is_sharded:
            self.agreement.begin_alike(self.model)
        self.trainer.model_wrapped = self.trainer._wrap_model(self.model)

    def finish_with_model(self) -> None:
        super().finish_with_model()
        self.saving.copies.clear()
        if self.run.speed is not None:
            self.run.speed.finish()
        self.kernels.finish()
        self.optim.unfreeze()
        if self._noise is not None:
            self._noise.remove()
            self._noise = None
        if self._watched_values is not None:
            self._watched_values.remove()
            self._watched_values = None
        if self.fp8 is not None:
            self.fp8.remove()
        self.saving.keep_compiled()
        if self.compiled is not None:
            self.compiled.finish()

    def _wrap_model(self, model: nn.Module, training: bool = True, dataloader: Any = None) -> nn.Module:
        """The model as the loop calls it; on one device, the model itself."""
        return self.strategy.wrap(model) if training else model

    def _start_state(self) -> None:
        super()._start_state()
        self.run.work = TorchWorkCounter(
            self.model,
            self.data.input_name(),
            tokens=self.args.include_num_input_tokens_seen,
            operations=self.trainer.floating_point_ops if is_overridden(self.trainer, "floating_point_ops") else None,
        )

    # ---- FLOPs -------------------------------------------------------------------------------------------------------

    def floating_point_ops(self, inputs: dict[str, Any]) -> int:
        """Operations of forward and backward: 6 x tokens x parameters outside the embeddings."""
        return operations_per_token(self.model) * tokens_in(inputs, self.data.input_name())


def _is_multi_label(model: nn.Module) -> bool:
    return getattr(getattr(model, "config", None), "problem_type", None) == "multi_label_classification"
