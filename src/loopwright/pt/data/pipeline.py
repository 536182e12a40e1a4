"""Datasets to batches: loaders, samplers, columns, and the run's position in them."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any

from torch.utils.data import DataLoader, Dataset, IterableDataset

from ...core.checkpoint.schema import check_part, count
from ...core.evaluation.entry import named_eval_dataset
from ...core.plan import Plan, make_plan
from ...core.user_code.overrides import adapt, is_overridden
from ...errors import ArgumentsError, DataError
from ...notices import logger
from ...snapshot import restore_rng, snapshot_rng
from ..arguments import TrainingArguments
from ..devices import can_pin_memory
from ..rng import rng_from_json, rng_to_json
from .balancing import BalancedSampler
from .columns import LABEL_COLUMNS, ColumnFilter, forward_parameters, takes_anything
from .loaders import (
    announce_epoch,
    build_loader,
    check_not_empty,
    check_stream_order,
    has_length,
    ordered_sampler,
)
from .loading_errors import add_note_of_loading, take
from .packing import packed_plan
from .prepared import whole_loader
from .sampling import Sampling
from .shard import Share, batches_of_all, draw_order, is_shared, share_loader, share_stream, whole_dataset, whole_length
from .streams import (
    CountedBatches,
    StreamPosition,
    end_position,
    knows_end,
    load_stream_state,
    own_generators,
    read_generators,
    replay,
    stream_state,
)
from .unrecorded import batches_of
from .workers import stop_workers, workers_end_with_errors


class TorchData(Sampling):
    """Loaders, samplers and columns; users may override every public method on the trainer."""

    def __init__(self, internals: Any) -> None:
        super().__init__(internals)
        self.kept_loaders: dict[str, DataLoader[Any]] = {}
        """Evaluation loaders with persistent workers, by the key of `_get_dataloader`."""
        self.kept_for: dict[str, Any] = {}
        """The dataset of each of them: another one with the same key gets a new loader."""
        self.are_columns_named = True
        """Whether `_signature_columns` was set by the user, not found by `_set_signature_columns_if_needed`."""

    # ---- loaders ----------------------------------------------------------------------------------------------------

    def get_train_dataloader(self) -> DataLoader[Any]:
        """The loader of the training data."""
        if self.trainer.train_dataset is None:
            raise DataError("training needs a train_dataset: Trainer(..., train_dataset=...)")
        data = self.training_data()
        check_not_empty(data, "training")
        dataset = self.trainer._remove_unused_columns(data, description="training")
        if isinstance(dataset, IterableDataset):
            check_stream_order(self.args)
        return self.trainer._get_dataloader(
            dataset=dataset,
            description="Training",
            batch_size=self.args.train_batch_size,
            sampler_fn=self._call_train_sampler,
            is_training=True,
        )

    def get_eval_dataloader(self, eval_dataset: str | Dataset[Any] | None = None) -> DataLoader[Any]:
        """The loader of the evaluation data, or of one of its named sets."""
        if eval_dataset is None and self.trainer.eval_dataset is None:
            raise DataError("evaluation needs an eval_dataset: Trainer(..., eval_dataset=...) or evaluate(dataset)")
        key = eval_dataset if isinstance(eval_dataset, str) else "eval"
        if isinstance(eval_dataset, str):
            eval_dataset = named_eval_dataset(self.trainer.eval_dataset, eval_dataset)
        dataset = self.trainer.eval_dataset if eval_dataset is None else eval_dataset
        return self._evaluation_loader(dataset, "evaluation", key)

    def get_test_dataloader(self, test_dataset: Dataset[Any]) -> DataLoader[Any]:
        """The loader of the data to predict."""
        return self._evaluation_loader(test_dataset, "test")

    def _evaluation_loader(self, dataset: Any, description: str, key: str | None = None) -> DataLoader[Any]:
        check_not_empty(dataset, description)
        dataset = self.trainer._remove_unused_columns(dataset, description=description)
        return self.trainer._get_dataloader(
            dataset=dataset,
            description=description.capitalize() if description == "evaluation" else description,
            batch_size=self.args.eval_batch_size,
            sampler_fn=self.trainer._get_eval_sampler,
            **({} if key is None or not self.args.dataloader_persistent_workers else {"dataloader_key": key}),
        )

    def _get_dataloader(
        self,
        dataset: Any,
        description: str,
        batch_size: int,
        sampler_fn: Callable[[Any], Any] | None = None,
        is_training: bool = False,
        dataloader_key: str | None = None,
    ) -> DataLoader[Any]:
        if dataloader_key in self.kept_loaders and self.kept_for[dataloader_key] is dataset:
            return self._for_a_rank(self.kept_loaders[dataloader_key])
        given = dataset
        is_stream = isinstance(dataset, IterableDataset)
        sampler = None if is_stream or sampler_fn is None else sampler_fn(dataset)
        if is_stream and self.strategy.data_world > 1:
            dataset = share_stream(dataset, self.share(), batch_size)
        words = description.lower()
        collate = self.trainer._get_collator_with_removed_columns(self.trainer.data_collator, description=words)
        # Every evaluation creates a new loader, so its workers would not be reused, unless it is kept.
        persists = self.args.dataloader_persistent_workers and (is_training or dataloader_key is not None)
        loader = build_loader(
            dataset,
            args=self.args,
            batch_size=batch_size,
            collate_fn=self._with_static_shapes(collate, dataset, batch_size, words),
            sampler=sampler,
            # Evaluation reads streams to their end, like in transformers.
            drop_last=self.args.dataloader_drop_last and (is_training or not is_stream),
            pin_memory=self.args.dataloader_pin_memory and not self.args.use_cpu and can_pin_memory(self.device),
            persistent_workers=persists,
            keep_order=not is_training,
        )
        vars(loader)["total_batch_size"] = batch_size * self.strategy.data_world
        if dataloader_key is not None and persists:
            if dataloader_key in self.kept_loaders:
                stop_workers(self.kept_loaders[dataloader_key])
            self.kept_loaders[dataloader_key], self.kept_for[dataloader_key] = loader, given
        return self._for_a_rank(loader)

    def _for_a_rank(self, loader: DataLoader[Any]) -> DataLoader[Any]:
        """The loader, which iterates the batches of this rank if code of the user iterates it."""
        if self.strategy.data_world == 1 or is_shared(loader):
            return loader
        prepared: DataLoader[Any] = self.trainer.accelerator.share_prepared(loader, places=False)
        return prepared

    def num_examples(self, dataloader: DataLoader[Any]) -> int:
        """Number of samples of a loader's dataset; an estimate if the dataset has no length."""
        dataset: Any = whole_dataset(dataloader)
        if has_length(dataset):
            return len(dataset)
        return whole_length(dataloader, self.strategy.data_world) * self.args.per_device_train_batch_size

    def share_loader(self, loader: Any) -> Any:
        """A loader of this rank's part of the data."""
        loader = whole_loader(loader)
        if self.strategy.data_world == 1:
            return loader
        return share_loader(loader, self.share(), self.strategy.broadcast, self.notices.warn_once)

    # ---- columns ----------------------------------------------------------------------------------------------------

    def _set_signature_columns_if_needed(self) -> None:
        """Find the parameters of the model's forward; a subclass may set `_signature_columns` itself."""
        if self.trainer._signature_columns is None:
            self.are_columns_named = False
            names = forward_parameters(self.model)
            if names is not None:
                self.trainer._signature_columns = [*names, *LABEL_COLUMNS, *self.trainer.label_names]

    def _remove_unused_columns(self, dataset: Any, description: str | None = None) -> Any:
        """The dataset unchanged: columns are removed after loading, so that lazy transforms see all of them."""
        return dataset

    def _get_collator_with_removed_columns(
        self, data_collator: Callable[[Any], Any], description: str | None = None
    ) -> Callable[[Any], Any]:
        """The collator, wrapped to remove the columns the model does not accept."""
        if not self.args.remove_unused_columns:
            return data_collator
        self.trainer._set_signature_columns_if_needed()
        if self.trainer._signature_columns is None:
            return data_collator
        are_named = self.are_columns_named or is_overridden(self.trainer, "_set_signature_columns_if_needed")
        steps = ("compute_loss", "training_step", "prediction_step")
        return ColumnFilter(
            data_collator,
            set(self.trainer._signature_columns),
            notices=self.notices,
            description=description or "training",
            in_workers=self.args.dataloader_num_workers > 0,
            are_named=are_named,
            passes_made=takes_anything(self.model) or any(is_overridden(self.trainer, name) for name in steps),
        )

    # ---- plan and position ------------------------------------------------------------------------------------------

    def set_initial_training_values(
        self, args: TrainingArguments, dataloader: Any, total_train_batch_size: int | None = None
    ) -> tuple[int, int, int, int, int, int | None, int]:
        """Epochs, updates per epoch, examples, samples of the run, samples per update, batches per epoch, updates."""
        plan = self._plan_of_arguments(dataloader)
        examples = plan.examples if plan.examples is not None else plan.train_samples
        return (
            plan.epochs,
            plan.updates_per_epoch,
            examples,
            plan.train_samples,
            self.trainer.get_total_train_batch_size(args),
            plan.batches_per_epoch,
            plan.max_steps,
        )

    def get_total_train_batch_size(self, args: TrainingArguments) -> int:
        """Effective batch size: samples of one update over all ranks."""
        return args.train_batch_size * args.gradient_accumulation_steps * self.strategy.data_world

    def make_plan(self, loader: Any) -> Plan:
        """The plan of the arguments, or that of an overridden `set_initial_training_values`."""
        plan = self._plan_of_arguments(loader)
        if not is_overridden(self.trainer, "set_initial_training_values"):
            return plan
        override = adapt(self.trainer.set_initial_training_values, "total_train_batch_size")
        values = override(self.args, loader, total_train_batch_size=plan.total_batch_size)
        epochs, updates, examples, _, _, batches, max_steps = values
        return dataclasses.replace(
            plan,
            epochs=epochs,
            updates_per_epoch=updates,
            examples=None if plan.examples is None else examples,
            batches_per_epoch=batches,
            max_steps=max_steps,
        )

    def _plan_of_arguments(self, loader: Any) -> Plan:
        if self.args.batch_packing:
            return packed_plan(loader, self.args, self.notices)
        sized = has_length(loader)
        if not sized and self.args.max_steps <= 0:
            raise ArgumentsError("the training data has no length, so set max_steps")
        return make_plan(
            batch_size=self.args.train_batch_size,
            accumulation=self._accumulation(),
            batches_per_epoch=self._batches_in(loader) if sized else None,
            examples=self.trainer.num_examples(loader) if sized else None,
            max_steps=self.args.max_steps,
            num_train_epochs=self.args.num_train_epochs,
            world_size=self.strategy.data_world,
        )

    def share(self) -> Share:
        """The part of the data this rank uses."""
        return Share(self.strategy.data_rank, self.strategy.data_world)

    def _batches_in(self, loader: Any) -> int:
        """Batches over all ranks in an epoch."""
        if self.strategy.data_world == 1:
            return len(loader)
        if self.run.counted_loader is None or self.run.counted_loader[0] is not loader:  # a collective, so once only
            count = batches_of_all(loader, lambda own: sum(row[0] for row in self.processes.all_gather_numbers([own])))
            self.run.counted_loader = (loader, count)
        return self.run.counted_loader[1]

    def plan_again(self) -> Plan:
        if self.run.loader is not None and isinstance(ordered_sampler(self.run.loader), BalancedSampler):
            raise ArgumentsError(
                f"gradient_accumulation_steps was changed after step {self.state.global_step}, but with "
                "train_sampling_strategy='batch_rebalance' the micro-batches of a step are made together; keep it, or "
                "use another train_sampling_strategy"
            )
        self.run.kept_accumulation = None  # the user has set another value
        return self.make_plan(self.run.loader)

    def release(self) -> None:
        """Stop the loader's persistent workers, whose later collection would take seconds."""
        if self.run.loader is not None and not is_overridden(self.trainer, "get_train_dataloader"):
            stop_workers(self.run.loader)
        for loader in self.kept_loaders.values():
            stop_workers(loader)

    def ended_with_errors(self) -> AbstractContextManager[None]:
        return workers_end_with_errors()

    def epoch_batches(self, epoch: int) -> Iterator[Any]:
        """The micro-batches of an epoch, starting at the run's current position.

        The random states of a checkpoint are restored at the same point where they were saved: inside an epoch, after
        the loader has drawn its seed for it; between two epochs, before that.
        """
        loader, progress = self.run.loader, self.run.progress
        self.run.batches_overridden = is_overridden(self.trainer, "get_batch_samples")
        announce_epoch(loader, epoch)
        if progress.batches_in_epoch == 0:
            self.internals.saving.put_back_rng()
            if self.internals.may_be_undone():
                # If the first update of an epoch is undone, the epoch restarts and its loader draws its seed again.
                self.run.snapshot = self.strategy.snapshot()
        self.restart_epoch()
        done = progress.batches_in_epoch
        self.run.order_sampler = sampler = ordered_sampler(loader)
        self.run.splits_by_source = self.splits_by_source
        if sampler is not None:
            sampler.go_to(epoch, progress.samples_in_epoch)
            batches = iter(loader) if self.run.batches_overridden else batches_of(loader)  # an override may read more
        else:
            batches = self._stream_from(loader, done if self.is_alone else self.share().batches_of(done))
        self.internals.saving.put_back_rng()
        return batches

    def _stream_from(self, loader: Any, done: int) -> Iterator[Any]:
        """Data with its own order, after `done` batches: from its saved state, or read again from the start."""
        saved, self.run.stream, self.run.stream_end = self.run.stream, None, None
        self._restore_generators(loader)
        if done and saved is not None and load_stream_state(loader, saved.state):
            batches = iter(loader)
            if saved.batches:  # up to the end
                take(batches, saved.batches)
                self.run.stream_end = saved
            return batches
        if done and self.run.epoch_rng is not None:
            restore_rng(self.run.epoch_rng)  # repeat the draws that determine the order
        self.run.epoch_rng = snapshot_rng()
        batches = iter(loader)
        draw_order(loader)
        if done:
            self.notices.warn_once(f"this dataset cannot seek: re-reading and skipping the {done} batches already used")
            replay(batches, done, logger.warning)
        return batches

    def _restore_generators(self, loader: Any) -> None:
        """Restore the random generators of a loader of the user, and note their states for the next checkpoint."""
        generators = own_generators(loader)
        for generator, state in zip(generators, self.run.resume_generators, strict=False):
            generator.set_state(state)
        self.run.resume_generators = []
        self.run.generators = [generator.get_state() for generator in generators]

    def part_states(self) -> dict[str, Any]:
        states: dict[str, Any] = {}
        # Before the first epoch of a resumed run, its sampler is still that of the loader.
        if self.run.loader is not None and (self.run.order_sampler or ordered_sampler(self.run.loader)) is None:
            position, inside = self._stream_position(), self.run.progress.batches_in_epoch > 0
            states["stream"] = position.state if inside else None
            if states["stream"] is not None:
                states["stream_again"] = position.batches
            states["epoch_rng"] = None if self.run.epoch_rng is None else rng_to_json(self.run.epoch_rng)
            if generators := self._generator_states(at_start=inside or self.run.undone):
                states["generators"] = generators
        return states

    def _stream_position(self) -> StreamPosition:
        """The position in the stream; at its end, where it may start over, relative to the update before."""
        run = self.run
        known = run.stream or (run.stream_before if run.undone else run.stream_end)  # the first is not restored yet
        return known or StreamPosition(stream_state(run.loader))

    def _generator_states(self, *, at_start: bool) -> list[list[int]]:
        """The states of the loader's own random generators: at the beginning of the epoch, or now."""
        now = [generator.get_state() for generator in own_generators(self.run.loader)]
        states = self.run.resume_generators or (self.run.generators if at_start else now)
        return [state.tolist() for state in states]

    def load_part_states(self, states: dict[str, Any]) -> None:
        again = check_part(states.get("stream_again", 0), count())
        self.run.stream = None if states.get("stream") is None else StreamPosition(states["stream"], again)
        self.run.epoch_rng = rng_from_json(states["epoch_rng"]) if states.get("epoch_rng") else None
        self.run.resume_generators = read_generators(states.get("generators", []))

    def next_batches(self, batches: Iterator[Any]) -> list[Any]:
        run = self.run
        if run.order_sampler is None and (self.internals.may_be_undone() or not knows_end(run.loader)):
            run.stream_before = run.stream_end or StreamPosition(stream_state(run.loader))
        try:
            if run.order_sampler is not None:
                return self._taken(batches)
            counted = CountedBatches(batches)
            found = self._taken(counted)
            run.stream_end = run.stream_end or end_position(run.loader, counted, run.stream_before)
            return found
        except Exception as error:  # dataset and collator may raise anything; re-raised with a note
            add_note_of_loading(error, "training", self.internals.moment(ahead=1))
            raise

    def _taken(self, batches: Iterator[Any]) -> list[Any]:
        number = self.run.plan.accumulation
        if not self.run.batches_overridden:
            return take(batches, number)
        return adapt(self.trainer.get_batch_samples, "device")(batches, number, device=self.device)[0]

    def get_batch_samples(self, epoch_iterator: Iterator[Any], num_batches: int, device: Any) -> tuple[list[Any], Any]:
        """The next micro-batches of one update, and their number of targets."""
        batches = take(epoch_iterator, num_batches)
        return batches, self.trainer._get_num_items_in_batch(batches, device)
