"""Measure the cost of pictures: python benchmarks/viz.py [--seconds 4]

Measures an animation of 16 x 16 tiles, and the player of a trace of 100,000 events: its size, the
time until Chromium shows it, and the frames per second at which it plays, alone and inside a
notebook's frame. The player needs Playwright and Chromium; without a GPU, the browser renders in
software.
"""

from __future__ import annotations

import argparse
import shutil
import statistics
import tempfile
import time
from pathlib import Path

import numpy as np
from rich.console import Console
from rich.table import Table

import flashsim
from flashsim import Tiling, viz

FLAGS = ("--no-sandbox", "--disable-dev-shm-usage")
# Returns the times of all frames while the player runs at one step per frame, and the script's time
# per step.
PLAY = """async (ms) => {
  const times = [];
  player.setSpeed(120);
  player.go(0);
  player.play(true);
  await new Promise((done) => {
    const start = performance.now();
    const tick = (now) => {
      times.push(now);
      if (now - start < ms) requestAnimationFrame(tick); else done();
    };
    requestAnimationFrame(tick);
  });
  player.play(false);
  const work = [];
  for (let n = 0; n < 200; n++) {
    player.move(1000 + n);
    const start = performance.now();
    player.draw();
    work.push(performance.now() - start);
  }
  return { times, work };
}"""
OPENED = """() => new Promise((done) => {
  const shown = () => done(performance.now());
  const look = () => window.player ? requestAnimationFrame(shown) : setTimeout(look, 1);
  look();
})"""


def run(n: int, head_dim: int, tile: int) -> flashsim.Result:
    """Return a traced forward pass of random tensors."""
    q, k, v = np.random.default_rng(0).standard_normal((3, n, head_dim), dtype=np.float32)
    return flashsim.run(q, k, v, tiling=Tiling(tile, tile), trace=True)


def animation(table: Table, folder: Path) -> None:
    """Write a GIF of 256 visits, with one frame per visit, and add its rows to the table."""
    traced = run(512, 32, 32)
    start = time.perf_counter()
    path = viz.animate(traced, folder / "walk.gif")
    took = time.perf_counter() - start
    table.add_row("GIF of 16 x 16 tiles, 272 frames", f"{took:.1f} s", "20 s")
    table.add_row("", f"{path.stat().st_size / 1e6:.2f} MB", "5 MB")


def page(table: Table, folder: Path, seconds: float) -> None:
    """Open the player of 100,000 events in Chromium, and add its rows to the table."""
    traced = run(2112, 2, 16)
    start = time.perf_counter()
    shown = viz.page(traced)
    took = time.perf_counter() - start
    what = f"page of {traced.trace.n_events:,} events"
    table.add_row(f"{what}: written in", f"{took:.2f} s", "")
    table.add_row("", f"{len(shown.html) / 1e6:.2f} MB", "5 MB")
    alone = shown.save(folder / "page.html")
    cell = folder / "cell.html"
    cell.write_text(f"<!DOCTYPE html><body>{shown._repr_html_()}</body>", encoding="utf-8")
    chromium = shutil.which("chromium") or shutil.which("google-chrome")
    try:
        from playwright.sync_api import sync_playwright
    except ImportError:
        chromium = None
    if chromium is None:
        table.add_row("in a browser", "not measured: no Playwright or no Chromium", "")
        return
    with sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=chromium, args=list(FLAGS))
        for where, file in (("alone", alone), ("in a notebook's frame", cell)):
            opened = [_opened(browser, file) for _ in range(5)]
            table.add_row(f"{where}: opens in", f"{statistics.median(opened):.2f} s", "2 s")
        for width, height in ((1280, 800), (1920, 1080)):
            tab = browser.new_page(viewport={"width": width, "height": height})
            tab.goto(alone.as_uri())
            measured = tab.evaluate(PLAY, seconds * 1000)
            gaps = np.diff(measured["times"])
            table.add_row(
                f"plays at {width} x {height}: frames a second", f"{1000 / gaps.mean():.1f}", "60"
            )
            late = f"{np.mean(gaps > 25):.1%}"
            table.add_row("frames later than 25 ms", late, "")
            work = statistics.median(measured["work"])
            table.add_row("work of the page a step", f"{work:.2f} ms", "16.7 ms")
            tab.close()
        browser.close()


def _opened(browser, file: Path) -> float:
    """Return the seconds from navigation to the first frame."""
    tab = browser.new_page(viewport={"width": 1280, "height": 800})
    tab.goto(file.as_uri(), wait_until="commit")
    start = time.perf_counter()
    tab.wait_for_selector("iframe, #panes canvas", state="attached")
    frame = tab.frames[-1]
    milliseconds = frame.evaluate(OPENED)
    waited = time.perf_counter() - start
    tab.close()
    return max(milliseconds / 1000, waited)


def main() -> None:
    """Measure, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seconds", type=float, default=4, help="how long each player plays")
    given = parser.parse_args()
    table = Table("what", "measured", "asked for")
    with tempfile.TemporaryDirectory() as folder:
        animation(table, Path(folder))
        page(table, Path(folder), given.seconds)
    Console().print(table)


if __name__ == "__main__":
    main()
