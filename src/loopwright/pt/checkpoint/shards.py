"""Sharded tensors in checkpoints: each rank writes its shard with its offsets, and reads it back in any layout."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import safe_open
from torch import Tensor, nn

from ...core.checkpoint.folder import MODEL, OPTIMIZER, WEIGHTS
from ...core.checkpoint.manifest import Entry, names_outside, read_manifest
from ...core.checkpoint.reading import link_problem
from ...core.checkpoint.schema import flag, list_of, maybe, named, record, restoring, text
from ...core.checkpoint.writers import Part
from ...errors import CheckpointError
from .tensors import check_fit, read_json, write_tensors

INDEX = f"{MODEL}.index.json"
NAMES = {torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16", torch.int64: "I64",
         torch.int32: "I32", torch.int16: "I16", torch.int8: "I8", torch.uint8: "U8", torch.bool: "BOOL"}  # fmt: skip
FORMATS = {name: dtype for dtype, name in NAMES.items()}


PLACES = record({"file": maybe(text), "elsewhere": named(list_of(text, length=2)), "complete": flag})
"""weights.json: the file with the weights, those in other files, and whether they are all of the model's."""
INDEX_OF_FILES = record({"weight_map": named(text)})


class Box(NamedTuple):
    """A part of a tensor, with its offset in the full tensor."""

    values: Tensor
    offset: tuple[int, ...]
    shape: tuple[int, ...]
    """The shape of the full tensor."""

    @property
    def places(self) -> tuple[slice, ...]:
        """The position of the part in the full tensor."""
        return tuple(slice(low, low + n) for low, n in zip(self.offset, self.values.shape, strict=True))


def is_distributed(tensor: Any) -> bool:
    """Whether a tensor is distributed over ranks."""
    return hasattr(tensor, "device_mesh") and hasattr(tensor, "placements")


def local_part(tensor: Any) -> Box:
    """This rank's shard of a tensor."""
    tensor = tensor.detach()
    if not is_distributed(tensor):
        return Box(tensor, (0,) * tensor.dim(), tuple(tensor.shape))
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    shape, offset = compute_local_shape_and_global_offset(tensor.shape, tensor.device_mesh, tensor.placements)
    local = tensor.to_local()
    if hasattr(local, "wait"):
        local = local.wait()
    return Box(local[tuple(slice(0, size) for size in shape)], tuple(offset), tuple(tensor.shape))


def own_boxes(tensors: Mapping[str, Tensor], rank: int) -> dict[str, Box]:
    """The shards this rank writes; each shard is written by exactly one rank."""
    return {name: local_part(tensor) for name, tensor in tensors.items() if _writes(tensor, rank)}


def _writes(tensor: Any, rank: int) -> bool:
    if not is_distributed(tensor):
        return rank == 0
    # A mesh over a subset of the ranks has replicas; the one that contains rank 0 writes.
    if 0 not in tensor.device_mesh.mesh.flatten().tolist():
        return False
    place = tensor.device_mesh.get_coordinate()
    replicated = [where for where, kind in zip(place, tensor.placements, strict=True) if kind.is_replicate()]
    return not any(replicated) and 0 not in local_part(tensor).values.shape


def shard_name(stem: str, rank: int, world: int) -> str:
    return f"{stem}-{rank + 1:05d}-of-{world:05d}.safetensors"


def write_boxes(folder: Path, stem: str, boxes: Mapping[str, Box], rank: int, world: int) -> Part:
    """Write boxes into this rank's file; returns the part of the manifest for it."""
    file = shard_name(stem, rank, world)
    if not boxes:
        return Part()
    write_tensors(folder / file, {name: box.values.clone() for name, box in boxes.items()})
    entries: dict[str, Entry] = {}
    for name, box in boxes.items():
        place = {"file": file, "key": name, "offset": list(box.offset), "size": list(box.values.shape)}
        entries[f"{stem}.safetensors/{name}"] = {
            "dtype": NAMES.get(box.values.dtype, str(box.values.dtype)),
            "shape": list(box.shape),
            "boxes": [place],
        }
    return Part([file], entries)


def shard_writer(
    stem: str, tensors: Mapping[str, Tensor], keep: Any, *, rank: int, world: int
) -> Callable[[Path], Any]:
    """Writes this rank's shards of the tensors, of which `keep` makes a copy now."""
    boxes = own_boxes(tensors, rank)
    values = keep({f"{stem}/{name}": box.values for name, box in boxes.items()})
    kept = {name: box._replace(values=values[f"{stem}/{name}"]) for name, box in boxes.items()}
    return partial(write_boxes, stem=stem, boxes=kept, rank=rank, world=world)


def files_in_index(folder: Path) -> list[str]:
    """The files that the index of an exported model names, all of them in its folder."""
    files = sorted(set(read_json(folder / INDEX, INDEX_OF_FILES)["weight_map"].values()))
    check_files(folder, INDEX, files)
    return files


def check_files(folder: Path, document: str, names: Iterable[str]) -> None:
    """Raise unless the files that a document names are regular ones of the checkpoint, and listed in its manifest."""
    names, manifest = list(names), read_manifest(folder)
    for name in names:
        problem = "leads out of the folder" if names_outside([name]) else None
        if problem is None and manifest is not None and name not in manifest.files:
            problem = "is not listed in the manifest"
        problem = problem or link_problem(folder, name) or (None if (folder / name).is_file() else "is not a file")
        if problem is not None:
            raise CheckpointError(f"{folder.name}/{document} names {name!r}, which {problem}")


# ---- reading ---------------------------------------------------------------------------------------------------------


class BoxReader:
    """Reads any part of any tensor of a checkpoint, independent of how it was sharded."""

    def __init__(self, folder: str | Path, stem: str) -> None:
        self.folder = Path(folder)
        self._entries = self._described(stem)
        self._aliases: dict[str, str] = {}
        self._files: dict[str, Any] = {}
        self._stack = ExitStack()

    @contextmanager
    def opened(self) -> Iterator[BoxReader]:
        with self._stack:
            self._find_aliases()
            yield self
        self._files = {}

    def _described(self, stem: str) -> dict[str, Entry]:
        if stem == MODEL.removesuffix(".safetensors") and (self.folder / WEIGHTS).is_file():
            return self._own_names(read_json(self.folder / WEIGHTS, PLACES))
        manifest = read_manifest(self.folder)
        prefix = f"{stem}.safetensors/"
        found = {}
        if manifest is not None:
            found = {key.removeprefix(prefix): one for key, one in manifest.tensors.items() if key.startswith(prefix)}
            for name in {box["file"] for entry in found.values() for box in entry["boxes"]} - manifest.files.keys():
                raise CheckpointError(f"{self.folder.name}: its manifest has shards in {name}, which it does not list")
            if not found and stem == OPTIMIZER and f"{stem}.safetensors" not in manifest.files:
                return {}  # an optimizer without state, or before its first step
        return found or self._from_files(stem)

    def _from_files(self, stem: str) -> dict[str, Entry]:
        """Entries of files that no manifest describes: each tensor is one box."""
        files = [f"{stem}.safetensors"]
        if stem == MODEL.removesuffix(".safetensors") and (self.folder / INDEX).is_file():
            files = files_in_index(self.folder)
        if not all((self.folder / file).is_file() for file in files):
            raise CheckpointError(f"{self.folder} has no {stem}.safetensors, so there is nothing to load")
        return {key: entry for name in files for key, entry in self._in_file(name).items()}

    def _own_names(self, document: dict[str, Any]) -> dict[str, Entry]:
        """Entries by the module's own names, from all files."""
        check_files(self.folder, WEIGHTS, [*([document["file"]] * (document["file"] is not None)),
                                           *(file for file, _ in document["elsewhere"].values())])  # fmt: skip
        found = {} if document["file"] is None else self._in_file(document["file"])
        others = {file: self._in_file(file) for file, _ in document["elsewhere"].values()}
        for name, (file, key) in document["elsewhere"].items():
            if key not in others[file]:
                raise CheckpointError(f"{self.folder.name}/{WEIGHTS}: {file} has no tensor {key!r} (for {name})")
            found[name] = others[file][key]
        return found

    def _in_file(self, name: str) -> dict[str, Entry]:
        found = {}
        with _opened(self.folder / name) as file:
            for key in file.keys():
                shape = list(file.get_slice(key).get_shape())
                box = {"file": name, "key": key, "offset": [0] * len(shape), "size": shape}
                found[key] = {"dtype": file.get_slice(key).get_dtype(), "shape": shape, "boxes": [box]}
        return found

    def _find_aliases(self) -> None:
        """Collect the aliases of tensors from the files' metadata."""
        for name in {box["file"] for entry in self._entries.values() for box in entry["boxes"]}:
            self._aliases.update(_aliases_in(self._open(name), self.folder / name))

    def __contains__(self, name: str) -> bool:
        return name in self._entries or name in self._aliases

    def names(self) -> Iterable[str]:
        return [*self._entries, *self._aliases]

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(self._entry(name)["shape"])

    def whole(self, name: str) -> Tensor:
        shape = self.shape(name)
        return self.part(name, (0,) * len(shape), shape)

    def part(self, name: str, offset: tuple[int, ...], size: tuple[int, ...]) -> Tensor:
        """A part of a tensor, read only from the boxes it overlaps."""
        entry = self._entry(name)
        if len(entry["boxes"]) == 1 and list(size) == entry["shape"] == entry["boxes"][0]["size"]:
            box = entry["boxes"][0]
            with restoring(self.folder / box["file"], name):
                return self._open(box["file"]).get_tensor(box["key"])
        if entry["dtype"] not in FORMATS:
            raise CheckpointError(f"{self.folder.name}: {name} has the type {entry['dtype']!r}, which is not supported")
        result, filled = torch.empty(size, dtype=FORMATS[entry["dtype"]]), torch.zeros(size, dtype=torch.bool)
        for box in entry["boxes"]:
            found = _overlap(offset, size, box["offset"], box["size"])
            if found is None:
                continue
            there, here = found
            source = self._open(box["file"])
            with restoring(self.folder / box["file"], f"the shard of {name}"):
                values = source.get_slice(box["key"])[there] if there else source.get_tensor(box["key"])
                result[here] = values
                filled[here] = True
        if not bool(filled.all()):
            raise CheckpointError(
                f"{self.folder.name}: a shard of {name} is missing (its shards cover only {int(filled.sum())} values)"
            )
        return result

    def _entry(self, name: str) -> Entry:
        found = self._aliases.get(name, name)
        if found not in self._entries:
            raise CheckpointError(f"{self.folder} has no tensor {found!r}; a file was damaged or changed")
        return self._entries[found]

    def _open(self, name: str) -> Any:
        if name not in self._files:
            self._files[name] = self._stack.enter_context(_opened(self.folder / name))
        return self._files[name]


def _opened(path: Path) -> Any:
    try:
        return safe_open(str(path), framework="pt")
    except Exception as error:  # a damaged file fails in many ways
        raise CheckpointError(f"{path} cannot be read as safetensors: {error}") from error


def _aliases_in(file: Any, path: Path) -> dict[str, str]:
    with restoring(path, "the aliases"):
        return dict(json.loads((file.metadata() or {}).get("aliases", "{}")))


def _overlap(
    offset: tuple[int, ...], size: tuple[int, ...], box_offset: list[int], box_size: list[int]
) -> tuple[tuple[slice, ...], tuple[slice, ...]] | None:
    """The overlap as slices of the box and slices of the requested part; None if they do not overlap."""
    there, here = [], []
    for begin, length, box_begin, box_length in zip(offset, size, box_offset, box_size, strict=True):
        low, high = max(begin, box_begin), min(begin + length, box_begin + box_length)
        if low >= high and length:
            return None
        there.append(slice(low - box_begin, high - box_begin))
        here.append(slice(low - begin, high - begin))
    return tuple(there), tuple(here)


def copy_part(tensor: Tensor, name: str, reader: BoxReader | HeldTensors) -> None:
    """Copy a tensor, or this rank's shard of it, from a checkpoint."""
    box = local_part(tensor)
    if reader.shape(name) != box.shape:
        raise CheckpointError(f"{name} has shape {reader.shape(name)} in {reader.folder}, but {box.shape} here")
    if 0 not in box.values.shape:
        box.values.copy_(reader.part(name, box.offset, tuple(box.values.shape)))


def like(values: Tensor, pattern: Any) -> Tensor:
    """A DTensor from this rank's shard, with the layout of another DTensor."""
    from torch.distributed.tensor import DTensor

    return DTensor.from_local(
        values, pattern.device_mesh, pattern.placements, run_check=False, shape=pattern.shape, stride=pattern.stride()
    )


def sharded_like(values: Any, parameter: Any) -> Any:
    """A full tensor of a parameter's shape with the layout of the parameter: if that is sharded, this rank's shard."""
    if not is_distributed(parameter) or not isinstance(values, Tensor) or values.shape != parameter.shape:
        return values
    box = local_part(parameter)
    return like(values[box.places].to(box.values.device), parameter)


class SlotReader:
    """The optimizer's tensors of a checkpoint, each read on access and sharded like its parameter."""

    def __init__(self, reader: BoxReader, module: nn.Module) -> None:
        self._reader = reader
        self._parameters = dict(module.named_parameters(remove_duplicate=False))

    def __getitem__(self, key: str) -> Tensor:
        name = key
        while name and name not in self._parameters:
            name = name.rpartition("/")[0]
        pattern = self._parameters.get(name)
        if pattern is None or not is_distributed(pattern) or self._reader.shape(key) != tuple(pattern.shape):
            return self._reader.whole(key)
        box = local_part(pattern)
        return like(self._reader.part(key, box.offset, tuple(box.values.shape)).to(box.values.device), pattern)


def sharded_slots(state: dict[str, Any], optimizer: Any) -> dict[str, Any]:
    """An optimizer's state dict of full tensors, with those of sharded parameters as this rank's shards."""
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    slots = dict(state["state"])  # an optimizer may also have states under keys of its own
    for index, parameter in enumerate(parameters):
        if is_distributed(parameter) and index in slots:
            slots[index] = {name: sharded_like(value, parameter) for name, value in slots[index].items()}
    return {**state, "state": slots}


def save_config(model: Any, folder: Path) -> None:
    """Write the configuration of a transformers model."""
    parts: list[Any] = [getattr(model, "config", None), getattr(model, "generation_config", None)]
    for part in parts:
        if hasattr(part, "save_pretrained"):
            part.save_pretrained(str(folder))


# ---- loading into a model --------------------------------------------------------------------------------------------


class HeldTensors:
    """Full tensors in host memory, with the interface of a BoxReader."""

    def __init__(self, tensors: Mapping[str, Tensor], folder: str | Path) -> None:
        self._tensors, self.folder = tensors, Path(folder)

    def names(self) -> Iterable[str]:
        return self._tensors

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(self._tensors[name].shape)

    def whole(self, name: str) -> Tensor:
        return self._tensors[name]

    def part(self, name: str, offset: tuple[int, ...], size: tuple[int, ...]) -> Tensor:
        return self._tensors[name][tuple(slice(low, low + n) for low, n in zip(offset, size, strict=True))]


def _has_shards(model: nn.Module) -> bool:
    return any(hasattr(parameter, "device_mesh") for parameter in model.parameters())


def fill(model: nn.Module, reader: BoxReader | HeldTensors, *, strict: bool, optional: str = "") -> None:
    """Load saved tensors into a model, sharded or not; only this rank's shards are read.

    A model with its own `load_state_dict`, for example for buffers that grow, loads them by that.
    """
    if type(model).load_state_dict is not nn.Module.load_state_dict and not _has_shards(model):
        model.load_state_dict({name: reader.whole(name) for name in reader.names()}, strict=strict)
        return
    own = model.state_dict(keep_vars=True)
    shapes = {name: reader.shape(name) for name in reader.names()}
    check_fit(own, shapes, strict=strict, source=str(reader.folder), optional=optional)
    with torch.no_grad():
        for name in shapes:
            if name in own:
                copy_part(own[name], name, reader)
