"""Tensors of which each rank has a copy: comparing them by hashes, and taking those of rank 0."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ..checkpoint.shards import is_distributed
from ..devices import is_lazy
from .process_group import Host

WORD = 4
"""Bytes of a word. Its sums have 64 bits, so that no bit of it is lost."""
ROW = 1024
"""Words per row: sums over rows and over columns make a hash depend on the order of values."""
CHUNK = ROW << 12
"""Words that are converted at a time, so that memory does not depend on the size of a tensor."""
PRIME = 0x100000001B3


def copied_tensors(module: nn.Module) -> dict[str, Tensor]:
    """Weights and persistent buffers of which each rank has a copy, by name.

    Left out: shards, tensors without values, and those that the user excludes from DDP.
    """
    excluded = set(getattr(module, "_ddp_params_and_buffers_to_ignore", ()))
    state = module.state_dict(keep_vars=True)
    return {name: each for name, each in state.items() if name not in excluded and is_plain(each)}


def has_values(module: nn.Module) -> bool:
    """Whether this rank has the full weights: not shards, and not on the meta device."""
    tensors = [each for each in module.state_dict(keep_vars=True).values() if isinstance(each, Tensor)]
    return not any(each.is_meta or is_distributed(each) or hasattr(each, "ds_id") for each in tensors)


def persistent_buffers(module: nn.Module) -> dict[str, Tensor]:
    """The buffers that a checkpoint holds and of which each rank has a copy."""
    names = {name for name, _ in module.named_buffers(remove_duplicate=False)}
    return {name: each for name, each in copied_tensors(module).items() if name in names}


def is_plain(tensor: object) -> bool:
    """Whether the tensor is dense, has values and is not a shard."""
    if not isinstance(tensor, Tensor) or is_distributed(tensor) or tensor.is_meta:
        return False
    return type(tensor) in (Tensor, nn.Parameter) and tensor.layout is torch.strided and not hasattr(tensor, "ds_id")


def hashes(tensors: Mapping[str, Tensor]) -> dict[str, str]:
    """A 64-bit hash of the bits of each tensor; the device is waited for once."""
    found = [_hash(tensor.detach()) for tensor in tensors.values()]
    by_device: dict[torch.device, list[int]] = {}
    for index, each in enumerate(found):
        by_device.setdefault(each.device, []).append(index)
    numbers = [0] * len(found)
    for indices in by_device.values():
        values = torch.stack([found[index] for index in indices]).tolist()
        for index, value in zip(indices, values, strict=True):
            numbers[index] = value
    return {name: f"{number & (2**64 - 1):016x}" for name, number in zip(tensors, numbers, strict=True)}


def _hash(tensor: Tensor) -> Tensor:
    """Sums of the bits as integers, which are exact in any order: weighted by column, and by row."""
    if is_lazy(tensor.device):
        tensor = tensor.cpu()
    content = tensor.contiguous().reshape(-1).view(torch.uint8)
    if content.storage_offset() % WORD:
        content = content.clone()
    whole = content.numel() // WORD * WORD
    total = _weighted(content[whole:].long(), 7)
    words = content[:whole].view(torch.int32)
    full = words.numel() // ROW * ROW
    for number, part in enumerate(words[:full].split(CHUNK)):
        table = part.long().view(-1, ROW)
        total = total * PRIME + _weighted(table.sum(0), 2 * number + 3) + _weighted(table.sum(1), PRIME)
    return total * PRIME + _weighted(words[full:].long(), 5)


def _weighted(values: Tensor, factor: int) -> Tensor:
    places = torch.arange(values.numel(), dtype=torch.int64, device=values.device)
    return (values * ((2 * places + 1) * factor)).sum()


def take_from_first(module: nn.Module, host: Host, device: torch.device) -> None:
    """Overwrite weights and persistent buffers with those of rank 0; a collective."""
    with torch.no_grad():
        for tensor in copied_tensors(module).values():
            _receive(tensor, host, device)


def _receive(tensor: Tensor, host: Host, device: torch.device) -> None:
    via_host = is_lazy(device)
    sent = tensor.detach().to("cpu" if via_host else device).contiguous()
    dist.broadcast(sent, src=0, group=host.group if via_host else None)
    tensor.copy_(sent)


@contextmanager
def buffers_of_first(buffers: Mapping[str, Tensor], host: Host, device: torch.device) -> Iterator[None]:
    """A context in which the buffers have the values of rank 0, which are those of a checkpoint.

    Ranks normalize different batches, so their running statistics differ. Afterwards each rank has its own again,
    unless something else has changed them.
    """
    values = hashes(buffers)
    of_ranks = host.gather({name: (tuple(t.shape), str(t.dtype), values[name]) for name, t in buffers.items()})
    first = of_ranks[0]
    alike = [name for name in first if all(row.get(name, ())[:2] == first[name][:2] for row in of_ranks)]
    own: dict[str, tuple[Tensor, int]] = {}
    with torch.no_grad():
        for name in (each for each in alike if any(row[each] != first[each] for row in of_ranks)):
            kept = buffers[name].detach().clone()
            _receive(buffers[name], host, device)
            own[name] = (kept, buffers[name]._version)
    try:
        yield
    finally:
        if host.rank:
            with torch.no_grad():
                for name, (kept, version) in own.items():
                    if buffers[name]._version == version:
                        buffers[name].copy_(kept)
