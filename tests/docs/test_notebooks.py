"""The notebooks of `examples/` run from their first cell to the last, and say what they are meant to say."""

from __future__ import annotations

import shutil

import pytest

from tests.docs.blocks import ROOT

nbformat = pytest.importorskip("nbformat")
pytest.importorskip("nbclient")
pytest.importorskip("ipykernel")
NOTEBOOKS = {
    "first_run": ("the same weights: True", "evaluation loss below 0.02: True"),
    "find_mistakes": ("columns: predicted", "accuracy above 0.8: True"),
}
SECONDS = 300
"""How long a cell may take on a slow machine."""


@pytest.mark.parametrize("name", NOTEBOOKS)
def test_a_notebook_runs(name, tmp_path):
    from nbclient import NotebookClient

    shutil.copy(ROOT / "examples" / "generated.py", tmp_path)
    notebook = nbformat.read(ROOT / "examples" / f"{name}.ipynb", as_version=4)
    nbformat.validate(notebook)
    client = NotebookClient(
        notebook, timeout=SECONDS, kernel_name="python3", resources={"metadata": {"path": str(tmp_path)}}
    )
    client.execute()
    outputs = [output for cell in notebook.cells if cell.cell_type == "code" for output in cell.outputs]
    printed = "".join(output.get("text", "") for output in outputs)
    assert [words for words in NOTEBOOKS[name] if words not in printed] == []


def test_notebooks_are_stored_without_outputs_and_all_tested():
    paths = sorted((ROOT / "examples").glob("*.ipynb"))
    assert {path.stem for path in paths} == set(NOTEBOOKS)
    for path in paths:
        cells = nbformat.read(path, as_version=4).cells
        assert not [cell for cell in cells if cell.cell_type == "code" and (cell.outputs or cell.execution_count)], path
