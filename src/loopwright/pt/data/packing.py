"""batch_packing="across_updates": a sampler with micro-batches of as many consecutive samples as fit."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice, pairwise
from typing import Any

from ...args.base import BaseArguments
from ...args.groups.data import DataArgs
from ...core.sampling.packing import PackedPlan, Packing, make_packed_plan
from ...errors import ArgumentsError, NotAvailable
from ...notices import Notices
from ...snapshot import untouched_rng
from .loaders import OrderedSampler, data_seed, ordered_sampler, sample_lengths, seed_all


class PackedSampler(OrderedSampler):
    """Micro-batches of indices in the order of core/order.py, starting at any epoch and position."""

    packing: Packing
    makes_batches = True

    def __init__(self, packing: Packing) -> None:
        super().__init__(packing.order)
        self.packing = packing

    def __len__(self) -> int:
        return self.packing.count(self.epoch)

    def __iter__(self) -> Iterator[Any]:
        places = super().__iter__()
        ends = [self.start, *self.packing.ends(self.epoch, self.start)]
        return (list(islice(places, end - first)) for first, end in pairwise(ends))


def packed_sampler(sampler: OrderedSampler, dataset: Any, args: BaseArguments, input_names: list[str]) -> PackedSampler:
    """The sampler's order in micro-batches of `per_device_train_batch_tokens`; measures all lengths once."""
    if args.world_size > 1:
        raise NotAvailable(
            f"batch_packing={args.batch_packing!r} is not available yet with {args.world_size} processes (WORLD_SIZE), "
            "since every rank would need the micro-batches of all ranks; train without packing, or in one process"
        )
    # With a fixed seed: a dataset with random samples has the same lengths when the run resumes.
    with untouched_rng():
        seed_all(data_seed(args), 0, 0)
        lengths = sample_lengths(dataset, args.length_column_name, input_names, what="batch_packing")
    budget = args.per_device_train_batch_tokens
    assert budget is not None  # validated with the arguments
    return PackedSampler(Packing(sampler.order, lengths, budget, drop_last=args.dataloader_drop_last))


def packed_samples(sampler: OrderedSampler, batches: int, position: int) -> int:
    """Samples in the next micro-batches from a position of the sampler's current epoch."""
    assert sampler.packing is not None
    return sampler.packing.samples_ahead(sampler.epoch, sampler.start, position=position, batches=batches)


def packed_plan(loader: Any, args: BaseArguments, notices: Notices) -> PackedPlan:
    """The plan of a run over this loader; warns about samples that do not fit into a micro-batch."""
    packing = packing_of(loader, args)
    if packing.too_long:
        notices.warn_once(
            f"packing: {packing.too_long:,} of {len(packing.lengths):,} samples are longer than "
            f"per_device_train_batch_tokens={packing.budget:,} (the longest has {packing.lengths.max():,} tokens); "
            "each becomes its own micro-batch"
        )
    return make_packed_plan(
        packing,
        accumulation=args.gradient_accumulation_steps,
        max_steps=args.max_steps,
        num_train_epochs=args.num_train_epochs,
    )


def packing_of(loader: Any, args: DataArgs) -> Packing:
    """How a loader packs samples; raises if its order is not loopwright's."""
    sampler = ordered_sampler(loader)
    if isinstance(sampler, PackedSampler):
        return sampler.packing
    given = type(getattr(loader, "sampler", loader)).__name__
    raise ArgumentsError(
        f"batch_packing={args.batch_packing!r} needs loopwright's own sampling order, but get_train_dataloader or "
        f"_get_train_sampler is overridden ({given}). Remove the override, or pack in your own loader and remove "
        "batch_packing"
    )


def sizes_of_updates(args: DataArgs) -> tuple[str, ...]:
    """The arguments that determine which samples share an update."""
    size = "per_device_train_batch_tokens" if args.batch_packing else "per_device_train_batch_size"
    return ("batch_packing", size, "gradient_accumulation_steps")
