"""Counting the bytes of all tensors that are alive, and the most there were at one time."""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from typing import Any

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class LiveBytes(TorchDispatchMode):
    """Follows every tensor made inside the context, and those made before it that are given."""

    def __init__(self, existing: Iterable[Tensor | None] = ()) -> None:
        super().__init__()
        self.now = self.peak = 0
        self._alive: dict[int, Any] = {}
        for tensor in existing:
            if tensor is not None:
                self._add(tensor)
        self._before = self.now

    @property
    def added(self) -> int:
        """The most bytes there were at one time beyond those of the tensors given."""
        return self.peak - self._before

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Code may be compiled inside the context."""
        return True

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(result):
            if type(tensor) is Tensor:
                self._add(tensor)
        return result

    def _add(self, tensor: Tensor) -> None:
        storage = tensor.untyped_storage()
        place = storage._cdata
        if place in self._alive:
            return
        size = storage.nbytes()

        def forget(_: Any) -> None:
            self.now -= size
            del self._alive[place]

        self._alive[place] = weakref.ref(storage, forget)
        self.now += size
        self.peak = max(self.peak, self.now)
