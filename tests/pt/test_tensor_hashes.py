"""Hashes of tensors: a change of a bit or of the order changes them; layout and place do not."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from loopwright.pt.tensor_hashes import CHUNK, hashes


def hash_of(tensor: Tensor) -> str:
    return hashes({"it": tensor})["it"]


CHANGES: dict[str, Callable[[Tensor], Tensor]] = {
    "one bit": lambda x: x.index_fill(0, torch.tensor([4000]), float(x[4000].nextafter(torch.tensor(9.0)))),
    "two signs": lambda x: torch.cat([-x[:2], x[2:]]),
    "two signs apart": lambda x: torch.cat([x[:1], -x[1:2], x[2:3], -x[3:4], x[4:]]),
    "all signs": lambda x: -x,
    "two values": lambda x: torch.cat([x[:1], x[2:3], x[1:2], x[3:]]),
    "two rows": lambda x: torch.cat([x[1024:2048], x[:1024], x[2048:]]),
    "reversed": lambda x: x.flip(0),
    "the last value": lambda x: torch.cat([x[:-1], x[-1:] + 1]),
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_change_changes_the_hash(change: str) -> None:
    first = torch.randn(4097, generator=torch.Generator().manual_seed(1))
    assert hash_of(CHANGES[change](first.clone())) != hash_of(first)


def test_chunks_have_an_order() -> None:
    first = torch.zeros(2 * CHUNK, dtype=torch.int64)
    first[0] = 1
    assert len({hash_of(first), hash_of(first.roll(CHUNK)), hash_of(first.roll(1))}) == 3


@pytest.mark.parametrize("dtype", [torch.float32, torch.int32, torch.int64, torch.bool])
@pytest.mark.parametrize("size", [8, 12, 2049])
def test_no_pattern_of_small_changes_cancels_out(dtype: torch.dtype, size: int) -> None:
    """Masks and counters: sums of values, of places, and of their products are the same for several of these."""
    rows = [(1, 0, 0, 1), (0, 1, 1, 0), (1, 0, 1, 0), (0, 1, 0, 1), (3, 0, 0, 0), (0, 1, 0, 0), (5, 0, 0, 0),
            (0, 0, 1, 0)]  # fmt: skip
    tables = []
    for row in rows[: 4 if dtype == torch.bool else None]:
        for start in (0, 1, 4):
            table = torch.zeros(size)
            table[start : start + 4] = torch.tensor(row, dtype=torch.float32)
            tables.append(table.to(dtype))
    different = {tuple(each.tolist()) for each in tables}
    assert len({hash_of(each) for each in tables}) == len(different)


def test_layout_and_alignment_do_not_matter() -> None:
    first = torch.randn(11, 13)
    assert hash_of(first.t()) == hash_of(first.t().contiguous())
    assert hash_of(first[:, 1:]) == hash_of(first[:, 1:].clone())
    small = torch.arange(40, dtype=torch.uint8)[3:]
    assert hash_of(small) == hash_of(small.clone())


@pytest.mark.parametrize("dtype", [torch.bool, torch.int8, torch.int64, torch.bfloat16, torch.float8_e4m3fn,
                                   torch.float64, torch.complex64])  # fmt: skip
@pytest.mark.parametrize("shape", [(), (0,), (7,), (3000, 2)])
def test_any_tensor_has_a_hash(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    ones, zeros = torch.ones(shape).to(dtype), torch.zeros(shape).to(dtype)
    assert hash_of(ones) == hash_of(ones.clone())
    assert (hash_of(ones) == hash_of(zeros)) == (0 in shape)
