"""The built site in a real browser without network: pages, dark, phone, search. Pictures are left in runs/screenshots.

    make docs && make test-grid TESTS=tests/docs/test_site.py
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.docs.blocks import ROOT
from tests.report.browser import Browser, chromium, started

SITE = ROOT / "build" / "site"
PICTURES = ROOT / "runs" / "screenshots"
PAGES = {
    "front": ("index.html", 1280, False),
    "guide": ("guides/chat-lora.html", 1280, False),
    "api": ("api.html", 1280, False),
    "dark": ("guides/resume.html", 1280, True),
    "phone": ("start/ten-minutes.html", 390, False),
}
SHADOW = "[...document.querySelectorAll('*')].map(each => each.shadowRoot).filter(Boolean)"
"""The search is drawn in a tree of its own."""
BACKGROUND = "getComputedStyle(document.body).backgroundColor"
pytestmark = [
    pytest.mark.grid,
    pytest.mark.skipif(chromium() is None, reason="Chromium is not installed (on Debian: apt-get install chromium)"),
    pytest.mark.skipif(not (SITE / "index.html").exists(), reason="the site is not built (make docs)"),
    pytest.mark.xdist_group("browser"),
]


@pytest.fixture(scope="module")
def browser(tmp_path_factory: Any) -> Iterator[Browser]:
    with started(tmp_path_factory.mktemp("browser") / "profile") as found:
        yield found


def show(browser: Browser, page: Path, width: int = 1280, dark: bool = False) -> None:
    browser.send(
        "Emulation.setDeviceMetricsOverride", width=width, height=900, deviceScaleFactor=1, mobile=width < 600
    )
    scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
    browser.send("Emulation.setEmulatedMedia", features=[scheme])
    if browser.evaluate("location.protocol") == "file:":
        browser.evaluate("localStorage.clear()")  # the site stores the colours of the first visit
    browser.requests.clear()
    browser.errors.clear()
    browser.send("Page.navigate", url=page.as_uri())
    browser.wait_for(f"document.readyState === 'complete' && location.href.startsWith('{page.as_uri()}')")


@pytest.mark.parametrize("name", PAGES)
def test_a_page_looks_right_and_fetches_nothing(browser, name):
    path, width, dark = PAGES[name]
    show(browser, SITE / path, width, dark)
    browser.screenshot(PICTURES / f"site-{name}.png", whole=False)
    assert [each for each in browser.requests if not each.startswith(("file:", "data:", "blob:"))] == []
    assert browser.errors == []
    assert browser.evaluate("document.querySelector('h1').innerText.length") > 2
    assert browser.evaluate("document.documentElement.scrollWidth") <= width
    red, green, blue = (int(part) for part in browser.evaluate(BACKGROUND).strip("rgb()").split(",")[:3])
    assert (red + green + blue < 200) == dark


def test_the_api_page_has_signatures_and_contracts(browser):
    show(browser, SITE / "api.html")
    text = browser.evaluate("document.body.innerText")
    names = ("compute_loss", "training_step", "num_items_in_batch", "on_step_end")
    assert [each for each in names if each not in text] == []


def test_search_works_from_disk(browser):
    show(browser, SITE / "index.html")
    browser.wait_for(f"{SHADOW}.length")
    browser.evaluate("document.querySelector('.md-search__button').click()")
    browser.wait_for(f"{SHADOW}.some(root => root.activeElement && root.activeElement.tagName === 'INPUT')")
    browser.send("Input.insertText", text="preemption")
    browser.wait_for(f"{SHADOW}.some(root => root.textContent.includes('Resume, preemption and interrupted runs'))")
    browser.screenshot(PICTURES / "site-search.png", whole=False)
    assert browser.errors == []
