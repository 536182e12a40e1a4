"""A model's weights on disk: under the module's own names in checkpoints, in transformers' format when exported."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ...core.checkpoint.folder import MODEL, MODULE, WEIGHTS
from ...core.checkpoint.json_files import read_json, write_json
from ...errors import CheckpointError
from .conversion import from_exported, is_pretrained, is_sharded_class, reads_own_names, skeleton
from .shards import INDEX, PLACES, BoxReader, HeldTensors, files_in_index, fill
from .tensors import host_copy, read_tensors, some, write_tensors

ADAPTER = "adapter_model.safetensors"

Write = Callable[[Path], Any]


# ---- exporting -------------------------------------------------------------------------------------------------------


def export_writer(model: nn.Module, tensors: Mapping[str, Tensor]) -> Write:
    """A function that writes the model into a folder: its own `save_pretrained` if it has one, else safetensors."""
    tensors = _in_host_memory(tensors)
    if not hasattr(model, "save_pretrained"):
        return lambda folder: write_tensors(folder / MODEL, tensors)
    # transformers selects conversions by class names, which FSDP has changed.
    written = skeleton(model) if is_pretrained(model) and is_sharded_class(model) else model
    return lambda folder: _save_pretrained(written, folder, tensors)


def adapter_writer(
    model: nn.Module, tensors: Mapping[str, Tensor], *, needed: set[str], tell: Callable[[str], None]
) -> Write:
    """Like `export_writer`, for adapters: reports needed tensors that are not in the files."""
    tensors = _in_host_memory(tensors)

    def write(folder: Path) -> None:
        places = _export_with_places(model, folder, tensors, needed & set(tensors))
        lost = sorted((needed & set(tensors)) - set(places))
        if lost:
            tell(
                f"checkpoint_format='transformers' saves the adapters of {type(model).__name__} only, without "
                f"{len(lost)} other tensors that training has changed ({lost[0]}); a resumed run begins with those of "
                "the model it is given. Use checkpoint_format='native' to resume exactly"
            )

    return write


def _in_host_memory(tensors: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
    return host_copy(tensors) if any(tensor.device.type != "cpu" for tensor in tensors.values()) else tensors


def _save_pretrained(model: Any, folder: Path, tensors: Mapping[str, Tensor]) -> None:
    """Call the model's `save_pretrained`, without its progress bar."""
    try:
        from transformers.utils import logging
    except ImportError:
        model.save_pretrained(str(folder), state_dict=dict(tensors))
        return
    drawn = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        model.save_pretrained(str(folder), state_dict=dict(tensors))
    finally:
        if drawn:
            logging.enable_progress_bar()


# ---- checkpoints -----------------------------------------------------------------------------------------------------


def native_writer(
    model: nn.Module, tensors: Mapping[str, Tensor], *, needed: set[str], tell: Callable[[str], None]
) -> Write:
    """A function that writes the weights so that they can be read under the module's own names.

    `needed` are the names that a checkpoint of an adapter must hold: those changed by training.
    """
    if not hasattr(model, "save_pretrained"):
        return lambda folder: write_tensors(folder / MODEL, tensors)
    tensors = _in_host_memory(tensors)
    if is_exact(model):
        return lambda folder: _write_own(model, folder, tensors)
    needed = needed & set(tensors) if is_adapter(model) else set(tensors)
    return lambda folder: _write_hf_format(model, folder, tensors, needed, tell)


def is_adapter(model: Any) -> bool:
    """Whether the model is saved as its PEFT adapters."""
    return hasattr(model, "peft_config")


def _is_of_transformers(model: Any) -> bool:
    """Whether `save_pretrained` is transformers' own, and writes the state dict it is given."""
    home = getattr(type(model).save_pretrained, "__module__", "")
    return home.startswith("transformers.") and getattr(model, "hf_quantizer", None) is None


def is_exact(model: Any) -> bool:
    """Whether the files of `save_pretrained` are known to hold all weights."""
    return not hasattr(model, "save_pretrained") or (
        is_pretrained(model) and not is_adapter(model) and _is_of_transformers(model)
    )


def is_saved_by_others(model: Any) -> bool:
    """Whether `save_pretrained` is user code, which may write the live model instead of the given state dict."""
    home = getattr(getattr(type(model), "save_pretrained", None), "__module__", None) or "torch"
    return home.split(".")[0] not in ("torch", "transformers", "peft")


def _write_own(model: Any, folder: Path, tensors: Mapping[str, Tensor]) -> None:
    """Write weights under their own names; as the file of `from_pretrained` only if it reads them unchanged."""
    written = skeleton(model) if is_sharded_class(model) else model
    _save_pretrained(written, folder, {})  # configuration, and the code of custom models
    (folder / MODEL).unlink(missing_ok=True)
    file = MODEL if reads_own_names(model) else MODULE
    aliases = write_tensors(folder / file, tensors, keep_aliases=False)
    _write_places(folder, file, {name: (file, key) for name, key in aliases.items()}, complete=True)


def _write_hf_format(
    model: Any, folder: Path, tensors: Mapping[str, Tensor], needed: set[str], tell: Callable[[str], None]
) -> None:
    """Call an unknown `save_pretrained`; needed tensors that its files lack bit by bit are written beside them."""
    places = _export_with_places(model, folder, tensors, needed)
    rest = {name: tensor for name, tensor in tensors.items() if name in needed and name not in places}
    if rest:
        aliases = write_tensors(folder / MODULE, rest, keep_aliases=False)
        places.update({name: (MODULE, key) for name, key in aliases.items()})
        size = sum(each.numel() * each.element_size() for each in rest.values()) / 1e6
        tell(
            f"{type(model).__name__}.save_pretrained omits or converts {len(rest)} tensors that resuming needs "
            f"({next(iter(rest))}); checkpoints also store them, {size:,.1f} MB in {MODULE}"
        )
    _write_places(folder, MODULE if rest else None, places, complete=not is_adapter(model))


def _export_with_places(
    model: Any, folder: Path, tensors: Mapping[str, Tensor], needed: set[str]
) -> dict[str, tuple[str, str]]:
    """Call `save_pretrained`; returns file and key of those needed tensors that its files hold bit by bit."""
    before = set(folder.rglob("*.safetensors"))
    _save_pretrained(model, folder, tensors)
    found = {
        _digest(tensor): (file.relative_to(folder).as_posix(), key)
        for file in sorted(set(folder.rglob("*.safetensors")) - before)
        for key, tensor in read_tensors(file).items()
    }
    return {name: place for name in sorted(needed) if (place := found.get(_digest(tensors[name]))) is not None}


def _digest(tensor: Tensor) -> tuple[Any, ...]:
    plain = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
    return tuple(tensor.shape), tensor.dtype, hashlib.blake2b(plain.numpy().data if plain.numel() else b"").digest()


def _write_places(folder: Path, file: str | None, elsewhere: dict[str, tuple[str, str]], *, complete: bool) -> None:
    write_json(folder / WEIGHTS, {"file": file, "elsewhere": elsewhere, "complete": complete})


# ---- loading ---------------------------------------------------------------------------------------------------------


def load_model(model: nn.Module, folder: str | os.PathLike[str], *, strict: bool = True) -> nn.Module:
    """Load the weights saved in a checkpoint or by `save_model` into the model, in place; returns the model."""
    load_weights(model, Path(folder), strict=strict)
    return model


def load_weights(model: nn.Module, folder: str | Path, *, strict: bool = True) -> None:
    """Load the weights of a checkpoint or an exported model; either side may be sharded."""
    folder = Path(folder)
    if is_exported(folder) and (folder / ADAPTER).is_file() and is_adapter(model):
        _load_adapter(model, folder)
        return
    complete = not (folder / WEIGHTS).is_file() or read_json(folder / WEIGHTS, PLACES)["complete"]
    with saved_weights(model, folder) as reader:
        fill(model, reader, strict=strict and complete, optional=_optional(model) if is_exported(folder) else "")


def is_exported(folder: Path) -> bool:
    """Whether the weights in a folder have the names of a `save_pretrained`, as far as can be determined."""
    whole = any((folder / name).is_file() for name in (INDEX, MODEL, ADAPTER))
    return whole and not (folder / WEIGHTS).is_file()


def partly_saved_names(folder: Path) -> frozenset[str]:
    """The names in a checkpoint that does not hold the whole model, such as that of an adapter; otherwise empty."""
    if not (folder / WEIGHTS).is_file() or read_json(folder / WEIGHTS, PLACES)["complete"]:
        return frozenset()
    with BoxReader(folder, "model").opened() as reader:
        return frozenset(reader.names())


@contextmanager
def saved_weights(model: nn.Module, folder: str | Path) -> Iterator[BoxReader | HeldTensors]:
    """The weights in a folder under the module's own names, converted if transformers wrote them."""
    folder = Path(folder)
    if is_exported(folder) and is_pretrained(model):
        yield HeldTensors(from_exported(model, _read_model(folder), source=str(folder)), folder)
        return
    with BoxReader(folder, "model").opened() as reader:
        yield reader


def _optional(model: Any) -> str:
    """A pattern of names that transformers' files may omit."""
    named = ("_keys_to_ignore_on_load_missing", "_keys_to_ignore_on_save")
    return "|".join(f"(?:{each})" for name in named for each in getattr(model, name, None) or ())


def _read_model(folder: Path) -> dict[str, Tensor]:
    if (folder / INDEX).is_file():
        return {name: tensor for file in files_in_index(folder) for name, tensor in read_tensors(folder / file).items()}
    if (folder / MODEL).is_file():
        return read_tensors(folder / MODEL)
    raise CheckpointError(f"{folder} has no {MODEL}, so there are no weights to load")


def _load_adapter(model: Any, folder: Path) -> None:
    from peft import set_peft_model_state_dict

    active = getattr(model, "active_adapters", None) or ["default"]
    adapter = next(iter(active() if callable(active) else active))
    tensors = read_tensors(folder / ADAPTER)
    if is_pretrained(model):  # a model with built-in adapters: PEFT's files have the prefix of PEFT's wrapper
        tensors = {name.removeprefix("base_model.model."): tensor for name, tensor in tensors.items()}
    result = set_peft_model_state_dict(model, tensors, adapter_name=adapter)
    unexpected = list(getattr(result, "unexpected_keys", ()))
    if unexpected:
        raise CheckpointError(f"the adapter in {folder} does not fit the model. unexpected: {some(unexpected)}")
