"""What a model and its optimizer hold at the moment, without walking the model each time."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import chain
from operator import attrgetter, is_
from typing import Any

from torch import nn

END = object()
"""Comes after the last member: a list that has become longer differs there."""
LIBRARIES = ("torch.", "transformers.", "peft.", "loopwright.")
"""Where an own `train()` only follows a change of mode, so that it need not be called while the mode stays."""
IS_TRAINED, IS_TRAINING = attrgetter("requires_grad"), attrgetter("training")


class Contents:
    """Modules and parameters of a model, and the parameters its optimizer steps, as they are now.

    A walk over a model of 300 modules takes 300 microseconds, and `model.train()` 700. `look` compares what modules
    and parameter groups hold with what they held at the last walk, object by object, in 40; only a difference is a
    reason to walk again. Whoever adds, replaces or deletes a parameter or a module, or adds a parameter group, has to
    tell nobody.
    """

    def __init__(self, model: nn.Module, optimizer: Any = None) -> None:
        self.model, self.optimizer = model, optimizer
        self.changes = 0
        """Rises whenever there is another module, parameter, optimizer or group, `requires_grad` or mode."""
        self._modes: list[bool] = []
        self._flags: list[bool] = []
        self._walk()

    def take(self, model: nn.Module, optimizer: Any) -> None:
        """Go over to another model or optimizer."""
        self.model, self.optimizer = model, optimizer
        self._walk()
        self.changes += 1

    def look(self) -> bool:
        """See whether everything is as it was at the last look; returns whether something is not."""
        if self.is_same():
            if self._flags == list(map(IS_TRAINED, self.parameters)):
                return False
            self._flags = list(map(IS_TRAINED, self.parameters))
        else:
            self._walk()
        self.changes += 1
        return True

    def is_same(self) -> bool:
        """Whether modules and groups hold the objects they held; nobody asks here who wants a gradient."""
        return (
            all(map(is_, chain.from_iterable(self._held), self._members))
            and not any(self._empty)
            and all(map(is_, chain(_stepped_by(self.optimizer), (END,)), self._stepped))
        )

    def trained(self) -> list[nn.Parameter]:
        """The parameters that want a gradient."""
        return [p for p in self.parameters if p.requires_grad]

    def _walk(self) -> None:
        self.modules = tuple(self.model.modules())
        self.parameters = list(self.model.parameters())
        """All parameters of the model, each once: a gradient may be on any of them."""
        stepped = list(_stepped_by(self.optimizer))
        inside = set(map(id, self.parameters))
        self.outside = [p for p in stepped if id(p) not in inside]
        """What the optimizer steps and the model does not have, such as the parameters of a loss."""
        self.everything = [*self.parameters, *self.outside] if self.outside else self.parameters
        places = [place for module in self.modules for place in (module._modules, module._parameters)]
        # Views of dicts show what is in them at any time.
        self._held = (*(place.values() for place in places if place), (END,))
        self._empty = tuple(place for place in places if not place)
        self._members = list(chain.from_iterable(self._held))
        self._stepped = [*stepped, END]
        self._flags = list(map(IS_TRAINED, self.parameters))
        self._calls_train = any(_has_own_train(module) for module in self.modules)

    # ---- modes ------------------------------------------------------------------------------------------------------

    def train(self) -> None:
        """Put all modules into training mode, as `model.train()` would: at no cost while they are in it.

        A `train()` of the user's own, which may keep a part in evaluation mode, decides for its module.
        """
        if self._calls_train or self._modes != list(map(IS_TRAINING, self.modules)):
            self.model.train()
            modes = list(map(IS_TRAINING, self.modules))
            if modes != self._modes:
                self._modes = modes
                self.changes += 1


def _stepped_by(optimizer: Any) -> Iterable[Any]:
    groups = getattr(optimizer, "param_groups", None)
    return chain.from_iterable([group["params"] for group in groups]) if groups else ()


def _has_own_train(module: nn.Module) -> bool:
    train = type(module).train
    if "train" in vars(module):
        return True
    return train is not nn.Module.train and not (train.__module__ or "").startswith(LIBRARIES)
