"""Columns that a model accepts; the others are removed from batches, never from the dataset."""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import nn
from torch.utils.data import get_worker_info

from ...errors import DataError
from ...notices import Notices, logger

LABEL_COLUMNS = ("label", "label_ids", "labels")
"""Names of labels in datasets: always kept, for losses and metrics."""


def innermost(model: nn.Module) -> nn.Module:
    """The user's module, without the wrappers of compile, parallelism or PEFT."""
    while True:
        model = without_wrappers(model)
        if not hasattr(model, "get_base_model"):
            return model
        model = model.get_base_model()


def without_wrappers(model: nn.Module) -> nn.Module:
    """The model without the wrappers of compile and parallelism; PEFT's are kept, because they may add inputs."""
    while True:
        if hasattr(model, "_orig_mod"):
            model = model._orig_mod
        elif type(model).__name__ in ("DistributedDataParallel", "DataParallel", "FullyShardedDataParallel"):
            model = model.module
        else:
            return model


def forward_parameters(model: nn.Module) -> list[str] | None:
    """The names of the forward's parameters, or None if it has only **kwargs."""
    parameters = inspect.signature(innermost(model).forward).parameters.values()
    named = [p.name for p in parameters if p.kind not in (p.VAR_KEYWORD, p.VAR_POSITIONAL)]
    return named or (None if any(p.kind is p.VAR_KEYWORD for p in parameters) else [])


def takes_anything(model: nn.Module) -> bool:
    """Whether the forward has **kwargs: it may compute a loss from labels among them."""
    parameters = inspect.signature(innermost(model).forward).parameters.values()
    return any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters)


def find_labels(model: nn.Module) -> list[str]:
    """The parameters of the forward that are labels."""
    names = forward_parameters(model) or []
    labels = [name for name in names if "label" in name]
    if "QuestionAnswering" in type(innermost(model)).__name__:
        labels += [name for name in names if name in ("start_positions", "end_positions")]
    return labels


def takes_loss_flag(model: nn.Module) -> bool:
    """Whether the model can compute a loss without labels, with `return_loss`."""
    parameter = inspect.signature(innermost(model).forward).parameters.get("return_loss")
    return parameter is not None and parameter.default is True


class ColumnFilter:
    """A collator that removes the columns of the dataset that the model does not accept.

    They are removed before the call if a subclass names the columns (`_signature_columns`), or for a collator known to
    fail on extra columns. Another collator sees all of them, and they are removed from its batch; columns it makes are
    passed on if the model or a loss of the user can take them (`passes_made`).
    """

    def __init__(
        self,
        collator: Callable[[Any], Any],
        accepted: set[str],
        *,
        notices: Notices,
        description: str = "training",
        in_workers: bool = False,
        are_named: bool = False,
        passes_made: bool = False,
    ) -> None:
        self.collator = collator
        self.accepted = accepted
        self.description = description
        self._passes_made = passes_made
        self._notices = notices
        self._are_named = are_named
        self._before = are_named or _chokes_on_extras(collator)
        # Every worker of every epoch has a copy of this object, so a flag in shared memory records the report.
        self._told = torch.zeros((), dtype=torch.bool).share_memory_() if in_workers else None
        self._level = logger.getEffectiveLevel()
        self._seen: list[str] = []
        self._keep: list[str] = []

    def __call__(self, features: list[Any]) -> Any:
        if not self._before:
            return self._of_batch(self._collated(features), features)
        first = features[0] if features else None
        if type(first) is dict or isinstance(first, Mapping):
            names = [*first]
            keep = self._keep if names == self._seen else self._kept(first)
            if keep != names:  # compared as lists: this runs for every batch, and len() is a call
                features = [{name: each[name] for name in keep} for each in features]
        return self.collator(features)

    def _collated(self, features: list[Any]) -> Any:
        """Call a user's collator with all columns; if it fails (on text, for example), without the extra ones."""
        names = [*features[0]] if features and isinstance(features[0], Mapping) else []
        if all(name in self.accepted for name in names):
            return self.collator(features)
        try:
            return self.collator([dict(each) for each in features])  # copies: it may pop from them before it fails
        except Exception as error:  # a user's collator may fail on an unknown column
            try:
                batch = self.collator([{n: each[n] for n in self._kept(features[0])} for each in features])
            except Exception:  # the columns were not the cause: raise the first error
                raise error from None
            self._before = True
            return batch

    def _of_batch(self, batch: Any, features: list[Any]) -> Any:
        if not isinstance(batch, Mapping):
            return batch
        if [*batch] == self._seen:
            keep = self._keep
        else:
            given = features[0] if features and isinstance(features[0], Mapping) else batch
            keep = self._kept(batch, made={name for name in batch if self._passes_made and name not in given})
        return batch if len(keep) == len(batch) else {name: batch[name] for name in keep}

    def _kept(self, columns: Mapping[str, Any], made: Iterable[str] = ()) -> list[str]:
        """The accepted columns, and those that the collator has made."""
        self._seen = [*columns]
        self._keep = keep = [name for name in columns if name in self.accepted or name in made]
        if not any(name not in LABEL_COLUMNS for name in keep):
            raise DataError(self._no_column(columns))
        if len(keep) < len(columns):
            withheld = ", ".join(name for name in columns if name not in keep)
            why = (
                "the trainer does not name in _signature_columns"
                if self._are_named
                else ("the model's forward does not accept")
            )
            self._tell(f"removed columns of the {self.description} data that {why}: {withheld}")
        return keep

    def _no_column(self, columns: Iterable[str]) -> str:
        there, wanted = ", ".join(columns) or "none", ", ".join(sorted(self.accepted))
        if self._are_named:
            return (
                f"no column of the {self.description} data is named in _signature_columns, which this trainer sets "
                f"(columns: {there}; named: {wanted}). Rename the columns, name them there, or set "
                "remove_unused_columns=False to pass all of them"
            )
        return (
            f"no column of the {self.description} data is an argument of the model's forward (columns: {there}; "
            f"arguments: {wanted}). Rename the columns, or set remove_unused_columns=False to pass all of them"
        )

    def _tell(self, text: str) -> None:
        worker = get_worker_info()
        if worker is not None and self._told is not None:
            if worker.id or self._told:
                return
            self._told.fill_(True)
            if not logger.hasHandlers():  # a worker that was not forked has the settings of no logger
                logger.setLevel(self._level)
                logger.addHandler(logging.StreamHandler())
        self._notices.inform_once(text)


def _chokes_on_extras(collator: Any) -> bool:
    """Whether the collator is a known one that stacks or pads every column."""
    home = getattr(collator, "__module__", None) or type(collator).__module__
    return home.startswith(("transformers.data", "loopwright.pt.data.collators", "torch.utils.data"))
