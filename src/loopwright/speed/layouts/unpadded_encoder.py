"""An encoder that computes real tokens only, inside a model with padded inputs and outputs.

Embeddings, pooling and heads get the padded batch they expect; the blocks between them get one row of documents. This
is for models with a module of blocks that takes and returns hidden states, such as BERT.
"""

from __future__ import annotations

import inspect
from typing import Any

from torch import Tensor, nn


class UnpaddedEncoder:
    """Removes padding before a model's blocks and inserts it again after them."""

    def __init__(self, encoder: nn.Module) -> None:
        self.encoder = encoder
        self.places: Tensor | None = None
        """Indices of real tokens in the padded batch, one past the end for filler; None disables the unpadding."""
        self._forward = encoder.forward
        self._replaced: Any = None
        """A `forward` that was set on the encoder before; `remove` restores it."""

    def install(self) -> None:
        if self.encoder.__dict__.get("forward") == self._run:
            return
        self._replaced, self._forward = self.encoder.__dict__.get("forward"), self.encoder.forward
        self.encoder.forward = self._run

    def remove(self) -> None:
        self.encoder.__dict__.pop("forward", None)
        if self._replaced is not None:
            self.encoder.forward = self._replaced

    def _run(self, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Any:
        if self.places is None:
            return self._forward(hidden_states, *args, **kwargs)
        rows, width, size = hidden_states.shape
        row = hidden_states.reshape(rows * width, size).index_select(0, self.places.clamp_max(rows * width - 1))
        row = row.unsqueeze(0)
        return self._padded(self._forward(row, *args, **kwargs), rows, width)

    def _padded(self, output: Any, rows: int, width: int) -> Any:
        if isinstance(output, Tensor):
            return self._spread(output, rows, width)
        if isinstance(output, tuple):
            return (self._spread(output[0], rows, width), *output[1:])
        output.last_hidden_state = self._spread(output.last_hidden_state, rows, width)
        return output

    def _spread(self, row: Tensor, rows: int, width: int) -> Tensor:
        padded = row.new_zeros(rows * width + 1, row.shape[-1])
        return padded.index_copy(0, self.places, row.squeeze(0))[:-1].view(rows, width, -1)


def find_encoder(model: nn.Module) -> nn.Module | None:
    """The only module that holds the model's blocks and takes hidden states and a mask; None if not unique."""
    found = [
        module
        for module in model.modules()
        if any(isinstance(child, nn.ModuleList) and len(child) > 0 for child in module.children())
        and _takes_hidden_states(module)
    ]
    return found[0] if len(found) == 1 else None


def _takes_hidden_states(module: nn.Module) -> bool:
    names = list(inspect.signature(module.forward).parameters)
    return bool(names) and names[0] in ("hidden_states", "x") and "attention_mask" in names
