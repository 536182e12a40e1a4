"""What the ranks of a PyTorch run must have in common: data, model, optimizer and weights."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from itertools import chain
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.utils.data import IterableDataset, Subset

from ...core.distributed.agreement import Agreement, Description
from ...core.distributed.description import described, digest, name_of
from ...core.user_code.overrides import is_overridden
from ...errors import ModelError
from ..checkpoint.tensors import plain_module
from ..data.columns import without_wrappers
from ..data.loaders import has_length
from ..loss.saved_parts import found_together
from ..part import TorchPart
from ..tensor_hashes import hashes, is_plain
from .replicas import copied_tensors, has_values, take_from_first

PLACE = re.compile(r"0x[0-9a-f]+|\b(cuda|xpu|npu|mlu|musa|xla):\d+")
"""Addresses and device numbers, which differ between processes."""
OF_A_MACHINE = ("_name_or_path", "transformers_version", "_commit_hash")
"""Entries of a model's configuration that say where it came from."""
ROWS = 8
"""Rows of a dataset that are compared."""


class TorchAgreement(TorchPart, Agreement):
    """Compares the ranks of a run, and gives them the same initial weights."""

    packages = ("loopwright", "torch", "transformers", "numpy")

    def settings(self) -> Description:
        own = super().settings()
        own.same["device type"] = self.device.type
        own.same["torch.get_default_dtype()"] = str(torch.get_default_dtype())
        if self.strategy.is_sharded and not self.args.save_on_each_node:  # each rank writes its shards there
            own.same["output_dir"] = own.usual.pop("output_dir")
        return own

    # ---- data -------------------------------------------------------------------------------------------------------

    def data(self) -> Description:
        """Lengths, columns and a few rows; a loader of the user's own may give each rank another dataset."""
        sets: dict[str, Any] = {}
        if not is_overridden(self.trainer, "get_train_dataloader"):
            train = self.trainer.train_dataset
            named = train if isinstance(train, dict) else {}
            sets.update({f"train_dataset[{name!r}]": each for name, each in named.items()})
            sets.update({} if named else {"train_dataset": train})
        if not is_overridden(self.trainer, "get_eval_dataloader"):
            given = self.trainer.eval_dataset
            several = isinstance(given, dict)
            sets.update({f"eval_dataset[{name!r}]": each for name, each in given.items()} if several else {})
            sets.update({} if several else {"eval_dataset": given})
        found = Description()
        for name, each in sets.items():
            found.same.update(_described_data(name, each))
            if type(each) in (list, tuple):
                found.usual[f"a hash of rows of {name}"] = _rows_of(each)
        return found

    def functions(self) -> dict[str, Any]:
        return {**super().functions(), "processing_class": self.trainer.processing_class}

    # ---- model ------------------------------------------------------------------------------------------------------

    def begin_alike(self, model: nn.Module) -> None:
        """Compare the models of all ranks; where their initial weights differ, take those of rank 0."""
        if self.strategy.world_size == 1:
            return
        module = without_wrappers(model)
        self.compare(Description(dict(_described_model(module))))
        if self.strategy.any_rank(not has_values(module)):
            return  # shards, or weights that only rank 0 has and that sharding distributes: only shapes are compared
        if not self._weights_differ(module):
            return
        take_from_first(module, self.processes.host, self.device)
        self.notices.warn_once(
            "the ranks have initialized the model with different weights; all use those of rank 0. Call "
            "loopwright.set_seed before you build the model, or pass model_init"
        )
        if self._weights_differ(module):
            raise ModelError(
                "the ranks have different weights after those of rank 0 were copied to all: a tensor of the model "
                "cannot be written to. Load the same weights on every rank before you create the trainer"
            )

    def _weights_differ(self, module: nn.Module) -> bool:
        text = described(hashes(copied_tensors(module)))
        own = [float(int(digest(text)[at : at + 12], 16)) for at in range(0, 48, 12)]
        rows = self.strategy.numbers_of_ranks(own)
        return any(row != rows[0] for row in rows)

    def weights(self) -> dict[str, str]:
        """Hashes of parameters; buffers may differ, as each rank updates its own."""
        module = plain_module(self.model)
        parameters = {name for name, _ in module.named_parameters(remove_duplicate=False)}
        copied = {name: each for name, each in copied_tensors(module).items() if name in parameters}
        return {f"the weight {name}": f"of hash {value}" for name, value in hashes(copied).items()}

    def restored(self) -> dict[str, str]:
        findings = found_together(self.run.accounting)
        return {**super().restored(), **{f"loss.{name}": described(each) for name, each in findings.items()}}

    # ---- updates ----------------------------------------------------------------------------------------------------

    def optimizer(self) -> dict[str, str]:
        optimizer, schedule = self.trainer.optimizer, self.trainer.lr_scheduler
        named = {id(p): name for name, p in plain_module(self.model).named_parameters()}
        found = {"optimizer": name_of(type(optimizer)), "scheduler": name_of(type(schedule))}
        for index, group in enumerate(getattr(optimizer, "param_groups", [])):
            for key, value in group.items():
                if key == "params":
                    names = [named.get(id(each), "?") for each in value]
                    found[f"the parameters of optimizer group {index}"] = f"{len(names)} ({digest(str(names))[:8]})"
                else:
                    found[f"{key} of optimizer group {index}"] = described(value)
        for key, value in vars(schedule).items() if hasattr(schedule, "__dict__") else ():
            if not key.startswith("_") and key != "optimizer":
                found[f"scheduler.{key}"] = described(value)
        for name, p in plain_module(self.model).named_parameters():
            found[f"requires_grad of {name}"] = str(p.requires_grad)
        return found


def _described_data(name: str, dataset: Any) -> Iterator[tuple[str, str]]:
    yield name, "missing" if dataset is None else name_of(type(dataset))
    if dataset is None or isinstance(dataset, IterableDataset) or not has_length(dataset):
        return
    yield f"len({name})", str(len(dataset))
    columns = getattr(dataset, "column_names", None)
    if columns is not None:
        yield f"{name}.column_names", described(columns)
    if isinstance(dataset, Subset):
        yield f"a hash of {name}.indices", digest(str(list(dataset.indices)))[:16]
    if type(dataset).__module__ == "datasets.arrow_dataset":
        yield f"a hash of rows of {name}", _rows_of(dataset.with_format("arrow"))


def _rows_of(dataset: Any) -> str:
    """A hash of a few rows as they are stored: no transform of the user is called."""
    places = sorted({len(dataset) * part // ROWS for part in range(ROWS)}) if len(dataset) else []
    rows = [dataset[place : place + 1] for place in places]
    return digest(str([_content(row.to_pylist() if hasattr(row, "to_pylist") else row) for row in rows]))[:16]


def _content(value: Any) -> Any:
    """The values of a row as a text."""
    if isinstance(value, Mapping):
        return {str(key): _content(each) for key, each in value.items()}
    if isinstance(value, (list, tuple)):
        return [_content(each) for each in value]
    if isinstance(value, np.ndarray) and value.dtype != object:
        return digest(value.tobytes().hex())
    return hashes({"": value}) if is_plain(value) else described(value)


def _described_model(module: nn.Module) -> Iterator[tuple[str, str]]:
    """Modules with their options, parameters, persistent buffers and the configuration."""
    yield "model", name_of(type(module))
    for path, each in module.named_modules():
        yield f"module {path or 'model'}", PLACE.sub("", f"{name_of(type(each))}({each.extra_repr()})")
    tensors = module.state_dict(keep_vars=True)
    for name, tensor in chain(tensors.items(), module.named_parameters(remove_duplicate=False)):
        if isinstance(tensor, torch.Tensor):
            shape = tuple(getattr(tensor, "ds_shape", tensor.shape))
            yield name, f"{str(tensor.dtype).removeprefix('torch.')} {shape}, requires_grad={tensor.requires_grad}"
    config: Any = getattr(module, "config", None)
    entries = config.to_dict() if callable(getattr(config, "to_dict", None)) else {}
    for key, value in entries.items() if isinstance(entries, Mapping) else ():
        if key not in OF_A_MACHINE:
            yield f"config.{key}", described(value)
