"""Averages of the weights over training: EMACallback and SWACallback."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from ...args.base import BaseArguments
from ...core.events import TrainerCallback
from ...core.state import ExportableState
from ...errors import ArgumentsError, ModelError
from ..data.columns import without_wrappers


class WeightAveraging(TrainerCallback, ExportableState):
    """Base of callbacks that average the trained parameters.

    The averages are saved in checkpoints and restored by a resumed run. Evaluations and predictions use them, unless
    `use_in_evaluation` is False; training never does. Frozen parameters and buffers, such as statistics of BatchNorm,
    are those of the model. Parameters in half precision are averaged in single precision.
    """

    def __init__(self, use_in_evaluation: bool = True) -> None:
        self.use_in_evaluation = use_in_evaluation
        self.averaged = 0
        """Number of times that weights were added."""
        self._averages: dict[str, Tensor] = {}
        self._model: nn.Module | None = None

    def state(self) -> dict[str, Any]:
        return {"args": {}, "attributes": {"averaged": self.averaged}}

    def on_train_begin(self, args: BaseArguments, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        if state.global_step == 0:
            self.averaged, self._averages = 0, {}
        self.checkpoint_tensors(model)

    def checkpoint_tensors(self, model: nn.Module) -> dict[str, Tensor]:
        """The averages by parameter name; those of a model that is new here begin with its weights."""
        if self._model is not model or not self._averages:
            self._model = model
            self._averages = {name: _start(parameter) for name, parameter in _trained(model)}
        return self._averages

    @torch.no_grad()
    def add_weights(self, weight: float) -> None:
        """Move the averages towards the current weights by this fraction of the distance."""
        assert self._model is not None
        for name, parameter in _trained(self._model):
            average = self._averages.get(name)
            if average is None:  # made trainable since
                self._averages[name] = _start(parameter)
            else:
                average.lerp_(parameter.detach().to(average.dtype), weight)
        self.averaged += 1

    @contextmanager
    def evaluation_weights(self) -> Iterator[None]:
        """The context of an evaluation: with the averages, if there are any."""
        if not self.use_in_evaluation or not self.averaged:
            yield
            return
        with self.swapped():
            yield

    @contextmanager
    def swapped(self) -> Iterator[None]:
        """A context in which the model has the averages; afterwards it has its own weights again."""
        held = self._replaced()
        try:
            yield
        finally:
            with torch.no_grad():
                for parameter, own in held:
                    parameter.copy_(own)

    def copy_to_model(self) -> None:
        """Replace the weights of the model by the averages, for example after training."""
        self._replaced()

    @torch.no_grad()
    def _replaced(self) -> list[tuple[nn.Parameter, Tensor]]:
        if self._model is None or not self.averaged:
            raise ModelError(
                f"{type(self).__name__} has no averages yet: it has added the weights of no step; train first, or let "
                "it begin earlier"
            )
        parameters = dict(without_wrappers(self._model).named_parameters())
        held = [(parameters[name], parameters[name].detach().clone()) for name in self._averages if name in parameters]
        for name, average in self._averages.items():
            if name in parameters:
                parameters[name].copy_(average)
        return held


class EMACallback(WeightAveraging):
    """An exponential moving average of the weights: `decay` of the average is kept at each step.

    With `warmup`, the decay of the n-th addition is at most (1 + n) / (10 + n), so that early weights do not linger.
    The average begins with the weights after `start_step` steps, and is updated every `every_n_steps`.
    """

    def __init__(
        self,
        decay: float = 0.999,
        *,
        warmup: bool = False,
        start_step: int = 0,
        every_n_steps: int = 1,
        use_in_evaluation: bool = True,
    ) -> None:
        super().__init__(use_in_evaluation)
        if not 0 <= decay < 1:
            raise ArgumentsError(f"EMACallback(decay={decay}): must be at least 0 and below 1, for example 0.999")
        if every_n_steps < 1 or start_step < 0:
            raise ArgumentsError(
                f"EMACallback(start_step={start_step}, every_n_steps={every_n_steps}): must be at least 0 and 1"
            )
        self.decay, self.warmup = decay, warmup
        self.start_step, self.every_n_steps = start_step, every_n_steps

    def on_step_end(self, args: BaseArguments, state: Any, control: Any, **kwargs: Any) -> None:
        step = state.global_step - self.start_step
        if step < 0 or step % self.every_n_steps or (step == 0 and state.global_step == 0):
            return
        decay = min(self.decay, (1 + self.averaged) / (10 + self.averaged)) if self.warmup else self.decay
        is_first = self.start_step > 0 and not self.averaged
        self.add_weights(1.0 if is_first else 1.0 - decay)


class SWACallback(WeightAveraging):
    """Stochastic weight averaging: the mean of the weights at several steps of the last part of training.

    It begins at `start`, a step or a fraction of all steps, and adds the weights at the end of every epoch, or every
    `every_n_steps`. Use a constant learning rate for that part. Statistics of BatchNorm are not computed again: run
    batches through the model in training mode before you use the averages.
    """

    def __init__(
        self, start: float = 0.75, *, every_n_steps: int | None = None, use_in_evaluation: bool = True
    ) -> None:
        super().__init__(use_in_evaluation)
        if start < 0 or (start > 1 and start != int(start)):
            raise ArgumentsError(f"SWACallback(start={start}): must be a step, or a fraction of all steps below 1")
        if every_n_steps is not None and every_n_steps < 1:
            raise ArgumentsError(f"SWACallback(every_n_steps={every_n_steps}): must be at least 1")
        self.start, self.every_n_steps = start, every_n_steps

    def on_step_end(self, args: BaseArguments, state: Any, control: Any, **kwargs: Any) -> None:
        if self.every_n_steps is not None and state.global_step % self.every_n_steps == 0:
            self._add(state)

    def on_epoch_end(self, args: BaseArguments, state: Any, control: Any, **kwargs: Any) -> None:
        if self.every_n_steps is None:
            self._add(state)

    def _add(self, state: Any) -> None:
        first = self.start if self.start >= 1 else self.start * state.max_steps
        if state.global_step >= max(first, 1):
            self.add_weights(1.0 / (self.averaged + 1))


def _trained(model: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    """The trainable parameters of a model, each once."""
    for name, parameter in without_wrappers(model).named_parameters():
        if parameter.requires_grad and parameter.is_floating_point():
            yield name, parameter


def _start(parameter: nn.Parameter) -> Tensor:
    own = parameter.detach()
    return own.clone() if own.dtype in (torch.float32, torch.float64) else own.float()
