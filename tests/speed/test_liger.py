"""use_liger_kernel: applied after a comparison of loss and gradients, removed after the run, refused with a reason.

Most tests run with a package of Liger's interface in plain PyTorch (`liger_like`); one runs the real package, if it is
installed, by Triton's interpreter.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch

from loopwright import ArgumentsError, MissingPackage, TrainerCallback
from tests.models import Tokens, llama, made, samples, trainer_of, weights

pytest.importorskip("transformers")

OPTIONS: dict[str, Any] = {"per_device_train_batch_size": 2, "max_steps": 2, "use_liger_kernel": True}
HERE = Path(__file__).parent


@pytest.fixture
def liger(monkeypatch: pytest.MonkeyPatch) -> Any:
    for name in [each for each in sys.modules if each.split(".")[0] == "liger_kernel"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.syspath_prepend(str(HERE / "liger_like"))
    from liger_kernel.transformers import monkey_patch

    monkeypatch.setitem(monkey_patch.SCALE, "norm", 1.0)
    yield monkey_patch
    for name in [each for each in sys.modules if each.split(".")[0] == "liger_kernel"]:
        del sys.modules[name]


class Calls(TrainerCallback):
    """Counts calls of the kernels by the steps of training."""

    def __init__(self, found: dict[str, int]) -> None:
        self.found, self.steps = found, []

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.before = dict(self.found)

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.steps.append({name: self.found[name] - self.before[name] for name in self.found})


def trained(folder: Any, model: Any = None, **options: Any) -> Any:
    trainer = trainer_of(llama() if model is None else model, samples((5, 7, 3, 6)), folder, **{**OPTIONS, **options})
    trainer.train()
    return trainer


def test_kernels_that_agree_are_used_and_removed_afterwards(tmp_path: Any, liger: Any) -> None:
    from transformers.models.llama import modeling_llama

    rope, calls = modeling_llama.apply_rotary_pos_emb, Calls(liger.CALLS)
    plain = trained(tmp_path / "a", use_liger_kernel=False)
    found = trained(tmp_path / "b", callbacks=[calls])
    assert [each["norm"] for each in calls.steps] == [2, 2]  # two layers, once in each step
    for name, value in weights(plain.model).items():
        assert float((weights(found.model)[name] - value).abs().max()) < 1e-6
    assert modeling_llama.apply_rotary_pos_emb is rope and not hasattr(modeling_llama.LlamaRMSNorm, "is_liger")
    assert not any("forward" in vars(module) or "offset" in vars(module) for module in found.model.modules())


def test_kernels_that_differ_are_left_out_and_named(tmp_path: Any, liger: Any, caplog: Any) -> None:
    liger.SCALE["norm"] = 1.001
    calls = Calls(liger.CALLS)
    plain = trained(tmp_path / "a", use_liger_kernel=False)
    found = trained(tmp_path / "b", callbacks=[calls])
    assert "use_liger_kernel=True has no effect: the loss differs by" in caplog.text
    assert [each["norm"] for each in calls.steps] == [0, 0]
    assert all(torch.equal(weights(found.model)[name], value) for name, value in weights(plain.model).items())


def test_an_option_that_does_not_exist_is_named(tmp_path: Any, liger: Any) -> None:
    with pytest.raises(ArgumentsError, match="liger_kernel_config: 'rms_nrom' is not an option.*did you mean 'rms_no"):
        trained(tmp_path, liger_kernel_config={"rms_nrom": False})
    calls = Calls(liger.CALLS)
    trained(tmp_path / "b", liger_kernel_config={"rms_norm": False}, callbacks=[calls])
    assert [each["norm"] for each in calls.steps] == [0, 0]


def test_a_model_without_kernels_trains_and_says_why(tmp_path: Any, liger: Any, caplog: Any) -> None:
    trained(tmp_path, made(Tokens))
    assert "has no effect: Tokens is not a model of transformers" in caplog.text


def test_a_run_with_kernels_resumes_to_the_bit(tmp_path: Any, liger: Any) -> None:
    options = {"save_strategy": "steps", "save_steps": 1, "optim": "adamw_torch", "max_steps": 3}
    whole = trained(tmp_path / "a", **options)
    folder = tmp_path / "a" / "checkpoint-1"
    assert "offset" not in json.dumps(json.loads(next(folder.glob("*progress*.json")).read_text())["parts"])
    again = trainer_of(llama(), samples((5, 7, 3, 6)), tmp_path / "a", **{**OPTIONS, **options})
    again.train(resume_from_checkpoint=str(folder))
    assert all(torch.equal(weights(again.model)[name], value) for name, value in weights(whole.model).items())


@pytest.mark.skipif(find_spec("liger_kernel") is not None, reason="Liger is installed")
def test_a_missing_package_is_an_error_with_the_command() -> None:
    with pytest.raises(MissingPackage, match="use_liger_kernel=True needs.*pip install liger-kernel"):
        trainer_of(made(Tokens), samples(), "run", **OPTIONS)


REAL = """
import sys, torch, loopwright
from tests.models import llama, samples, trainer_of
names = ("rope", "fused_linear_cross_entropy", "rms_norm", "swiglu")
for on in ("fused_linear_cross_entropy", "cross_entropy"):
    options = {**dict.fromkeys(names, False), on: True}
    trainer = trainer_of(llama().float(), samples((5, 7, 3, 6)), sys.argv[1], per_device_train_batch_size=2,
        max_steps=1, use_liger_kernel=True, liger_kernel_config=options, log_level="info", strict=True)
    trainer.train(resume_from_checkpoint=False)
"""


@pytest.mark.skipif(
    find_spec("liger_kernel") is None or find_spec("triton") is None, reason="Liger or Triton is not installed"
)
def test_the_real_package_agrees_in_tritons_interpreter(tmp_path: Any) -> None:
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    done = subprocess.run(
        [sys.executable, "-c", REAL, str(tmp_path)], env=environment, capture_output=True, text=True, timeout=300,
        cwd=HERE.parents[1],
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("speed: Liger's kernels are used: loss within") == 2
