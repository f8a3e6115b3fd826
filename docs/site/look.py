"""Open a built site in Chromium from disk, without a network, and look: out/site-pictures.

    python docs/site/look.py out/site [PAGE ...]

Each page at 360, 1280 and 1920 pixels, light, and at 1280 dark. It fails where a page asks for
anything beyond its folder, says something to the console, or is wider than its window; a player
must play. Needs Chromium and playwright.
"""

from __future__ import annotations

import shutil
import sys
import time
from pathlib import Path

from playwright.sync_api import Frame, Page, Request, sync_playwright

WIDTHS = ((360, "light"), (1280, "light"), (1920, "light"), (1280, "dark"))
FLAGS = (
    *("--no-sandbox", "--disable-gpu", "--disable-background-networking", "--no-first-run"),
    *("--disable-component-update", "--disable-sync", "--disable-quic"),
)


def look(site: Path, names: list[str], to: Path) -> list[str]:
    """What is wrong with the pages; their pictures are written to the folder `to`."""
    wrong: list[str] = []
    chromium = shutil.which("chromium") or shutil.which("google-chrome")
    if chromium is None:
        sys.exit("no Chromium on this machine")
    to.mkdir(parents=True, exist_ok=True)
    with sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=chromium, args=list(FLAGS))
        for width, scheme in WIDTHS:
            tab = browser.new_page(viewport={"width": width, "height": 900}, color_scheme=scheme)
            tab.context.set_offline(True)
            for name in names:
                wrong += [f"{name} at {width}, {scheme}: {said}" for said in seen(tab, site, name)]
                picture = f"{name.removesuffix('.html').replace('/', '-')}-{width}-{scheme}.png"
                tab.screenshot(path=to / picture)
            tab.close()
        browser.close()
    return wrong


def seen(tab: Page, site: Path, name: str) -> list[str]:
    """Open a page, scroll through it, and say what is wrong."""
    wrong: list[str] = []

    def asked(request: Request) -> None:
        if not request.url.startswith((site.as_uri(), "data:", "blob:", "about:")):
            wrong.append(f"asks for {request.url}")

    heard = {
        "request": asked,
        "requestfailed": lambda request: wrong.append(f"failed: {request.url}"),
        "console": lambda message: wrong.append(f"console: {message.text}"),
        "pageerror": lambda error: wrong.append(f"error: {error}"),
    }
    for event, hear in heard.items():
        tab.on(event, hear)
    tab.goto((site / name).as_uri())
    wide = "document.documentElement.scrollWidth - document.documentElement.clientWidth"
    if over := tab.evaluate(wide):
        wrong.append(f"{over} pixels wider than the window")
    frame = tab.query_selector(".player iframe")
    if frame is not None:
        frame.scroll_into_view_if_needed()
        inner = frame.content_frame()
        assert inner is not None
        frame.focus()
        found = "document.querySelector('#scrub') ?? document.querySelector('input[type=range]')"
        slider = f"Number(({found})?.value ?? NaN)"
        inner.press("body", "ArrowRight")  # stops those that play from the start
        before = inner.evaluate(slider)
        inner.press("body", "Space")
        if not until(inner, f"{slider} > {before}"):
            wrong.append("its player does not play")
    for event, hear in heard.items():
        tab.remove_listener(event, hear)
    return wrong


def until(frame: Frame, condition: str, seconds: float = 10) -> bool:
    """Whether a condition comes true: asked again and again, as a player's page forbids `eval`."""
    end = time.monotonic() + seconds
    while not (found := bool(frame.evaluate(condition))) and time.monotonic() < end:
        time.sleep(0.05)
    return found


if __name__ == "__main__":
    root = Path(sys.argv[1]).resolve()
    pages = sys.argv[2:] or sorted(p.relative_to(root).as_posix() for p in root.rglob("*.html"))
    found = look(root, pages, root.parent / "site-pictures")
    print(*found, sep="\n", end="\n" if found else "")
    print(f"{len(pages)} pages at {len(WIDTHS)} sizes: {len(found)} things wrong")
    sys.exit(1 if found else 0)
