"""`loopwright selfcheck`: a report that says whether a device agrees with the CPU."""

from __future__ import annotations

import json
from typing import Any

import pytest

from loopwright.cli.commands import selfcheck
from loopwright.cli.main import main


def test_the_report_is_printed_and_written(tmp_path: Any, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["selfcheck", "--json", str(tmp_path / "report.json")]) == 0
    report = json.loads((tmp_path / "report.json").read_text())
    losses = report["on_device"]["losses"]
    assert len(losses) == selfcheck.STEPS + 1 and losses[-2] < losses[0]
    assert report["on_device"]["resumed_exactly"]
    printed = capsys.readouterr().out
    assert "the device agrees with the CPU" in printed and "bitwise identical" in printed


def test_a_device_that_computes_something_else_does_not_pass(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    train = selfcheck._train

    def wrong(folder: str, *, use_cpu: bool, torch_compile: bool = False) -> Any:
        found = train(folder, use_cpu=use_cpu, torch_compile=torch_compile)
        return found if use_cpu else {**found, "losses": [loss + 0.1 for loss in found["losses"]]}

    monkeypatch.setattr(selfcheck, "_train", wrong)
    report = selfcheck.check(str(tmp_path))
    assert not report["passed"] and "DOES NOT AGREE" in selfcheck.text_of(report)


def test_a_device_that_fails_is_reported_with_its_error(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    train = selfcheck._train

    def failing(folder: str, *, use_cpu: bool, torch_compile: bool = False) -> Any:
        if not use_cpu:
            raise RuntimeError("the compiler gave up")
        return train(folder, use_cpu=use_cpu)

    monkeypatch.setattr(selfcheck, "_train", failing)
    report = selfcheck.check(str(tmp_path))
    assert not report["passed"]
    assert "training on the device failed: RuntimeError: the compiler gave up" in selfcheck.text_of(report)
