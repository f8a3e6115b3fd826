"""Open pages in Chromium from file://; they must not write to the console or contact a server.

With FLASHSIM_SCREENSHOTS=FOLDER, a screenshot of every page is saved there.
"""

import contextlib
import os
import re
import shutil
import time
from pathlib import Path

import pytest

CHROMIUM = shutil.which("chromium") or shutil.which("google-chrome")
FLAGS = (
    *("--no-sandbox", "--disable-gpu", "--disable-background-networking", "--no-first-run"),
    *("--disable-component-update", "--disable-sync", "--disable-quic"),
)
#: URL schemes of requests that contact no server.
OWN = ("file:", "data:", "blob:")


@contextlib.contextmanager
def started():
    """Yield a browser; skip the test if there is none."""
    playwright = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
    if CHROMIUM is None:
        pytest.skip("no Chromium on this machine")
    with playwright.sync_playwright() as driver:
        opened = driver.chromium.launch(executable_path=CHROMIUM, args=list(FLAGS))
        yield opened
        _spare.clear()
        opened.close()


#: Tabs that a test has left. A new tab takes Chromium 0.3 s, three times as long as most pages.
_spare = []


@pytest.fixture(scope="module")
def browser():
    with started() as opened:
        yield opened


@contextlib.contextmanager
def tabs(browser, folder, test, ready):
    """Yield a function that opens HTML in a tab and waits until the JavaScript `ready` is true."""
    opened = []

    def show(html, at="", width=1280, height=800, scheme="light", **more):
        path = folder / f"page{len(opened)}.html"
        path.write_text(html, encoding="utf-8")
        said = []
        hears = {
            "console": lambda message: said.append(message.text),
            "pageerror": lambda error: said.append(str(error)),
            "request": lambda asked: asked.url.startswith(OWN) or said.append(asked.url),
        }
        tab = _spare.pop() if _spare and not more else browser.new_page(**more)
        tab.set_viewport_size({"width": width, "height": height})
        tab.emulate_media(color_scheme=scheme)
        tab.mouse.move(0, 0)
        for event, hear in hears.items():
            tab.on(event, hear)
        tab.goto(path.as_uri() + at)
        until(tab, ready)
        opened.append((tab, said, hears, not more))
        return tab

    yield show
    name, pictures = re.sub(r"\W+", "-", test), os.environ.get("FLASHSIM_SCREENSHOTS")
    for n, (tab, said, hears, plain) in enumerate(opened):
        if pictures:
            tab.screenshot(path=Path(pictures) / f"{name}-{n}.png")
        tab.evaluate("0")  # what it has said is heard before it answers
        for event, hear in hears.items():
            tab.remove_listener(event, hear)
        if plain:
            _spare.append(tab)
        else:
            tab.close()
        assert said == []


def until(tab, condition, seconds=20):
    """Wait in Python until a condition holds, since the page's policy forbids eval."""
    end = time.monotonic() + seconds
    while not tab.evaluate(f"Boolean({condition})"):
        assert time.monotonic() < end, condition
        time.sleep(0.02)
