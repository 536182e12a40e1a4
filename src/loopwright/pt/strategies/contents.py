"""The current modules and parameters of a model and its optimizer, without walking the model each time."""

from __future__ import annotations

from itertools import chain
from operator import attrgetter, is_, itemgetter
from typing import Any

from torch import nn

END = object()
"""Follows the last member: a list that has grown differs at this position."""
LIBRARIES = ("torch.", "transformers.", "peft.", "loopwright.")
"""Packages whose `train()` only sets the mode, so that it need not be called while the mode is unchanged."""
IS_TRAINED, IS_TRAINING, PARAMETERS = attrgetter("requires_grad"), attrgetter("training"), itemgetter("params")


class Contents:
    """The current modules and parameters of a model, and the parameters its optimizer steps.

    Walking a model of 300 modules takes 300 microseconds, and `model.train()` 700. `look` compares the members of
    modules and parameter groups with those at the last walk, by identity, in 40; it walks again only after a
    difference. So parameters, modules and parameter groups may be added, replaced or deleted at any time.
    """

    def __init__(self, model: nn.Module, optimizer: Any = None) -> None:
        self.model, self.optimizer = model, optimizer
        self.changes = 0
        """Increases with every change of a module, parameter, optimizer, group, `requires_grad` or mode."""
        self.modes: list[bool] = []
        """The modes of the modules after the last `model.train()`."""
        self._flags: list[bool] = []
        self._walk()

    def take(self, model: nn.Module, optimizer: Any) -> None:
        """Switch to another model or optimizer."""
        self.model, self.optimizer = model, optimizer
        self._walk()
        self.changes += 1

    def detect_changes(self) -> bool:
        """Check for changes since the last call; returns whether there are any."""
        if self.is_same():
            if self._flags == list(map(IS_TRAINED, self.parameters)):
                return False
            self._flags = list(map(IS_TRAINED, self.parameters))
        else:
            self._walk()
        self.changes += 1
        return True

    def is_same(self) -> bool:
        """Whether modules and groups hold the same objects; requires_grad is not checked."""
        groups = self.optimizer.param_groups if self._has_groups else ()
        stepped = chain.from_iterable(map(PARAMETERS, groups))
        now = chain(chain.from_iterable(self._held), stepped, (END,))
        return all(map(is_, now, self._members)) and not any(self._empty)

    def trained(self) -> list[nn.Parameter]:
        """The parameters that require a gradient."""
        return [p for p in self.parameters if p.requires_grad]

    def _walk(self) -> None:
        self.modules = tuple(self.model.modules())
        self.parameters = list(self.model.parameters())
        """All parameters of the model, each once; any of them may have a gradient."""
        self._has_groups = bool(getattr(self.optimizer, "param_groups", None))
        stepped = [p for group in self.optimizer.param_groups for p in group["params"]] if self._has_groups else []
        inside = set(map(id, self.parameters))
        self.outside = [p for p in stepped if id(p) not in inside]
        """Parameters of the optimizer that are not in the model, such as those of a loss."""
        self.everything = [*self.parameters, *self.outside] if self.outside else self.parameters
        places = [place for module in self.modules for place in (module._modules, module._parameters)]
        # Views of dicts always show the current members.
        self._held = (*(place.values() for place in places if place), (END,))
        self._empty = tuple(place for place in places if not place)
        self._members = [*chain.from_iterable(self._held), *stepped, END]
        self._flags = list(map(IS_TRAINED, self.parameters))
        self.calls_train = any(_has_own_train(module) for module in self.modules)

    # ---- modes ------------------------------------------------------------------------------------------------------

    def train(self) -> None:
        """Set all modules to training mode, and record their modes.

        A user's `train()`, which may keep a part in evaluation mode, determines the mode of its module; it is called in
        every step (`calls_train`), because its decision may depend on anything.
        """
        self.model.train()
        modes = list(map(IS_TRAINING, self.modules))
        if modes != self.modes:
            self.modes = modes
            self.changes += 1


def _has_own_train(module: nn.Module) -> bool:
    train = type(module).train
    if "train" in vars(module):
        return True
    return train is not nn.Module.train and not (train.__module__ or "").startswith(LIBRARIES)
