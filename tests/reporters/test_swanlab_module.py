"""SwanLab's module as older and newer versions have it."""

from __future__ import annotations

import sys
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest

from loopwright.reporters.base import RunInfo
from loopwright.reporters.swanlab import SwanLabReporter


def started(swanlab: Any, monkeypatch: pytest.MonkeyPatch) -> SwanLabReporter:
    monkeypatch.setitem(sys.modules, "swanlab", swanlab)
    reporter = SwanLabReporter()
    monkeypatch.delitem(sys.modules, "swanlab")
    reporter.start(RunInfo(run_id="0123456789abcdef0123456789", run_name="mine"))
    return reporter


@pytest.mark.parametrize("get_run", [{"return_value": None}, {"side_effect": RuntimeError("No active Run")}])
def test_a_run_is_started_where_there_is_none(get_run: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SWANLAB_RUN_ID", "run-123")
    swanlab = Mock(config={}, get_run=Mock(**get_run))
    started(swanlab, monkeypatch)
    assert swanlab.init.call_args.kwargs["id"] == "run-123"


def test_a_run_of_the_user_is_used_and_not_finished(monkeypatch: pytest.MonkeyPatch) -> None:
    run = SimpleNamespace(alive=True, finish=Mock())
    swanlab = Mock(config={}, get_run=Mock(return_value=run))
    started(swanlab, monkeypatch).finish("finished")
    swanlab.init.assert_not_called()
    run.finish.assert_not_called()
