"""A strategy for a model of numpy arrays, with which the core runs without a framework: for tests and as an example.

Numpy has no autograd, so a loss here carries its gradients, and `backward` accumulates them.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from loopwright.core.randomness import decode_numpy, decode_python, encode_numpy, encode_python
from loopwright.core.strategy import OneProcess, StepwiseStrategy
from loopwright.core.update import MicroBatch, Update

Array = npt.NDArray[np.float64]
Arrays = dict[str, Array]


@dataclass(frozen=True)
class Loss:
    """A loss and the gradients of the parameters, by name."""

    value: float
    gradients: Arrays


class LinearModel:
    """Linear regression; in training mode, each input is dropped with probability `dropout`."""

    def __init__(self, inputs: int, outputs: int = 1, *, dropout: float = 0.0, seed: int = 0) -> None:
        drawn = np.random.default_rng(seed)
        self.parameters: Arrays = {"weight": drawn.normal(size=(inputs, outputs)), "bias": np.zeros(outputs)}
        self.dropout, self.is_training = dropout, True

    def __call__(self, inputs: Array) -> Array:
        return inputs @ self.parameters["weight"] + self.parameters["bias"]

    def loss(self, inputs: Array, targets: Array, items: int) -> Loss:
        """The sum of squared errors divided by the items of the whole update."""
        if self.is_training and self.dropout:
            inputs = inputs * (np.random.random_sample(inputs.shape) >= self.dropout)
        errors = self(inputs) - targets
        slopes = 2 * errors / items
        return Loss(float((errors**2).sum() / items), {"weight": inputs.T @ slopes, "bias": slopes.sum(axis=0)})


class Momentum:
    """Gradient descent with momentum: a minimal optimizer with state."""

    def __init__(self, parameters: Arrays, learning_rate: float, momentum: float = 0.9) -> None:
        self.parameters, self.learning_rate, self.momentum = parameters, learning_rate, momentum
        self.velocity: Arrays = {name: np.zeros_like(value) for name, value in parameters.items()}

    def step(self, gradients: Arrays) -> None:
        for name, gradient in gradients.items():
            self.velocity[name] = self.momentum * self.velocity[name] + gradient
            self.parameters[name] -= self.learning_rate * self.velocity[name]


class NumpyStrategy(OneProcess, StepwiseStrategy):
    """Runs updates of a `LinearModel` in this process; `read_weights` reads the arrays from a folder."""

    logs_later = False
    reads_are_free = True

    def __init__(self, read_weights: Callable[[Any], Arrays]) -> None:
        self.alarm: AbstractContextManager[Any] = nullcontext()
        self.gradients: Arrays = {}
        self._read_weights = read_weights
        self._broken = False

    # ---- setting up -------------------------------------------------------------------------------------------------

    def setup_model(self, model: LinearModel) -> LinearModel:
        self.model = model
        return model

    def wrap(self, model: LinearModel) -> LinearModel:
        return model

    def unwrap(self, model: LinearModel) -> LinearModel:
        return model

    def rewrap(self, model: LinearModel) -> LinearModel:
        return model

    def setup_optimizer(self, optimizer: Momentum) -> Momentum:
        self.optimizer, self._broken = optimizer, False
        return optimizer

    # ---- one update -------------------------------------------------------------------------------------------------

    def put(self, batch: Any) -> Any:
        return batch

    def begin_update(self, update: Update) -> None:
        """Does nothing: batches are on the host."""

    def micro_batch(self, micro: MicroBatch) -> AbstractContextManager[Any]:
        return nullcontext()

    def forward_context(self) -> AbstractContextManager[Any]:
        return nullcontext()

    def backward(self, loss: Loss) -> None:
        """Add the gradients of a micro-batch to those of the update."""
        for name, gradient in loss.gradients.items():
            self.gradients[name] = self.gradients[name] + gradient if name in self.gradients else gradient

    def scale_gradients(self, factor: float) -> None:
        self.gradients = {name: gradient * factor for name, gradient in self.gradients.items()}

    def clip_gradients(self, max_norm: float | None, *, want_norm: bool) -> float | None:
        """Clip to the norm and return the norm before clipping; without a limit, compute it only for `want_norm`."""
        if not max_norm and not want_norm:
            return None
        norm = math.sqrt(sum(float((gradient**2).sum()) for gradient in self.gradients.values()))
        if max_norm and norm > max_norm:
            self.scale_gradients(max_norm / norm)
        return norm

    def nonfinite(self, loss: float, norm: float | None, *, sticky: bool) -> bool:
        """Whether loss or norm is NaN or infinite; with `sticky`, also true after an earlier such update."""
        found = not math.isfinite(loss + (norm or 0.0))
        self._broken = sticky and (self._broken or found)
        return found or self._broken

    def optimizer_step(self, veto: bool | None = None) -> bool:
        """Step unless vetoed; returns True, so the schedule advances in any case."""
        if not veto:
            self.optimizer.step(self.gradients)
        return True

    def zero_grad(self) -> None:
        self.gradients = {}

    def boundary(self) -> None:
        """Does nothing: numpy computes synchronously."""

    def defer(self, function: Callable[[], None]) -> None:
        function()

    def free_memory(self) -> None:
        """Does nothing: numpy holds no unused memory."""

    # ---- modes ------------------------------------------------------------------------------------------------------

    def training(self) -> None:
        self.model.is_training = True

    def evaluating(self) -> None:
        self.model.is_training = False

    # ---- undoing ----------------------------------------------------------------------------------------------------

    def snapshot(self) -> dict[str, Any]:
        return self.rng_state()

    def restore(self, held: dict[str, Any]) -> None:
        self.load_rng_state(held)
        self.zero_grad()

    # ---- state to save and load: copies, because background saves run during training --------------------------------

    def model_state(self, module: LinearModel) -> Arrays:
        return {name: value.copy() for name, value in module.parameters.items()}

    def load_weights(self, module: LinearModel, folder: Any) -> None:
        for name, value in self._read_weights(folder).items():
            module.parameters[name][...] = value

    def optimizer_state(self, optimizer: Momentum, module: LinearModel) -> tuple[dict[str, Any], Arrays]:
        described = {"learning_rate": optimizer.learning_rate, "momentum": optimizer.momentum}
        return described, {name: value.copy() for name, value in optimizer.velocity.items()}

    def load_optimizer(
        self, described: dict[str, Any], tensors: Arrays, optimizer: Momentum, module: LinearModel
    ) -> None:
        optimizer.learning_rate, optimizer.momentum = described["learning_rate"], described["momentum"]
        optimizer.velocity = {name: value.copy() for name, value in tensors.items()}

    # ---- numbers ----------------------------------------------------------------------------------------------------

    def read(self, scalars: list[Any]) -> list[float]:
        return [float(each) for each in scalars]

    # ---- randomness -------------------------------------------------------------------------------------------------

    def rng_state(self) -> dict[str, Any]:
        """The random states of Python and numpy, as JSON values."""
        return {"python": encode_python(random.getstate()), "numpy": encode_numpy(np.random.get_state(legacy=True))}

    def load_rng_state(self, state: dict[str, Any]) -> None:
        random.setstate(decode_python(state["python"]))
        np.random.set_state(decode_numpy(state["numpy"]))
