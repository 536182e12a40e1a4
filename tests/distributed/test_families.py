"""Models of transformers whose names or modules need care when they are saved, on several processes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from .pool import Pool

LAYOUTS: dict[str, dict[str, Any]] = {
    "ddp": {},
    "fsdp": {"fsdp": True},
    "whole": {"fsdp": True, "fsdp_config": {"state_dict_type": "FULL_STATE_DICT"}},
}


def assert_equal(one: Any, other: Any) -> None:
    assert one.keys() == other.keys() and not [name for name in one if not torch.equal(one[name], other[name])]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_best_model_is_loaded_and_its_export_read_by_transformers(
    pool: Pool, tmp_path: Path, layout: str
) -> None:
    from transformers import GPTNeoXForCausalLM

    for found in pool.run(2, "family", folder=str(tmp_path), model="gpt-neox", **LAYOUTS[layout]):
        assert_equal(found["best"], found["seen"][found["best_step"]])
        assert_equal(found["back"], found["best"])
    theirs = GPTNeoXForCausalLM.from_pretrained(tmp_path / "exported")
    assert_equal(theirs.state_dict(), found["best"])


@pytest.mark.parametrize(
    ("model", "layout"),
    [
        ("gpt-neox", "ddp"),
        ("gpt-neox", "whole"),
        ("dynamic", "fsdp"),
        pytest.param("gpt-neox", "fsdp", marks=pytest.mark.grid),
    ],
)
def test_a_run_of_two_resumes_to_the_bit(pool: Pool, tmp_path: Path, model: str, layout: str) -> None:
    given = {"model": model, "save_strategy": "steps", "save_steps": 1, "max_steps": 5, "speed": "off",
             "per_device_train_batch_size": 1, **LAYOUTS[layout]}  # fmt: skip
    whole = pool.run(2, "trained", folder=str(tmp_path / "whole"), **given)
    resume = str(tmp_path / "whole/checkpoint-2")
    again = pool.run(2, "trained", folder=str(tmp_path / "again"), resume=resume, **given)
    for one, other in zip(whole, again, strict=True):
        assert_equal(one["weights"], other["weights"])
