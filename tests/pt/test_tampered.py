"""Documents of a checkpoint with other values than those saved, under a manifest that agrees with them, in PyTorch."""

from __future__ import annotations

import json
import re
import shutil
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from loopwright import CheckpointError, EarlyStoppingCallback, Trainer, TrainingArguments
from loopwright.core.checkpoint.manifest import describe, file_entry, read_manifest
from loopwright.pt.checkpoint.shards import INDEX, BoxReader
from tests.core.tampering import PARTS, SavedRun

FREE = re.compile(
    r"arguments\.json|log_history\.|stateful_callbacks|best_|total_flos|meter|recent|scheduled_updates|"
    r"options\.|parts\.(speed|loss)|(_last_lr|base_lrs)\S* (fraction|true|a list)|samples_seen|resized"
)
"""See `SavedRun.free`."""


class Model(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.linear, self.dropout = torch.nn.Linear(3, 1), torch.nn.Dropout(0.3)

    def forward(self, x: Any, labels: Any) -> Any:
        y = self.linear(self.dropout(x)).squeeze(-1)
        return {"loss": torch.nn.functional.mse_loss(y, labels), "y": y}


def make(folder: Path, **options: Any) -> Trainer:
    drawn = torch.Generator().manual_seed(1)
    data = [{"x": torch.randn(3, generator=drawn), "labels": torch.tensor(1.0)} for _ in range(10)]
    args = TrainingArguments(
        str(folder), max_steps=5, per_device_train_batch_size=2, logging_steps=1, save_steps=2, eval_steps=2,
        eval_strategy="steps", save_strategy="steps", metric_for_best_model="loss", use_cpu=True, disable_tqdm=True,
        report_to=[], log_level="warning", speed="off", async_save=False, learning_rate=0.01, **options,
    )  # fmt: skip
    return Trainer(
        Model(), args, train_dataset=data, eval_dataset=data[:4], callbacks=[EarlyStoppingCallback(3)]
    )


def computed(trainer: Trainer) -> dict[str, Any]:
    rows = [
        {name: value for name, value in row.items() if not name.endswith(("time", "_per_second"))}
        for row in trainer.state.log_history
        if row.get("step", 0) not in (1, 2)
    ]
    return {"weights": {k: v.tolist() for k, v in trainer.model.state_dict().items()}, "rows": rows}


@pytest.fixture(scope="module", params=["native", "transformers", "transformers alone"])
def saved(request: Any, tmp_path_factory: pytest.TempPathFactory) -> SavedRun:
    """A run with a checkpoint of step 2, and what it became; alone: with the files that transformers writes."""
    folder = tmp_path_factory.mktemp("run")
    again = partial(make, checkpoint_format=request.param.split()[0])
    whole = again(folder)
    whole.train()
    for step in (4, 5):
        shutil.rmtree(folder / f"checkpoint-{step}")
    if request.param.endswith("alone"):
        for name in ("manifest.json", "progress.json"):
            (folder / "checkpoint-2" / name).unlink()
    return SavedRun(folder, "checkpoint-2", computed(whole), again, computed, FREE)


def test_some_changes_of_documents_are_named_or_do_no_harm(
    saved: SavedRun, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    assert saved.wrong(tmp_path / "run", caplog, first=11, step=140) == {}


@pytest.mark.grid
@pytest.mark.slow
@pytest.mark.parametrize("part", range(PARTS))
def test_every_change_of_documents_is_named_or_does_no_harm(
    part: int, saved: SavedRun, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    assert saved.wrong(tmp_path / "run", caplog, first=part, step=PARTS) == {}


OPTIONS = ("groups.0 missing", "groups.1.options.amsgrad true", "groups.0.options.maximize null",
           "groups.0.options.betas.tuple.1 missing", "groups.0.options.differentiable true")  # fmt: skip


def test_options_of_an_optimizer_are_those_it_can_have(
    saved: SavedRun, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    chosen = [each for each in saved.cases() if each[1].removeprefix("optimizer.json: ") in OPTIONS]
    if not chosen:
        pytest.skip("not a file of this format")
    assert len(chosen) == len(OPTIONS)
    for name, case, content in chosen:
        assert saved._problem(tmp_path / "run", caplog, name, content) is None, case


# ---- files that name others ------------------------------------------------------------------------------------------


def exported(folder: Path, weight_map: Any) -> Path:
    folder.mkdir()
    save_file({"w": torch.ones(2)}, folder / "model-1.safetensors")
    (folder / INDEX).write_text(json.dumps({"weight_map": weight_map}))
    return folder


@pytest.mark.parametrize(
    "weight_map",
    [{"w": "../model.safetensors"}, {"w": "/etc/passwd"}, {"w": 3}, {"w": None}, [], {"w": "missing.safetensors"},
     {"w": ["model-1.safetensors"]}, {"w": "a/../../x"}, {"w": "link.safetensors"}],
)  # fmt: skip
def test_an_index_names_files_of_its_folder(weight_map: Any, tmp_path: Path) -> None:
    save_file({"w": torch.zeros(2)}, tmp_path / "model.safetensors")
    folder = exported(tmp_path / "model", weight_map)
    (folder / "link.safetensors").symlink_to(tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match=re.escape(INDEX)):
        BoxReader(folder, "model")


def test_an_index_of_files_in_the_folder_is_read(tmp_path: Path) -> None:
    with BoxReader(exported(tmp_path / "model", {"w": "model-1.safetensors"}), "model").opened() as reader:
        assert reader.whole("w").tolist() == [1, 1]


@pytest.mark.parametrize(
    "places",
    [{}, [], {"file": 1, "elsewhere": {}, "complete": True}, {"file": "../x", "elsewhere": {}, "complete": True},
     {"file": "model-1.safetensors", "elsewhere": {"v": ["model-1.safetensors", "no"]}, "complete": True},
     {"file": None, "elsewhere": {"v": ["/etc/passwd", "w"]}, "complete": True},
     {"file": "model-1.safetensors", "elsewhere": {"v": "w"}, "complete": True},
     {"file": "model-1.safetensors", "elsewhere": {}, "complete": "yes"}],
)  # fmt: skip
def test_weights_json_names_tensors_of_its_folder(places: Any, tmp_path: Path) -> None:
    folder = exported(tmp_path / "model", {})
    (folder / "weights.json").write_text(json.dumps(places))
    with pytest.raises(CheckpointError, match="weights.json"):
        BoxReader(folder, "model")


@pytest.mark.parametrize(
    "box",
    [{"offset": [1]}, {"size": [1]}, {"key": "no"}, {"file": "other.safetensors"}, {"size": [-1]}, {"offset": ["0"]}],
)
def test_boxes_that_do_not_fit_are_refused(box: dict[str, Any], tmp_path: Path) -> None:
    """Two shards of one tensor; one of them is described wrongly."""
    folder = tmp_path / "checkpoint-1"
    folder.mkdir()
    for number in (1, 2):
        save_file({"w": torch.full((2,), float(number))}, folder / f"model-{number}.safetensors")
    boxes = [{"file": f"model-{n}.safetensors", "key": "w", "offset": [2 * n - 2], "size": [2]} for n in (1, 2)]
    manifest = describe(folder, 1, format="native")
    manifest.tensors = {"model.safetensors/w": {"dtype": "F32", "shape": [4], "boxes": boxes}}
    manifest.write(folder)
    with BoxReader(folder, "model").opened() as reader:
        assert reader.whole("w").tolist() == [1, 1, 2, 2]
    boxes[1].update(box)
    manifest.write(folder)
    with pytest.raises(CheckpointError):
        with BoxReader(folder, "model").opened() as reader:
            reader.whole("w")


@pytest.mark.parametrize("size", [1 << 62, 99_999_999])
@pytest.mark.parametrize("name", ["model.safetensors", "optimizer.safetensors"])
def test_a_header_of_absurd_size_is_refused(saved: SavedRun, tmp_path: Path, name: str, size: int) -> None:
    original = saved.folder / "checkpoint-2" / name
    if not original.is_file() or not (original.parent / "manifest.json").is_file():
        pytest.skip("not a file of this format")
    folder = tmp_path / "run/checkpoint-2"
    shutil.copytree(saved.folder, folder.parent)
    (folder / name).write_bytes(size.to_bytes(8, "little") + original.read_bytes()[8:])
    with pytest.raises(CheckpointError, match=name):
        describe(folder, 2, format="native")
    manifest = read_manifest(folder)
    assert manifest is not None
    manifest.files[name] = file_entry(folder / name)
    manifest.write(folder)
    with pytest.raises(CheckpointError, match=name):
        saved.make(folder.parent).train(resume_from_checkpoint=str(folder))
