"""The wheel: two builds are equal, it holds what it should, and it works outside the checkout."""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest

pytest.importorskip("setuptools", minversion="77")
pytest.importorskip("wheel")
ROOT = Path(__file__).resolve().parents[2]
RUNTIME = ["torch>=2.9", "numpy", "safetensors", "pyyaml", "rich"]
"""Everything that an installation brings; a package more is a decision, not an accident."""


def build(source: Path, where: Path) -> Path:
    """A wheel of a copy of the sources, made without the network."""
    shutil.copytree(ROOT / "src", source / "src", ignore=shutil.ignore_patterns("__pycache__", "*.egg-info"))
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    done = subprocess.run(
        [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation", "--wheel-dir",
         str(where), str(source)],
        env={**os.environ, "SOURCE_DATE_EPOCH": "1700000000", "PIP_DISABLE_PIP_VERSION_CHECK": "1"},
        capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    (wheel,) = where.glob("*.whl")
    return wheel


@pytest.fixture(scope="module")
def wheels(tmp_path_factory):
    folders = [tmp_path_factory.mktemp(name) for name in ("first", "second")]
    for folder in folders:
        (folder / "source").mkdir()
    return [build(folder / "source", folder) for folder in folders]


def test_two_builds_are_equal(wheels):
    assert len({hashlib.sha256(wheel.read_bytes()).hexdigest() for wheel in wheels}) == 1


def test_the_wheel_holds_every_file_and_nothing_else(wheels):
    names = set(zipfile.ZipFile(wheels[0]).namelist())
    sources = {path.relative_to(ROOT / "src").as_posix() for path in (ROOT / "src" / "loopwright").rglob("*")
               if path.is_file() and "__pycache__" not in path.parts}  # fmt: skip
    assert sources <= names, sorted(sources - names)
    assert all(name.startswith(("loopwright/", "loopwright-")) for name in names)
    assert any(name.endswith("licenses/LICENSE") for name in names)


SCRIPT = """
import torch
from torch import nn
from loopwright import Trainer, TrainingArguments, __file__ as place

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(2, 1)
    def forward(self, x, labels=None):
        return {"loss": (self.layer(x) - labels).square().mean()}

data = [{"x": torch.ones(2), "labels": torch.ones(1)}] * 8
Trainer(Net(), TrainingArguments("run", max_steps=2, use_cpu=True, report_to="none"), train_dataset=data).train()
print(place)
"""


def test_the_wheel_trains_outside_the_checkout(wheels, tmp_path):
    site = tmp_path / "site"
    zipfile.ZipFile(wheels[0]).extractall(site)  # as pip unpacks it
    (tmp_path / "train.py").write_text(SCRIPT)
    done = subprocess.run(
        [sys.executable, "train.py"], cwd=tmp_path, env={**os.environ, "PYTHONPATH": str(site)}, capture_output=True,
        text=True, timeout=300,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip().splitlines()[-1].startswith(str(site))


def test_no_runtime_dependency_is_added_by_accident():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert project["dependencies"] == RUNTIME


def test_the_version_has_a_section_in_the_changelog():
    from loopwright import __version__

    assert f"\n## {__version__} " in (ROOT / "CHANGELOG.md").read_text()
    assert f'version: "{__version__}"' in (ROOT / "CITATION.cff").read_text()


def test_public_names_are_frozen():
    """A name that disappears breaks somebody's script: take it from the list only with a deprecation behind it."""
    import loopwright

    listed = (Path(__file__).parent / "public_names.txt").read_text().split()
    assert sorted(loopwright.__all__) == listed
