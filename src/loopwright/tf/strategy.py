"""Where TensorFlow computes: one compiled update on one device or on the replicas of a tf.distribute strategy.

An update is one call of a `tf.function`: forward and backward of all its micro-batches, the sum over replicas,
clipping, the optimizer step. What BaseTrainer asks for afterwards (the norm, whether the weights moved) is there.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import numpy as np
import tensorflow as tf

from ..core.update import Update
from ..errors import LoopwrightError
from .compiled import FlatFunction
from .host_batch import HostBatch, can_be_stacked, even_cuts, mapped, pad_rows, row_weights, stacked
from .models import raw
from .rng import restore_rng, snapshot_rng

MicroGradients = Callable[[Any, Any, Any, Any], tuple[list[Any], Any, Any]]
"""(features, labels, row weights, items of the update) -> gradients, their loss and the items it is a sum over."""


@dataclass(frozen=True)
class UpdateRules:
    """What is done with the gradients of an update; fixed when it is compiled."""

    max_norm: float = 0.0
    veto: str = "continue"
    """on_nonfinite: an update that is not finite is applied (continue), left out (skip), or the last one (raise)."""


class TFStrategy:
    """Carries out updates with TensorFlow."""

    logs_later = False
    # Every process goes through all batches and takes its rows of each: to the core they are all in the same place.
    data_rank, data_world, copies = 0, 1, 1
    is_sharded = forward_is_collective = False
    alarm: AbstractContextManager[Any] = nullcontext()

    def __init__(self, distribution: Any, *, rank: int, world_size: int, xla: bool) -> None:
        self.distribution, self.rank, self.world_size, self.xla = distribution, rank, world_size, xla
        self.replicas = int(distribution.num_replicas_in_sync)
        self.reads_are_free = not tf.config.list_logical_devices("GPU") and not tf.config.list_logical_devices("TPU")
        self.model: Any = None
        self.optimizer: Any = None
        self.learning_rate: float | None = None
        """Told to the optimizer in the next update; None if its own schedule decides."""
        self.rules = UpdateRules()
        self.full_rows = 0
        """Rows of a micro-batch that is not the last of its epoch."""
        self.trained_variables: list[Any] = []
        self._states: list[Any] = []
        self._compiled: Any = None
        self._norm: Any = None
        self._moved: Any = None
        self._broken: Any = None

    @property
    def spreads(self) -> bool:
        """Whether there is more than one replica."""
        return self.replicas > 1 or self.world_size > 1

    # ---- setting up -------------------------------------------------------------------------------------------------

    def scope(self) -> Any:
        """Where variables have to be made: on one device they may be made anywhere."""
        return self.distribution.scope() if self.spreads else nullcontext()

    def setup_model(self, model: Any) -> Any:
        self.model, self._compiled = model, None
        return model

    def setup_optimizer(self, optimizer: Any) -> Any:
        """Take the optimizer, with its variables made now: a checkpoint is about to be loaded into them."""
        self.optimizer, self._compiled = optimizer, None
        self.trained_variables = list(self.model.trainable_variables)
        trained = {id(variable) for variable in self.trained_variables}
        self._states = [
            variable for variable in getattr(self.model, "non_trainable_variables", ())
            if id(variable) not in trained and tf.as_dtype(variable.dtype).is_floating
        ]  # fmt: skip
        with self.scope():
            if not getattr(optimizer, "built", False):
                optimizer.build(self.trained_variables)
        return optimizer

    def prepare(self, micro_gradients: MicroGradients, apply: Callable[..., Any], rules: UpdateRules) -> None:
        """Compile updates of this kind from here on."""
        self.rules = rules
        self._micro_gradients = tf.function(micro_gradients, jit_compile=True) if self.xla else micro_gradients
        self._apply = apply
        if rules.veto == "raise":
            with self.scope():
                self._broken = tf.Variable(False, trainable=False)
        # Values of several replicas are no plain tensors: only TensorFlow's own dispatch takes them.
        spread = tf.function(self._update, reduce_retracing=True) if self.spreads else None
        self._compiled = spread or FlatFunction(self._update)

    @property
    def scales(self) -> bool:
        """Whether the loss is scaled for float16."""
        return hasattr(self.optimizer, "dynamic_scale") or hasattr(self.optimizer, "loss_scale")

    # ---- one update -------------------------------------------------------------------------------------------------

    def put(self, batch: Any) -> Any:
        """The batch as TensorFlow takes it; an array is copied to the device by the call itself."""
        return batch

    def run_update(self, update: Update) -> Any:
        """The whole update in one compiled call; returns its loss. What it computes was given to `prepare`."""
        batches = [self.padded(batch, self.full_rows) for batch in update.batches]
        loop = len(batches) > 1 and can_be_stacked(batches)
        given = self.placed(batches, loop=loop)
        numbers = np.array([max(update.total_items or 1, 1), self.learning_rate or 0.0], np.float32)
        with plain_errors():
            loss, self._norm, self._moved = self._compiled(given, numbers, loop)
        return loss

    def padded(self, batch: HostBatch, full: int) -> HostBatch:
        """The batch with at least one row for each replica; with XLA, which compiles each shape anew, a full one."""
        rows = max(batch.padded_rows, self.replicas, full if self.xla else 0)
        if self.world_size > 1:  # what is gathered from workers must be of one size
            rows = -(-rows // self.replicas) * self.replicas
        return pad_rows(batch, rows)

    def placed(self, batches: list[HostBatch], *, loop: bool = False) -> Any:
        """Features, labels and row weights of each micro-batch, or of all in one stack, for the replicas here."""
        weighed = self.xla or any(batch.padded_rows > batch.rows for batch in batches)
        whole = [(batch.features, batch.labels, row_weights(batch) if weighed else None) for batch in batches]
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
        """The compiled update, in no replica's context; `numbers` are its items and its learning rate."""
        items = numbers[0]
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
        """Keep what replicas collect for themselves (moving means) the same everywhere."""
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
        """One loop over stacked micro-batches: the graph holds the model once, however many there are."""
        count = tf.shape(tf.nest.flatten(batches[0])[0])[0]
        has_items = []

        def body(index: Any, gradients: Any, loss: Any, summed: Any) -> Any:
            features, labels, weights = _at(batches, index)
            found = self._micro_gradients(features, labels, weights, items)
            has_items.append(found[2] is not None)
            added = [a + b for a, b in zip(gradients, found[0], strict=True)]
            return index + 1, added, loss + found[1], summed if found[2] is None else summed + found[2]

        zeros = [tf.zeros_like(raw(variable)) for variable in self.trained_variables]
        start = (tf.constant(0), zeros, tf.constant(0.0), tf.constant(0.0))
        _, gradients, loss, summed = tf.while_loop(lambda index, *_: index < count, body, start)
        return gradients, loss, summed if all(has_items) else None

    def finish(self, gradients: list[Any], loss: Any, summed: Any, items: Any) -> tuple[Any, Any, Any]:
        """Sum over replicas, divide by the items, clip, step; returns loss, norm and whether the weights moved."""
        if self.spreads:
            gradients, loss, summed = self._all_reduced(gradients, loss, summed)
        scale = tf.constant(1.0) if summed is None else items / tf.maximum(summed, 1.0)
        loss = loss * scale
        if self.scales:
            scale = scale / tf.cast(self._loss_scale(), tf.float32)
        norm = tf.linalg.global_norm(gradients) * scale
        if self.rules.max_norm:
            # torch's formula, so that both frameworks take the same step.
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
        """Step the optimizer, unless loss or gradients are not finite and that matters; returns whether it moved."""
        if self.rules.veto == "continue":
            self._optimize(gradients)
            return tf.math.is_finite(norm) if self.scales else None
        fine = tf.math.is_finite(loss if self.scales else loss + norm)
        if self._broken is not None:
            fine = tf.logical_and(fine, tf.logical_not(self._broken))
        self._step_if(fine, gradients)
        return tf.logical_and(fine, tf.math.is_finite(norm)) if self.scales else None

    def _step_if(self, fine: Any, gradients: list[Any]) -> None:
        if not self.spreads:
            tf.cond(fine, lambda: self._optimized(gradients), lambda: False)
            self._note_broken(fine)
            return

        # A condition around an optimizer that talks to the other replicas has to stand outside of them.
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
        pairs = list(zip(gradients, self.trained_variables, strict=True))
        if self.is_legacy_optimizer:
            self.optimizer.apply_gradients(pairs, skip_gradients_aggregation=True)
            return
        # Keras adds the gradients of the replicas up once more: each hands in its part of what is already the sum.
        parts = [gradient / self.replicas for gradient in gradients] if self.spreads else gradients
        self.optimizer.apply(parts, self.trained_variables)

    @property
    def is_legacy_optimizer(self) -> bool:
        """Whether the optimizer is one of tf_keras."""
        return "tf_keras" in {each.__module__.split(".")[0] for each in type(self.optimizer).__mro__}

    # ---- what BaseTrainer asks for after the update -----------------------------------------------------------------

    def backward(self, loss: Any) -> None:
        raise NotImplementedError("gradients are taken inside the compiled update")

    def scale_gradients(self, factor: Any) -> None:
        raise NotImplementedError("gradients are divided inside the compiled update")

    def clip_gradients(self, max_norm: float | None, *, want_norm: bool) -> Any:
        """The norm before clipping, which has happened."""
        return self._norm if max_norm or want_norm else None

    def nonfinite(self, loss: Any, norm: Any, *, sticky: bool) -> Any:
        """The compiled update has looked itself."""
        return None

    def optimizer_step(self, veto: Any = None) -> bool:
        """Whether the schedule may advance; the step is done. Only loss scaling makes the host wait for the answer."""
        return True if self._moved is None else bool(self._moved)

    def zero_grad(self) -> None:
        """Gradients live inside the compiled update only."""

    def free_memory(self) -> None:
        """TensorFlow keeps its memory."""

    def training(self) -> None:
        """Keras models are told with every call whether they train."""

    def evaluating(self) -> None:
        """Keras models are told with every call whether they train."""

    def hold(self) -> Any:
        """An update is one call: nothing can find it half done."""
        return None

    def undo(self, held: Any) -> None:
        """Nothing was held."""

    # ---- numbers and agreement --------------------------------------------------------------------------------------

    def read(self, scalars: list[Any]) -> list[float]:
        """Device scalars as host numbers."""
        return [float(each) for each in scalars]

    def rows(self, outputs: Any, rows: int) -> Any:
        """What the replicas gave for one batch, joined in the order of its rows, without padding, on the host."""
        return mapped(lambda leaf: self._joined(leaf)[:rows], outputs)

    def _joined(self, leaf: Any) -> Any:
        if not self.spreads:
            return as_host(leaf)
        if self.world_size > 1:
            return as_host(self.distribution.gather(leaf, axis=0))
        return np.concatenate([as_host(part) for part in self.distribution.experimental_local_results(leaf)])

    def reduce(self, values: list[float]) -> list[float]:
        return values

    def gather(self, values: Any) -> Any:
        return values

    def broadcast(self, value: Any) -> Any:
        return value

    def agree(self, flag: bool) -> bool:
        """Whether any worker says so."""
        if self.world_size == 1:
            return flag
        total = self.distribution.reduce("SUM", self._everywhere(np.float32(flag)), axis=None)
        return float(total) > 0

    def barrier(self) -> None:
        """Until every worker is here."""
        if self.world_size > 1:
            self.agree(False)

    def _everywhere(self, value: Any) -> Any:
        return self.distribution.experimental_distribute_values_from_function(lambda context: tf.constant(value))

    # ---- randomness -------------------------------------------------------------------------------------------------

    def rng_state(self) -> dict[str, Any]:
        return snapshot_rng()

    def load_rng_state(self, state: dict[str, Any]) -> None:
        restore_rng(state)


@contextmanager
def plain_errors() -> Iterator[None]:
    """What loopwright raises while TensorFlow traces is raised as it is, not as TensorFlow wraps it."""
    try:
        yield
    except Exception as error:  # looked through for one of ours; all others go on as they are
        original: BaseException | None = error
        while original is not None and not isinstance(original, LoopwrightError):
            original = original.__cause__ or original.__context__
        if original is None or original is error:
            raise
        raise original from None


def as_host(leaf: Any) -> Any:
    """A tensor as a numpy array; number formats numpy does not know become float32."""
    array = leaf.numpy() if hasattr(leaf, "numpy") else np.asarray(leaf)
    return array.astype(np.float32) if array.dtype.kind == "V" or array.dtype.name == "bfloat16" else array


def _at(batches: Any, index: Any) -> Any:
    return tf.nest.map_structure(lambda leaf: None if leaf is None else leaf[index], batches)


def _added(total: Any, found: Any) -> Any:
    gradients = [a + b for a, b in zip(total[0], found[0], strict=True)]
    return gradients, total[1] + found[1], None if total[2] is None or found[2] is None else total[2] + found[2]

