"""Sampling: the order of the training samples, and which of them are in an update."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch.utils.data import Sampler

from ...args.reading import read_dict
from ...core.sampling.mixing import MixedOrder
from ...core.update import Place
from ...core.user_code.overrides import adapt
from ...errors import ArgumentsError
from ...snapshot import untouched_rng
from ..loss.targets import count_samples
from .balancing import BalancedSampler, balanced_sampler
from .loaders import sampling_strategy, training_sampler
from .mixing import MixedDataset, check_mapping, check_packing, mixed_sampler, runs
from .packing import packed_sampler, packed_samples
from .shape_checks import Shapes


class Sampling(Shapes):
    """Samplers of the training data; users may override `_get_train_sampler` on the trainer."""

    _mixed: MixedDataset | None = None
    """The mixture of the current `train_dataset`, if it is one."""
    _mixed_of: Any = None
    _sources: tuple[Any, int, Any] | None = None
    """The order and the epoch of a mixture, and the numbers of its sources by position."""

    def training_data(self) -> Any:
        """The training dataset: that of the trainer, or the mixture of several by name."""
        given = self.trainer.train_dataset
        weights = read_dict(self.args.train_dataset_weights)
        if not isinstance(given, Mapping):
            if weights is not None:
                raise ArgumentsError(
                    f"train_dataset_weights needs several training datasets, train_dataset={{name: dataset}}, but "
                    f"train_dataset is a {type(given).__name__}; name the datasets, or remove the weights"
                )
            return given
        if self._mixed_of is not given or self._mixed is None:
            check_mapping(given)
            self._mixed, self._mixed_of = MixedDataset(given, weights), given
        return self._mixed

    @property
    def splits_by_source(self) -> bool:
        """Whether micro-batches are divided by the sources of their samples, to log the loss of each."""
        order = None if self.run.order_sampler is None else self.run.order_sampler.order
        return isinstance(order, MixedOrder) and self.args.logging_source_losses

    def sources_of(self, batches: int) -> list[list[tuple[str, int]]] | None:
        """For each of this rank's next micro-batches, the sources of its rows and how many; None if they are mixed."""
        sampler, progress = self.run.order_sampler, self.run.progress
        assert sampler is not None and isinstance(sampler.order, MixedOrder) and self._mixed is not None
        if sampler.makes_batches or sampler.order.strategy == "group_by_length":
            return None
        if self._sources is None or self._sources[0] is not sampler.order or self._sources[1] != progress.epoch:
            by_position = sampler.order.source_of(sampler.order.epoch(progress.epoch)[:])
            self._sources = (sampler.order, progress.epoch, by_position)
        rank, world, size = sampler.part or (0, 1, self.run.plan.batch_size)
        starts = [progress.samples_in_epoch + (k * world + rank) * size for k in range(batches)]
        names = self._mixed.names
        return [
            [(names[number], rows) for number, rows in runs(self._sources[2][start : start + size])] for start in starts
        ]

    def _call_train_sampler(self, dataset: Any) -> Any:
        return adapt(self.trainer._get_train_sampler, "train_dataset")(train_dataset=dataset)

    def _get_train_sampler(self, train_dataset: Any = None) -> Sampler[Any] | None:
        """The sampler of the training data: seed, epoch and position determine the order."""
        dataset = self.training_data() if train_dataset is None else train_dataset
        group_size = self.args.train_batch_size * self._accumulation() * self.strategy.data_world
        sampler = training_sampler(dataset, self.args, group_size=group_size, input_name=self.input_name())
        if sampler is not None and isinstance(dataset, MixedDataset):
            if self.args.batch_packing:
                check_packing(dataset)
            batch = self.args.train_batch_size * self.strategy.data_world
            dropped = len(dataset) % batch if self.args.dataloader_drop_last else 0
            sampler = mixed_sampler(sampler, dataset, dropped)
        if sampler is not None and sampling_strategy(self.args) == "batch_rebalance":
            return balanced_sampler(sampler, dataset, self.args, group_size=group_size, input_name=self.input_name())
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
        dataset = self.training_data()
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
