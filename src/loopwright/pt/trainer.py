"""Trainer: the override points of training with PyTorch."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor, nn

from ..callbacks.defaults import default_callbacks
from ..core.batches import Update
from ..core.meter import Meter
from ..core.overrides import accepts, adapt, is_overridden
from ..core.signals import Interrupted
from ..core.state import Progress, TrainerState
from ..errors import ModelError
from .accelerator import AcceleratorFace
from .accounting import LossAccounting
from .arguments import TrainingArguments
from .columns import LABEL_COLUMNS, find_labels, forward_parameters, innermost, takes_loss_flag
from .construction import check_constructor, default_collator, old_tokenizer, takes_trial
from .data import DataMethods
from .loss import LabelSmoother, LossKind, LossProbe, check_has_gradient, count_samples, predicts_next_token
from .memory import MemoryMeter
from .metric_inputs import metrics_function
from .neftune import add_embedding_noise
from .oom import run_or_halve, split_all
from .optimizing import OptimizerMethods
from .outputs import decodes_from_labels, find_loss, loss_in
from .precision import choose_precision, set_tf32
from .preparing import buffers_and_parameters_on, checkpoint_activations, compile_blocks
from .rehearsal import RehearsalMethods
from .saving import SavingMethods
from .seeding import enable_full_determinism, set_seed
from .strategies.single import SingleDevice
from .work import WorkCounter, operations_per_token, tokens_in


class Trainer(DataMethods, OptimizerMethods, RehearsalMethods, SavingMethods):
    """Trains, evaluates and saves any PyTorch model."""

    args: Any
    strategy: Any
    loss_is_scaled_for_ga: bool | None = None
    """Set it in a subclass to say whether your loss is already divided by num_items_in_batch."""
    _noise: Any = None

    # What other trainers have and overrides may ask for.
    is_deepspeed_enabled = is_fsdp_enabled = is_fsdp_xla_enabled = False
    deepspeed = hp_search_backend = hp_name = objective = hub_model_id = None
    current_flos = 0.0

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
        args = TrainingArguments("tmp_trainer") if args is None else args
        processing_class = old_tokenizer(processing_class, old_names)
        check_constructor(
            model,
            model_init,
            optimizers,
            optimizer_cls_and_kwargs,
            args,
            (train_dataset, eval_dataset),
            compute_metrics=compute_metrics,
        )
        enable_full_determinism(args.seed) if args.full_determinism else set_seed(args.seed)
        set_tf32(args.tf32)
        self.device = args.device
        self.model_init, self.compute_loss_func = model_init, compute_loss_func
        self.compute_metrics = metrics_function(compute_metrics, self.device)
        self.preprocess_logits_for_metrics = preprocess_logits_for_metrics
        self.train_dataset, self.eval_dataset = train_dataset, eval_dataset
        self.processing_class = processing_class
        self.optimizer, self.lr_scheduler = optimizers
        self.optimizer_cls_and_kwargs = optimizer_cls_and_kwargs
        self.data_collator = data_collator or default_collator(processing_class)
        self.strategy = SingleDevice(
            self.device,
            choose_precision(args, self.device),
            non_blocking=bool(args.accelerator_config.non_blocking) or args.dataloader_pin_memory,
        )
        self.accelerator = AcceleratorFace(self.strategy)
        self.memory = MemoryMeter(self.device)
        self._set_up(args, [*default_callbacks(args), *(callbacks or [])], processing_class=processing_class)
        if args.should_save:
            self._check_output_dir()
        self._adopt_model(self.call_model_init() if model is None else model)
        self.callback_handler.fire("on_init_end")

    def _adopt_model(self, model: nn.Module) -> None:
        """Place the model and find out what its forward takes."""
        self.model = model
        self.is_model_parallel = len(buffers_and_parameters_on(model)) > 1
        if getattr(model, "config", None) is not None and hasattr(model.config, "use_cache"):
            model.config.use_cache = self.args.use_cache
        if self.place_model_on_device:
            self._move_model_to_device(model, self.device)
        self.model_wrapped = self.strategy.setup_model(model, place=False)
        self.label_names = find_labels(model) if self.args.label_names is None else list(self.args.label_names)
        self.can_return_loss = takes_loss_flag(model)
        self._forward_takes = forward_parameters(model)
        self.model_accepts_loss_kwargs = bool(
            getattr(innermost(model), "accepts_loss_kwargs", accepts(innermost(model).forward, "num_items_in_batch"))
        )
        self.label_smoother = None
        if self.args.label_smoothing_factor:
            self.label_smoother = LabelSmoother(epsilon=self.args.label_smoothing_factor)
        self.callback_handler.context["model"] = model
        self.accounting = self._make_accounting()
        self._bind_overrides()

    def _move_model_to_device(self, model: nn.Module, device: torch.device) -> None:
        model.to(device)

    def call_model_init(self, trial: Any = None) -> nn.Module:
        """A fresh model from `model_init`."""
        assert self.model_init is not None
        model = self.model_init(trial) if takes_trial(self.model_init) else self.model_init()
        if model is None:
            raise ModelError("model_init() returned None; it must return the model")
        return model

    @property
    def place_model_on_device(self) -> bool:
        """Whether the trainer moves the model to the device."""
        return self.args.place_model_on_device is not False and not self.is_model_parallel

    @property
    def current_gradient_accumulation_steps(self) -> int:
        """Micro-batches of an update."""
        return self.args.gradient_accumulation_steps

    @property
    def gather_function(self) -> Callable[[Any], Any]:
        """Collects values from all processes."""
        return self.strategy.gather

    @property
    def neftune_noise_alpha(self) -> float | None:
        """The size of the noise on embeddings."""
        return self.args.neftune_noise_alpha

    def get_tp_size(self) -> int:
        """Devices one tensor is split over."""
        return 1

    def get_cp_size(self) -> int:
        """Devices one sequence is split over."""
        return 1

    def get_sp_size(self) -> int:
        """Devices the tokens of one sequence are split over."""
        return 1

    # ---- getting ready ----------------------------------------------------------------------------------------------

    def prepare_training(self, checkpoint: str | None) -> None:
        args = self.args
        if not args.skip_memory_metrics:
            self.memory.start()
        if self.model_init is not None:
            set_seed(args.seed)
            self._adopt_model(self.call_model_init())
            self.optimizer = self.lr_scheduler = None
        if checkpoint is not None:
            self._load_from_checkpoint(checkpoint)
        self._switch_on_model_options()
        self.train_dataloader = self.get_train_dataloader()
        self.plan = self._make_plan(self.train_dataloader)
        self._start_state()
        self._prepare_optimizer()
        self.accounting = self._make_accounting()
        self._bind_overrides()
        if checkpoint is not None:
            self._resume(checkpoint)
        self.check_metric_name()
        self.strategy.training()
        self.strategy.zero_grad()

    def _switch_on_model_options(self) -> None:
        args = self.args
        if args.gradient_checkpointing:
            checkpoint_activations(self.model, args.gradient_checkpointing_kwargs)
        if args.neftune_noise_alpha is not None:
            self._noise = add_embedding_noise(self.model, args.neftune_noise_alpha)
        if args.torch_compile:
            compile_blocks(
                self.model, backend=args.torch_compile_backend, mode=args.torch_compile_mode, notices=self.notices
            )
        self.model_wrapped = self._wrap_model(self.model)

    def finish_with_model(self) -> None:
        if self._noise is not None:
            self._noise.remove()
            self._noise = None

    def _wrap_model(self, model: nn.Module, training: bool = True, dataloader: Any = None) -> nn.Module:
        """The model as the loop calls it; on one device it is the model itself."""
        return model

    def _start_state(self) -> None:
        """A fresh state, progress and meter in the objects callbacks already hold."""
        for mine, fresh in ((self.state, TrainerState()), (self.progress, Progress())):
            for each in dataclasses.fields(fresh):
                if not each.name.startswith("is_"):
                    setattr(mine, each.name, getattr(fresh, each.name))
        plan = self.plan
        self.state.max_steps, self.state.num_train_epochs = plan.max_steps, plan.epochs
        self.state.train_batch_size = self.args.train_batch_size
        self.state.compute_steps(self.args, plan.max_steps)
        self.meter = Meter(self.strategy.read, filter_nonfinite=self.args.logging_nan_inf_filter)
        self.micro_split = 1
        self.learning_rate = 0.0
        self._resume_rng = None
        self.work = WorkCounter(
            self.model,
            self._input_name(),
            tokens=self.args.include_num_input_tokens_seen,
            operations=self.floating_point_ops if is_overridden(self, "floating_point_ops") else None,
        )

    # ---- loss -------------------------------------------------------------------------------------------------------

    def training_step(self, model: nn.Module, inputs: dict[str, Any], num_items_in_batch: Any = None) -> Tensor:
        """Forward and backward of one micro-batch; returns its share of the update's loss."""
        inputs = self._prepare_inputs(inputs)
        with self.compute_loss_context_manager():
            loss = self._compute_loss(model, inputs, num_items_in_batch=num_items_in_batch)
        loss = self.accounting.weigh(loss)
        try:
            self.strategy.backward(loss)
        except RuntimeError:
            check_has_gradient(loss)
            raise
        return loss.detach()

    def compute_loss(
        self, model: nn.Module, inputs: dict[str, Any], return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        """The loss of a batch: the model's own, or that of `compute_loss_func` or label smoothing.

        An override may return the mean over its targets, or `(sum, count)` to be exact in every case.
        """
        if self.compute_loss_func is None and self.label_smoother is None:
            outputs = model(**self._for_model(inputs, num_items_in_batch))
            loss = outputs["loss"] if type(outputs) is dict and "loss" in outputs else None
            loss = loss_in(outputs, inputs) if loss is None else loss
        else:
            labels = inputs.get("labels") if decodes_from_labels(model, inputs) else inputs.pop("labels", None)
            outputs = model(**self._for_model(inputs))
            loss = self._loss_from(outputs, labels, num_items_in_batch)
        return (loss, outputs) if return_outputs else loss

    def _loss_from(self, outputs: Any, labels: Any, num_items_in_batch: Any) -> Any:
        if self.compute_loss_func is not None:
            function = adapt(self.compute_loss_func, "num_items_in_batch")
            return function(outputs, labels, num_items_in_batch=num_items_in_batch)
        if labels is None:
            return loss_in(outputs, {})
        assert self.label_smoother is not None
        return self.label_smoother(
            outputs, labels, shift_labels=self.accounting.shifts, num_items_in_batch=num_items_in_batch
        )

    def _for_model(self, inputs: Mapping[str, Any], num_items_in_batch: Any = None) -> Mapping[str, Any]:
        """The inputs the forward takes: labels only if it names them, the item count only if it uses it."""
        takes = self._forward_takes
        if takes is not None:
            surplus = [name for name in LABEL_COLUMNS if name in inputs and name not in takes]
            if surplus:
                inputs = {name: value for name, value in inputs.items() if name not in surplus}
        if num_items_in_batch is not None and self.model_accepts_loss_kwargs:
            return {**inputs, "num_items_in_batch": num_items_in_batch}
        return inputs

    def compute_loss_context_manager(self) -> AbstractContextManager[Any]:
        """Around forward and loss: autocast, and whatever a subclass adds."""
        return self.autocast_smart_context_manager() if self._autocast_is_theirs else self.strategy.forward_context()

    def autocast_smart_context_manager(self, cache_enabled: bool | None = True) -> AbstractContextManager[Any]:
        return self.strategy.forward_context()

    def _prepare_inputs(self, inputs: Any) -> Any:
        """The batch on the device, in a container of its own."""
        return self._prepare_input(inputs) if self._input_is_theirs else self.strategy.put(inputs)

    def _prepare_input(self, data: Any) -> Any:
        return self.strategy.put(data)

    def _bind_overrides(self) -> None:
        """Look at the user's methods once, so that calling them costs nothing per step."""
        self._training_step = adapt(self.training_step, "num_items_in_batch")
        self._compute_loss = self._bound_compute_loss()
        self._input_is_theirs = is_overridden(self, "_prepare_input")
        self._autocast_is_theirs = is_overridden(self, "autocast_smart_context_manager")
        self._items_are_theirs = is_overridden(self, "_get_num_items_in_batch")

    def _bound_compute_loss(self) -> Callable[..., Any]:
        """compute_loss with the arguments it takes; an override runs with the device as torch's default."""
        function = adapt(self.compute_loss, "num_items_in_batch", "return_outputs")
        if self.device.type == "cpu" or not is_overridden(self, "compute_loss"):
            return function

        def on_device(*args: Any, **kwargs: Any) -> Any:
            with self.device:  # torch.tensor([...]) of class weights lands where the logits are
                return function(*args, **kwargs)

        return on_device

    # ---- accounting -------------------------------------------------------------------------------------------------

    def _make_accounting(self) -> LossAccounting:
        """Who is told how many items an update has, and what is known about the loss beforehand."""
        step_is_theirs = is_overridden(self, "training_step")
        loss_is_theirs = is_overridden(self, "compute_loss") or self.compute_loss_func is not None
        kind = None
        if self.loss_is_scaled_for_ga is not None:
            kind = LossKind.SCALED if self.loss_is_scaled_for_ga else LossKind.MEAN
        elif step_is_theirs or (self.label_smoother is not None and not loss_is_theirs):
            kind = LossKind.SCALED
        told = self.compute_loss if is_overridden(self, "compute_loss") else self.compute_loss_func
        return LossAccounting(
            self.label_names,
            guessed_shift=predicts_next_token(self.model),
            kind=kind,
            wants_items=step_is_theirs or (told is not None and accepts(told, "num_items_in_batch")),
        )

    def make_update(self, batches: list[Any]) -> Update:
        """Count targets and samples on the host, before the batches travel."""
        update = Update(batches, samples=self._samples_in(batches), micro_batches=len(batches))
        if self.work.counts:
            update.flos, update.tokens = self.work.measure(batches)
        if self.micro_split > 1:
            update.batches = split_all(batches, self.micro_split)
        if self.label_smoother is not None:
            self.accounting.learn_shift(batches[0], self._shift_probe())
        if len(update.batches) > 1 or self.accounting.wants_items or self._items_are_theirs:
            self._count(update)
        return update

    def _count(self, update: Update) -> None:
        if self.accounting.kind is None:
            self.accounting.learn(update.batches[0], self._probe())
            # Only a model whose loss really changes with the item count is told it from now on.
            self.model_accepts_loss_kwargs &= self.accounting.kind is not LossKind.MEAN or self._loss_is_theirs()
        self.accounting.count(update)
        if self._items_are_theirs and self.accounting.kind is LossKind.SCALED:
            update.total_items = self._get_num_items_in_batch(update.batches, self.device)

    def _loss_is_theirs(self) -> bool:
        return is_overridden(self, "compute_loss") or self.compute_loss_func is not None

    def _get_num_items_in_batch(self, batch_samples: list[Any], device: Any) -> Any:
        """The targets of an update's micro-batches; None when they have no labels."""
        return self.accounting.total(batch_samples)

    def _eval_items(self, inputs: Any, learn: bool = False) -> Any:
        if learn and self._labels_in(inputs):
            self.accounting.learn_shift(inputs, self._shift_probe())
        return self.accounting.items_in(inputs)

    def _probe(self) -> LossProbe:
        def compute(inputs: dict[str, Any], items: Any) -> Any:
            inputs = self._prepare_inputs(inputs)
            with self.compute_loss_context_manager():
                return self._compute_loss(self.model_wrapped, inputs, num_items_in_batch=items)

        return LossProbe(compute, self.model)

    def _shift_probe(self) -> LossProbe:
        """Smoothing shifts as the model's own loss does, so that one is asked; every other loss is asked itself."""
        if self.label_smoother is None or self._loss_is_theirs() or "labels" not in (self._forward_takes or ()):
            return self._probe()

        def compute(inputs: dict[str, Any], items: Any) -> Any:
            inputs = self._prepare_inputs(inputs)
            with self.compute_loss_context_manager():
                loss = find_loss(self.model_wrapped(**self._for_model(inputs)))
            return torch.zeros(()) if loss is None else loss  # a model without a loss cannot tell

        return LossProbe(compute, self.model)

    def micro_step(self, update: Update, index: int) -> Any:
        if index and self.signals.wants_save:
            raise Interrupted
        items = self.accounting.begin(update, index)
        loss = self._training_step(self.model_wrapped, update.batches[index], num_items_in_batch=items)
        if index + 1 < len(update.batches):
            self.callback_handler.fire("on_substep_end")
        return loss

    def run_micro_batches(self, update: Update) -> Any:
        run = self.strategy.run_update
        if self.args.auto_find_batch_size:
            loss = run_or_halve(lambda: run(self.micro_step, update), lambda: self._halve(update), self.strategy)
        else:
            loss = run(self.micro_step, update)
        return self.accounting.settle(loss, self.strategy)

    def _halve(self, update: Update) -> bool:
        """Cut the update's micro-batches in two; returns whether there was anything to cut."""
        if max(map(count_samples, update.batches)) == 1:
            return False
        self.strategy.zero_grad()
        self.strategy.free_memory()
        self.micro_split *= 2
        update.batches = split_all(update.batches, 2)
        self._count(update)
        self.notices.tell_once(
            f"out of memory: micro-batches are cut in {self.micro_split} from here on; updates stay what they are"
        )
        return True

    def _part_states(self) -> dict[str, Any]:
        return {"micro_split": self.micro_split}

    def _load_part_states(self, states: dict[str, Any]) -> None:
        self.micro_split = states.get("micro_split", 1)

    # ---- work done --------------------------------------------------------------------------------------------------

    def floating_point_ops(self, inputs: dict[str, Any]) -> int:
        """Operations of forward and backward: 6 x tokens x parameters outside the embeddings."""
        return operations_per_token(self.model) * tokens_in(inputs, self._input_name())

    def _add_memory_metrics(self, split: str, metrics: dict[str, Any]) -> None:
        if not self.args.skip_memory_metrics:
            metrics.update(self.memory.figures(split))
