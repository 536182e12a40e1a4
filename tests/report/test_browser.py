"""report.html in a real browser without network: looks, zoom, hover, live update, keyboard, accessibility."""

from __future__ import annotations

import json
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from loopwright.cli.main import main
from loopwright.report.data_file import write_data
from loopwright.report.document import document
from loopwright.report.folder import open_run

from .browser import Browser, chromium, started
from .folders import rows, write_ledger, write_rows, write_run

pytestmark = [
    pytest.mark.skipif(chromium() is None, reason="Chromium is not installed (on Debian: apt-get install chromium)"),
    pytest.mark.xdist_group("browser"),
]
SCREENSHOTS = Path(__file__).resolve().parents[2] / "runs" / "screenshots"
"""Where the pictures of the page are left."""


@pytest.fixture(scope="module")
def browser(tmp_path_factory: Any) -> Iterator[Browser]:
    with started(tmp_path_factory.mktemp("browser") / "profile") as found:
        yield found


@pytest.fixture(scope="module")
def one(tmp_path_factory: Any) -> Path:
    """The page of a run."""
    folder = write_run(tmp_path_factory.mktemp("one") / "baseline")
    assert main(["report", str(folder)]) == 0
    return folder / "report.html"


@pytest.fixture(scope="module")
def two(tmp_path_factory: Any) -> Path:
    """A page with two runs of different length."""
    place = tmp_path_factory.mktemp("two")
    folders = [write_run(place / "baseline"), write_run(place / "larger batch", 640, every=16, shift=0.4)]
    assert main(["report", *map(str, folders), "-o", str(place / "both.html")]) == 0
    return place / "both.html"


def scale(browser: Browser, chart: str) -> list[float]:
    return browser.evaluate(f"(({{min, max}}) => [min, max])(charts.get('{chart}').uplot.scales.x)")


def box(browser: Browser, chart: str) -> dict[str, float]:
    """The area of a chart's curves in the window."""
    browser.evaluate(f"charts.get('{chart}').area.scrollIntoView({{block: 'center'}})")
    return browser.evaluate(f"(r => ({{x: r.x, y: r.y, width: r.width, height: r.height}}))"
                            f"(charts.get('{chart}').uplot.over.getBoundingClientRect())")  # fmt: skip


def inked(browser: Browser, chart: str) -> int:
    """Pixels of a chart that are not empty."""
    code = """((c) => { const d = c.getContext('2d').getImageData(0, 0, c.width, c.height).data;
      let n = 0; for (let i = 3; i < d.length; i += 4) n += d[i] > 0; return n; })"""
    return browser.evaluate(f"{code}(charts.get('{chart}').uplot.ctx.canvas)")


LOOKS = {
    "light": {},
    "dark": {"dark": True},
    "phone": {"width": 375, "height": 800},
}


def spread(*always: tuple[str, str]) -> Any:
    """All looks of both pages; those that are not always tested are part of the grid."""
    cases = [(pages, look) for pages in ("one", "two") for look in LOOKS]
    marked = [pytest.param(*each, marks=() if each in always else pytest.mark.grid) for each in cases]
    return pytest.mark.parametrize(("pages", "look"), marked)


@spread(("one", "light"), ("one", "dark"), ("one", "phone"), ("two", "light"))
def test_the_page_is_drawn_without_network(browser: Browser, request: Any, pages: str, look: str) -> None:
    page = request.getfixturevalue(pages)
    browser.open(page, **LOOKS[look])
    browser.screenshot(SCREENSHOTS / f"{pages}-{look}.png")
    assert browser.errors == [] and all(each.startswith("file://") for each in browser.requests)
    names = browser.evaluate("[...charts.keys()]")
    assert names[:3] == ["loss", "learning_rate", "grad_norm"] and {"tokens", "mfu", "memory", "eval_f1"} <= set(names)
    assert all(inked(browser, name) > 500 for name in names)
    width = LOOKS[look].get("width", 1280)
    assert browser.evaluate("document.documentElement.scrollWidth") <= width, "the page is wider than the window"
    colour = browser.evaluate("getComputedStyle(document.body).backgroundColor")
    assert (colour == "rgb(18, 21, 26)") == (look == "dark")


def test_the_page_shows_the_verdict_first(browser: Browser, one: Path) -> None:
    browser.open(one)
    text = browser.evaluate("document.querySelector('main').innerText")
    order = ["Verdict", "62% of the time waited for data", "Curves", "Time ledger", "Incidents", "Evaluations", "Texts",
             "<b>there</b>", "Speed plan", "Configuration", "run.yaml:3"]  # fmt: skip
    places = [text.find(word) for word in order]
    assert -1 not in places and places == sorted(places)


def test_dragging_zooms_all_charts_and_a_double_click_shows_everything(browser: Browser, one: Path) -> None:
    browser.open(one)
    whole = scale(browser, "loss")
    area = box(browser, "loss")
    y = area["y"] + area["height"] / 2
    browser.drag((area["x"] + 0.25 * area["width"], y), (area["x"] + 0.5 * area["width"], y))
    browser.wait_for("range !== null")
    low, high = scale(browser, "loss")
    assert whole == [10, 500] and low == pytest.approx(132, abs=8) and high == pytest.approx(255, abs=8)
    assert scale(browser, "grad_norm") == [low, high]
    browser.evaluate("charts.get('loss').uplot.over.dispatchEvent(new MouseEvent('dblclick', {bubbles: true}))")
    browser.wait_for("range === null")
    assert scale(browser, "loss") == whole


def test_hovering_shows_the_step_and_its_values(browser: Browser, two: Path) -> None:
    browser.open(two)
    area = box(browser, "loss")
    browser.mouse("mouseMoved", area["x"] + area["width"] - 2, area["y"] + 20)
    text = browser.wait_for("(t => t.style.display === 'block' && t.textContent)(charts.get('loss').tip)")
    assert text.startswith("step 640\n") and "larger batch: loss" in text
    assert "baseline: loss" not in text, "the shorter run has no value there"


def test_the_labels_of_an_axis_are_those_of_its_ticks(browser: Browser, tmp_path: Path) -> None:
    """A constant learning rate has ticks such as 1.05e-4, and a single step none between two steps."""
    write_rows(tmp_path, [{"step": 1, "loss": "NaN", "learning_rate": 1e-4}])
    assert main(["report", str(tmp_path)]) == 0
    browser.open(tmp_path / "report.html")
    shown = browser.evaluate("labels([9e-5, 9.5e-5, 1e-4, 1.05e-4, 1.1e-4])")
    assert shown == ["9.00e-5", "9.50e-5", "1.00e-4", "1.05e-4", "1.10e-4"]
    assert browser.evaluate("labels([0, 0.5, null, 100000.01, 100000.02])")[3:] == ["100,000.01", "100,000.02"]
    ticks = browser.evaluate("charts.get('learning_rate').uplot.axes[0]._splits")
    assert ticks and all(float(tick).is_integer() for tick in ticks)
    assert browser.evaluate("document.querySelector('[data-chart=loss] .legend').textContent") == "loss: not finite"


def test_a_page_follows_its_run_and_keeps_the_zoom(browser: Browser, tmp_path: Path) -> None:
    folder = tmp_path / "live"
    write_rows(folder, rows(500)[:20])
    write_ledger(folder, step=190, max_steps=500, status="running", updated=4e9)
    assert main(["report", str(folder)]) == 0
    browser.open(folder / "report.html")
    assert "step 190 of 500" in browser.evaluate("document.getElementById('runs').innerText")
    browser.evaluate("zoom(50, 100)")
    write_rows(folder, rows(500))
    write_ledger(folder, step=500, max_steps=500)
    write_data(folder, document([open_run(folder).read()]))
    browser.wait_for("document.getElementById('runs').innerText.includes('step 500 of 500')")
    assert "finished" in browser.evaluate("document.getElementById('runs').innerText")
    assert scale(browser, "loss") == [50, 100] and browser.errors == []
    browser.evaluate("document.getElementById('whole').click()")
    assert scale(browser, "loss") == [10, 500]


def test_a_page_without_its_data_file_shows_what_it_holds(browser: Browser, one: Path, tmp_path: Path) -> None:
    alone = tmp_path / "mailed.html"
    alone.write_bytes(one.read_bytes())
    browser.open(alone)
    assert inked(browser, "loss") > 500


def test_charts_are_used_by_keyboard(browser: Browser, one: Path) -> None:
    browser.open(one)
    browser.evaluate("charts.get('loss').area.focus()")
    browser.press("Home")
    browser.press("ArrowRight")
    browser.wait_for("document.getElementById('live').textContent.startsWith('step 20, loss: ')")
    assert browser.evaluate("charts.get('loss').tip.style.display") == "block"
    browser.press("+", "+")
    browser.wait_for("range !== null")
    low, high = scale(browser, "loss")
    assert high - low < 490
    browser.press("0", "0")
    browser.wait_for("range === null")


def test_each_chart_has_a_name_and_a_table(browser: Browser, two: Path) -> None:
    browser.open(two)
    found = browser.evaluate("""[...charts.values()].map((chart) => { chart.details.open = true; chart.fill();
        return [document.getElementById(chart.area.getAttribute('aria-labelledby')).textContent,
                chart.table.querySelectorAll('tbody tr').length, chart.data[0].length]; })""")
    assert all(name and count == points > 0 for name, count, points in found)


def test_lines_differ_by_more_than_colour(browser: Browser, two: Path) -> None:
    browser.open(two)
    dashes = browser.evaluate("charts.get('loss').lines.map((line) => line.dash.join())")
    assert len(dashes) == 4 == len(set(dashes))


@spread(("one", "light"), ("two", "dark"))
def test_axe_finds_no_violation(browser: Browser, request: Any, pages: str, look: str) -> None:
    spec = find_spec("axe_playwright_python")
    if spec is None or not spec.submodule_search_locations:
        pytest.skip("axe-core is not installed (pip install --no-deps axe-playwright-python)")
    script = (Path(spec.submodule_search_locations[0]) / "axe.min.js").read_text(encoding="utf-8")
    browser.open(request.getfixturevalue(pages), **LOOKS[look])
    browser.evaluate("(chart => { chart.details.open = true; chart.fill(); })(charts.get('eval_f1'))")
    browser.evaluate(script + "\n;0")
    found = json.loads(browser.evaluate("axe.run(document).then((r) => JSON.stringify(r.violations))"))
    short = [(each["id"], each["nodes"][0]["html"][:200], each["nodes"][0].get("failureSummary")) for each in found]
    assert short == []
