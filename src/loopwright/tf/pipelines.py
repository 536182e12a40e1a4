"""tf.data pipelines as sources of batches; restored from the iterator's state, or by skipping batches."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import tensorflow as tf

from ..keras.data.host_batch import HostBatch
from ..keras.data.sources import Finish, Skipping, Source

LARGEST_BUFFER = 100_000
"""Maximum size of the shuffle buffer of an unbatched tf.data pipeline."""


class TFDataSource(Source):
    """A tf.data pipeline; an unbatched one is shuffled by seed and epoch, and batched."""

    STATE = "tf_data"

    def __init__(
        self,
        dataset: Any,
        *,
        finish: Finish,
        size: int = 0,
        drop_last: bool = False,
        shuffle_seed: int | None = None,
        batched: bool = True,
    ) -> None:
        super().__init__()
        self._dataset, self._size, self._drop, self._finish = dataset, size, drop_last, finish
        self._seed, self._batched = shuffle_seed, batched
        self._iterator: Any = None
        self._begun = 0
        """Epochs that were begun in this process."""
        self.cannot_save: str | None = None
        """Why TensorFlow could not save the iterator, after a failed attempt."""
        known = int(dataset.cardinality())
        if known >= 0:
            self.batches = known if batched else (known // size if drop_last else -(-known // size))
            self.examples = None if batched else known

    def _pipeline(self, epoch: int) -> Any:
        dataset = self._dataset
        if self._batched:
            return dataset
        if self._seed is not None:
            known = int(dataset.cardinality())
            buffer = min(known if known > 0 else 10_000, LARGEST_BUFFER)
            dataset = dataset.shuffle(buffer, seed=self._seed + epoch, reshuffle_each_iteration=False)
        if _is_ragged(dataset):
            return dataset.padded_batch(
                self._size, drop_remainder=self._drop, padding_values=_padding(dataset.element_spec)
            )
        return dataset.batch(self._size, drop_remainder=self._drop)

    def open(
        self, epoch: int, *, samples: int = 0, batches: int = 0, state: Any = None, skipping: Skipping = None
    ) -> Iterator[HostBatch]:
        pipeline, is_over = self._pipeline(epoch), bool(batches) and batches == self.batches
        restores = bool(batches) and state is not None and not is_over
        self._begin_earlier(epoch + is_over - restores)  # restoring begins one epoch more
        self._begun, self.position = epoch + 1, batches
        if is_over:
            return
        if not batches:
            self._iterator = iter(pipeline.prefetch(2))
        elif not restores or not self._put_back(pipeline, state):
            if skipping is not None:
                skipping()
            self._iterator = iter(pipeline.skip(batches).prefetch(2))
        for element in self._iterator:
            self.position += 1
            yield self._finish(element)

    def _begin_earlier(self, epochs: int) -> None:
        """Begin the epochs that another process has read: TensorFlow draws the order of a `shuffle` each time."""
        for _ in range(self._begun, epochs):
            iter(self._dataset)

    def _put_back(self, pipeline: Any, state: Any) -> bool:
        """Restore the iterator's state; returns whether that succeeded."""
        self._iterator = iter(pipeline.prefetch(2))
        try:
            tf.train.Checkpoint(iterator=self._iterator).read(str(Path(state) / self.STATE)).assert_consumed()
        except (tf.errors.OpError, AssertionError):
            return False
        return True

    def first(self) -> HostBatch | None:
        found = super().first()
        self._begun = 0
        return found

    def files(self) -> Path | None:
        if self._iterator is None or self.cannot_save:
            return None
        folder = Path(tempfile.mkdtemp(prefix="loopwright-tf-data-"))
        try:
            tf.train.Checkpoint(iterator=self._iterator).write(str(folder / self.STATE))
        except tf.errors.OpError as error:
            shutil.rmtree(folder, ignore_errors=True)
            self.cannot_save = str(error.message).splitlines()[0][:200]
            return None
        return folder


def _is_ragged(dataset: Any) -> bool:
    shapes = [spec.shape for spec in tf.nest.flatten(dataset.element_spec)]
    return any(shape.rank is None or None in shape.as_list() for shape in shapes)


def _padding(spec: Any) -> Any:
    """Padding values: 0 for features; -100, which losses ignore, for integer labels."""

    def zero(each: Any) -> Any:
        return tf.constant("" if each.dtype == tf.string else 0, each.dtype)

    if not isinstance(spec, tuple) or len(spec) != 2:
        return tf.nest.map_structure(zero, spec)
    labels = tf.nest.map_structure(
        lambda each: tf.constant(-100, each.dtype) if each.dtype.is_integer and each.shape.rank else zero(each), spec[1]
    )
    return tf.nest.map_structure(zero, spec[0]), labels
