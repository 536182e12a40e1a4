"""Comparing a compiled region with the model as written, on an update as it is trained: with dropout."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor

from ..compile.region import MODEL, Region
from ..cuda_graphs.contexts import any_wait_is_fine, autocast_without_cache
from ..layouts.rows import MASK
from ..training_setup import TrainingSetup
from .distance import HALF
from .prober import Candidate, Prober, Proof, ProofRefused, Setting, tolerance_of

RUNS = 3
"""Runs of a micro-batch that are timed, after one that is not."""
BUSY_CYCLES = 400_000_000
"""A fifth of a second of an idle kernel, in which the host launches a micro-batch."""


def region_inputs(batch: Any, region: Region) -> Any:
    """A batch as a region gets it: for a whole model without its mask, if the mask holds ones only."""
    mask = batch.get(MASK) if region.scope == MODEL and isinstance(batch, Mapping) else None
    if not isinstance(mask, Tensor) or mask.device.type != "cpu" or not bool(mask.all()):
        return batch
    return {name: value for name, value in batch.items() if name != MASK}


class RegionProver:
    """Compares updates, and times micro-batches, with a region and without it."""

    def __init__(
        self,
        setup: TrainingSetup,
        region: Region,
        *,
        in_graph: bool,
        prepare: Callable[[Any], Any] = lambda batch: batch,
    ) -> None:
        self._setup, self._region = setup, region
        self._prepare = prepare
        """Converts a micro-batch on the device to what the region gets."""
        self._prober = Prober(setup.model, setup.loss_of, sandbox=lambda: setup.sandbox_compiled())
        tolerance = HALF if setup.computes_half else tolerance_of(setup.model)

        @contextmanager
        def as_trained() -> Iterator[None]:
            # Compiled code depends on autocast's cache, which is off in a graph.
            with autocast_without_cache() if in_graph else nullcontext(), setup.as_trained():
                yield

        # Both draw the same random numbers, so that the code compared is the code used.
        self._setting = Setting(tolerance, train=True, whole=False, around=as_trained, drops=True)

    def prove(self, batches: Sequence[Any], *, name: str) -> Proof:
        """Compare loss, gradients and state of an update; new shapes are compiled."""
        setup, region = self._setup, self._region
        try:
            with any_wait_is_fine(), region.installed(False), self._sparing():
                given = [setup.to_device(batch) for batch in batches]
                reference = self._prober.reference(None, given, self._setting, repeats=False)
        except ProofRefused as reason:
            return Proof(name, has_no_reference=True).refuse(str(reason))
        del given
        reference.batches = [self._prepare(setup.to_device(region_inputs(batch, region))) for batch in batches]
        candidate = Candidate.on_batches(name, region.installed)
        times = region.times
        with any_wait_is_fine(), region.open():
            proof = self._prober.prove(candidate, reference, divided=False)
        if proof.accepted and region.times == times:
            proof.refuse("the inputs of the compiled modules are not plain tensors")
        return proof

    def _sparing(self) -> AbstractContextManager[None]:
        """Recomputes activations of the update as written, unless that would update running statistics twice."""
        modules = self._setup.model.modules()
        is_normed = any(getattr(module, "track_running_stats", False) for module in modules)
        return nullcontext() if is_normed else self._setup.sparing()

    def seconds(self, batches: Sequence[Any], *, with_region: bool, around: Callable[[], Any] = nullcontext) -> float:
        """Seconds of forward and backward of the first micro-batch, measured."""
        batch = region_inputs(batches[0], self._region) if with_region else batches[0]
        run = trial(self._setup, batch)
        with any_wait_is_fine(), self._region.installed(with_region), around(), self._prober.quiet(self._setting):
            run()
            return min(_seconds(run, self._setup.device) for _ in range(RUNS))  # others may use host and device too

    def device_seconds(self, batches: Sequence[Any], *, is_compiled: bool) -> float:
        """Seconds of the device for the first micro-batch, as written or prepared and compiled, launches left out."""
        batch = region_inputs(batches[0], self._region) if is_compiled else batches[0]
        run = trial(self._setup, batch, self._prepare if is_compiled else lambda each: each)
        with any_wait_is_fine(), self._region.installed(is_compiled), self._prober.quiet(self._setting):
            run()
            return min(_device_seconds(run, self._setup.device) for _ in range(RUNS))


def trial(
    setup: TrainingSetup, batch: Any, prepare: Callable[[Any], Any] = lambda batch: batch
) -> Callable[[], None]:
    """A function that computes the loss of a micro-batch and its gradients, and keeps neither."""
    parameters = [p for p in setup.model.parameters() if p.requires_grad]
    given = prepare(setup.to_device(batch))

    def backward(loss: Tensor | None, factor: Any = None) -> None:
        if loss is not None:
            torch.autograd.grad(loss, parameters, allow_unused=True)

    def run() -> None:
        with torch.enable_grad():
            setup.loss_of([given], lambda each: each, backward)

    return run


def _seconds(run: Callable[[], None], device: torch.device) -> float:
    _wait(device)
    started = time.perf_counter()
    run()
    _wait(device)
    return time.perf_counter() - started


def _device_seconds(run: Callable[[], None], device: torch.device) -> float:
    """Seconds between two events, with the device kept busy while the host launches everything between them."""
    if device.type != "cuda":
        return _seconds(run, device)
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    _wait(device)
    torch.cuda._sleep(BUSY_CYCLES)
    start.record()
    run()
    end.record()
    _wait(device)
    return float(start.elapsed_time(end)) / 1000


def _wait(device: torch.device) -> None:
    if device.type != "cpu":
        torch.accelerator.synchronize(device)
