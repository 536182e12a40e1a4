"""How much a run has computed: tokens and floating point operations, from shapes alone."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor, nn

from ..core.overrides import adapt
from .columns import innermost


class WorkCounter:
    """Measures the operations and tokens of batches while they are in host memory."""

    def __init__(
        self, model: nn.Module, input_name: str, *, tokens: str | bool, operations: Callable[[Any], float] | None = None
    ) -> None:
        self._input = input_name
        self._tokens = tokens
        self._operations = operations
        self._per_token = operations_per_token(model)
        self.counts = operations is not None or self._per_token > 0 or tokens not in ("no", False)
        """Whether there is anything to count at all."""

    def measure(self, batches: list[Any]) -> tuple[float, int]:
        """Floating point operations and tokens of the batches."""
        if self._operations is not None:
            flos = sum(float(self._operations(batch)) for batch in batches)
        else:
            flos = float(self._per_token * sum(tokens_in(batch, self._input) for batch in batches))
        tokens = 0 if self._tokens in ("no", False) else sum(map(self._seen, batches))
        return flos, tokens

    def _seen(self, batch: Any) -> int:
        mask = batch.get("attention_mask") if isinstance(batch, Mapping) else None
        if self._tokens == "non_padding" and isinstance(mask, Tensor):
            return int(mask.sum())
        return tokens_in(batch, self._input)


def tokens_in(batch: Any, input_name: str) -> int:
    """The elements of the main input."""
    main = batch.get(input_name) if isinstance(batch, Mapping) else None
    return main.numel() if isinstance(main, Tensor) else 0


def operations_per_token(model: nn.Module) -> int:
    """6 x parameters outside the embeddings, for models that can count them; else 0."""
    count = getattr(innermost(model), "num_parameters", None)
    return 6 * int(adapt(count, "exclude_embeddings")(exclude_embeddings=True)) if callable(count) else 0
