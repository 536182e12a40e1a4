"""`loopwright convert`: transformers resumes the converted checkpoints, and loopwright those of Lightning."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import loopwright
from loopwright.cli.main import main
from tests.pt.test_transformers_checkpoints import Payload, assert_close, losses, trained

transformers = pytest.importorskip("transformers")


@pytest.mark.parametrize("name", ["regression", "llama"])
def test_a_native_checkpoint_goes_on_in_transformers(name: str, tmp_path: Path) -> None:
    ours = trained(loopwright, name, tmp_path / "ours")
    out = tmp_path / "converted" / "checkpoint-12"
    assert main(["convert", str(tmp_path / "ours" / "checkpoint-12"), str(out), "--to", "transformers"]) == 0
    theirs = trained(transformers, name, tmp_path / "theirs", resume=str(out))
    assert_close(ours, theirs)
    assert losses(theirs) == pytest.approx(losses(ours), rel=1e-5)


def test_a_converted_checkpoint_goes_on_here_to_the_bit(tmp_path: Path) -> None:
    whole = trained(loopwright, "llama", tmp_path / "whole")
    out = tmp_path / "checkpoint-12"
    assert main(["convert", str(tmp_path / "whole" / "checkpoint-12"), str(out), "--to", "transformers"]) == 0
    part = trained(loopwright, "llama", tmp_path / "part", resume=str(out))
    assert losses(part) == losses(whole)
    for name, value in whole.model.state_dict().items():
        assert torch.equal(value, part.model.state_dict()[name]), name


class Lines(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.one, self.two = nn.Linear(4, 8), nn.Linear(8, 1)

    def forward(self, x: Any, labels: Any) -> dict[str, Any]:
        return {"loss": nn.functional.mse_loss(self.two(torch.tanh(self.one(x)))[:, 0], labels)}


def rows() -> list[dict[str, Any]]:
    generator = torch.Generator().manual_seed(0)
    return [{"x": torch.randn(4, generator=generator), "labels": torch.tensor(float(each % 3))} for each in range(16)]


def adam(model: nn.Module) -> Any:
    return torch.optim.Adam(model.parameters(), lr=0.01)


def lightning_run(folder: Path, steps: int) -> dict[str, Any]:
    """Train with Lightning in the order of the data; returns the weights and writes last.ckpt."""
    lightning = pytest.importorskip("lightning")

    class Module(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.model = Lines()

        def training_step(self, batch: Any, index: int) -> Any:
            return self.model(**batch)["loss"]

        def configure_optimizers(self) -> Any:
            return adam(self)

    trainer = lightning.Trainer(
        max_steps=steps, accelerator="cpu", logger=False, enable_checkpointing=False, enable_progress_bar=False,
        enable_model_summary=False,
    )  # fmt: skip
    module = Module()
    trainer.fit(module, torch.utils.data.DataLoader(rows(), batch_size=2))
    trainer.save_checkpoint(folder / "last.ckpt")
    return module.model.state_dict()


def test_a_run_of_lightning_goes_on_here(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    expected = lightning_run(tmp_path, 12)
    lightning_run(tmp_path, 5)
    out = tmp_path / "checkpoint-5"
    assert main(["convert", str(tmp_path / "last.ckpt"), str(out), "--to", "transformers", "--prefix", "model."]) == 0
    assert "random states" in capsys.readouterr().out
    model = Lines()
    optimizer = adam(model)
    constant = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0)
    args = loopwright.TrainingArguments(
        str(tmp_path / "run"), max_steps=12, per_device_train_batch_size=2, use_cpu=True, report_to="none",
        max_grad_norm=0.0, train_sampling_strategy="sequential",
    )  # fmt: skip
    trainer = loopwright.Trainer(model, args, train_dataset=rows(), optimizers=(optimizer, constant))
    trainer.train(resume_from_checkpoint=str(out))
    for name, value in expected.items():
        torch.testing.assert_close(model.state_dict()[name], value, rtol=1e-5, atol=1e-6)


def test_a_malicious_file_runs_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path, trace = tmp_path / "bad.ckpt", tmp_path / "trace"
    path.write_bytes(pickle.dumps(Payload(str(trace))))
    assert main(["convert", str(path), str(tmp_path / "out"), "--to", "transformers"]) == 1
    assert "cannot be read safely" in capsys.readouterr().err
    assert not trace.exists() and not (tmp_path / "out").exists()


def test_what_cannot_be_converted_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "there").mkdir()
    cases = {
        ("nowhere", "out", "transformers"): (1, "does not exist"),
        ("there", "out", "transformers"): (1, "no intact manifest.json"),
        ("there", "there", "transformers"): (1, "exists already"),
        ("there", "out", "native"): (2, "resume_from_checkpoint"),
    }
    for (source, out, target), (code, text) in cases.items():
        assert main(["convert", str(tmp_path / source), str(tmp_path / out), "--to", target]) == code
        assert text in capsys.readouterr().err


def test_a_damaged_checkpoint_is_not_converted(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trained(loopwright, "regression", tmp_path / "run")
    folder = tmp_path / "run" / "checkpoint-4"
    (folder / "model.safetensors").write_bytes(b"x" * 100)
    assert main(["convert", str(folder), str(tmp_path / "out"), "--to", "transformers"]) == 1
    assert "model.safetensors" in capsys.readouterr().err
