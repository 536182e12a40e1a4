"""`loopwright check` predicts the peak memory of a run."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("transformers")

from benchmarks.check import MODELS, compare


@pytest.mark.grid
@pytest.mark.parametrize("name", MODELS)
def test_the_peak_is_predicted_within_ten_percent(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(compare.__globals__["STEPS"], name, 20)
    assert compare(name, tmp_path)["peak_ratio"] == pytest.approx(1, abs=0.1)
