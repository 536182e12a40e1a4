"""Reading the samples of updates, with what earlier updates have shown about their entries."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from ..proof.guard import image_tokens_of, samples_of
from ..training_setup import TrainingSetup
from .positions import check_lengths, longest_alike
from .samples import NoSamples, OddSamples, Samples


class SampleReader:
    """Separates the samples of an update."""

    def __init__(self, setup: TrainingSetup, whole: set[str], *, tell: Callable[[str], None]) -> None:
        self._setup, self._tell = setup, tell
        self._whole = whole
        """Entries of batches that have no token dimension; added to."""
        self._image_tokens = image_tokens_of(getattr(setup.model, "config", None))
        self._longest_alike = longest_alike(setup.model)

    def read(self, batches: Sequence[Any]) -> Samples:
        """The samples; raises `NoSamples` if they cannot be separated."""
        setup = self._setup
        samples = samples_of(
            batches, is_pair=setup.is_pair, shifts=setup.shifts(), whole=self._whole, image_tokens=self._image_tokens
        )
        self._whole.update(samples.per_sample())
        check_lengths(samples, self._longest_alike)
        return samples

    def read_to_lay(self, batches: Sequence[Any]) -> Samples:
        """The samples, to lay them out; raises `NoSamples` if they cannot be separated, or must not be regrouped."""
        samples = self.read(batches)
        if self._setup.shifts() and samples.first_targets_are_counted():
            raise OddSamples("a left-padded sample has a target on its first token")
        return samples

    def read_or_none(self, batches: Sequence[Any]) -> Samples | None:
        """The samples to lay out, or None if the update keeps the collator's batches."""
        try:
            return self.read_to_lay(batches)
        except NoSamples as reason:
            self._tell(f"speed: keeping the collator's batches when they look like these: {reason}")
            return None
