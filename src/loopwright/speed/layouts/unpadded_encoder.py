"""An encoder that computes real tokens only, inside a model with padded inputs and outputs.

Pooling and heads get the padded batch they expect; the blocks before them get one row of documents. This is for models
with a module of blocks that takes and returns hidden states, such as BERT. On CPUs the embeddings before the blocks get
the same row if they are known to treat every token alone; on GPUs their time does not matter.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from ..proof.dropout import without_dropout

PER_TOKEN = ("input_ids", "token_type_ids", "position_ids")
"""Arguments of embeddings with one number per token."""
NEEDED = {"input_ids", "position_ids"}
LIBRARIES = ("torch", "transformers", "peft")
"""Packages whose embeddings treat every token alike: what one batch shows holds for all."""
UNUSED = ("inputs_embeds", "past_key_values_length")
"""Further arguments that embeddings may have; if one is used, the embeddings stay padded."""


class ReplacedForward:
    """A module whose `forward` is another function while it is installed."""

    def __init__(self, module: nn.Module, run: Callable[..., Any]) -> None:
        self.module, self._run = module, run
        self.original = module.forward
        self.set_before: Any = None
        """A `forward` that was set on the module before; `remove` restores it."""

    def install(self) -> None:
        if self.module.__dict__.get("forward") == self._run:
            return
        self.set_before, self.original = self.module.__dict__.get("forward"), self.module.forward
        self.module.forward = self._run

    def remove(self) -> None:
        self.module.__dict__.pop("forward", None)
        if self.set_before is not None:
            self.module.forward = self.set_before


class UnpaddedEncoder:
    """Removes padding before a model's blocks and inserts it again after them."""

    def __init__(self, encoder: nn.Module, embeddings: nn.Module | None = None) -> None:
        self.places: Tensor | None = None
        """Indices of real tokens in the padded batch, one past the end for filler; None disables the unpadding."""
        self._encoder = ReplacedForward(encoder, self._run)
        self._embeddings = UnpaddedEmbeddings(embeddings, self) if embeddings is not None else None

    def install(self) -> None:
        self._encoder.install()
        if self._embeddings is not None:
            self._embeddings.replaced.install()

    def remove(self) -> None:
        self._encoder.remove()
        if self._embeddings is not None:
            self._embeddings.replaced.remove()
            self._embeddings.shape = None

    def _run(self, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Any:
        if self.places is None:
            return self._encoder.original(hidden_states, *args, **kwargs)
        shape = None if self._embeddings is None else self._embeddings.shape
        if shape is not None and hidden_states.shape[:2] == (1, len(self.places)):
            return self._padded(self._encoder.original(hidden_states, *args, **kwargs), *shape)
        rows, width, size = hidden_states.shape
        row = hidden_states.reshape(rows * width, size).index_select(0, within(self.places, rows * width))
        return self._padded(self._encoder.original(row.unsqueeze(0), *args, **kwargs), rows, width)

    def _padded(self, output: Any, rows: int, width: int) -> Any:
        if isinstance(output, Tensor):
            return self._spread(output, rows, width)
        if isinstance(output, tuple):
            return (self._spread(output[0], rows, width), *output[1:])
        output.last_hidden_state = self._spread(output.last_hidden_state, rows, width)
        return output

    def _spread(self, row: Tensor, rows: int, width: int) -> Tensor:
        assert self.places is not None
        if row.device.type == "cpu" and int(self.places[-1]) < rows * width:
            # Without a place for filler nothing of the padded size is copied, here or in backward.
            return row.new_zeros(rows * width, row.shape[-1]).index_copy_(0, self.places, row[0]).view(rows, width, -1)
        padded = row.new_zeros(rows * width + 1, row.shape[-1])
        return padded.index_copy(0, self.places, row.squeeze(0))[:-1].view(rows, width, -1)


def within(places: Tensor, count: int) -> Tensor:
    """The places with those of filler moved to the last token: what is computed there is not used."""
    return places.clamp_max(count - 1)


class UnpaddedEmbeddings:
    """Embeddings that get the real tokens as one row, once a batch has shown that the row has the same numbers.

    Only code of a library: other code may read neighbours where it finds a token that only later batches have.
    """

    def __init__(self, embeddings: nn.Module, encoder: UnpaddedEncoder) -> None:
        self.replaced = ReplacedForward(embeddings, self._run)
        self._encoder = encoder
        self._names = list(inspect.signature(embeddings.forward).parameters)
        self._is_same: bool | None = None
        self._code: list[Any] = []
        self.shape: tuple[int, int] | None = None
        """Rows and width of the batch that was given as one row last; None if the last one was padded."""

    def _run(self, *args: Any, **kwargs: Any) -> Any:
        self.shape = None
        given = {**dict(zip(self._names, args, strict=False)), **kwargs}
        places = self._encoder.places
        if places is None or not can_be_a_row(given):
            return self.replaced.original(*args, **kwargs)
        row = as_row(given, places)
        code = self._code_now()
        if code != self._code:  # a callback may have changed what a module computes
            self._is_same, self._code = None, code
        if self._is_same is None:
            self._is_same = self._is_known() and self._has_same_numbers(given, row, places)
        if not self._is_same:
            return self.replaced.original(*args, **kwargs)
        self.shape = tuple(given["input_ids"].shape)
        return self.replaced.original(**row)

    def _code_now(self) -> list[Any]:
        """What the modules of the embeddings compute: their classes and functions, and functions set on them."""
        modules = self.replaced.module.modules()
        inner = [_code_of(each, each.__dict__.get("forward")) for each in modules if each is not self.replaced.module]
        return [_code_of(self.replaced.module, self.replaced.set_before), *inner]

    def _is_known(self) -> bool:
        """Whether all code of the embeddings is that of a library."""
        homes = {each.__module__.partition(".")[0] for code in self._code for each in code if each is not None}
        return homes <= set(LIBRARIES)

    @torch.no_grad()
    def _has_same_numbers(self, given: dict[str, Any], row: dict[str, Any], places: Tensor) -> bool:
        """Whether every token has the same numbers in the row as in the padded batch, to the last bit."""
        with torch.random.fork_rng(devices=[]), without_dropout():
            try:
                padded, alone = self.replaced.original(**given), self.replaced.original(**row)
            except Exception:  # any error of the model: its embeddings stay padded
                return False
        if not isinstance(padded, Tensor) or not isinstance(alone, Tensor) or padded.dim() != 3:
            return False
        tokens = padded.flatten(0, 1)
        expected = tokens.index_select(0, within(places, len(tokens))).unsqueeze(0)
        return bool(torch.equal(expected, alone))


def _code_of(module: nn.Module, function: Any) -> tuple[Any, ...]:
    """What a module computes: its class, the function of its class, and one that is set on it, if any."""
    return type(module), type(module).forward, function


def can_be_a_row(given: dict[str, Any]) -> bool:
    """Whether embeddings were given nothing but numbers per token, on a CPU."""
    ids = given.get("input_ids")
    if not isinstance(ids, Tensor) or ids.dim() != 2 or ids.device.type != "cpu":
        return False
    if any(isinstance(given.get(name), Tensor) or given.get(name) for name in UNUSED):
        return False
    numbers = [given[name] for name in PER_TOKEN if given.get(name) is not None]
    return all(each.dim() == 2 and each.shape[1] == ids.shape[1] and len(each) in (1, len(ids)) for each in numbers)


def as_row(given: dict[str, Any], places: Tensor) -> dict[str, Any]:
    """The arguments with the real tokens of all samples as one row; positions are those in the padded batch."""
    shape = given["input_ids"].shape
    chosen = within(places, shape.numel())
    numbers = {name: given[name] for name in PER_TOKEN if given.get(name) is not None}
    row = {name: each.expand(shape).reshape(-1)[chosen].unsqueeze(0) for name, each in numbers.items()}
    return {**given, "position_ids": (chosen % shape[1]).unsqueeze(0), **row}


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


def find_embeddings(model: nn.Module, encoder: nn.Module) -> nn.Module | None:
    """The embeddings beside an encoder, if they take nothing but numbers per token."""
    for module in model.modules():
        children = dict(module.named_children())
        if encoder in children.values() and "embeddings" in children:
            names = set(inspect.signature(children["embeddings"].forward).parameters)
            known = NEEDED <= names <= {*PER_TOKEN, *UNUSED}
            return children["embeddings"] if known else None
    return None
