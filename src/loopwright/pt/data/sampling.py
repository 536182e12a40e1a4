"""Sampling: the order of the training samples, and which of them are in an update."""

from __future__ import annotations

from typing import Any

from torch.utils.data import Sampler

from ...core.overrides import adapt
from ...core.update import Place
from ...snapshot import untouched_rng
from ..loss.targets import count_samples
from .balancing import BalancedSampler, balanced_sampler
from .loaders import sampling_strategy, training_sampler
from .packing import packed_sampler, packed_samples
from .shape_checks import Shapes


class Sampling(Shapes):
    """Samplers of the training data; users may override `_get_train_sampler` on the trainer."""

    def _call_train_sampler(self, dataset: Any) -> Any:
        return adapt(self.trainer._get_train_sampler, "train_dataset")(train_dataset=dataset)

    def _get_train_sampler(self, train_dataset: Any = None) -> Sampler[Any] | None:
        """The sampler of the training data: seed, epoch and position determine the order."""
        dataset = self.trainer.train_dataset if train_dataset is None else train_dataset
        group_size = self.args.train_batch_size * self._accumulation() * self.strategy.data_world
        sampler = training_sampler(dataset, self.args, group_size=group_size, input_name=self.input_name())
        if sampler is not None and sampling_strategy(self.args) == "batch_rebalance":
            return balanced_sampler(
                sampler, dataset, self.args, group_size=group_size, input_name=self.input_name()
            )
        if sampler is None or not self.args.batch_packing:
            return sampler
        is_pair = getattr(getattr(self.model, "config", None), "is_encoder_decoder", False)
        names = [self.input_name(), "labels"] if is_pair else [self.input_name()]
        return packed_sampler(sampler, dataset, self.args, names)

    def _get_eval_sampler(self, eval_dataset: Any) -> Sampler[Any] | None:
        """The sampler of evaluation data; None reads it in its own order."""
        return None

    def input_name(self) -> str:
        names = getattr(self.trainer.processing_class, "model_input_names", None)
        return names[0] if names else getattr(self.model, "main_input_name", "input_ids")

    def samples_in(self, batches: list[Any]) -> int:
        """The samples of an update: from loopwright's order if it is used, else counted in the batches."""
        if self.run.order_sampler is None:
            return sum(map(count_samples, batches))
        if self.run.order_sampler.packing is not None:
            return packed_samples(self.run.order_sampler, len(batches), self.run.progress.samples_in_epoch)
        if self.run.order_sampler.part is not None:
            return self.run.order_sampler.samples_ahead(len(batches), self.run.progress.samples_in_epoch)
        whole = len(batches) * self.run.plan.batch_size
        left = self.run.order_sampler.order.n - self.run.progress.samples_in_epoch
        return whole if whole < left else left

    def samples_at(self, place: Place) -> tuple[list[int], list[Any]] | None:
        """An update's sample indices, and its micro-batches loaded again; None if the data has its own order."""
        if self.run.order_sampler is None:
            return None
        dataset: Any = self.trainer.train_dataset
        indices = self.run.order_sampler.order.epoch(place.epoch)[place.first : place.first + place.samples].tolist()
        collate = self.trainer._get_collator_with_removed_columns(self.trainer.data_collator, description="training")
        packing, size = self.run.order_sampler.packing, self.run.plan.batch_size
        parts = [indices[k : k + size] for k in range(0, len(indices), size)]
        if packing is not None:
            parts = packing.cut(indices)
        elif isinstance(self.run.order_sampler, BalancedSampler):
            parts = self.run.order_sampler.regrouped(indices)
        with untouched_rng():
            batches = [collate([dataset[i] for i in part]) for part in parts]
        return indices, batches

    def _accumulation(self) -> int:
        """Micro-batches per update on each rank."""
        kept = self.run.kept_accumulation
        return self.args.gradient_accumulation_steps if kept is None else kept
