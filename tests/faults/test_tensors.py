"""Tensors of every kind go through a checkpoint and come back as they were, ties included."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from loopwright import Trainer, TrainingArguments
from loopwright.pt.checkpoint.tensors import HostSnapshot, copy_into, host_copy, read_tensors, write_tensors

KINDS: dict[str, Any] = {
    "tied": lambda base: {"a": base, "b": base},
    "tied views": lambda base: {"a": base.view(4, 6), "b": base.view(4, 6)},
    "overlapping": lambda base: {"a": base[:16], "b": base[8:]},
    "one inside another": lambda base: {"whole": base, "part": base[4:8]},
    "transposed": lambda base: {"a": base.view(4, 6).t(), "b": base.view(4, 6)},
    "every second": lambda base: {"a": base[::2], "b": base[1::2]},
    "expanded": lambda base: {"a": torch.ones(1).expand(5)},
    "empty": lambda base: {"a": torch.empty(0), "b": torch.empty(0, 3), "c": torch.empty(2, 0, 4)},
    "scalar": lambda base: {"a": torch.tensor(3.5), "b": torch.tensor(2, dtype=torch.int64)},
    "types": lambda base: {
        str(dtype): torch.ones(3).to(dtype)
        for dtype in (torch.float64, torch.float16, torch.bfloat16, torch.int8, torch.uint8, torch.int16, torch.bool)
    },
    "not finite": lambda base: {"a": torch.tensor([float("nan"), float("inf"), -0.0, -float("inf")])},
    "nothing": lambda base: {},
}


def tensors_of(kind: str) -> dict[str, torch.Tensor]:
    return KINDS[kind](torch.arange(24, dtype=torch.float32))


@pytest.mark.parametrize("copied", [False, True], ids=["now", "in the background"])
@pytest.mark.parametrize("kind", KINDS)
def test_tensors_come_back(kind: str, copied: bool, tmp_path: Path) -> None:
    tensors = tensors_of(kind)
    expected = {name: tensor.clone() for name, tensor in tensors.items()}
    kept = host_copy(tensors) if copied else tensors
    if copied:
        for tensor in tensors.values():  # training goes on
            tensor.untyped_storage().fill_(7)
    write_tensors(tmp_path / "file.safetensors", kept)
    found = read_tensors(tmp_path / "file.safetensors")
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert found[name].shape == tensor.shape and found[name].dtype == tensor.dtype
        assert found[name].contiguous().view(-1).view(torch.uint8).equal(tensor.contiguous().view(-1).view(torch.uint8))
    if kind == "tied":
        assert found["a"].data_ptr() == found["b"].data_ptr()


@pytest.mark.parametrize("kind", KINDS)
def test_a_copy_shares_no_memory_with_the_original(kind: str) -> None:
    tensors = tensors_of(kind)
    copies = host_copy(tensors)
    places = {t.untyped_storage().data_ptr() for t in tensors.values() if t.numel()}
    assert not [name for name, t in copies.items() if t.numel() and t.untyped_storage().data_ptr() in places]


def test_memory_of_earlier_copies_is_used_again() -> None:
    """One copy after another, of tensors that change, that get another shape, and of fewer of them."""
    copies, base = HostSnapshot(), torch.arange(24, dtype=torch.float32)
    first = copies({"a": base, "tied": base, "b": base[:8]})
    places = {name: tensor.data_ptr() for name, tensor in first.items()}
    base += 1
    second = copies({"a": base, "tied": base, "b": base[:8]})
    assert {name: tensor.data_ptr() for name, tensor in second.items()} == places
    assert torch.equal(second["a"], base) and second["a"] is second["tied"] and torch.equal(second["b"], base[:8])
    third = copies({"a": base.view(4, 6), "b": base[:8].double()})
    assert third["a"].shape == (4, 6) and third["b"].dtype == torch.float64
    assert torch.equal(third["a"].view(-1), base)
    assert copies.size == 24 * 4 + 8 * 8
    copies.clear()
    assert copies.size == 0


def test_ties_that_come_and_go_between_two_copies() -> None:
    copies, base = HostSnapshot(), torch.arange(24, dtype=torch.float32)
    copies({"a": base, "b": base.clone()})
    tied = copies({"a": base, "b": base})
    assert tied["a"] is tied["b"]
    other = base + 5
    apart = copies({"a": base, "b": other})
    assert torch.equal(apart["a"], base) and torch.equal(apart["b"], other)
    assert apart["a"].data_ptr() != apart["b"].data_ptr()


@pytest.mark.parametrize("kind", ["tied", "overlapping", "one inside another", "empty"])
def test_equal_tensors_are_equal_files(kind: str, tmp_path: Path) -> None:
    for name in ("one", "two"):
        write_tensors(tmp_path / name, tensors_of(kind))
    write_tensors(tmp_path / "copied", host_copy(tensors_of(kind)))
    assert (tmp_path / "one").read_bytes() == (tmp_path / "two").read_bytes() == (tmp_path / "copied").read_bytes()


class Odd(nn.Module):
    """Parameters that overlap, do not lie in one piece, are empty or tied, and a buffer that is a view of one."""

    def __init__(self) -> None:
        super().__init__()
        memory = torch.linspace(-1, 1, 12)
        self.left, self.right = nn.Parameter(memory[:8]), nn.Parameter(memory[4:])
        self.turned = nn.Parameter(torch.linspace(0, 1, 12).view(3, 4).t())
        self.nothing = nn.Parameter(torch.empty(0))
        self.tied = self.turned
        self.register_buffer("seen", torch.zeros(4)[::2])

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        self.seen += 1
        y = (x @ self.turned).sum(-1) + self.left.sum() * 0.01 + self.right.sum() * 0.01 + self.nothing.sum()
        return {"loss": nn.functional.mse_loss(y, labels), "y": y}


def odd_trainer(folder: Path, **options: Any) -> Trainer:
    torch.manual_seed(0)
    g = torch.Generator().manual_seed(3)
    data = [{"x": torch.randn(4, generator=g), "labels": torch.randn((), generator=g)} for _ in range(12)]
    arguments = TrainingArguments(
        str(folder), per_device_train_batch_size=4, max_steps=6, save_steps=2, use_cpu=True, disable_tqdm=True,
        report_to=[], optim="sgd", optim_args="momentum=0.9", learning_rate=0.05, **options,
    )  # fmt: skip
    return Trainer(Odd(), arguments, train_dataset=data)


@pytest.mark.parametrize("async_save", [True, False])
def test_a_model_of_odd_tensors_resumes_exactly_and_stays_tied(async_save: bool, tmp_path: Path) -> None:
    whole = odd_trainer(tmp_path / "run", async_save=async_save)
    whole.train()
    for step in (2, 4):
        again = odd_trainer(tmp_path / f"again-{step}")
        again.train(resume_from_checkpoint=str(tmp_path / f"run/checkpoint-{step}"))
        assert again.model.tied is again.model.turned
        assert again.model.left.untyped_storage().data_ptr() == again.model.right.untyped_storage().data_ptr()
        for name, value in whole.model.state_dict().items():
            assert torch.equal(again.model.state_dict()[name], value), (step, name)


def test_weights_are_loaded_into_the_memory_that_is_there() -> None:
    model = Odd()
    places = {name: value.data_ptr() for name, value in model.state_dict().items()}
    copy_into(model, {name: value.clone() + 1 for name, value in Odd().state_dict().items()})
    assert {name: value.data_ptr() for name, value in model.state_dict().items()} == places
