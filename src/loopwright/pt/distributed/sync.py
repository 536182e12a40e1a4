"""The trainer's methods for several ranks: synchronizing updates, decisions, evaluation and stopping."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

from ...core.evaluation.loop import EvalStep
from ...core.events import CallbackHandler
from ...core.shutdown.signals import WATCHED, Interrupted, SignalWatch
from ...core.update import Update
from ...errors import ArgumentsError
from ..checkpoint.tensors import plain_module
from ..evaluation.precheck import Precheck
from ..loss.step import TorchLoss
from ..loss.targets import LossKind, count_samples
from ..strategies.base import on_host
from .replicas import buffers_of_first, persistent_buffers

SIGNALS = ("", *(each.name for each in WATCHED))
"""Signals, encoded as their index in a row of numbers."""


HAS_LOSS_WITHOUT_ITEMS, WEIGHS_DIFFERENTLY = 1, 2
"""What the data of one rank may reveal about the loss of all ranks."""


class SharedLoss(TorchLoss):
    """Updates divided among several ranks."""

    # ---- one update -------------------------------------------------------------------------------------------------

    def sync_update(self, batches: list[Any]) -> Update | None:
        """Count targets and samples over all ranks with one all-gather of a few numbers.

        A rank without targets runs a dummy batch with weight zero, because the other ranks wait for its gradients.
        """
        self._settle_kernels(batches)
        self._learn_together(batches)
        self._plan_together(batches)
        nothing = Update([], real_tokens=0, computed_tokens=0, squared_lengths=0)
        update = self.make_update(batches) if batches else nothing
        rows = self._exchanged(update, self._doubt(batches))
        if any(row[-1] for row in rows):
            self._settle_doubts([int(row[-1]) for row in rows], batches)
            update = self.make_update(batches) if batches else nothing
            rows = self._exchanged(update, 0)
        lengths, items, weights, samples, micro_batches, flos, tokens, signals, accumulations, _ = (
            list(each) for each in zip(*rows, strict=True)
        )
        if len(set(accumulations)) > 1:
            raise ArgumentsError(
                f"gradient_accumulation_steps is {[int(each) for each in accumulations]} on the ranks of this run; "
                "change it on all of them at the same step"
            )
        if any(signals):
            self.run.undone = True
            self.strategy.restore(self.run.snapshot)
            adopt_signal(self.run.signals, signals)
            self.internals.save_and_exit()
        if not any(lengths):
            return None
        self._add_dummy_batches(update, lengths, weights)
        update.shared = True
        averaged, rank = self.args.average_tokens_across_devices, self.strategy.data_rank
        update.total_items = (sum(items) / len(items) if averaged else items[rank]) or 1
        update.total_weight = (sum(weights) / len(weights) if averaged else weights[rank]) or 1
        if self.run.accounting.kind is LossKind.TOTAL:  # a sum, but gradients are averaged over ranks
            update.total_weight = 1 / len(rows)
        update.samples, update.micro_batches = int(sum(samples)), int(sum(micro_batches))
        update.flos, update.tokens = sum(flos), int(sum(tokens))
        return update

    def _settle_kernels(self, batches: list[Any]) -> None:
        """Compare requested kernels on the same batch on all ranks, so that their results agree."""
        if self.internals.kernels.is_pending:
            holders = self._holders_of_any(batches)
            if holders:
                self.internals.kernels.settle(self._batches_of(holders[0], batches))

    def _holders_of_any(self, batches: list[Any]) -> list[int]:
        """The ranks that have batches."""
        rows = self.processes.all_gather_numbers([float(bool(batches))])
        return [rank for rank, (has_any,) in enumerate(rows) if has_any]

    def _exchanged(self, update: Update, doubt: int) -> list[list[float]]:
        """The numbers of every rank for the update, in one all-gather."""
        own, work = self._own_items(update), [update.flos, update.tokens]
        weight = own if update.weights is None else float(sum(update.weights))
        return self.processes.all_gather_numbers(
            [len(update), own, weight, update.samples, update.micro_batches, *work, signal_number(self.run.signals),
             self.run.plan.accumulation, doubt]
        )  # fmt: skip

    def _doubt(self, batches: list[Any]) -> int:
        """Whether this rank's data reveals something about the loss that all ranks need."""
        if self.strategy.forward_is_collective or not batches:
            return 0
        if self.run.accounting.empty_in(batches) and self._look_at_empty(batches):
            return HAS_LOSS_WITHOUT_ITEMS
        return WEIGHS_DIFFERENTLY if self.run.accounting.disagrees(batches) else 0

    def _settle_doubts(self, doubts: list[int], batches: list[Any]) -> None:
        if HAS_LOSS_WITHOUT_ITEMS in doubts:
            self.run.accounting.record_loss_without_items()
            self._report_trouble()
        else:
            self.learn_loss(self._batches_of(doubts.index(WEIGHS_DIFFERENTLY), batches))

    def _batches_of(self, source: int, batches: list[Any]) -> list[Any]:
        """A few micro-batches of one rank, broadcast to all."""
        own = [on_host(batch) for batch in batches[:3]] if self.strategy.data_rank == source else None
        found: list[Any] = self.strategy.broadcast(own, source * self.strategy.copies)
        return found

    def _own_items(self, update: Update) -> float:
        if self._items_overridden and self.run.accounting.kind is LossKind.SCALED and update.batches:
            return float(update.total_items)
        return float(sum(update.items))

    def _add_dummy_batches(self, update: Update, lengths: list[float], items: list[float]) -> None:
        """Pad this rank with zero-weight dummy batches, so that all ranks run as many forwards as needed."""
        strategy, rank = self.strategy, self.strategy.data_rank
        full = [r for r, count in enumerate(items) if count] or [r for r, count in enumerate(lengths) if count]
        idle = [r for r in range(len(lengths)) if not lengths[r] or (not items[r] and items[full[0]])]
        most = int(max(lengths)) if strategy.forward_is_collective else 1
        needed = [max(most - int(count), 0) for count in lengths]
        if not idle and not any(needed):
            return
        own = on_host(self._first_as_made(update)) if rank == full[0] else None
        stand_in = strategy.broadcast(own, full[0] * strategy.copies)
        if rank in idle:
            update.batches, update.items = [], []
            update.weights = None if update.weights is None else []
            if self.run.speed is not None:
                self.run.speed.keep_collated()
            needed[rank] = max(most, 1)
        update.real = len(update.batches)
        update.batches = [*update.batches, *[stand_in] * needed[rank]]
        update.items = [*update.items, *[0] * needed[rank]]
        if update.weights is not None or self.run.accounting.kind is LossKind.TOTAL:
            update.weights = [*(update.weights or []), *[0] * needed[rank]]

    def _learn_together(self, batches: list[Any]) -> None:
        """Determine how the loss is scaled, on the same batches on all ranks, so that their results agree."""
        accounting = self.run.accounting
        smoothed = self.trainer.label_smoother is not None and accounting.undecided_shift
        is_due = self._is_recheck_due()
        if not accounting.is_open and not smoothed and not is_due:
            return
        holders = self._holders_of_any(batches)
        if not holders:
            return
        found = self._batches_of(holders[0], batches)
        if len(found) == 1 and count_samples(found[0]) == 1 and len(holders) > 1:
            found = [*found, *self._batches_of(holders[1], batches)]
        if smoothed:
            accounting.learn_shift(found[0], self.shift_probe())
        if accounting.is_open:
            self.learn_loss(found)
        elif is_due:
            self._check_loss_again(found, after_change=False)

    def _first_as_made(self, update: Update) -> Any:
        return update.batches[0] if self.run.speed is None else self.run.speed.collated_batches(update)[0]

    def _plan_together(self, batches: list[Any]) -> None:
        """Make the speed plan on one rank, from its batches; the others adopt it."""
        if self.run.has_planned:
            return
        speed, rank = self.run.speed, self.strategy.data_rank
        is_decided = speed is None or speed.is_decided
        rows = self.processes.all_gather_numbers([float(bool(batches)), float(is_decided), float(speed is None)])
        decided = [each for each, row in enumerate(rows) if row[1]]
        without = any(row[2] for row in rows)
        self.run.has_planned = len(decided) == len(rows) or without
        if speed is None or without:  # one rank may have a callback that the others lack
            self._give_up_speed()
            return
        holders = decided or [each for each, row in enumerate(rows) if row[0]]
        if self.run.has_planned or not holders:
            return
        source = holders[0]
        if rank == source and not speed.is_decided:
            speed.consider(batches)
        state = self.strategy.broadcast(speed.state_dict() if rank == source else None, source)
        if rank != source and not speed.is_decided:
            speed.follow(state)

    def _give_up_speed(self) -> None:
        if self.run.speed is not None:
            self.run.speed.finish()
            self.run.speed = None


class SharedEvaluation(Precheck):
    """Evaluations divided among several ranks."""

    _eval_learned = False

    def eval_steps(self, loader: Any, loss_only: bool, ignore_keys: list[str] | None) -> Iterator[EvalStep]:
        if self.is_alone:
            return super().eval_steps(loader, loss_only, ignore_keys)
        return self._shared_eval_steps(loader, loss_only, ignore_keys)

    def _shared_eval_steps(self, loader: Any, loss_only: bool, ignore_keys: Any) -> Iterator[EvalStep]:
        """The steps of all ranks, in the order of the data, with the buffers that a checkpoint would have."""
        buffers = persistent_buffers(plain_module(self.model))
        with buffers_of_first(buffers, self.processes.host, self.device):
            yield from self._steps_in_order(loader, loss_only, ignore_keys)

    def _steps_in_order(self, loader: Any, loss_only: bool, ignore_keys: Any) -> Iterator[EvalStep]:
        waiting: list[Any] = []
        steps = super().eval_steps(_taken_from(waiting), loss_only, ignore_keys)
        own = iter(loader)
        while True:
            inputs = next(own, None)
            is_heard = self.trainer.is_in_train and self.run.may_leave
            signal = signal_number(self.run.signals) if is_heard else 0
            rows = self.processes.all_gather_numbers([float(inputs is not None), float(signal)])
            holders = [rank for rank, (has_any, _) in enumerate(rows) if has_any]
            if any(signal for _, signal in rows):
                adopt_signal(self.run.signals, [signal for _, signal in rows])
                raise Interrupted
            if not holders:
                return
            stand_in = self._eval_stand_in(inputs, holders)
            given = inputs if inputs is not None else stand_in
            step = None
            if given is not None:
                waiting.append(given)
                step = next(steps)
            yield from self._gathered(step if inputs is not None else None)

    def _eval_stand_in(self, inputs: Any, holders: list[int]) -> Any:
        """A batch of another rank, if the forward is collective or the scaling of the loss is still unknown."""
        is_open = self.run.accounting.undecided_shift or self.internals.loss.accounting_of_evaluation().is_open
        unknown = is_open and not self._eval_learned
        lacking = self.strategy.forward_is_collective and len(holders) < self.strategy.data_world
        if not unknown and not lacking:
            return None
        # A single process learns from its first two batches, and these are the ones of the first two ranks.
        batches = [self._broadcast_from(rank, inputs) for rank in (holders[:2] if unknown else holders[:1])]
        if unknown:
            self._eval_learned = True
            if self.labels_in(batches[0]):
                self.run.accounting.learn_shift(batches[0], self.internals.loss.shift_probe())
            if self.has_loss(batches[0]):
                self.internals.loss.learn_eval_loss(batches)
        return batches[0] if lacking else None

    def _broadcast_from(self, source: int, inputs: Any) -> Any:
        """The batch of one rank, on all ranks."""
        own = on_host(inputs) if self.strategy.data_rank == source else None
        return self.strategy.broadcast(own, source * self.strategy.copies)

    def _gathered(self, step: EvalStep | None) -> Iterator[EvalStep]:
        own = None
        if step is not None:
            own = (step.loss, step.logits, step.labels, step.inputs, step.items, step.samples)
        for each in self.processes.gather_each(own, objects=self.args.eval_use_gather_object):
            if each is not None:
                yield EvalStep(*each)


def signal_number(signals: SignalWatch) -> int:
    """The signal this rank received, as a number that fits into a row of numbers; 0 is none."""
    return SIGNALS.index(signals.noted or "")


def adopt_signal(signals: SignalWatch, numbers: list[float]) -> None:
    """Adopt the signal any rank received; one that saves takes precedence."""
    signals.received = SIGNALS[int(min(number for number in numbers if number))]


def _taken_from(waiting: list[Any]) -> Iterator[Any]:
    """The last element of the list, removed, at each iteration."""
    while True:
        yield waiting.pop()


class FlagAgreement:
    """After an event: flags that callbacks set on one rank are set on all ranks."""

    MOMENTS = ("on_train_begin", "on_epoch_begin", "on_step_end", "on_epoch_end", "on_evaluate", "on_save")
    ALONE = ("save_minutes", "save_trigger_file", "max_runtime")
    """Arguments whose effect depends on the clock or the disk of a rank."""

    def __init__(self, all_gather_numbers: Callable[[list[float]], list[list[float]]]) -> None:
        self._all_gather_numbers = all_gather_numbers
        self._differs: bool | None = None
        """Whether callbacks of any rank may set control independently; None before the first all-gather."""

    def __call__(self, handler: CallbackHandler, event: str) -> None:
        if event not in self.MOMENTS:
            return
        if self._differs is None or event == "on_train_begin":
            # Gathered from all ranks: a callback may exist on one rank only, and then all have to exchange control.
            self._differs = any(row[0] for row in self._all_gather_numbers([float(self._may_differ(handler))]))
        if self._differs:
            control = handler.control
            wishes = [each.name for each in dataclasses.fields(control)]
            rows = self._all_gather_numbers([float(getattr(control, name)) for name in wishes])
            for name, values in zip(wishes, zip(*rows, strict=True), strict=True):
                setattr(control, name, any(values))

    def _may_differ(self, handler: CallbackHandler) -> bool:
        """Whether a flag can depend on anything but the state of the run, which is the same on all ranks."""
        if any(getattr(handler.args, name) is not None for name in self.ALONE):
            return True
        known = ("loopwright.", "transformers.")
        return any(not type(each).__module__.startswith(known) for each in handler.callbacks)
