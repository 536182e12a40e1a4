"""Accelerations: the inputs of the speed engine, and the use of its plan."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ..args.names import DebugOption
from ..args.paths import working_folder
from ..core.measure.ledger import PROVING
from ..core.update import Update
from ..core.user_code.overrides import is_overridden
from ..notices import logger
from ..speed.attention.dispatch import HALF
from ..speed.compile.blocks import as_written, repeated_blocks
from ..speed.compile.cache import is_cached, load_compile_cache
from ..speed.compile.region import Region
from ..speed.cuda_graphs.graphed_step import GraphedTraining
from ..speed.cuda_graphs.recorder import cannot_capture
from ..speed.engine import SpeedEngine
from ..speed.memory.estimate import model_bytes
from ..speed.memory.host_heap import keep_heap
from ..speed.model_stamp import fingerprint, hooks_of, is_foreign
from ..speed.planner.decision import SpeedPlan
from ..speed.planner.planner import VARYING_DEVICES
from ..speed.training_setup import TrainingSetup
from .arguments import TrainingArguments
from .data.columns import innermost, without_wrappers
from .device_traits import kind_of
from .devices import total_memory
from .loss.accounting import divided
from .loss.identity import stamp_of
from .loss.plan_key import code_key, plan_key
from .loss.targets import check_loss
from .measure.token_counter import operations_per_token
from .model.options import checkpoint_activations, compile_as_asked, compile_key, recomputing_policies
from .part import TorchPart
from .precision import Autocast, Precision
from .restoring.sandbox import sandbox

FILE_NAME = "speed_plan.json"
KEEP_BATCHES = {
    "training_step": "training_step is overridden",
    "get_batch_samples": "get_batch_samples is overridden",
    "_get_num_items_in_batch": "_get_num_items_in_batch is overridden",
}
"""Overrides that see micro-batches; with one of them, the collator's micro-batches are kept."""
KEEP_INPUTS = {
    "compute_loss": "compute_loss is overridden and may read the mask",
    "_prepare_inputs": "_prepare_inputs is overridden",
    "_prepare_input": "_prepare_input is overridden",
    "compute_loss_context_manager": "compute_loss_context_manager is overridden",
}
"""Overrides that see the model's inputs; with one of them, only the number of samples per micro-batch may change."""


class Acceleration(TorchPart):
    """Decides which accelerations a run uses, and provides the inputs of the speed engine."""

    graph_recorder: Any = None
    """Records micro-batches as graphs on devices other than CUDA."""
    region_backend: Any = None
    """The compiler of regions; None for inductor."""

    def start(self) -> SpeedEngine | None:
        """Create the speed engine, or log why it is disabled and return None."""
        self.run.has_planned = False
        if self.args.speed != "off" and self.run.heap is None:
            self.run.heap = keep_heap(all_sizes=self.device.type == "cuda")
        reason = "speed='off'" if self.args.speed == "off" else self._why_not()
        if reason is not None:
            plan = SpeedPlan()
            plan.note("layouts", False, reason)
            self.run.speed_plan = plan.as_dict()
            if self.args.speed == "off":
                return None
            logger.info(f"speed: keeping the collator's micro-batches: {reason}")
            if self.args.per_device_train_batch_tokens:
                self.notices.warn_once(
                    f"per_device_train_batch_tokens is not enforced because batches are padded: {reason}"
                )
            # Where shapes vary, the engine still chooses attention kernels, which changes neither batches nor model.
            if self.device.type not in VARYING_DEVICES or self.strategy.world_size > 1:
                return None
        return SpeedEngine(lambda: self.training_setup(reason), announce=self.announce, tell=self.notices.warn_once)

    def _why_not(self) -> str | None:
        for name, reason in KEEP_BATCHES.items():
            if is_overridden(self.trainer, name):
                return reason
        if (why_kept := self._why_keep_model()) is not None:
            return why_kept
        if self.callback_handler.listens("on_substep_end"):
            return "a callback uses on_substep_end, which is called after each micro-batch"
        if self.internals.data.wants_static_shapes():
            return "this device compiles for each shape, so batches keep few shapes"
        if self.strategy.is_sharded:
            return "parameters are sharded, which is not supported yet"
        if self.strategy.world_size > self.strategy.data_world:
            return "several ranks use the same samples, which is not supported yet"
        if self.strategy.world_size > 1 and self.strategy.forward_is_collective:
            return "all ranks must have the same number of micro-batches"
        return None

    def _why_keep_model(self) -> str | None:
        if self.trainer.neftune_noise_alpha is not None:
            return "neftune_noise_alpha is set, and the scale of its noise depends on the row length"
        if DebugOption.UNDERFLOW_OVERFLOW in self.args.debug:
            return "debug=underflow_overflow checks every module of the model as it is"
        if isinstance(self.trainer.train_dataset, Mapping) and self.args.logging_source_losses:
            return "logging_source_losses needs micro-batches of one training dataset each"
        if self.internals.kernels.is_used:
            return "use_liger_kernel replaces the layers that layouts are made for"
        return None

    def training_setup(self, why_unchanged: str | None = None) -> TrainingSetup:
        """What the planner and the proofs need; `why_unchanged` is why batches and model must not change."""
        model, loss = innermost(self.model), self.internals.loss
        weights = next((p for p in model.parameters() if p.is_floating_point()), None)
        operations = operations_per_token(model) or 6 * sum(p.numel() for p in model.parameters())
        return TrainingSetup(
            model=without_wrappers(self.model),
            device=self.device,
            level=self.args.speed,
            loss_of=self._loss_of_update,
            to_device=self.strategy.put,
            sandbox=self._sandbox,
            as_trained=self.strategy.forward_context,
            computes_half=isinstance(self.strategy.precision, Autocast)
            or (weights is not None and weights.dtype in HALF),
            # Ranks analyze the loss together, before they plan: separately, their results could differ.
            learn=loss.learn_loss if self.strategy.world_size == 1 else lambda _: loss.is_additive(),
            targets_in=lambda batch: self.run.accounting.items_in(batch),
            shifts=lambda: self.run.accounting.shifts,
            updates_left=lambda: self.run.plan.max_steps - self.state.global_step,
            compile=self._compile_blocks,
            why_not_compile=self._why_not_compile(),
            operations_per_token=float(operations),
            token_budget=self.args.per_device_train_batch_tokens,
            why_unchanged=why_unchanged,
            packs=self.args.batch_packing is not None,
            why_only_grouped=self._why_only_grouped(),
            is_shared=self.strategy.world_size > 1,
            is_pair=bool(getattr(getattr(model, "config", None), "is_encoder_decoder", False)),
            device_memory=lambda: total_memory(self.device),
            model_bytes=lambda: model_bytes(model.parameters(), states=states_per_weight(self.trainer.optimizer)),
            recompute=lambda policy: checkpoint_activations(model, {"policy": policy}),
            policies=recomputing_policies(model),
            recomputes=self.args.gradient_checkpointing or bool(getattr(model, "is_gradient_checkpointing", False)),
            graph=self._graph_micro_batches,
            why_not_graph=self._why_not_graph(),
            region=self._region,
            why_not_region=self._why_not_region(),
            sandbox_compiled=lambda: self._sandbox(is_compiled=True),
            may_measure=not self.args.full_determinism,
            is_warm=lambda: not self.args.full_determinism and is_cached(compile_key(self.model, self.args)),
            free_memory=self.strategy.free_memory,
            identity=self._identity,
            plan_key=self._plan_key,
            code_key=lambda: code_key(self.trainer, self.model),
            wants_test=lambda batches: self.run.accounting.wants_test(batches),
            why_not_additive=lambda: self.run.accounting.reason if self.run.accounting.is_additive is False else None,
            recount=lambda update: self.internals.loss.count_update(update),
            user_hook=lambda: hooked_module(self.model) or hooked_parameter(self.model),
        )

    def _identity(self) -> str:
        """A hash of the trainer, collator and attention; a saved plan is reused only if it is equal."""
        attention = getattr(getattr(innermost(self.model), "config", None), "_attn_implementation", None)
        parts = [stamp_of(self.trainer), fingerprint(self.trainer.data_collator), str(attention)]
        return hashlib.sha256("|".join(parts).encode()).hexdigest()[:16]

    def _plan_key(self) -> str | None:
        """Identifies what a plan depends on, for later runs of the same model; None if it is not kept for them."""
        if self.args.full_determinism or self.strategy.world_size > 1:
            return None
        return plan_key(self.trainer, self.model, self.args, identity=self._identity())

    def training_objects(self) -> tuple[Any, ...]:
        """Objects that callbacks may replace during a run; the plan is checked again if one changes."""
        accumulation, loss = self.args.gradient_accumulation_steps, self.trainer.compute_loss_func
        return (self.trainer.optimizer, accumulation, loss, self.model, self.strategy.changes)

    def _why_only_grouped(self) -> str | None:
        for name, reason in KEEP_INPUTS.items():
            if is_overridden(self.trainer, name):
                return reason
        if self.trainer.compute_loss_func is not None:
            return "compute_loss_func is set and may read the outputs of padded batches"
        return None

    def _why_not_compile(self) -> str | None:
        if self.args.torch_compile:
            return "torch_compile already does it"
        if not repeated_blocks(self.model):
            return "the model has no repeated blocks"
        return "gradient_checkpointing is on" if self.args.gradient_checkpointing else None

    def _compile_blocks(self, short_rows: bool) -> None:
        self.internals.compiled = compile_as_asked(
            self.model, self.args, self.notices, dynamic=True, short_rows=short_rows
        )
        self.internals.pacing.follow_compiler()

    def _why_not_region(self) -> str | None:
        args, model = self.args, self.model
        reasons = (
            ("torch_compile already does it", args.torch_compile),
            ("there is more than one rank", self.strategy.world_size > 1),
            ("gradient_checkpointing is on", args.gradient_checkpointing),
            ("fp8 is on", args.fp8),
            ("the device has its own compiler", kind_of(self.device).static_shapes),
            ("the model is already compiled", any(m._compiled_call_impl is not None for m in model.modules())),
            ("the model is on several devices", len({p.device for p in model.parameters()}) > 1),
        )
        return next((reason for reason, is_so in reasons if is_so), None)

    def _region(self) -> Region:
        if self.run.step_timer is not None:
            self.run.step_timer.detach()  # its hooks would become part of the compiled code
        key = compile_key(self.model, self.args)
        load_compile_cache(key)
        model, is_deterministic = without_wrappers(self.model), self.args.full_determinism
        region = Region(model, notices=self.notices, backend=self.region_backend, is_deterministic=is_deterministic)
        region.session.cache_key = key if self.region_backend is None else None
        self.internals.compiled = region.session
        self.internals.pacing.follow_compiler()
        return region

    def _why_not_graph(self) -> str | None:
        args, kind = self.args, self.device.type
        reasons = (
            (f"{kind} has none", kind != "cuda" and self.graph_recorder is None),
            ("there is more than one rank", self.strategy.world_size > 1),
            ("torch_compile may record its own", args.torch_compile and _may_record(args)),
            ("gradient_checkpointing is on", args.gradient_checkpointing),
            ("fp8 is on", args.fp8),
            ("loss scaling is on", type(self.strategy.precision) not in (Precision, Autocast)),
            (
                "autocast_smart_context_manager is overridden",
                is_overridden(self.trainer, "autocast_smart_context_manager"),
            ),
        )
        found = next((reason for reason, is_so in reasons if is_so), None)
        found = found or self._why_only_grouped()
        return cannot_capture(self.model, self.device) if found is None and kind == "cuda" else found

    def _graph_micro_batches(self) -> GraphedTraining:
        if self.run.step_timer is not None:
            self.run.step_timer.detach()  # its own hooks must not prevent graphs

        def loss_of(inputs: dict[str, Any], items: Any) -> Tensor:
            with self.strategy.forward_context():
                model = self.trainer.model_wrapped
                return check_loss(self.internals.loss.called_compute_loss(model, inputs, num_items_in_batch=items))

        def put(inputs: Any) -> Any:
            self.strategy.training()  # as in the training step that the graphs replace
            return self.strategy.put(inputs)

        logged: set[str] = set()

        def tell(text: str) -> None:
            if text not in logged:
                logged.add(text)
                logger.info(f"speed: {text}")

        assert self.run.speed is not None
        self.run.step = step = GraphedTraining(
            self.model,
            loss_of=loss_of,
            micro_batch=lambda: self.run.micro_batch,
            weigh=self.run.accounting.weigh,
            backward=self.strategy.backward,
            put=put,
            plain=self.run.step,
            give_up=self.run.speed.give_up_graphs,
            tell=tell,
            recorder=self.graph_recorder,
        )
        return step

    @contextmanager
    def _sandbox(self, *, is_compiled: bool = False) -> Iterator[None]:
        self.internals.is_probing = True  # logs of overrides here belong to no update
        written = nullcontext() if is_compiled else self.as_written()
        # Compiled code is compared with whole updates as written, which take as much memory as training.
        box = sandbox(self.model, self.trainer, spares_memory=is_compiled)
        try:
            with self.run.ledger.during(PROVING), box, written:
                yield
        finally:
            self.internals.is_probing = False

    def as_written(self) -> AbstractContextManager[Any]:
        """A context for trial computations, without compiled code unless the device has no other mode."""
        return nullcontext() if kind_of(self.device).static_shapes else as_written(self.model)

    def _loss_of_update(
        self, batches: list[Any], prepare: Callable[[Any], Any], backward: Callable[..., None] | None = None
    ) -> Tensor:
        """The loss of an update made of these micro-batches, weighted as in training; see `speed.probe.LossOf`."""
        update, accounting, total = Update(list(batches)), self.run.accounting, None
        self.internals.loss.count_items(update)
        model = without_wrappers(self.model)
        for index, batch in enumerate(update.batches):
            micro = accounting.micro_batch(update, index)
            inputs = dict(prepare(batch))  # a copy: overrides remove labels
            loss = self.internals.loss.called_compute_loss(model, inputs, num_items_in_batch=micro.items)
            loss = accounting.weigh(loss, micro)
            if backward is not None:
                backward(loss)
                loss = loss.detach()
            total = loss if total is None else total + loss
        assert total is not None
        if backward is not None and update.summed is not None:
            backward(None, divided(update, torch.ones_like(total)))
        return divided(update, total)

    def announce(self, plan: SpeedPlan) -> None:
        """Log the plan, store it with the run and write it to a file."""
        self.run.speed_plan = plan.as_dict()
        if self.args.should_log:
            # A plan that changes the computation is logged as a warning, which is shown by default.
            say = logger.warning if plan.changes_anything else logger.info
            say("\n".join(["speed:", *(f"  {line}" for line in plan.lines())]))
        path = Path(working_folder(self.args.output_dir)) / FILE_NAME
        if self.args.should_save and (plan.changes_anything or path.exists()):
            try:
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_text(json.dumps(plan.as_dict(), indent=2) + "\n", encoding="utf-8")
            except OSError as error:  # only a record: speed_report() and checkpoints have the plan too
                logger.warning(f"{path} cannot be written ({error}); training continues without it")


def hooked_module(model: nn.Module) -> str | None:
    """The first module with a user's hook, as opposed to one of this library or of the model itself."""
    of_all = (torch.nn.modules.module._global_forward_hooks, torch.nn.modules.module._global_forward_pre_hooks)
    if any(is_foreign(hook) for hooks in of_all for hook in hooks.values()):
        return "all modules"
    for name, module in model.named_modules():
        for hook in (*module._forward_hooks.values(), *module._forward_pre_hooks.values()):
            if is_foreign(hook):
                return name or type(module).__name__
    return None


def hooked_parameter(model: nn.Module) -> str | None:
    """The first parameter whose gradient a hook of the user gets, which is called for each micro-batch."""
    for name, parameter in model.named_parameters():
        if any(is_foreign(hook) for hooks in hooks_of(parameter) for hook in hooks.values()):
            return name
    return None


def _may_record(args: TrainingArguments) -> bool:
    """Whether the requested compiler may record CUDA graphs itself."""
    return args.torch_compile_mode is not None or args.torch_compile_backend not in (None, "inductor")


def states_per_weight(optimizer: Any) -> float:
    """Optimizer state per weight, in tensors of the weight's size; a high estimate for unknown optimizers."""
    if not isinstance(optimizer, torch.optim.SGD):
        return 2.0
    return 1.0 if any(group.get("momentum") for group in optimizer.param_groups) else 0.0
