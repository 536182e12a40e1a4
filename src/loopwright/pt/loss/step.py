"""Forward, backward and weighting of micro-batches."""

from __future__ import annotations

import tempfile
import traceback
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from torch import Tensor, nn

from ...args.paths import working_folder
from ...core.checkpoint.schema import check_part
from ...core.logs.incident import write_incident
from ...core.shutdown.signals import Interrupted
from ...core.update import MicroBatch, Update, whole_batch
from ...speed.engine import SpeedEngine
from ...speed.memory.out_of_memory import is_out_of_memory
from ...speed.model_stamp import AROUND, ModelStamp, besides
from ...speed.planner.decision import COLLATED
from ..data.columns import innermost
from .accounting import divide_by_count
from .calling import LossCalls
from .identity import stamp_of
from .incident import bad_weights, examine
from .input_errors import explain
from .probe import ARGUMENTS
from .saved_parts import PARTS
from .splitter import BatchSplitter, CannotSplit
from .targets import USES_ITEMS, LossKind, check_has_gradient, count_samples

HARMLESS = ("hooks", "training", AROUND)
"""Changes of a model that do not affect the denominator of its loss, besides those of `requires_grad`."""


class TorchLoss(LossCalls):
    """Forward and backward of micro-batches; users may override every public method on the trainer."""

    splitter: BatchSplitter

    # ---- loss -------------------------------------------------------------------------------------------------------

    def enter_training(self, model: nn.Module) -> None:
        """Set the model and its wrapper to training mode: callbacks and evaluations may have changed it."""
        self.strategy.training()
        if not model.training:
            model.train()

    def backward(self, loss: Any) -> Tensor:
        """Weight the loss of a micro-batch by its share of the update's targets, and compute its gradients."""
        run = self.run
        given, loss = loss, run.accounting.weigh(loss, run.micro_batch)
        if run.micro_batch.update.sources:
            self._add_source(given, loss)
        try:
            self.strategy.backward(loss if self.is_alone else self.strategy.without_dummy(loss, run.micro_batch))
        except RuntimeError:
            check_has_gradient(loss)
            raise
        return loss.detach()

    # ---- one update -------------------------------------------------------------------------------------------------

    def make_update(self, batches: list[Any]) -> Update:
        """Count targets and samples on the host, before the batches are copied to the device."""
        if self.internals.kernels.is_pending and self.is_alone:
            self.internals.kernels.settle(batches)
        update = Update(batches, samples=self.internals.data.samples_in(batches), micro_batches=len(batches))
        if self.run.work.counts:
            self.run.work.measure(update)
        if self.is_alone:
            self._learn_from_collated(batches)
        self._apply_speed_plan(update)
        self._divide(update)
        needs_items = self.run.accounting.wants_items or self._items_overridden or self._active_speed is not None
        if needs_items or len(update.batches) > 1 or not self.is_alone:
            self.count_update(update)
        self._stamp_model(update)
        return update

    @property
    def _active_speed(self) -> SpeedEngine | None:
        """The speed engine, if its plan changes updates."""
        return self.run.speed if self.run.speed is not None and self.run.speed.is_active else None

    def _learn_from_collated(self, batches: list[Any]) -> None:
        """Test the loss if that is due, with the collator's batches: rearranged ones are less informative."""
        if self.trainer.label_smoother is not None:
            self.run.accounting.learn_shift(batches[0], self.shift_probe())
        if len(self.run.accounting.rivals) > 1 and self.run.accounting.disagrees(batches):
            self.learn_loss(batches)
        if self._is_recheck_due():
            if len(batches) > 1:
                self._check_loss_again(batches, after_change=False)
            self.run.accounting.is_postponed = len(batches) == 1

    def _apply_speed_plan(self, update: Update) -> None:
        """Apply the speed plan, unless the loss turned out not to allow it."""
        speed = self.run.speed
        if speed is None or speed.is_idle:
            return
        if speed.plan.layout != COLLATED and self.run.accounting.is_additive is False:
            self._leave_layouts()
        else:
            speed.arrange(update)

    def _leave_layouts(self) -> None:
        """Stop rearranging batches, because the loss turned out not to allow it."""
        assert self.run.speed is not None
        since = self.run.speed.leave()
        doubtful = f". The last step that agreed was {since} steps earlier, those in between may be wrong" * (since > 0)
        reason = self.run.accounting.reason
        self.notices.warn_once(f"speed: from now on the collator's micro-batches are kept: {reason}{doubtful}")
        self.run.speed = None

    def _add_source(self, given: Any, loss: Tensor) -> None:
        micro = self.run.micro_batch
        source = micro.update.sources.get(id(micro.update.batches[micro.index]))
        if source is not None:
            self.named.add_source(f"loss_{source}", given, loss, micro)

    def _divide(self, update: Update) -> None:
        """Divide micro-batches by datasets and, after running out of memory, into smaller ones."""
        if self.run.splits_by_source:
            self._split_by_source(update)
        is_laid = self.run.speed is not None and self.run.speed.is_laid
        if self.run.micro_split > 1 and not is_laid:  # rearranged rows are not split
            update.batches = self._cut(update.batches, self.run.micro_split, update.sources)

    def _split_by_source(self, update: Update) -> None:
        """Divide micro-batches by the datasets of their samples, if the sum over the parts is the same loss."""
        sources = self.internals.data.sources_of(len(update.batches))
        if self.is_alone and self.run.accounting.is_open and any(len(each) > 1 for each in sources or []):
            self.learn_loss(update.batches)
        reason = "micro-batches are formed by length" if sources is None else None
        if self.run.accounting.is_additive is False:
            reason = f"the loss depends on how a batch is split: {self.run.accounting.reason}"
        pieces: list[Any] = []
        for batch, runs in zip(update.batches, sources or [], strict=False):
            try:
                if reason is None and sum(rows for _, rows in runs) != count_samples(batch):
                    reason = "the collator returns other numbers of rows than samples"
                whole = len(runs) == 1 or reason is not None
                made = [batch] if whole else self.splitter.split(batch, [rows for _, rows in runs])
            except CannotSplit as problem:
                made, reason = [batch], str(problem)
            if reason is None:
                update.sources.update({id(part): name for part, (name, _) in zip(made, runs, strict=True)})
            pieces += made
        if reason is not None:
            self.notices.warn_once(f"the loss of each training dataset is not logged: {reason}")
        update.batches = pieces or update.batches

    def _cut(self, batches: list[Any], parts: int, sources: dict[int, str]) -> list[Any]:
        """Split each micro-batch into `parts`; those that cannot be split safely are kept."""
        pieces = []
        for batch in batches:
            try:
                made = self.splitter.split_all([batch], parts)
                if id(batch) in sources:
                    sources.update(dict.fromkeys(map(id, made), sources[id(batch)]))
                pieces += made
            except CannotSplit as reason:
                self.notices.warn_once(f"a micro-batch is not split although memory is low: {reason}")
                pieces.append(batch)
        return pieces

    def count_update(self, update: Update) -> None:
        """Count the targets of an update; tests the loss first if what it counts is not known."""
        is_collated = self._active_speed is None  # otherwise the speed engine has tested the loss on the collator's
        has_parts = len(update.batches) > 1
        has_parts_or_items = has_parts or self._items_overridden  # only a loss that divides by items needs them
        if self.is_alone and is_collated and has_parts_or_items and self.run.accounting.is_open:
            self.learn_loss(update.batches)
        elif self.is_alone and is_collated and self._must_know_shift():
            self.run.accounting.learn_shift(update.batches[0], self.probe())  # num_items_in_batch depends on it
        batches = update.batches
        self.count_items(update)
        if self.is_alone and has_parts and _has_empty(update, batches) and self._look_at_empty(batches):
            update.batches = batches
            self.count_items(update)
        self._report_trouble()
        if self._items_overridden and self.run.accounting.kind is LossKind.SCALED:
            update.total_items = self.trainer._get_num_items_in_batch(update.batches, self.device)

    def count_items(self, update: Update) -> None:
        """Count the denominator of the loss, and set a factor that undoes a division by the accumulation."""
        self.run.accounting.count(update)
        if self.run.accounting.divides is not None:
            from_arguments = self.run.accounting.divides == ARGUMENTS
            update.factor = float(self.args.gradient_accumulation_steps if from_arguments else len(update.batches))

    def _get_num_items_in_batch(self, batch_samples: list[Any], device: Any) -> Any:
        """The targets of an update's micro-batches; None if they have no labels."""
        return self.run.accounting.total(batch_samples)

    def micro_batch(self, update: Update, index: int) -> MicroBatch:
        if index and self.run.signals.wants_save and self._may_be_cut_short():
            raise Interrupted
        micro, speed = self.run.accounting.micro_batch(update, index), self._active_speed
        if speed is not None:
            micro.inputs = speed.inputs_of(micro)
        return micro

    def _may_be_cut_short(self) -> bool:
        """Whether an update can be undone: one that changes plain attributes of modules is finished instead."""
        modules = self.internals.saving.modules
        return modules is None or not modules.state_dict(lambda text: None)["values"]

    def _stamp_model(self, update: Update) -> None:
        """Record the state of the model if weights of micro-batches or a speed plan depend on it."""
        if len(update.batches) == 1 and self._active_speed is None:
            self.run.stamp = None
        elif self.run.stamp is None:
            self.strategy.training()
            self.run.stamp = ModelStamp(self.model, self.internals.acceleration.training_objects)

    def _follow_model(self, update: Update) -> None:
        """Check the loss and the speed plan again if the model was changed since the last update."""
        speed = self._active_speed
        made = update.batches if speed is None else speed.collated_batches(update)
        changes = self.run.stamp.changes() if self.run.stamp is not None else []
        if not changes:
            return
        may_matter = bool(besides(changes, HARMLESS))
        if self.is_alone and not self.run.accounting.is_claimed and may_matter:
            self._check_loss_again(made, after_change=True)
            self.count_update(update)
        elif not self.is_alone and may_matter:
            self.notices.warn_once(
                f"{changes[0]} was changed during training. With several ranks the denominator of the loss is not "
                "determined again; micro-batches keep their weights"
            )
        if speed is not None:
            speed.follow_changes(update, changes)

    def begin_update(self, update: Update) -> None:
        run = self.run
        if run.known is not None and self.is_alone and self.internals.changes.has_new_overrides(run.known):
            self._make_again(update)
        self._follow_model(update)
        if self.named.has_any:
            self.named.clear()
        run.micro_batches = len(update.batches)
        run.before_update = self.strategy.snapshot() if self.args.auto_find_batch_size else None

    def around_update(self) -> AbstractContextManager[Any]:
        speed = self.run.speed
        if speed is None:
            return nullcontext()
        return speed.active() if speed.is_active else speed.attention()

    def end_update(self, update: Update, loss: Any) -> Any:
        run = self.run
        if run.stamp is not None:
            run.stamp.settle()
        run.micro_batch = whole_batch()
        if self.named.has_any or self.named.is_shared:
            self._collect_named(update)
        return loss if update.summed is None else divide_by_count(update, loss, self.strategy)

    def _collect_named(self, update: Update) -> None:
        named = self.named.of_update(update, self._named_again, self.run.accounting.kind)
        self.run.named = named if named or self.named.is_shared else None

    def recover(self, error: Exception, update: Update) -> bool:
        """Out of memory: restore random states and buffers, and halve the micro-batches."""
        if not self.args.auto_find_batch_size or not is_out_of_memory(error):
            return False
        traceback.clear_frames(error.__traceback__)  # the frames hold tensors of the failed forward
        if not self._halve(update):
            return False
        self.strategy.restore(self.run.before_update)
        self.named.clear()
        return True

    def _make_again(self, update: Update) -> None:
        """Count and rearrange an update again, because methods or losses were assigned after it was made."""
        made = self.run.speed.collated_batches(update) if self.run.speed is not None else update.batches
        self.internals.changes.follow_overrides()
        vars(update).update(vars(self.make_update(made)))

    def _halve(self, update: Update) -> bool:
        """Split the update's micro-batches in two; returns whether that was possible."""
        rearranged = self.run.speed is not None and self.run.speed.rearrange(update)
        if not rearranged and self.run.speed is not None and self.run.speed.is_laid:
            return False
        if not rearranged and not any(self._can_be_cut(batch) for batch in update.batches):
            return False
        self.strategy.zero_grad()
        self.strategy.free_memory()
        if not rearranged:
            self.run.micro_split *= 2
            update.batches = self._cut(update.batches, 2, update.sources)
        self.run.micro_batches = len(update.batches)
        self.count_update(update)
        if rearranged:
            return True
        self.notices.warn_once(
            f"out of memory: micro-batches are now split in {self.run.micro_split}; the effective batch size is "
            "unchanged"
        )
        return True

    def _can_be_cut(self, batch: Any) -> bool:
        if count_samples(batch) == 1:
            return False
        reason = self.splitter.why_whole(batch)
        if reason is not None:
            self.notices.warn_once(f"out of memory, and the micro-batch cannot be split: {reason}")
        return reason is None

    def explain(self, error: BaseException, batch: Any, what: str = "training") -> str:
        return explain(error, batch, innermost(self.model), self.args, what)

    def write_incident(self, step: int) -> str:
        place = self.run.places.get(step)
        found = self.internals.data.samples_at(place) if place is not None else None
        ids, batches = found if found else (None, None)
        self.strategy.zero_grad()
        own = working_folder(self.args.output_dir)
        folder = write_incident(
            # All ranks examine it, since a forward pass may be collective; rank 0 writes the report.
            own if self.strategy.rank == 0 else tempfile.mkdtemp(),
            step=step,
            sample_ids=ids,
            bad_weights=bad_weights(self.model),
            examine=None if batches is None else lambda place: examine(place, self.model, batches, self._run_again),
        )
        self.strategy.zero_grad()
        return str(folder)

    def _run_again(self, batch: Any) -> Tensor:
        with self.trainer.compute_loss_context_manager():
            model = self.strategy.unwrap(self.trainer.model_wrapped)
            loss = self.called_compute_loss(model, self.trainer._prepare_inputs(batch), num_items_in_batch=None)
        loss = self.run.accounting.weigh(loss, whole_batch())
        loss.backward()
        return loss.detach()

    def part_states(self) -> dict[str, Any]:
        speed = None if self.run.speed is None else self.run.speed.state_dict()
        loss = {"stamp": stamp_of(self.trainer), **self.run.accounting.state_dict()}
        evaluated = {} if self._eval_accounting is None else {"eval_loss": self._eval_accounting.state_dict()}
        return {"micro_split": self.run.micro_split, "speed": speed, "loss": loss, **evaluated}

    def load_part_states(self, states: dict[str, Any]) -> None:
        check_part(states, PARTS)
        self.run.micro_split = states.get("micro_split", 1)
        loss = states.get("loss")
        if loss is not None and loss["stamp"] == stamp_of(self.trainer) and not self.run.accounting.is_claimed:
            self.run.accounting.load_state_dict(loss)
            if states.get("eval_loss"):
                self._eval_accounting = self._make_eval_accounting()
                self._eval_accounting.load_state_dict(states["eval_loss"])
            self.trainer.model_accepts_loss_kwargs &= self.run.accounting.kind in USES_ITEMS or self.has_custom_loss()
        if self.run.speed is not None and states.get("speed"):
            self.run.speed.load_state_dict(states["speed"])
            if self.run.speed.is_decided:
                self.internals.acceleration.announce(self.run.speed.plan)  # the run may resume in another folder


def _has_empty(update: Update, batches: list[Any]) -> bool:
    """Whether some micro-batches were left out, or none of them has an item."""
    return len(update.batches) < len(batches) or not any(not isinstance(items, int) or items for items in update.items)
