"""The JAX strategy: one jitted update over the devices of this process; batches are sharded by rows."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import keras
import numpy as np

from ..core.update import Update
from ..errors import ModelError
from ..keras.data.host_batch import HostBatch, mapped, pad_rows, with_row_weights
from ..keras.optim.optimizers import scales_loss
from ..keras.rng import RandomStreams
from ..keras.strategy import KerasStrategy, UpdateRules


class JaxStrategy(KerasStrategy):
    """Runs updates with JAX: variables are arguments and results of a pure function."""

    def __init__(self, devices: list[Any]) -> None:
        super().__init__(RandomStreams(), replicas=len(devices), reads_are_free=devices[0].platform == "cpu")
        self.devices = devices
        mesh = jax.sharding.Mesh(np.array(devices), ("batch",))
        self._by_rows = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("batch"))
        self._everywhere_alike = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())

    def set_tf32(self, enabled: bool) -> None:
        jax.config.update("jax_default_matmul_precision", "tensorfloat32" if enabled else "float32")

    def place(self) -> str:
        name = str(self.devices[0].device_kind)
        return f"{len(self.devices)} x {name}" if len(self.devices) > 1 else name

    def setup_optimizer(self, optimizer: Any) -> Any:
        if scales_loss(optimizer):
            raise ModelError("JAXTrainer does not scale the loss, as float16 needs; use bfloat16 (bf16=True)")
        self.optimizer, self.trained = optimizer, list(self.model.trainable_variables)
        if not optimizer.built:
            optimizer.build(self.model.trainable_variables)
        return optimizer

    def prepare(self, micro_gradients: Any, rules: UpdateRules) -> None:
        self.rules, self._loss_and_gradients = rules, micro_gradients
        self._jitted = jax.jit(self._pure_update)
        # From now on variables are replicated on all devices.
        for variable in self._all_variables():
            variable.assign(jax.device_put(variable.value, self._everywhere_alike))

    def _all_variables(self) -> list[Any]:
        return [*self.model.trainable_variables, *self.model.non_trainable_variables, *self.optimizer.variables]

    # ---- one update -------------------------------------------------------------------------------------------------

    def padded(self, batch: HostBatch) -> HostBatch:
        """The batch padded so that all devices get the same number of rows."""
        return pad_rows(batch, -(-batch.padded_rows // self.replicas) * self.replicas)

    def placed(self, batches: list[HostBatch]) -> Any:
        whole = with_row_weights(batches)
        return mapped(lambda leaf: jax.device_put(leaf, self._by_rows), whole)

    @property
    def compilations(self) -> int:
        return int(self._jitted._cache_size())

    def run_update(self, update: Update) -> Any:
        batches = self.placed([self.padded(batch) for batch in update.batches])
        numbers = np.array([max(update.total_items or 1, 1), self.learning_rate or 0.0], np.float32)
        states = self._values()
        loss, self._norm, states = self._jitted(states, batches, numbers)
        self._keep(states)
        return loss

    def _values(self) -> tuple[list[Any], list[Any], list[Any]]:
        model = self.model
        lists = (model.trainable_variables, model.non_trainable_variables, self.optimizer.variables)
        trained, states, slots = ([variable.value for variable in each] for each in lists)
        return trained, states, slots

    def _keep(self, values: Any) -> None:
        for variable, value in zip(self._all_variables(), [*values[0], *values[1], *values[2]], strict=True):
            variable.assign(value)

    def _pure_update(self, values: Any, batches: Any, numbers: Any) -> Any:
        """Loss, norm and all variables after an update, as a function of all variables before it."""
        trained, states, slots = values
        items = numbers[0]
        total: Any = None
        for features, labels, weights in batches:
            found, states = self._loss_and_gradients(trained, states, features, labels, weights, items)
            total = found if total is None else jax.tree.map(jnp.add, total, found)
        loss, summed, gradients = total
        scale = items / jnp.where(summed > 0, summed, 1.0)
        loss = loss * scale
        norm = jnp.sqrt(sum(jnp.sum(jnp.square(each)) for each in gradients)) * scale
        if self.rules.max_norm:
            scale = scale * jnp.minimum(1.0, self.rules.max_norm / (norm + 1e-6))
        if self.learning_rate is not None:
            slots = [
                numbers[1].astype(value.dtype) if variable is self.optimizer._learning_rate else value
                for variable, value in zip(self.optimizer.variables, slots, strict=True)
            ]
        scale = scale * (self.optimizer.loss_scale_factor or 1.0)  # the optimizer divides by it
        moved, new_slots = self.optimizer.stateless_apply(slots, [each * scale for each in gradients], trained)
        if self.rules.veto != "continue":
            fine = jnp.isfinite(loss + norm)
            moved, new_slots, states = jax.tree.map(
                lambda new, old: jnp.where(fine, new, old),
                (list(moved), list(new_slots), list(states)),
                (trained, list(slots), values[1]),
            )
        return loss, norm, (list(moved), list(states), list(new_slots))

    # ---- numbers ----------------------------------------------------------------------------------------------------

    def rows(self, outputs: Any, rows: int) -> Any:
        return mapped(lambda leaf: np.asarray(keras.ops.convert_to_numpy(leaf))[:rows], outputs)
