"""Tensors of every kind go through a checkpoint and come back as they were, ties included."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from loopwright import Trainer, TrainingArguments
from loopwright.pt.checkpoint import copy_into, host_copy, read_tensors, write_tensors

BASE = torch.arange(24, dtype=torch.float32)
KINDS: dict[str, Any] = {
    "tied": lambda: {"a": BASE, "b": BASE},
    "tied views": lambda: {"a": BASE.view(4, 6), "b": BASE.view(4, 6)},
    "overlapping": lambda: {"a": BASE[:16], "b": BASE[8:]},
    "one inside another": lambda: {"whole": BASE, "part": BASE[4:8]},
    "transposed": lambda: {"a": BASE.view(4, 6).t(), "b": BASE.view(4, 6)},
    "every second": lambda: {"a": BASE[::2], "b": BASE[1::2]},
    "expanded": lambda: {"a": torch.ones(1).expand(5)},
    "empty": lambda: {"a": torch.empty(0), "b": torch.empty(0, 3), "c": torch.empty(2, 0, 4)},
    "scalar": lambda: {"a": torch.tensor(3.5), "b": torch.tensor(2, dtype=torch.int64)},
    "types": lambda: {
        str(dtype): torch.ones(3).to(dtype)
        for dtype in (torch.float64, torch.float16, torch.bfloat16, torch.int8, torch.uint8, torch.int16, torch.bool)
    },
    "not finite": lambda: {"a": torch.tensor([float("nan"), float("inf"), -0.0, -float("inf")])},
    "nothing": lambda: {},
}


@pytest.mark.parametrize("copied", [False, True], ids=["now", "in the background"])
@pytest.mark.parametrize("kind", KINDS)
def test_tensors_come_back(kind: str, copied: bool, tmp_path: Path) -> None:
    tensors = KINDS[kind]()
    expected = {name: tensor.clone() for name, tensor in tensors.items()}
    kept = host_copy(tensors) if copied else tensors
    if copied:
        for tensor in tensors.values():
            if tensor.numel() and tensor.dtype != torch.bool and kind != "expanded":
                tensor.detach().data = torch.zeros_like(tensor)
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
    tensors = KINDS[kind]()
    copies = host_copy(tensors)
    places = {t.untyped_storage().data_ptr() for t in tensors.values() if t.numel()}
    assert not [name for name, t in copies.items() if t.numel() and t.untyped_storage().data_ptr() in places]


@pytest.mark.parametrize("kind", ["tied", "overlapping", "one inside another", "empty"])
def test_equal_tensors_are_equal_files(kind: str, tmp_path: Path) -> None:
    for name in ("one", "two"):
        write_tensors(tmp_path / name, KINDS[kind]())
    write_tensors(tmp_path / "copied", host_copy(KINDS[kind]()))
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
    copy_into(model, {name: value.clone() + 1 for name, value in Odd().state_dict().items()}, strict=True, source="")
    assert {name: value.data_ptr() for name, value in model.state_dict().items()} == places
