"""Hashes of the contents of tensors, computed on their devices."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from .checkpoint.shards import is_distributed
from .devices import is_lazy

WORD = 8
"""Bytes of a word: each is mixed with its place, and the results are added, which is exact in any order."""
CHUNK = 1 << 19
"""Words that are mixed at a time, so that memory does not depend on the size of a tensor."""
PLACES, FIRST, SECOND = -0x61C8864680B583EB, -0x40A7B892E31B1A47, -0x6B2FB644ECCEEE15
"""Odd factors of 64 bits with as many ones as zeros, as signed numbers."""


def is_plain(tensor: object) -> bool:
    """Whether the tensor is dense, has values and is not a shard."""
    if not isinstance(tensor, Tensor) or is_distributed(tensor) or tensor.is_meta:
        return False
    usual = type(tensor) in (Tensor, nn.Parameter) and tensor.layout is torch.strided and not tensor.is_quantized
    return usual and not hasattr(tensor, "ds_id")


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
    """The sum of all words of a tensor, each mixed with its place."""
    if is_lazy(tensor.device):
        tensor = tensor.cpu()
    content = tensor.resolve_conj().resolve_neg().contiguous().reshape(-1).view(torch.uint8)
    if content.storage_offset() % WORD:
        content = content.clone()
    whole = content.numel() // WORD * WORD
    words = content[:whole].view(torch.int64)
    places = torch.arange(min(CHUNK, words.numel() + WORD), dtype=torch.int64, device=content.device) * PLACES
    total = _mixed(content[whole:].long(), places, words.numel())
    for start in range(0, words.numel(), CHUNK):
        total = total + _mixed(words[start : start + CHUNK], places, start)
    return total


def _mixed(words: Tensor, places: Tensor, start: int) -> Tensor:
    """The sum of the words after mixing: equal words at two places have unrelated values, so no pattern cancels out."""
    mixed = words + places[: words.numel()]
    mixed += (start * PLACES + 2**63) % 2**64 - 2**63
    mixed ^= mixed >> 30
    mixed *= FIRST
    mixed ^= mixed >> 27
    mixed *= SECOND
    mixed ^= mixed >> 31
    return mixed.sum()
