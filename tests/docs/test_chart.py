"""The chart of the README shows what the stored results of the benchmarks say."""

from __future__ import annotations

import importlib.util
import xml.etree.ElementTree as tree

from tests.docs.blocks import ROOT

spec = importlib.util.spec_from_file_location("chart", ROOT / "docs" / "chart.py")
chart = importlib.util.module_from_spec(spec)
spec.loader.exec_module(chart)


def test_the_chart_is_that_of_the_results():
    assert chart.CHART.read_text() == chart.chart(), "python docs/chart.py"
    tree.fromstring(chart.chart())


def test_bars_are_as_long_as_the_ratio():
    lines = chart.bar(0, "ours", 7.0, 68_110.0)
    assert f'width="{7 * chart.SCALE}"' in lines[0]
    assert "7.0 times, 68,110 tokens/s" in lines[1]
