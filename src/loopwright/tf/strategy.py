"""The TensorFlow strategy: one compiled update on one device or on the replicas of a tf.distribute strategy.

An update is one call of a `tf.function`: forward and backward of all its micro-batches, the sum over replicas,
clipping, the optimizer step.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import numpy as np
import tensorflow as tf

from ..core.update import Update
from ..keras.data.host_batch import HostBatch, can_be_stacked, even_cuts, mapped, pad_rows, stacked, with_row_weights
from ..keras.strategy import KerasStrategy, UpdateRules, as_host, plain_errors
from .compiled import FlatFunction
from .rng import TFStreams
from .variables import raw

MicroGradients = Callable[[Any, Any, Any, Any], tuple[list[Any], Any, Any]]
"""(features, labels, row weights, items of the update) -> gradients, loss and number of items."""


class TFStrategy(KerasStrategy):
    """Runs updates with TensorFlow."""

    def __init__(self, distribution: Any, *, apply: Callable[..., Any], rank: int, world_size: int, xla: bool) -> None:
        devices = [*tf.config.list_logical_devices("GPU"), *tf.config.list_logical_devices("TPU")]
        super().__init__(
            TFStreams(), replicas=int(distribution.num_replicas_in_sync), reads_are_free=not devices, rank=rank,
            world_size=world_size,
        )  # fmt: skip
        self.distribution, self.xla, self._apply = distribution, xla, apply
        self._states: list[Any] = []
        self._compiled: Any = None
        self._states_before: list[Any] = []
        """Moving means before the update that is traced, if it may be skipped."""
        self._broken: Any = None

    @property
    def spreads(self) -> bool:
        """Whether there is more than one replica."""
        return self.replicas > 1 or self.world_size > 1

    # ---- setting up -------------------------------------------------------------------------------------------------

    def scope(self) -> Any:
        """The scope in which variables must be created; a null context on one device."""
        return self.distribution.scope() if self.spreads else nullcontext()

    def setup_model(self, model: Any) -> Any:
        self._compiled = None
        return super().setup_model(model)

    def setup_optimizer(self, optimizer: Any) -> Any:
        self.optimizer, self._compiled = optimizer, None
        self.trained = list(self.model.trainable_variables)
        trained = {id(variable) for variable in self.trained}
        self._states = [
            variable for variable in getattr(self.model, "non_trainable_variables", ())
            if id(variable) not in trained and tf.as_dtype(variable.dtype).is_floating
        ]  # fmt: skip
        with self.scope():
            if not getattr(optimizer, "built", False):
                optimizer.build(self.trained)
        return optimizer

    def prepare(self, micro_gradients: MicroGradients, rules: UpdateRules) -> None:
        self.rules = rules
        self._micro_gradients = tf.function(micro_gradients, jit_compile=True) if self.xla else micro_gradients
        if rules.veto == "raise":
            with self.scope():
                self._broken = tf.Variable(False, trainable=False)
        # Values of several replicas are not plain tensors: only TensorFlow's dispatch accepts them.
        spread = tf.function(self._update, reduce_retracing=True) if self.spreads else None
        self._compiled = spread or FlatFunction(self._update)

    @property
    def scales(self) -> bool:
        return hasattr(self.optimizer, "dynamic_scale") or hasattr(self.optimizer, "loss_scale")

    def set_tf32(self, enabled: bool) -> None:
        tf.config.experimental.enable_tensor_float_32_execution(enabled)

    # ---- one update -------------------------------------------------------------------------------------------------

    @property
    def compilations(self) -> int:
        flat = isinstance(self._compiled, FlatFunction)
        return int(self._compiled.traced if flat else self._compiled.experimental_get_tracing_count())

    def run_update(self, update: Update) -> Any:
        batches = [self.padded(batch) for batch in update.batches]
        loop = len(batches) > 1 and can_be_stacked(batches)
        given = self.placed(batches, loop=loop)
        numbers = np.array([max(update.total_items or 1, 1), self.learning_rate or 0.0], np.float32)
        with plain_errors(), undivided_losses():
            loss, self._norm, self._moved = self._compiled(given, numbers, loop)
        return loss

    def padded(self, batch: HostBatch) -> HostBatch:
        """The batch padded to at least one row per replica."""
        rows = max(batch.padded_rows, self.replicas)
        if self.world_size > 1:  # all-gather needs equal sizes on all workers
            rows = -(-rows // self.replicas) * self.replicas
        return pad_rows(batch, rows)

    def placed(self, batches: list[HostBatch], *, loop: bool = False) -> Any:
        """Features, labels and row weights for the local replicas: per micro-batch, or stacked."""
        whole = with_row_weights(batches)
        if loop:
            stack = stacked(whole)
            return self._divided(stack, batches[0].padded_rows, axis=1) if self.spreads else stack
        if not self.spreads:
            return whole
        return [self._divided(each, batch.padded_rows) for each, batch in zip(whole, batches, strict=True)]

    def _divided(self, whole: Any, rows: int, axis: int = 0) -> Any:
        cuts = even_cuts(rows, self.replicas)

        def divided(leaf: Any) -> Any:
            def share(context: Any) -> Any:
                start, stop = cuts[context.replica_id_in_sync_group]
                return tf.convert_to_tensor(leaf[:, start:stop] if axis else leaf[start:stop])

            return self.distribution.experimental_distribute_values_from_function(share)

        return mapped(divided, whole)

    def _update(self, batches: Any, numbers: Any, loop: bool) -> Any:
        """The compiled update, in cross-replica context; `numbers` are its items and its learning rate."""
        items = numbers[0]
        skips = self.rules.veto != "continue"
        self._states_before = [tf.identity(raw(variable)) for variable in self._states] if skips else []
        if self.learning_rate is not None:
            self.optimizer.learning_rate.assign(numbers[1])
        if not self.spreads:
            return self._apply(batches, items, loop)
        loss, norm, moved = self.distribution.run(self._apply, args=(batches, items, loop))
        if self._states:
            self._average_states()
        first = self.distribution.experimental_local_results
        return first(loss)[0], None if norm is None else first(norm)[0], None if moved is None else first(moved)[0]

    def _average_states(self) -> None:
        """Average non-trainable statistics (moving means) over replicas."""
        for variable in map(raw, self._states):
            mean = self.distribution.reduce("MEAN", variable, axis=None)
            self.distribution.extended.update(variable, lambda each, value: each.assign(value), args=(mean,))

    # ---- on one replica ---------------------------------------------------------------------------------------------

    def accumulate(self, batches: Any, items: Any, loop: bool) -> tuple[list[Any], Any, Any]:
        """Gradients, loss and items of all micro-batches on this replica."""
        if loop:
            return self._loop(batches, items)
        total: Any = None
        for features, labels, weights in batches:
            found = self._micro_gradients(features, labels, weights, items)
            total = found if total is None else _added(total, found)
        return total

    def _loop(self, batches: Any, items: Any) -> tuple[list[Any], Any, Any]:
        """One loop over stacked micro-batches: the graph contains the model once, for any number of them."""
        count = tf.shape(tf.nest.flatten(batches[0])[0])[0]
        has_items = []

        def body(index: Any, gradients: Any, loss: Any, summed: Any) -> Any:
            features, labels, weights = _at(batches, index)
            found = self._micro_gradients(features, labels, weights, items)
            has_items.append(found[2] is not None)
            added = [a + b for a, b in zip(gradients, found[0], strict=True)]
            return index + 1, added, loss + found[1], summed if found[2] is None else summed + found[2]

        zeros = [tf.zeros_like(raw(variable)) for variable in self.trained]
        start = (tf.constant(0), zeros, tf.constant(0.0), tf.constant(0.0))
        _, gradients, loss, summed = tf.while_loop(lambda index, *_: index < count, body, start)
        return gradients, loss, summed if all(has_items) else None

    def finish(self, gradients: list[Any], loss: Any, summed: Any, items: Any) -> tuple[Any, Any, Any]:
        """Sum over replicas, divide by the items, clip, step; returns loss, norm and whether the step was applied."""
        if self.spreads:
            gradients, loss, summed = self._all_reduced(gradients, loss, summed)
        scale = tf.constant(1.0) if summed is None else items / tf.where(summed > 0, summed, 1.0)
        loss = loss * scale
        if self.scales:
            scale = scale / tf.cast(self._loss_scale(), tf.float32)
        norm = tf.linalg.global_norm(gradients) * scale
        if self.rules.max_norm:
            # torch's formula, so that both frameworks clip equally.
            scale = scale * tf.minimum(1.0, self.rules.max_norm / (norm + 1e-6))
        if self.scales:
            scale = scale * tf.cast(self._loss_scale(), tf.float32)
        moved = self._step([gradient * tf.cast(scale, gradient.dtype) for gradient in gradients], loss, norm)
        return loss, norm, moved

    def _loss_scale(self) -> Any:
        scale = self.optimizer.dynamic_scale if hasattr(self.optimizer, "dynamic_scale") else self.optimizer.loss_scale
        return tf.convert_to_tensor(scale)

    def _all_reduced(self, gradients: list[Any], loss: Any, summed: Any) -> tuple[list[Any], Any, Any]:
        context = tf.distribute.get_replica_context()
        *gradients, loss, total = context.all_reduce("SUM", [*gradients, loss, 0.0 if summed is None else summed])
        return gradients, loss, None if summed is None else total

    def _step(self, gradients: list[Any], loss: Any, norm: Any) -> Any:
        """Step the optimizer unless a non-finite update must be skipped; returns whether the step was applied."""
        if self.rules.veto == "continue":
            self._optimize(gradients)
            return tf.math.is_finite(norm) if self.scales else None
        fine = tf.math.is_finite(loss if self.scales else loss + norm)
        if self._broken is not None:
            fine = tf.logical_and(fine, tf.logical_not(self._broken))
        self._step_if(fine, gradients)
        for variable, before in zip(map(raw, self._states), self._states_before, strict=False):
            variable.assign(tf.where(fine, variable, before))  # a NaN would stay in a moving mean
        return tf.logical_and(fine, tf.math.is_finite(norm)) if self.scales else None

    def _step_if(self, fine: Any, gradients: list[Any]) -> None:
        if not self.spreads:
            tf.cond(fine, lambda: self._optimized(gradients), lambda: False)
            self._note_broken(fine)
            return

        # A condition around an optimizer that communicates between replicas must be in cross-replica context.
        def between_replicas(distribution: Any, fine: Any, gradients: Any) -> None:
            agreed = distribution.experimental_local_results(fine)[0]

            def everywhere() -> Any:
                distribution.extended.call_for_each_replica(self._optimized, args=(gradients,))
                return False

            tf.cond(agreed, everywhere, lambda: False)
            self._note_broken(agreed)

        tf.distribute.get_replica_context().merge_call(between_replicas, args=(fine, gradients))

    def _note_broken(self, fine: Any) -> None:
        if self._broken is not None:
            self._broken.assign(tf.logical_not(fine))

    def _optimized(self, gradients: list[Any]) -> Any:
        self._optimize(gradients)
        return False

    def _optimize(self, gradients: list[Any]) -> None:
        pairs = list(zip(gradients, self.trained, strict=True))
        if self.is_legacy_optimizer:
            self.optimizer.apply_gradients(pairs, skip_gradients_aggregation=True)
            return
        factor = self.optimizer.loss_scale_factor
        if factor is not None:  # the optimizer divides by it
            gradients = [gradient * factor for gradient in gradients]
        if self.spreads:
            # Keras clips on each replica and then sums over replicas, but these gradients are the sum already: they
            # are clipped here, and each replica passes its fraction.
            gradients = [gradient / self.replicas for gradient in self._clipped_by_optimizer(gradients)]
        self.optimizer.apply(gradients, self.trained)

    def _clipped_by_optimizer(self, gradients: list[Any]) -> list[Any]:
        """The gradients, clipped as the optimizer's own options say."""
        optimizer = getattr(self.optimizer, "inner_optimizer", self.optimizer)
        if optimizer.gradient_accumulation_steps:  # clips their mean
            return gradients
        scale = self._loss_scale() if self.scales else optimizer.loss_scale_factor
        if scale is None:
            return list(optimizer._clip_gradients(gradients))
        return [each * scale for each in optimizer._clip_gradients([each / scale for each in gradients])]

    @property
    def is_legacy_optimizer(self) -> bool:
        """Whether the optimizer is one of tf_keras."""
        return "tf_keras" in {each.__module__.split(".")[0] for each in type(self.optimizer).__mro__}

    # ---- numbers and agreement --------------------------------------------------------------------------------------

    def rows(self, outputs: Any, rows: int) -> Any:
        return mapped(lambda leaf: self._joined(leaf)[:rows], outputs)

    def _joined(self, leaf: Any) -> Any:
        if not self.spreads:
            return as_host(leaf)
        if self.world_size > 1:
            return as_host(self.distribution.gather(leaf, axis=0))
        return np.concatenate([as_host(part) for part in self.distribution.experimental_local_results(leaf)])

    def any_rank(self, flag: bool) -> bool:
        """Whether the flag is set on any worker."""
        if self.world_size == 1:
            return flag
        total = self.distribution.reduce("SUM", self._everywhere(np.float32(flag)), axis=None)
        return float(total) > 0

    def numbers_of_ranks(self, numbers: list[float]) -> list[list[float]]:
        if self.world_size == 1:
            return [numbers]
        rows = as_host(self.distribution.gather(self._everywhere(np.array([numbers], np.float64)), axis=0))
        return [list(map(float, row)) for row in rows[:: len(rows) // self.world_size]]

    def barrier(self) -> None:
        """Wait for every worker."""
        if self.world_size > 1:
            self.any_rank(False)

    def _everywhere(self, value: Any) -> Any:
        return self.distribution.experimental_distribute_values_from_function(lambda context: tf.constant(value))

    # ---- memory -----------------------------------------------------------------------------------------------------

    def place(self) -> str:
        kinds = [kind for kind in ("TPU", "GPU") if tf.config.list_logical_devices(kind)] or ["CPU"]
        return f"{self.replicas} x {kinds[0]}" if self.replicas > 1 else kinds[0]

    def reset_peak_memory(self) -> None:
        for name in _gpus():
            tf.config.experimental.reset_memory_stats(name)

    def memory_figures(self) -> dict[str, int]:
        found = [tf.config.experimental.get_memory_info(name) for name in _gpus()]
        sums = {name: sum(each[key] for each in found) for name, key in (("allocated", "current"), ("peak", "peak"))}
        return sums if found else {}


@contextmanager
def undivided_losses() -> Iterator[None]:
    """Context manager: a Keras loss that a user's code calls is the mean over its replica.

    Keras divides it by the number of replicas, but here the sum over replicas is divided by its items.
    """
    from keras.src.losses import loss as module

    name = "scale_loss_for_distribution"
    divide = getattr(module, name, None)  # older versions of Keras divide in `fit`
    try:
        setattr(module, name, lambda value: value)
        yield
    finally:
        setattr(module, name, divide)


def _gpus() -> list[str]:
    return [device.name.split("device:")[-1] for device in tf.config.list_logical_devices("GPU")]


def _at(batches: Any, index: Any) -> Any:
    return tf.nest.map_structure(lambda leaf: None if leaf is None else leaf[index], batches)


def _added(total: Any, found: Any) -> Any:
    gradients = [a + b for a, b in zip(total[0], found[0], strict=True)]
    return gradients, total[1] + found[1], None if total[2] is None or found[2] is None else total[2] + found[2]
