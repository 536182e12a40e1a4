"""The scripts of a release: the bill of materials, and the checks of the public interface."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("packaging")
ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    """Two bills of materials of the same environment."""
    files = [tmp_path_factory.mktemp("sbom") / name for name in ("first.json", "second.json")]
    for file in files:
        subprocess.run(
            [sys.executable, str(ROOT / "release" / "sbom.py"), str(file)], check=True, timeout=120,
            env={**os.environ, "SOURCE_DATE_EPOCH": "1700000000"},
        )  # fmt: skip
    return files


def test_two_bills_of_materials_are_equal(written):
    assert written[0].read_bytes() == written[1].read_bytes()


def test_the_bill_lists_every_required_package_and_what_it_needs(written):
    found = json.loads(written[0].read_text())
    assert (found["bomFormat"], found["specVersion"]) == ("CycloneDX", "1.6")
    names = {each["name"].lower() for each in found["components"]}
    assert {"torch", "numpy", "safetensors", "pyyaml", "rich"} <= names
    assert "sympy" in names and "pytest" not in names  # torch needs the first, nothing the second
    references = {each["bom-ref"] for each in found["components"]} | {found["metadata"]["component"]["bom-ref"]}
    assert {each["ref"] for each in found["dependencies"]} == references
    assert all(set(each["dependsOn"]) <= references for each in found["dependencies"])
    assert all(each["licenses"] for each in found["components"]), "a package without a licence"


def test_the_version_of_the_bill_is_that_of_the_package(written):
    from loopwright import __version__

    component = json.loads(written[0].read_text())["metadata"]["component"]
    assert (component["name"], component["version"]) == ("loopwright", __version__)


@pytest.mark.grid
def test_the_package_is_as_completely_typed_as_before():
    pytest.importorskip("pyright")
    spec = importlib.util.spec_from_file_location("interface", ROOT / "release" / "interface.py")
    interface = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(interface)
    assert interface.score() >= interface.LEAST
