"""Tensors of which each rank has a copy: which ones there are, and taking those of rank 0."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ..checkpoint.shards import is_distributed
from ..devices import is_lazy
from ..tensor_hashes import hashes, is_plain
from .process_group import Host


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
    own: dict[str, Tensor] = {}
    with torch.no_grad():
        for name in (each for each in alike if any(row[each] != first[each] for row in of_ranks)):
            own[name] = buffers[name].detach().clone()
            _receive(buffers[name], host, device)
    try:
        yield
    finally:
        if host.rank:
            now = hashes({name: buffers[name] for name in own})  # version counters do not count every write
            with torch.no_grad():
                for name in (each for each in own if now[each] == first[each][2]):
                    buffers[name].copy_(own[name])
