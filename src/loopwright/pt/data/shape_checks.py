"""Static shapes of batches, and the check that they change no result."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn
from torch.utils.data import IterableDataset

from ...core.part import DataPart
from ...errors import ArgumentsError, first_line
from ...snapshot import untouched_rng
from ..device_traits import kind_of
from ..loss.targets import IGNORED, check_loss
from ..part import TorchPart
from .columns import forward_parameters
from .loaders import sampling_strategy
from .static_shapes import Static, StaticCollator, StaticShapes

CLOSE = 1e-4
"""Largest relative difference between two ways to compute a mean in single precision."""


class Shapes(TorchPart, DataPart):
    """Static shapes, requested by the arguments or needed by the device."""

    def wants_static_shapes(self) -> bool:
        """Whether batches are padded to a few shapes."""
        return self.args.static_lengths is not None or kind_of(self.device).static_shapes

    def _with_static_shapes(self, collate: Callable[[Any], Any], dataset: Any, rows: int, description: str) -> Any:
        """The collator, padding to few shapes if required."""
        if not self.wants_static_shapes():
            return collate
        moving = [name for name in ("batch_packing", "per_device_train_batch_tokens") if getattr(self.args, name)]
        if sampling_strategy(self.args) == "batch_rebalance":
            moving.append("train_sampling_strategy='batch_rebalance'")
        if moving and description == "training":
            raise ArgumentsError(
                f"{' and '.join(moving)} makes micro-batches of many shapes, but batches must keep few shapes here "
                "(static_lengths, or a device that compiles for each shape); remove it"
            )
        if self.strategy.guard is not None:
            self.strategy.guard.tell = self.notices.warn_once
        takes = forward_parameters(self.model)
        shapes = StaticShapes(
            self.args.static_lengths,
            label_names=self.trainer.label_names,
            pad_token=self.padding_token(),
            takes_mask=takes is None or "attention_mask" in takes,
            tell=self.notices.warn_once,
        )
        if self.args.static_lengths is None:
            self.notices.warn_once(
                f"{self.device.type} compiles for each shape, so batches are padded to powers of two; set "
                "static_lengths to choose other lengths, or one length for all batches"
            )
        if self.args.dataloader_num_workers == 0:
            shapes.rows_stay = self._why_rows_stay(StaticCollator(collate, shapes, rows), dataset, description)
        elif self.internals.loss.has_custom_loss():
            shapes.rows_stay = "the loss is user-defined, and with data loading workers it is not tested"
        return StaticCollator(collate, shapes, rows)

    def padding_token(self) -> int:
        for place in (self.trainer.processing_class, getattr(self.model, "config", None)):
            found = getattr(place, "pad_token_id", None)
            if isinstance(found, int) and found >= 0:
                return found
        return 0

    # ---- checks ------------------------------------------------------------------------------------------------------

    def _why_rows_stay(self, collate: StaticCollator, dataset: Any, description: str) -> str | None:
        """Why rows must not be added to short batches, or None; a user's loss is tested on copies of one row."""
        couples = any(isinstance(module, nn.modules.batchnorm._BatchNorm) for module in self.model.modules())
        if couples and description == "training":
            return "the model normalizes over the batch, where every row counts"
        is_custom = self.internals.loss.has_custom_loss()
        if not is_custom or len_or_none(dataset) is None or len(dataset) % collate.rows == 0:
            return None if not isinstance(dataset, IterableDataset) else self._stream_reason()
        try:
            with untouched_rng():
                batch = collate([dataset[0]])
        except Exception:  # dataset and collator are user code; training raises the same error
            return "a sample could not be read"
        if not isinstance(batch, Static) or batch.full == 1:
            return None  # no rows are added to such batches
        return self._why_loss_minds(batch)

    def _stream_reason(self) -> str | None:
        is_custom = self.internals.loss.has_custom_loss()
        return "the loss is user-defined, and it is not tested on a stream" if is_custom else None

    def _why_loss_minds(self, batch: Static) -> str | None:
        """Compare the loss of one row beside ignored copies with the loss of all copies: the means should be equal."""
        names = [name for name in batch if name in ("labels", "label", "label_ids")]
        everywhere = dict(batch)
        for name in names:
            everywhere[name] = batch[name][:1].expand_as(batch[name]).clone()
        was_training = self.model.training
        self.model.eval()
        try:
            one, all_rows = self._mean_loss_of(dict(batch)), self._mean_loss_of(everywhere)
        except Exception as error:  # a user's loss may raise anything: the error is the reason
            return f"the loss does not accept labels of {IGNORED}: {first_line(error)}"
        finally:
            self.model.train(was_training)
        if abs(one - all_rows) <= CLOSE * max(abs(one), abs(all_rows), 1e-12):
            return None
        return f"the loss includes rows whose labels are {IGNORED}: {one:.6g} with them, {all_rows:.6g} without"

    def _mean_loss_of(self, inputs: dict[str, Any]) -> float:
        items = self.run.accounting.items_in(inputs)
        loss = self.internals.loss.probe().loss(inputs, items)
        if isinstance(loss, (tuple, list)):
            loss = loss[0] / loss[1]
        return float(check_loss(loss).double().item())

    # ---- removing padding --------------------------------------------------------------------------------------------

    def trimmed(self, batch: Static, logits: Any, labels: Any) -> tuple[Any, Any]:
        """Outputs and labels of a padded batch, trimmed to those of the batch without padding."""
        config = getattr(self.model, "config", None)
        vocabulary, classes = getattr(config, "vocab_size", None), getattr(config, "num_labels", None)
        return batch.trimmed(logits, vocabulary=vocabulary, classes=classes), batch.trimmed_labels(labels)


def len_or_none(dataset: Any) -> int | None:
    """The length of a map-style dataset; None for a stream or a dataset without a length."""
    if isinstance(dataset, IterableDataset):
        return None
    try:
        return len(dataset)
    except (TypeError, NotImplementedError, AttributeError):
        return None
