"""Layouts as objects that can be compared on a model, installed for an update, and removed again."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

from torch import Tensor, nn

from ..attention import pairs
from ..attention.dispatch import HALF
from ..attention.document_mask import as_given
from ..attention.kernel_choice import without_cudnn
from ..attention.switch import AttentionSwitch
from ..attention.t5_bias import switch_for
from ..fused_modules import FusedModules
from ..linear_products import LinearProducts
from ..planner.decision import BIASED, COLLATED, FLAT, GROUPED, IN_ROWS, LAYOUTS, PAIRED, UNMASKED, UNPADDED
from .positions import counts_by_row, most_positions, takes_any_length
from .rows import (
    BORDERS,
    DECODER_MASK,
    LONGEST,
    MASK,
    PLACES,
    SOURCE_SIDE,
    TARGET_SIDE,
    Laid,
    Limits,
    Side,
    lay_flat,
    lay_grouped,
    lay_in_shapes,
    lay_pairs,
    lay_unpadded,
)
from .samples import Samples
from .unpadded_encoder import UnpaddedEncoder, find_embeddings, find_encoder


class Layout:
    """A way to arrange samples; this class implements `grouped`, with or without mask, for any model."""

    def __init__(self, name: str, model: nn.Module, *, most_width: int | None = None) -> None:
        self.name, self._most_width = name, most_width
        self.products = LinearProducts(model)

    def lay(self, samples: Samples, limits: Limits, *, shifts: bool, fill: bool) -> Laid:
        if limits.few_shapes:
            return lay_in_shapes(samples, limits, most_width=self._most_width)
        return lay_grouped(samples, limits, drop_mask=self.name == UNMASKED)

    def for_model(self, batch: dict[str, Any]) -> dict[str, Any]:
        """Convert a micro-batch on the device to the inputs of the model."""
        return batch

    @contextmanager
    def active(self) -> Iterator[None]:
        """Install the layout around the forward and backward of an update."""
        with without_cudnn(), self.products.active():
            yield


class Biased(Layout):
    """Groups, with an attention that has fast kernels for the model's position bias, and norms of one kernel."""

    def __init__(self, model: nn.Module, switch: AttentionSwitch) -> None:
        super().__init__(BIASED, model)
        self._switch, self._fused = switch, FusedModules(model)

    @contextmanager
    def active(self) -> Iterator[None]:
        with super().active(), self._switch.active(), self._fused.active():
            yield


class Flat(Layout):
    """Rows of several documents without padding."""

    def __init__(self, model: nn.Module, switch: AttentionSwitch) -> None:
        super().__init__(FLAT, model)
        self._switch = switch

    def lay(self, samples: Samples, limits: Limits, *, shifts: bool, fill: bool) -> Laid:
        return lay_flat(samples, limits, shifts=shifts, fill=fill)

    def for_model(self, batch: dict[str, Any]) -> dict[str, Any]:
        if BORDERS not in batch:
            return batch
        return {
            **{name: value for name, value in batch.items() if name not in (BORDERS, LONGEST)},
            MASK: as_given(batch[BORDERS], batch[LONGEST]),
        }

    @contextmanager
    def active(self) -> Iterator[None]:
        with self._switch.active(), self.products.active():
            yield


class Paired(Layout):
    """Rows of several sources, and rows of their targets, without padding."""

    def __init__(
        self,
        model: nn.Module,
        switch: AttentionSwitch,
        bias: pairs.DistanceBias,
        positions: pairs.RowPositions,
        *,
        shift: Callable[[Tensor], Tensor],
    ) -> None:
        super().__init__(PAIRED, model)
        self._switch, self._bias, self._positions, self._shift = switch, bias, positions, shift
        self._fused = FusedModules(model)

    def lay(self, samples: Samples, limits: Limits, *, shifts: bool, fill: bool) -> Laid:
        return lay_pairs(samples, limits, shift=self._shift, fill=fill)

    def for_model(self, batch: dict[str, Any]) -> dict[str, Any]:
        if BORDERS not in batch:
            return batch
        source, target = (Side(*(batch[name] for name in names)) for names in (SOURCE_SIDE, TARGET_SIDE))
        self._bias.longest = {False: source.longest, True: target.longest}
        self._positions.places = {False: source.places, True: target.places}
        return {
            **{name: value for name, value in batch.items() if name not in (*SOURCE_SIDE, *TARGET_SIDE)},
            MASK: pairs.as_given(source.borders, target.borders),
            DECODER_MASK: pairs.as_given(target.borders),
        }

    @contextmanager
    def active(self) -> Iterator[None]:
        changes = (self._switch, self._bias, self._positions, self._fused, self.products)
        with ExitStack() as stack:
            for change in changes:
                stack.enter_context(change.active())
            yield


class Unpadded(Flat):
    """Padded batches with an encoder that computes real tokens only."""

    def __init__(self, model: nn.Module, switch: AttentionSwitch, encoder: UnpaddedEncoder) -> None:
        super().__init__(model, switch)
        self.name = UNPADDED
        self._encoder = encoder

    def lay(self, samples: Samples, limits: Limits, *, shifts: bool, fill: bool) -> Laid:
        return lay_unpadded(samples, limits, fill=fill)

    def for_model(self, batch: dict[str, Any]) -> dict[str, Any]:
        self._encoder.places = batch.get(PLACES)
        return {name: value for name, value in super().for_model(batch).items() if name != PLACES}

    @contextmanager
    def active(self) -> Iterator[None]:
        self._encoder.install()
        try:
            with super().active():
                yield
        finally:
            self._encoder.places = None
            self._encoder.remove()


def make_layout(name: str, model: nn.Module) -> Layout | str:
    """The layout for this model, or the reason why it is not possible."""
    if name in (GROUPED, UNMASKED):
        # A position out of range would abort the process on a GPU; an unknown limit leaves every width as it is.
        most = None if takes_any_length(model) else most_positions(model, of_sources=True) or 0
        return Layout(name, model, most_width=most)
    assert name in LAYOUTS and name != COLLATED
    if name == BIASED:
        biased = switch_for(model)
        return biased if isinstance(biased, str) else Biased(model, biased)
    if name == PAIRED:
        return _paired(model)
    switch = AttentionSwitch(model)
    reason = switch.reason or counts_by_row(model)
    if reason is not None:
        return reason
    if name == FLAT:
        return Flat(model, switch)
    encoder = find_encoder(model)
    if encoder is None:
        return "the model has no separate encoder"
    return Unpadded(model, switch, UnpaddedEncoder(encoder, find_embeddings(model, encoder)))


def _paired(model: nn.Module) -> Layout | str:
    switch, bias, positions = pairs.switch_for(model), pairs.DistanceBias(model), pairs.RowPositions(model)
    if isinstance(switch, str):
        return switch
    if not (bias.is_used or positions.are_used):
        return "it is not known where the model computes positions"
    shift = _shift_of(model)
    if shift is None:
        return "it is not known how the model makes inputs of the decoder from labels"
    reason = bias.reason or positions.reason
    return reason or Paired(model, switch, bias, positions, shift=shift)


def _shift_of(model: nn.Module) -> Callable[[Tensor], Tensor] | None:
    """The function by which a model makes inputs of the decoder from labels; None if it is not known."""
    found = getattr(model, "prepare_decoder_input_ids_from_labels", None)
    if callable(found):
        method: Callable[[Tensor], Tensor] = found
        return method
    shift = getattr(sys.modules.get(type(model).__module__), "shift_tokens_right", None)
    config: Any = getattr(model, "config", None)
    if not callable(shift) or config is None:
        return None
    return lambda labels: shift(labels, config.pad_token_id, config.decoder_start_token_id)


def needs_half_precision(name: str, device_type: str, weights: Tensor | None, computes_half: bool) -> bool:
    """Whether a layout is unusable because its kernels on this device support half precision only."""
    if name not in IN_ROWS or device_type == "cpu":
        return False
    return not computes_half and (weights is None or weights.dtype not in HALF)
