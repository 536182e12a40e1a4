"""Datasets to batches: sources, their order, and the position of a run in them."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from ...core.evaluation.entry import named_eval_dataset
from ...core.order import Order
from ...core.part import DataPart
from ...core.plan import Plan, make_plan
from ...core.update import Place
from ...core.user_code.overrides import is_overridden
from ...errors import ArgumentsError, DataError
from ..part import KerasPart
from .host_batch import HostBatch, as_array, mapped, rows_of, split_batch, stack_samples
from .sources import (
    INFINITE,
    MapSource,
    Source,
    StreamSource,
    check_data,
    is_batched,
    is_columns,
    is_map_style,
    is_tf_data,
    picker,
)


class KerasData(KerasPart, DataPart):
    """Sources of batches, their order and their position; every public method may be overridden."""

    # ---- what may be overridden -------------------------------------------------------------------------------------

    def get_train_tfdataset(self) -> Any:
        """The batches of the training data; an override may return a batched tf.data pipeline."""
        if self.trainer.train_dataset is None:
            raise DataError(f"training needs a train_dataset: {self.internals.trainer_name}(..., train_dataset=...)")
        return self._make_source(self.trainer.train_dataset, "training", self.args.train_batch_size, training=True)

    def get_eval_tfdataset(self, eval_dataset: Any = None) -> tuple[Any, int | None, int | None]:
        """The batches of the evaluation data, and the numbers of batches and samples (None if unknown)."""
        if isinstance(eval_dataset, str):
            eval_dataset = named_eval_dataset(self.trainer.eval_dataset, eval_dataset)
        dataset = self.trainer.eval_dataset if eval_dataset is None else eval_dataset
        if dataset is None:
            given = f"{self.internals.trainer_name}(..., eval_dataset=...)"
            raise DataError(f"evaluation needs an eval_dataset: {given} or evaluate(dataset)")
        source = self._make_source(dataset, "evaluation", self.args.eval_batch_size)
        return source, source.batches, source.examples

    def get_test_tfdataset(self, test_dataset: Any) -> tuple[Any, int | None, int | None]:
        """The batches of the data to predict, and the numbers of batches and samples (None if unknown)."""
        source = self._make_source(test_dataset, "test", self.args.eval_batch_size)
        return source, source.batches, source.examples

    # ---- sources ----------------------------------------------------------------------------------------------------

    def _make_source(self, dataset: Any, what: str, size: int, *, training: bool = False) -> Source:
        check_data(dataset, what)
        drop = training and self.args.dataloader_drop_last
        finish = self.finish
        if is_tf_data(dataset):
            return self._pipeline_source(dataset, what, size, training=training, drop=drop)
        collate = self.trainer.data_collator or stack_samples
        if is_columns(dataset) or is_map_style(dataset):
            pick, n = picker(dataset, collate, own_collator=self.trainer.data_collator is not None)
            order = self._order(dataset, n) if training else Order(n, 0, "sequential")
            return MapSource(pick, n, order, size=size, drop_last=drop, finish=finish)
        if training and self._sampling() == "group_by_length":
            raise ArgumentsError("train_sampling_strategy='group_by_length' needs a dataset that can be indexed")
        return StreamSource(dataset, collate, size=size, drop_last=drop, finish=finish)

    def _pipeline_source(self, dataset: Any, what: str, size: int, *, training: bool, drop: bool) -> Source:
        if not training and int(dataset.cardinality()) == INFINITE:
            raise DataError(f"the {what} pipeline never ends; pass dataset.take(number)")
        batched = is_batched(dataset)
        if batched:
            self.notices.warn_once(
                f"the {what} pipeline is already batched: its batches are split across all replicas, and it is not "
                "shuffled"
            )
        if training and self._sampling() == "group_by_length":
            raise ArgumentsError("train_sampling_strategy='group_by_length' needs a dataset that can be indexed")
        seed = self._data_seed() if training and self._sampling() == "random" else None
        return self.open_pipeline(dataset, size=size, drop_last=drop, shuffle_seed=seed, batched=batched)

    def open_pipeline(self, dataset: Any, **options: Any) -> Source:
        """A tf.data pipeline as a source; with `batched=False` it is batched here. Imports TensorFlow."""
        raise NotImplementedError

    def finish(self, batch: Any) -> HostBatch:
        """Host arrays of a batch, split into features and labels, without columns that the model does not accept."""
        features, labels = split_batch(batch, self.trainer.label_names)
        features = mapped(as_array, self._wanted_columns(features))
        return HostBatch(features, mapped(as_array, labels), rows_of(features))

    def _wanted_columns(self, features: Any) -> Any:
        inputs = self.internals.info.inputs
        if not isinstance(features, Mapping) or inputs is None or not self.args.remove_unused_columns:
            return features
        if len(inputs) == 1 and len(features) == 1:
            return next(iter(features.values()))  # a single input may have any column name
        surplus = [name for name in features if name not in inputs]
        kept = {name: value for name, value in features.items() if name in inputs}
        if surplus and kept:
            self.notices.inform_once(f"columns removed because the model does not accept them: {', '.join(surplus)}")
        return kept[inputs[0]] if len(inputs) == 1 and kept else kept or features

    # ---- order ------------------------------------------------------------------------------------------------------

    def _sampling(self) -> str:
        return str(getattr(self.args.train_sampling_strategy, "value", self.args.train_sampling_strategy))

    def _data_seed(self) -> int:
        return self.args.seed if self.args.data_seed is None else self.args.data_seed

    def _order(self, dataset: Any, n: int) -> Order:
        strategy = self._sampling()
        lengths = self._lengths(dataset, n) if strategy == "group_by_length" else None
        group = self.args.train_batch_size * self.args.gradient_accumulation_steps
        return Order(n, self._data_seed(), strategy, lengths=lengths, group_size=group)

    def _lengths(self, dataset: Any, n: int) -> list[int]:
        column = self.args.length_column_name
        if isinstance(dataset, Mapping) or getattr(dataset, "column_names", None):
            names = list(dataset) if isinstance(dataset, Mapping) else dataset.column_names
            name = next((each for each in (column, "input_ids") if each in names), None)
            if name is not None:
                return [int(each) if name == column else len(each) for each in dataset[name]]
        first = dataset[0]
        name = next((each for each in (column, "input_ids") if isinstance(first, Mapping) and each in first), None)
        if name is None:
            raise DataError(f"grouping by length needs a column {column!r} or 'input_ids'")
        return [int(dataset[i][name]) if name == column else len(dataset[i][name]) for i in range(n)]

    # ---- plan and position ------------------------------------------------------------------------------------------

    def make_plan(self, source: Any) -> Plan:
        if source.batches is None and self.args.max_steps <= 0:
            raise ArgumentsError("the training dataset has no length; set max_steps")
        return make_plan(
            batch_size=self.args.train_batch_size,
            accumulation=self.args.gradient_accumulation_steps,
            batches_per_epoch=source.batches,
            examples=source.examples,
            max_steps=self.args.max_steps,
            num_train_epochs=self.args.num_train_epochs,
        )

    def plan_again(self) -> Plan:
        return self.make_plan(self.run.source)

    def training_source(self) -> Source:
        """The return value of `get_train_tfdataset` as a source."""
        given = self.trainer.get_train_tfdataset()
        if isinstance(given, Source):
            return given
        if is_tf_data(given):
            return self.open_pipeline(given)
        if not is_overridden(self.trainer, "get_train_tfdataset") or not hasattr(given, "__iter__"):
            raise DataError(f"get_train_tfdataset returned a {type(given).__name__}; return an iterable of batches")
        return StreamSource(given, lambda batches: batches[0], size=1, drop_last=False, finish=self.finish)

    def epoch_batches(self, epoch: int) -> Iterator[HostBatch]:
        """The micro-batches of an epoch, from the current position on."""
        progress, source = self.run.progress, self.run.source
        self.restart_epoch()
        done = progress.batches_in_epoch
        if source.ordered:
            self.internals.saving.put_back_rng()
            return source.open(epoch, samples=progress.samples_in_epoch, batches=done)
        state, self.run.stream = self.run.stream, None
        if not done:
            self.internals.saving.put_back_rng()
            self.run.epoch_rng = self.strategy.streams.snapshot()
            return source.open(epoch)
        place = {"samples": progress.samples_in_epoch, "batches": done, "state": state}
        return self._then_put_back_rng(source.open(epoch, **place, skipping=lambda: self._begin_skip(done)))

    def _then_put_back_rng(self, batches: Iterator[HostBatch]) -> Iterator[HostBatch]:
        """The batches; random states are restored after the skipped batches were read."""
        first = next(batches, None)
        self.internals.saving.put_back_rng()
        if first is not None:
            yield first
            yield from batches

    def _begin_skip(self, done: int) -> None:
        self.notices.warn_once(
            f"this dataset cannot seek: re-reading and skipping the {done} batches already trained on"
        )
        if self.run.epoch_rng is not None:
            self.strategy.streams.restore(self.run.epoch_rng)  # the dataset draws the same random numbers again

    def samples_at(self, place: Place) -> tuple[list[int], list[HostBatch]] | None:
        """Indices and reloaded micro-batches of an update; None if the dataset determines its own order."""
        if not isinstance(self.run.source, MapSource):
            return None
        with self.strategy.streams.untouched():
            batches = self.run.source.open(place.epoch, samples=place.first)
            number = math.ceil(place.samples / self.run.plan.batch_size)
            found = [batch for batch, _ in zip(batches, range(number), strict=False)]
        indices = self.run.source.order.epoch(place.epoch)[place.first : place.first + place.samples]
        return indices.tolist(), found

    def part_states(self) -> dict[str, Any]:
        states: dict[str, Any] = {}
        if self.run.source is not None and not self.run.source.ordered:
            inside = bool(self.run.progress.batches_in_epoch)
            states["stream"] = self.run.source.state() if inside else None
            states["epoch_rng"] = (
                None if self.run.epoch_rng is None else self.strategy.streams.to_json(self.run.epoch_rng)
            )
        return states

    def load_part_states(self, states: dict[str, Any]) -> None:
        self.run.stream = states.get("stream")
        epoch_rng = states.get("epoch_rng")
        self.run.epoch_rng = self.strategy.streams.from_json(epoch_rng) if epoch_rng else None

    def source_files(self) -> Path | None:
        """Write the files of a pipeline's state; None, with one warning, if it cannot be saved."""
        source = self.run.source
        if source is None or source.ordered or not self.run.progress.batches_in_epoch:
            return None
        folder = source.files()
        if getattr(source, "cannot_save", None):
            self.notices.warn_once(
                f"TensorFlow cannot save the position of this pipeline ({source.cannot_save}): a resumed run re-reads "
                "and skips the batches of its epoch"
            )
        return folder
